"""A worker's sign of life for its own host: a file that says until when its lease runs.

1. A worker writes it anew whenever Redis has renewed its lease (`--alive-file`). When its engine,
   its event loop or Redis hangs it no longer renews, and no longer writes.
2. `python -m pageferry.kvtransfer.alive_file FILE` exits with 0 while the lease runs and the worker
   is not unhealthy, else with 1 and one sentence.

For container health checks, which run for ever in every container: this one takes 0.03 s of
processor time, one that asks Redis more than ten times as much. So nothing is imported that a bare
interpreter does not have already. Times are of the host's monotonic clock.
"""

from __future__ import annotations

import os
import sys
import time


def write(path: str, until: float, state: str) -> None:
    """Readers see the text before or this one. `OSError` if the file cannot be had."""
    draft = f"{path}.new"
    with open(draft, "w", encoding="ascii") as file:
        file.write(f"{until:.3f} {state}\n")
    os.replace(draft, path)


def trouble(path: str) -> str:
    """Why the worker does not count as alive; empty if it does."""
    try:
        with open(path, encoding="ascii") as file:
            until, state = file.read().split()
            late_s = time.monotonic() - float(until)
    except OSError as error:
        return f"no worker has written {path}: {error.strerror}"
    except ValueError:
        return f"{path} is no worker's --alive-file"
    if late_s > 0:
        return f"the worker's lease ended {late_s:.0f} s ago (it is {state})"
    return "the worker reports itself unhealthy" if state == "unhealthy" else ""


if __name__ == "__main__":
    sys.exit(trouble(sys.argv[1]) or 0)
