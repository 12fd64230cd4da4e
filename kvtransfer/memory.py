"""Where KV pages lie: one shared memory file per pool, and the seam through which bytes move.

1. The worker creates a `PoolMemory` (zero-filled memfd, mapped). Its tensors are views of `buffer`.
2. A writer on the same host receives the file descriptor over a unix socket and attaches to it.
3. `close` unmaps. The kernel frees the memory when the last process has let go; there is no file to
   clean up after a crash.

`PageStore` is all that the handoff code knows of memory, so that a store with other memory behind
it (a GPU and a pinned staging buffer) can take its place.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Sequence
from typing import Protocol, Self

from pageferry.kvtransfer.layout import KVLayout


class PageStore(Protocol):
    """Byte access to the pages of one layer, in the order of KVLayout."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def num_pages(self) -> int: ...

    def gather(self, layer: int, pages: Sequence[int]) -> list[memoryview]:
        """The bytes of `pages` in order, in as few views as the store can manage.

        The views are valid until this thread's next call of `gather` or `landing`.
        """
        ...

    def landing(self, layer: int, pages: Sequence[int]) -> list[memoryview]:
        """Writable views for the bytes of `pages`, in order; `land` makes them count."""
        ...

    def land(self, layer: int, pages: Sequence[int]) -> None:
        """The views of this thread's last `landing` call are filled: put them into the pages."""
        ...

    def mark_ready(self, layer: int) -> None:
        """The computing thread has launched all stores of this layer: `gather` waits for them."""
        ...


def adjacent_runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """`pages` as (first page, count), merging neighbours that ascend by one."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and runs[-1][0] + runs[-1][1] == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs


def copy_views(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
    """Copy bytes from `sources` to `targets`, which have as many bytes but may be cut elsewhere.

    memmove through ctypes lets other threads run meanwhile; a slice assignment would not.
    """
    ahead, behind = deque(targets), deque(sources)
    while ahead and behind:
        target, source = ahead.popleft(), behind.popleft()
        size = min(len(target), len(source))
        ctypes.memmove(
            ctypes.addressof(ctypes.c_char.from_buffer(target)),
            ctypes.addressof(ctypes.c_char.from_buffer(source)),
            size,
        )
        if size < len(target):
            ahead.appendleft(target[size:])
        if size < len(source):
            behind.appendleft(source[size:])
    if ahead or behind:
        raise ValueError("copy between views of different sizes")


class PoolMemory:
    """`num_pages` KV pages in an anonymous shared memory file; a `PageStore`.

    `buffer` is the whole pool as bytes (`KVLayout` order), writable.
    """

    def __init__(self, fd: int, layout: KVLayout, num_pages: int) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.fd = fd
        self._map = mmap.mmap(fd, layout.pool_bytes(num_pages))
        self.buffer = memoryview(self._map)

    @classmethod
    def create(cls, layout: KVLayout, num_pages: int) -> Self:
        """New zero-filled memory. Its size is sealed: no peer can shrink it under our feet."""
        if num_pages < 1:
            raise ValueError(f"num_pages {num_pages} must be at least 1")
        fd = os.memfd_create("pageferry-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, layout.pool_bytes(num_pages))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(fd, layout, num_pages)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, layout: KVLayout, num_pages: int) -> Self:
        """Map a pool that another process created. `fd` stays the caller's; a copy is kept."""
        size, expected = os.fstat(fd).st_size, layout.pool_bytes(num_pages)
        if size != expected:
            raise ValueError(f"pool memory has {size} bytes, {num_pages} pages need {expected}")
        own = os.dup(fd)
        try:
            return cls(own, layout, num_pages)
        except BaseException:
            os.close(own)
            raise

    def view(self, layer: int, first_page: int, count: int) -> memoryview:
        """The bytes of adjacent pages of one layer: `count * layout.page_bytes`."""
        start = self.offset(layer, first_page, count)
        return self.buffer[start : start + count * self.layout.page_bytes]

    def offset(self, layer: int, first_page: int, count: int) -> int:
        """Byte offset of a run of pages; `IndexError` unless the whole run is in the pool."""
        if not 0 <= layer < self.layout.num_layers:
            raise IndexError(f"layer {layer} is not one of {self.layout.num_layers}")
        if first_page < 0 or count < 0 or first_page + count > self.num_pages:
            raise IndexError(f"pages {first_page}+{count} are not within {self.num_pages}")
        return self.layout.offset(self.num_pages, layer, first_page)

    def gather(self, layer: int, pages: Sequence[int]) -> list[memoryview]:
        return [self.view(layer, first, count) for first, count in adjacent_runs(pages)]

    def landing(self, layer: int, pages: Sequence[int]) -> list[memoryview]:
        return self.gather(layer, pages)

    def land(self, layer: int, pages: Sequence[int]) -> None:
        """Nothing to do: `landing` views are the pages themselves."""

    def mark_ready(self, layer: int) -> None:
        """Nothing to wait for: a CPU's stores are done when the layer is."""

    def close(self) -> None:
        """Let go of the memory; harmless when repeated.

        If somebody still holds a view (a tensor, a slice), the mapping lives until they drop it:
        unmapping under them would crash the process.
        """
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        try:
            self.buffer.release()
            self._map.close()
        except BufferError:
            pass  # freed with its last view
