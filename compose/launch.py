"""Start a program that dies with its parent: `launch.py PARENT_PID PROGRAM [ARGUMENT...]`.

Linux keeps the "parent death signal" over `execv`, so the program needs to know nothing of it. The
signal is tied to the parent's *thread* that forked: `supervisor` starts children from its main
thread only. This file is run by path with `python -I -S` (20 ms) and imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; exit if it has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent_pid:
        sys.exit(f"launch: the parent {parent_pid} is gone")


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
