"""A `PageStore` over a KV tensor that the CPU cannot address: bytes go through pinned staging.

Each thread that moves pages has a *lane*: two staging buffers in pinned host memory, their twins on
the device, and on a GPU a stream of its own, so that transfers and computation overlap. A buffer
holds the pages of one call; memory is bounded by STAGING_BYTES, four times per thread.

Out (prefill worker's sender):
1. The computing thread calls `mark_ready(layer)` when a layer's stores are launched: an event.
2. `gather` makes the lane's stream wait for that event, launches the kernel that collects the pages
   and the copy to the host, and waits for that copy's event alone, not for the device.
3. `prepare`, which may be called in between for the pages of the next `gather`, starts the same in
   the other buffer: the copy of one message passes while the one before is hashed and sent.

In (decode worker's intake):
1. `landing` hands out the buffer whose earlier copy is over. The bytes arrive in it.
2. `land` launches the copy to the device and the kernel that puts pages in their places, and makes
   the *computing stream* wait for that. It returns at once: whatever is computed after it sees the
   pages, and the other buffer is filled meanwhile.

The intake does not wait for the computing stream: a page is granted only after the steps that read
it have ended, which the engine knows because it has their tokens.

What is decided (`Turns`, checks) runs without a GPU; what is done is behind `Lane`. Over a CPU
tensor `HostLane` does it on the spot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from pageferry.kernels import ops
from pageferry.kvtransfer.layout import KVLayout

if ops.HAS_TRITON:
    from pageferry.kernels.triton_pages import gather_pages, scatter_pages

STAGING_BYTES = 8 * 2**20
"""Of one staging buffer, or one page if that is larger: at 25 GB/s of PCIe a third of a
millisecond, against some ten microseconds to launch the copy."""

SLOTS = 2


class Lane(Protocol):
    """One thread's staging buffers and the copies between them and the pages.

    `fetch` and `put` may return before the copy is done; `settle` waits for the last one of a
    slot. Both read the list of pages before they return.
    """

    def buffer(self, slot: int, count: int) -> memoryview:
        """The first `count` pages of a slot's host memory."""
        ...

    def fetch(self, slot: int, layer: int, pages: Sequence[int]) -> None:
        """Start copying pages into the slot."""
        ...

    def put(self, slot: int, layer: int, pages: Sequence[int]) -> None:
        """Start copying the slot into pages; everything computed later sees them."""
        ...

    def settle(self, slot: int) -> None: ...


class Turns:
    """Which slot a thread's next call uses, and what the other one was prepared with."""

    def __init__(self) -> None:
        self.current = 0
        self._prepared: object = None

    @property
    def other(self) -> int:
        return (self.current + 1) % SLOTS

    def prepare(self, what: object) -> int:
        """The slot to fetch `what` into; `take` of the same finds it there."""
        self._prepared = what
        return self.other

    def take(self, what: object) -> tuple[int, bool]:
        """The slot of the next call, which becomes the current one, and whether `what` was
        prepared in it. What was prepared for a call that did not come is forgotten."""
        found = what is not None and self._prepared == what
        self._prepared = None
        self.current = self.other
        return self.current, found


class TensorStore:
    """Pages of `kv`, shape [layers, pages, 2, kv_heads, page_size, head_dim], contiguous."""

    def __init__(
        self,
        kv: torch.Tensor,
        layout: KVLayout,
        make_lane: Callable[[TensorStore], Lane] | None = None,
    ) -> None:
        shape = (layout.num_layers, 2, layout.num_kv_heads, layout.page_size, layout.head_dim)
        if (kv.shape[0], *kv.shape[2:]) != shape or not kv.is_contiguous():
            raise ValueError(f"kv tensor {tuple(kv.shape)} does not have the layout {layout}")
        if kv.element_size() * kv[0, 0].numel() != layout.page_bytes:
            raise ValueError(f"kv tensor is {kv.dtype}, the layout says {layout.dtype}")
        self.layout = layout
        self.num_pages = kv.shape[1]
        self.page_rows = kv.view(torch.uint8).view(layout.num_layers, self.num_pages, -1)
        """uint8 [layers, pages, page_bytes], the pool's own memory."""
        self.max_pages = max(1, STAGING_BYTES // layout.page_bytes)
        """Pages that one call may move."""
        self.ready = Readiness(layout.num_layers, kv.device)
        self._make_lane = make_lane or (CudaLane if kv.is_cuda else HostLane)
        self._local = threading.local()

    def mark_ready(self, layer: int) -> None:
        """Call on the computing thread after the kernels that store this layer's KV were launched,
        before the pages are pushed: `gather` waits for this point of the current stream."""
        self.ready.mark(layer)

    def prepare(self, layer: int, pages: Sequence[int]) -> None:
        """Start what this thread's next call, `gather` of the same pages, will wait for.

        The views of the last `gather` stay valid. Harmless if that call never comes.
        """
        self._check(layer, pages)
        lane, turns = self._mine()
        slot = turns.prepare(self._key(layer, pages))
        lane.settle(slot)
        lane.fetch(slot, layer, pages)

    def gather(self, layer: int, pages: Sequence[int]) -> list[memoryview]:
        """See `PageStore.gather`: one view, valid until this thread's next call."""
        self._check(layer, pages)
        lane, turns = self._mine()
        slot, fetched = turns.take(self._key(layer, pages))
        if not fetched:
            lane.settle(slot)
            lane.fetch(slot, layer, pages)
        lane.settle(slot)
        return [lane.buffer(slot, len(pages))]

    def landing(self, layer: int, pages: Sequence[int]) -> list[memoryview]:
        """See `PageStore.landing`."""
        self._check(layer, pages)
        lane, turns = self._mine()
        slot, _ = turns.take(None)
        lane.settle(slot)
        return [lane.buffer(slot, len(pages))]

    def land(self, layer: int, pages: Sequence[int]) -> None:
        """See `PageStore.land`: what the computing stream does from now on sees the pages."""
        self._check(layer, pages)
        lane, turns = self._mine()
        lane.put(turns.current, layer, pages)
        self.ready.changed(layer)

    def _key(self, layer: int, pages: Sequence[int]) -> tuple[int, int, tuple[int, ...]]:
        """What a fetch brought: a layer written since then makes it stale, whoever wrote."""
        return layer, self.ready.version[layer], tuple(pages)

    def _check(self, layer: int, pages: Sequence[int]) -> None:
        if not 0 <= layer < self.layout.num_layers:
            raise IndexError(f"layer {layer} is not one of {self.layout.num_layers}")
        if any(not 0 <= page < self.num_pages for page in pages):
            raise IndexError(f"pages {list(pages)} are not all within {self.num_pages}")
        if len(pages) > self.max_pages:
            raise ValueError(
                f"{len(pages)} pages of {self.layout.page_bytes} bytes in one call, staging holds "
                f"{self.max_pages}; move fewer at a time"
            )

    def _mine(self) -> tuple[Lane, Turns]:
        """This thread's lane, made at its first call; it ends with the thread."""
        if not hasattr(self._local, "lane"):
            self._local.lane, self._local.turns = self._make_lane(self), Turns()
        lane: Lane = self._local.lane
        turns: Turns = self._local.turns
        return lane, turns


class Readiness:
    """Per layer, the point of the computing stream at which its KV is complete."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.version = [0] * num_layers
        """Raised whenever pages of the layer may have got new contents."""
        self._device = device
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            for _ in range(num_layers):
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(device))
                self._events.append(event)

    def mark(self, layer: int) -> None:
        if self._events:
            self._events[layer].record(torch.cuda.current_stream(self._device))
        self.changed(layer)

    def changed(self, layer: int) -> None:
        self.version[layer] += 1

    def hold(self, stream: torch.cuda.Stream, layer: int) -> None:
        """Let `stream` wait until the layer is complete, as of the last `mark`."""
        stream.wait_event(self._events[layer])


class HostLane:
    """Copies on the spot, for a tensor in host memory."""

    def __init__(self, store: TensorStore) -> None:
        self._rows = store.page_rows
        shape = (SLOTS, store.max_pages, store.layout.page_bytes)
        self._host = torch.empty(shape, dtype=torch.uint8)

    def buffer(self, slot: int, count: int) -> memoryview:
        return _view(self._host[slot, :count])

    def fetch(self, slot: int, layer: int, pages: Sequence[int]) -> None:
        index = torch.tensor(list(pages), dtype=torch.int64)
        torch.index_select(self._rows[layer], 0, index, out=self._host[slot, : len(pages)])

    def put(self, slot: int, layer: int, pages: Sequence[int]) -> None:
        index = torch.tensor(list(pages), dtype=torch.int64)
        self._rows[layer].index_copy_(0, index, self._host[slot, : len(pages)])

    def settle(self, slot: int) -> None:
        """Nothing is ever under way."""


class CudaLane:
    """Copies on a stream of its own, through pinned memory."""

    def __init__(self, store: TensorStore) -> None:
        self._rows, self._ready = store.page_rows, store.ready
        device = self._rows.device
        self._computing = torch.cuda.default_stream(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        shape = (SLOTS, store.max_pages, store.layout.page_bytes)
        self._host = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self._host_ids = torch.empty(shape[:2], dtype=torch.int64, pin_memory=True)
        with torch.cuda.stream(self._stream):
            self._device = torch.empty(shape, dtype=torch.uint8, device=device)
            self._device_ids = torch.empty(shape[:2], dtype=torch.int64, device=device)
        # blocking: whoever waits sleeps instead of spinning on a core that others need.
        self._done = [
            torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            for _ in range(SLOTS)
        ]

    def buffer(self, slot: int, count: int) -> memoryview:
        return _view(self._host[slot, :count])

    def fetch(self, slot: int, layer: int, pages: Sequence[int]) -> None:
        count = len(pages)
        with torch.cuda.stream(self._stream):
            self._ready.hold(self._stream, layer)
            ids, staged = self._ids(slot, pages), self._device[slot : slot + 1, :count]
            if ops.HAS_TRITON:
                gather_pages(self._rows[layer : layer + 1], ids, staged)
            else:
                torch.index_select(self._rows[layer], 0, ids, out=staged[0])
            self._host[slot, :count].copy_(staged[0], non_blocking=True)
            self._done[slot].record(self._stream)

    def put(self, slot: int, layer: int, pages: Sequence[int]) -> None:
        count = len(pages)
        with torch.cuda.stream(self._stream):
            ids, staged = self._ids(slot, pages), self._device[slot : slot + 1, :count]
            staged[0].copy_(self._host[slot, :count], non_blocking=True)
            if ops.HAS_TRITON:
                scatter_pages(staged, ids, self._rows[layer : layer + 1])
            else:
                self._rows[layer].index_copy_(0, ids, staged[0])
            self._done[slot].record(self._stream)
        self._computing.wait_event(self._done[slot])

    def settle(self, slot: int) -> None:
        self._done[slot].synchronize()

    def _ids(self, slot: int, pages: Sequence[int]) -> torch.Tensor:
        """The page numbers on the device; their host copy is free once the slot is settled."""
        count = len(pages)
        self._host_ids[slot, :count] = torch.tensor(list(pages), dtype=torch.int64)
        self._device_ids[slot, :count].copy_(self._host_ids[slot, :count], non_blocking=True)
        return self._device_ids[slot, :count]


def _view(staging: torch.Tensor) -> memoryview:
    return staging.numpy().data.cast("B")
