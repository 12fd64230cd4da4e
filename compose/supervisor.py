"""Child processes of `pageferry up`: started, listened to, restarted, stopped.

Life of a child:

1. `start` runs it through `launch.py` in a session of its own (Ctrl-C in the terminal reaches only
   us; we decide the order) and it dies with us, even on kill -9.
2. Its stdout and stderr are read line by line. Warnings and worse are shown with a prefix; the last
   of the others are remembered and shown if its death ends the run.
3. Until `all_ready` is set, any death ends the whole run. Afterwards a child with `restart` is
   started again after a pause; `MAX_QUICK_DEATHS` short lives in a row end the run, and so does the
   death of a child without `restart`. An end with exit code 0 (drained) does not count as a death.
4. `stop` sends SIGTERM, waits, sends SIGKILL to the whole group, and returns when all are reaped.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

LAUNCHER = Path(__file__).with_name("launch.py")

QUICK_DEATH_S = 10.0
"""A child that lived longer than this starts with a clean record."""
MAX_QUICK_DEATHS = 5
FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 4.0

TAIL_LINES = 20
MAX_LINE_BYTES = 64 * 1024
"""Longer lines are cut into pieces of this size."""

LAST_OUTPUT_S = 1.0
"""How long after its end a process's output is read; something else may hold the pipe open."""

ROUTINE = re.compile(r"[\d-]{10} [\d:,]{12} (DEBUG|INFO) ")
"""Start of a line in `kvtransfer.logs` format that only --verbose shows."""


@dataclass(frozen=True)
class Program:
    """What to run and how to treat it."""

    name: str
    """Prefix of its log lines, e.g. `decode-0`."""
    argv: Sequence[str]
    """The executable's full path first."""
    env: Mapping[str, str]
    restart: bool = True
    quiet: bool = False
    """Only --verbose shows its lines."""


class ChildDied(Exception):
    """A child ended and cannot or must not be restarted. The text is for the operator."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def launcher_argv(argv: Sequence[str]) -> list[str]:
    """`argv` wrapped so that the process dies with the calling one."""
    return [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid()), *argv]


def describe_exit(code: int) -> str:
    """`exit code 3` or `signal SIGKILL`, for an asyncio or subprocess return code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


class Child:
    """One running process, its reader and its last lines."""

    def __init__(
        self,
        program: Program,
        process: asyncio.subprocess.Process,
        output: asyncio.StreamReader,
        pipe: asyncio.ReadTransport,
    ) -> None:
        self.program = program
        self.process = process
        self._output = output
        self._pipe = pipe
        self.started = time.monotonic()
        self.unshown: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)

    @classmethod
    async def start(cls, program: Program) -> Self:
        """`OSError` if the launcher cannot be run; what it cannot run ends with an exit code.

        The output pipe is ours, not asyncio's: `Process.wait` would wait for the pipe's end, which
        a grandchild that inherited it can put off for ever.
        """
        read_end, write_end = os.pipe()
        output = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(read_end, "rb")
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *launcher_argv(program.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env=dict(program.env),
                start_new_session=True,
            )
        except BaseException:
            pipe.close()
            raise
        finally:
            os.close(write_end)
        return cls(program, process, output, pipe)

    async def run(self, show: Callable[[str], None], verbose: bool) -> int:
        """Forward output until the process has ended; then kill what is left of its group."""
        reader = asyncio.ensure_future(self._forward(show, verbose))
        code = await self.process.wait()
        self.signal(signal.SIGKILL)
        await asyncio.wait([reader], timeout=LAST_OUTPUT_S)
        reader.cancel()
        self._pipe.close()
        return code

    def signal(self, number: signal.Signals) -> None:
        """To the whole process group; nothing when it is gone."""
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            # PermissionError: macOS says so of a group of zombies.
            return

    async def _forward(self, show: Callable[[str], None], verbose: bool) -> None:
        pending = b""
        while data := await self._output.read(MAX_LINE_BYTES):
            *lines, pending = (pending + data).split(b"\n")
            if len(pending) >= MAX_LINE_BYTES:
                lines, pending = [*lines, pending], b""
            for line in lines:
                self._line(line, show, verbose)
        if pending:
            self._line(pending, show, verbose)

    def _line(self, raw: bytes, show: Callable[[str], None], verbose: bool) -> None:
        text = raw.decode(errors="replace").rstrip()
        line = f"[{self.program.name}] {text}"
        if verbose or not (self.program.quiet or ROUTINE.match(text)):
            show(line)
        else:
            self.unshown.append(line)


class Supervisor:
    """Runs programs until `stop`; `failed` becomes done when the run cannot go on."""

    def __init__(self, show: Callable[[str], None], *, verbose: bool = False) -> None:
        self.all_ready = False
        """Set by the caller once everything has come up; from then on deaths are repaired."""
        self.failed: asyncio.Future[ChildDied] = asyncio.get_running_loop().create_future()
        self._show = show
        self._verbose = verbose
        self._stopping = asyncio.Event()
        self._children: dict[str, Child] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, program: Program) -> None:
        """Start `program` and keep it running. `OSError` if it cannot be started at all."""
        child = await self._spawn(program)
        self._tasks[program.name] = asyncio.create_task(
            self._keep(program, child), name=program.name
        )

    @property
    def names(self) -> list[str]:
        """Programs that are being kept running."""
        return list(self._tasks)

    def pid(self, name: str) -> int:
        return self._children[name].process.pid

    async def stop(self, names: Sequence[str] | None = None, grace_s: float = 4.0) -> None:
        """SIGTERM to these (default: all), after `grace_s` seconds SIGKILL; wait until reaped."""
        self._stopping.set()
        wanted = list(self._tasks) if names is None else [n for n in names if n in self._tasks]
        tasks = [self._tasks.pop(name) for name in wanted]
        for name in wanted:
            self._children[name].signal(signal.SIGTERM)
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for name in wanted:
            self._children[name].signal(signal.SIGKILL)
        await asyncio.gather(*tasks)

    def kill(self) -> None:
        """SIGKILL to every child, at once."""
        self._stopping.set()
        for child in self._children.values():
            child.signal(signal.SIGKILL)

    async def _spawn(self, program: Program) -> Child:
        child = self._children[program.name] = await Child.start(program)
        return child

    async def _keep(self, program: Program, child: Child) -> None:
        quick_deaths = 0
        while True:
            code = await child.run(self._show, self._verbose)
            if self._stopping.is_set():
                return
            lived_s = time.monotonic() - child.started
            quick_deaths = quick_deaths + 1 if lived_s < QUICK_DEATH_S else 1
            if code == 0:  # It was drained: a fresh one takes its place.
                quick_deaths = 0
            if not (self.all_ready and program.restart) or quick_deaths >= MAX_QUICK_DEATHS:
                self._fail(child, code, quick_deaths)
                return
            pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** max(0, quick_deaths - 1))
            self._show(
                f"pageferry: {program.name} ended ({describe_exit(code)}) after {lived_s:.0f} s; "
                f"starting it again in {pause_s:g} s"
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
                return
            child = await self._spawn(program)
            if self._stopping.is_set():
                child.signal(signal.SIGKILL)

    def _fail(self, child: Child, code: int, quick_deaths: int) -> None:
        if self.failed.done():
            return
        name = child.program.name
        often = f" {quick_deaths} times in a row" if quick_deaths > 1 else ""
        text = f"{name} ended{often} ({describe_exit(code)})"
        if child.unshown:
            text = "\n".join([f"{text}; its latest log lines:", *child.unshown])
        self.failed.set_result(ChildDied(text, code))
