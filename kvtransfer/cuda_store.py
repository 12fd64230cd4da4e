"""A `PageStore` over a KV tensor that the CPU cannot address: bytes go through pinned staging.

Out (`gather`): wait until the layer's KV is computed, collect the pages on the device, copy them to
the staging buffer, wait for that copy. In (`landing`, `land`): the bytes arrive in the staging
buffer, are copied to the device and scattered into their pages; `land` returns when they are there.

Each thread has its own staging buffer and stream, which grow to the largest call. With a CPU tensor
the same path runs without streams, which is how it is tested without a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from pageferry.kvtransfer.layout import KVLayout


class TensorStore:
    """Pages of `kv`, shape [layers, pages, 2, kv_heads, page_size, head_dim], contiguous."""

    def __init__(self, kv: torch.Tensor, layout: KVLayout) -> None:
        shape = (layout.num_layers, 2, layout.num_kv_heads, layout.page_size, layout.head_dim)
        if (kv.shape[0], *kv.shape[2:]) != shape or not kv.is_contiguous():
            raise ValueError(f"kv tensor {tuple(kv.shape)} does not have the layout {layout}")
        if kv.element_size() * kv[0, 0].numel() != layout.page_bytes:
            raise ValueError(f"kv tensor is {kv.dtype}, the layout says {layout.dtype}")
        self.layout = layout
        self.num_pages = kv.shape[1]
        self._bytes = kv.view(torch.uint8).view(layout.num_layers, self.num_pages, -1)
        self._on_gpu = kv.is_cuda
        self._local = threading.local()
        self._ready: list[torch.cuda.Event | None] = [None] * layout.num_layers

    def mark_ready(self, layer: int) -> None:
        """Call on the computing thread after the kernels that store this layer's KV were launched,
        before the pages are pushed: `gather` waits for this point of the current stream."""
        if self._on_gpu:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._bytes.device))
            self._ready[layer] = event

    def gather(self, layer: int, pages: Sequence[int]) -> list[memoryview]:
        """See `PageStore.gather`: one view, valid until this thread's next call."""
        staging, index = self._staging(len(pages)), self._index(pages)
        if not self._on_gpu:
            torch.index_select(self._bytes[layer], 0, index, out=staging)
        else:
            stream, event = self._stream(), self._ready[layer]
            with torch.cuda.stream(stream):
                if event is not None:
                    stream.wait_event(event)
                else:
                    stream.wait_stream(torch.cuda.default_stream(self._bytes.device))
                collected = self._bytes[layer].index_select(0, index.to(self._bytes.device))
                staging.copy_(collected, non_blocking=True)
            stream.synchronize()
        return [_view(staging)]

    def landing(self, layer: int, pages: Sequence[int]) -> list[memoryview]:
        """See `PageStore.landing`."""
        return [_view(self._staging(len(pages)))]

    def land(self, layer: int, pages: Sequence[int]) -> None:
        """See `PageStore.land`. The pages are complete for every stream when this returns."""
        staging, index = self._staging(len(pages)), self._index(pages)
        if not self._on_gpu:
            self._bytes[layer].index_copy_(0, index, staging)
            return
        device, stream = self._bytes.device, self._stream()
        with torch.cuda.stream(stream):
            arrived = staging.to(device, non_blocking=True)
            self._bytes[layer].index_copy_(0, index.to(device), arrived)
        stream.synchronize()

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        if any(not 0 <= page < self.num_pages for page in pages):
            raise IndexError(f"pages {list(pages)} are not all within {self.num_pages}")
        return torch.tensor(list(pages), dtype=torch.int64)

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self._bytes.device)  # type: ignore[no-untyped-call]
        stream: torch.cuda.Stream = self._local.stream
        return stream

    def _staging(self, count: int) -> torch.Tensor:
        """This thread's buffer for `count` pages, uint8 [count, page_bytes], in host memory."""
        buffer: torch.Tensor | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < count:
            buffer = torch.empty(
                (count, self.layout.page_bytes), dtype=torch.uint8, pin_memory=self._on_gpu
            )
            self._local.buffer = buffer
        return buffer[:count]


def _view(staging: torch.Tensor) -> memoryview:
    return staging.numpy().data.cast("B")
