"""A system under test: started, warmed up, loaded, watched, stopped.

1. `with system:` starts its process (it dies with us) and waits until it answers.
2. `run(load)` sends a load and returns what came back, timed on the client's side.
3. Meanwhile `Watch` samples the memory of the process and all its descendants and, for Pageferry,
   the page ledgers.
4. On leaving, the process gets its stop signal, then its whole group is killed.

`Served` talks HTTP through `pageferry.compose.bench_client`. `InProcess` drives a runner
(`run_*.py`) that lives in the system's own interpreter, for systems without a server of their own:
JSON lines on its standard input and output, so no HTTP and no client share its cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import uvloop

from pageferry.compose.bench_client import Load, Outcome, Result, Server, discover, run
from pageferry.compose.bench_workload import Request, prompt_ids
from pageferry.compose.supervisor import describe_exit, launcher_argv

STOP_S = 20.0
POLL_S = 0.1
SAMPLE_S = 0.5
"""Between two samples of `Watch`."""
MAX_REPEATED = 2000
"""Requests handed to a runner for a closed loop that repeats until its time is over."""


class Broken(RuntimeError):
    """The system could not be started or did not do what it was asked."""


@dataclasses.dataclass
class System:
    """What every system has. Subclasses start something in `_start`."""

    name: str
    version: str
    argv: Sequence[str]
    env: dict[str, str]
    """Added to our own environment."""
    log: Path
    """Where its standard error (and, if it serves HTTP, its output) goes."""
    settings: dict[str, Any]
    """What was set, for the result file."""
    start_timeout_s: float = 300.0
    stop_signal: signal.Signals = signal.SIGTERM
    start_s: float = 0.0
    """From the start of the process until it answers."""

    process: subprocess.Popen[str] = dataclasses.field(init=False, repr=False)

    def __enter__(self) -> Self:
        started = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                launcher_argv(self.argv),
                stdin=subprocess.PIPE if self.talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if self.talks else log,
                stderr=log,
                text=True,
                env={**os.environ, **self.env},
                start_new_session=True,
            )
        try:
            self._wait_ready(started + self.start_timeout_s)
        except BaseException:
            self._stop()
            raise
        self.start_s = time.monotonic() - started
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop()

    @property
    def talks(self) -> bool:
        """Whether it is driven over its standard input and output."""
        return False

    def _wait_ready(self, deadline: float) -> None:
        raise NotImplementedError

    def run(self, load: Load) -> Result:
        raise NotImplementedError

    def get(self, path: str) -> Any:
        """JSON of an HTTP path; None where there is no server."""
        return None

    def _stop(self) -> None:
        self.process.send_signal(self.stop_signal)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def broken(self, what: str) -> Broken:
        tail = self.log.read_text(errors="replace")[-1500:]
        return Broken(f"{self.name}: {what}; the end of {self.log}:\n{tail}")


@dataclasses.dataclass
class Served(System):
    """A server that speaks OpenAI's completions API."""

    port: int = 0
    ready_path: str = "/health"
    server: Server = dataclasses.field(init=False, repr=False)

    def _wait_ready(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise self.broken(f"ended with code {self.process.returncode} before it was ready")
            with contextlib.suppress(OSError):
                self.get(self.ready_path)
                self.server = uvloop.run(discover(Server(f"http://127.0.0.1:{self.port}")))
                return
            time.sleep(POLL_S)
        raise self.broken(f"not ready after {self.start_timeout_s:.0f} s")

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as reply:
            body = reply.read()
        return json.loads(body) if body else None

    def run(self, load: Load) -> Result:
        return uvloop.run(run(self.server, load))


@dataclasses.dataclass
class InProcess(System):
    """A runner: one JSON line in is a load, one JSON line out what came of it."""

    @property
    def talks(self) -> bool:
        return True

    def _wait_ready(self, deadline: float) -> None:
        timer = threading.Timer(deadline - time.monotonic(), self.process.kill)
        timer.start()
        try:
            if json.loads(self._line()) != {"ready": True}:
                raise self.broken("said something else than that it is ready")
        finally:
            timer.cancel()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait(STOP_S)
            raise self.broken(f"its runner ended ({describe_exit(code)})")
        return line

    def run(self, load: Load) -> Result:
        assert self.process.stdin is not None
        closed = list(itertools.islice(load.closed_requests(), MAX_REPEATED))
        opened = list(load.open_requests())
        job = {
            "concurrency": load.concurrency,
            "seconds": load.seconds,
            "closed": [_item(key, request) for key, request in closed],
            "open": [_item(key, request) for key, request in opened],
        }
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self._line())
        requests = {"closed": closed, "open": opened}
        outcomes = [
            Outcome(
                request=(request := requests[o["kind"]][o["index"]][1]),
                due_s=o["due_s"],
                sent_s=o["due_s"],
                chunks=[(at, tokens) for at, tokens in o["chunks"]],
                end_s=o["end_s"],
                prompt_tokens=request.prompt,
                output_tokens=sum(tokens for _, tokens in o["chunks"]),
                cut=o["cut"],
                storm=o["kind"] == "open",
            )
            for o in answer["outcomes"]
        ]
        return Result(outcomes, answer["wall_s"])


def _item(key: str, request: Request) -> dict[str, Any]:
    ids = prompt_ids(request.prompt, key)
    return {"ids": ids, "output": request.output, "at_s": request.arrival_s}


def clean_up_on_sigterm() -> None:
    """SIGTERM leaves `with system:` the way Ctrl-C does, so that nothing keeps running."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def descendants(pid: int) -> list[int]:
    """`pid` and everything below it, as far as it still exists."""
    found, waiting = [], [pid]
    while waiting:
        one = waiting.pop()
        found.append(one)
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                waiting += [int(child) for child in children.read_text().split()]
    return found


def tree_pss_bytes(pid: int) -> int:
    """Proportional set size of a process tree: memory shared within the tree counts once."""
    total = 0
    for one in descendants(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


class Watch:
    """Samples memory, and whatever `probe` returns, every half second while it is entered."""

    def __init__(self, pid: int, probe: Callable[[], Any] | None = None) -> None:
        self.peak_pss_bytes = 0
        self.probes = probe is not None
        self.samples: list[tuple[float, Any]] = []
        """(seconds since entering, what the probe returned)."""
        self._pid = pid
        self._probe = probe
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise Broken("could not watch the system") from self._failure

    def _run(self) -> None:
        try:
            while True:
                self.peak_pss_bytes = max(self.peak_pss_bytes, tree_pss_bytes(self._pid))
                if self._probe is not None:
                    self.samples.append((time.perf_counter() - self._started, self._probe()))
                if self._stop.wait(SAMPLE_S):
                    return
        except (OSError, ValueError) as error:
            self._failure = error
