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

    def prepare(self, layer: int, pages: Sequence[int]) -> None:
        """The next call of this thread will be `gather` of these: begin what it would wait for."""
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


def shared_runs(left: Sequence[int], right: Sequence[int]) -> list[tuple[int, int, int]]:
    """Pages at equal positions as (first left, first right, count), merging what is adjacent on
    both sides."""
    runs: list[tuple[int, int, int]] = []
    for mine, theirs in zip(left, right, strict=True):
        if runs:
            first, other, count = runs[-1]
            if (first + count, other + count) == (mine, theirs):
                runs[-1] = (first, other, count + 1)
                continue
        runs.append((mine, theirs, 1))
    return runs


def _address(view: memoryview) -> int:
    """Where the view's bytes are; good as long as the view is."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


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
        return self.runs(layer, adjacent_runs(pages))

    def runs(self, layer: int, runs: Sequence[tuple[int, int]]) -> list[memoryview]:
        """One view for each (first page, count)."""
        size = self.layout.page_bytes
        row = self.view(layer, 0, self.num_pages)
        for first, count in runs:
            if first < 0 or first + count > self.num_pages:
                raise IndexError(f"pages {first}+{count} are not within {self.num_pages}")
        return [row[first * size : (first + count) * size] for first, count in runs]

    def prepare(self, layer: int, pages: Sequence[int]) -> None:
        """Nothing to begin: the pages are read in place."""

    def landing(self, layer: int, pages: Sequence[int]) -> list[memoryview]:
        return self.gather(layer, pages)

    def land(self, layer: int, pages: Sequence[int]) -> None:
        """Nothing to do: `landing` views are the pages themselves."""

    def write(self, layer: int, runs: Sequence[tuple[int, int, int]], source: memoryview) -> None:
        """Copy pages of one layer from `source`, which is a row of pages.

        `runs`: (page here, page in the row, count), as of `shared_runs`. memmove through ctypes
        lets other threads run meanwhile; a slice assignment would not.
        """
        size = self.layout.page_bytes
        room = len(source) // size
        for page, position, count in runs:
            if page < 0 or page + count > self.num_pages or not 0 <= position <= room - count:
                raise IndexError(
                    f"pages {page}, {position} + {count} exceed {self.num_pages}, {room}"
                )
        with self.view(layer, 0, self.num_pages) as target:
            base, source_base = _address(target), _address(source)
            for page, position, count in runs:
                ctypes.memmove(base + page * size, source_base + position * size, count * size)

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
