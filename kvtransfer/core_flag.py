"""Whether a prefill worker computes, for the decode worker that borrows its cores meanwhile.

Prompts come in bursts: between them a prefill worker's cores would idle while decoding, bound by
memory, could read its weights with twice as many. Both processes map the same small file; its
first eight bytes are 1 while the owner has work. The borrower looks at them before each piece of a
pass, so it leaves the cores within a fraction of a millisecond.

An owner that dies at work leaves the 1 behind, and its cores are not borrowed until its successor
has started: the safe side.
"""

from __future__ import annotations

import ctypes
import mmap
import os

SIZE = mmap.PAGESIZE


class CoreFlag:
    """A flag in a file, made if it is not there. `OSError` when the file cannot be used."""

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, SIZE)
            self._memory = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        self._value = ctypes.c_int64.from_buffer(self._memory)

    @property
    def busy(self) -> bool:
        return self._value.value != 0

    @busy.setter
    def busy(self, value: bool) -> None:
        self._value.value = int(value)

    @property
    def address(self) -> int:
        """Of the eight bytes; valid as long as this object lives."""
        return ctypes.addressof(self._value)
