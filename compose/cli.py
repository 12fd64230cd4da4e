"""The console script `pageferry`: one word chooses the program, the rest goes to it unread.

Every command replaces this process (`execv`), so signals reach the program itself, and nothing of
the services is imported here: `pageferry gateway` must not pay for torch.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Command(NamedTuple):
    module: str
    """Run with `python -m`."""
    help: str


COMMANDS = {
    "up": Command(
        "pageferry.compose.local", "Serve a model on this machine: everything, one command."
    ),
    "gateway": Command("pageferry.gateway.main", "Run the HTTP gateway (OpenAI API)."),
    "prefill": Command("pageferry.prefill_worker.main", "Run a prefill worker."),
    "decode": Command("pageferry.decode_worker.main", "Run a decode worker."),
    "prepare": Command(
        "pageferry.kernels.prepare",
        "Fetch or convert a model and print its directory; without MODEL the demo model.",
    ),
    "bench": Command(
        "pageferry.compose.bench", "Load an OpenAI-compatible server and measure what users feel."
    ),
    "drain": Command(
        "pageferry.compose.drain", "Let a worker finish or hand over its requests, then leave."
    ),
}


def usage() -> str:
    lines = ["usage: pageferry COMMAND [options]", "", "Commands (each has its own --help):"]
    lines += [f"  {name:<9}{command.help}" for name, command in COMMANDS.items()]
    lines.append(f"  {'version':<9}Print the version.")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Replace this process by the chosen program; returns only for help, version and mistakes."""
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv else ""
    if name in ("version", "--version", "-V"):
        print(f"pageferry {importlib.metadata.version('pageferry')}")
        return 0
    if name in ("help", "--help", "-h"):
        print(usage())
        return 0
    if name not in COMMANDS:
        print(_mistake(name), file=sys.stderr)
        return 2
    # -P keeps the current directory out of sys.path, where a file redis.py would be imported.
    python = [sys.executable, "-P", "-m", COMMANDS[name].module]
    os.execv(sys.executable, [*python, *argv[1:]])


def _mistake(name: str) -> str:
    if not name:
        return usage()
    close = difflib.get_close_matches(name, [*COMMANDS, "version", "help"], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"pageferry: unknown command {name!r}{hint} (see pageferry --help)"


if __name__ == "__main__":
    sys.exit(main())
