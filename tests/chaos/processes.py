"""The stack under test: Valkey, gateways and workers as `pageferry up` starts them, and their logs.

`compose.local` says what runs and `compose.supervisor` keeps it running; this module adds what an
injector needs: ids of processes, signals, one log file per program, the link proxy in front of one
decode worker (which uses TCP; the other one shares memory).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import redis.asyncio
from link_proxy import LinkProxy

from pageferry.compose.embedded_valkey import ScratchDir, valkey_program
from pageferry.compose.local import UpSettings, choose_port, prepare_model, service_programs
from pageferry.compose.supervisor import Program, Supervisor
from pageferry.kvtransfer.settings import env_name

HOST = "127.0.0.1"
PROXY_HOST = "127.0.0.2"
"""Where prefill workers dial decode-1; it listens on the same port of `HOST`."""
PROXIED = "decode-1"
START_S = 90.0
NAMED = re.compile(r"\[([a-z]+-?\d*)\] (.*)", re.DOTALL)


@dataclass(frozen=True)
class Options:
    prefill: int = 2
    decode: int = 2
    gateways: int = 2
    lease_s: float = 2.0
    deterministic: bool = True


def settings_of(options: Options) -> UpSettings:
    """Small pools and queues, so that bursts meet their limits."""
    return UpSettings(
        deterministic=options.deterministic,
        prefill=options.prefill,
        decode=options.decode,
        lease_s=options.lease_s,
        num_pages=320,
        max_num_batched_tokens=256,
        max_queued_requests=128,
        request_timeout_s=140.0,
        worker_wait_s=10.0,
        keepalive_s=2.0,
        slow_client_s=3.0,
        handoff_timeout_s=10.0,
        drain_s=3.0,
    )


class Stack:
    """Everything that runs. `start` returns when all are ready; `stop` ends all."""

    def __init__(self, options: Options, log_dir: Path) -> None:
        self.options = options
        self.log_dir = log_dir
        self.lease_s = options.lease_s
        self.workers = [f"prefill-{i}" for i in range(options.prefill)]
        self.workers += [f"decode-{i}" for i in range(options.decode)]
        self.ports = [choose_port(HOST, 0) for _ in range(options.gateways)]
        handoff_port = choose_port(PROXY_HOST, 0)
        self.proxy = LinkProxy(PROXY_HOST, HOST, handoff_port)
        self._proxied_env = {
            env_name("transport"): "tcp",
            env_name("handoff_port"): str(handoff_port),
            env_name("advertise"): PROXY_HOST,
        }
        self._files = contextlib.ExitStack()
        self._logs: dict[str, Any] = {}
        self.supervisor = Supervisor(self._show, verbose=True)
        self._scratch = self._files.enter_context(ScratchDir())
        self.frozen: set[str] = set()
        self.redis: Any = None

    @property
    def gateways(self) -> list[str]:
        """Program names, in the order of `ports`."""
        return ["gateway", *(f"gateway-{i}" for i in range(1, len(self.ports)))]

    @property
    def urls(self) -> dict[str, str]:
        """Base URL by program name."""
        ports = zip(self.gateways, self.ports, strict=True)
        return {name: f"http://{HOST}:{port}" for name, port in ports}

    def pid(self, name: str) -> int:
        return self.supervisor.pid(name)

    def age_s(self, name: str) -> float | None:
        """Since the program's present process began; None while there is none."""
        try:
            return time.time() - os.stat(f"/proc/{self.pid(name)}").st_ctime
        except FileNotFoundError:
            return None

    def signal(self, name: str, number: signal.Signals) -> None:
        """To the program's process group."""
        os.killpg(self.pid(name), number)

    async def start(self) -> None:
        await self.proxy.start()
        valkey, redis_url = valkey_program(self._scratch.path)
        await self.supervisor.start(dataclasses.replace(valkey, restart=True))
        self.redis = redis.asyncio.Redis.from_url(redis_url, socket_timeout=10)
        settings = settings_of(self.options)
        await prepare_model(settings.model)
        for program in self._programs(settings, redis_url):
            await self.supervisor.start(program)
        await self.wait_ready(START_S)
        self.supervisor.all_ready = True

    def _programs(self, settings: UpSettings, redis_url: str) -> list[Program]:
        programs = service_programs(settings, redis_url, self.ports[0], self._scratch.path)
        gateway = programs[0]
        for name, port in zip(self.gateways[1:], self.ports[1:], strict=True):
            env = {**gateway.env, env_name("port"): str(port)}
            programs.append(dataclasses.replace(gateway, name=name, env=env))
        return [
            dataclasses.replace(p, env={**p.env, **self._proxied_env}) if p.name == PROXIED else p
            for p in programs
        ]

    async def wait_ready(self, timeout_s: float) -> None:
        """Until every gateway sees every worker. `TimeoutError` with what is missing."""
        deadline = time.monotonic() + timeout_s
        while True:
            missing = await self._missing()
            if not missing:
                return
            if self.supervisor.failed.done():
                raise self.supervisor.failed.result()
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ready after {timeout_s:g} s: {missing}")
            await asyncio.sleep(0.2)

    async def _missing(self) -> str:
        for url in self.urls.values():
            try:
                workers = await self.get(url, "/v1/workers")
                ready = await self.get(url, "/ready")
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                return f"{url}: {type(error).__name__} {error}"
            names = [w["id"] for w in workers["data"] if w["state"] == "ready"]
            lost = [n for n in self.workers if not any(i.startswith(n) for i in names)]
            if lost or not ready["ready"] or len(names) != len(self.workers):
                return f"{url}: {names}, {ready.get('reason')}"
        return ""

    async def answers(self, gateway: str) -> bool:
        """Whether its HTTP server is up."""
        try:
            await self.get(self.urls[gateway], "/health")
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False
        return True

    async def serving(self) -> dict[str, str]:
        """Workers whose present process is registered and ready: program name -> id."""
        for url in self.urls.values():
            try:
                records = (await self.get(url, "/v1/workers"))["data"]
            except (aiohttp.ClientError, OSError, TimeoutError):
                continue
            ids = {record["pid"]: record["id"] for record in records if record["state"] == "ready"}
            return {n: ids[self.pid(n)] for n in self.workers if self.pid(n) in ids}
        return {}

    async def drain(self, worker_id: str) -> int:
        """POST /v1/workers/{id}/drain to the gateways in turn; the last status, 0 without any."""
        status = 0
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for url in self.urls.values():
                try:
                    async with session.post(f"{url}/v1/workers/{worker_id}/drain") as reply:
                        status = reply.status
                except (aiohttp.ClientError, OSError, TimeoutError):
                    continue
                if status == 202:
                    break
        return status

    async def get(self, url: str, path: str) -> Any:
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url + path) as r:
            return await (r.json() if r.content_type == "application/json" else r.text())

    async def stop(self) -> None:
        for name in self.supervisor.names:
            with contextlib.suppress(ProcessLookupError):
                self.signal(name, signal.SIGCONT)
        services = [n for n in self.supervisor.names if n != "valkey"]
        await self.supervisor.stop(services, grace_s=10)
        await self.supervisor.stop(grace_s=1)
        await self.proxy.close()
        if self.redis is not None:
            await self.redis.aclose()
        self._files.close()

    def _show(self, text: str) -> None:
        """Lines of the services to a file each, what the supervisor says to its own."""
        named = NAMED.match(text)
        name, line = (named[1], named[2]) if named else ("supervisor", text)
        if name not in self._logs:
            path = self.log_dir / f"{name}.log"
            self._logs[name] = self._files.enter_context(path.open("w", buffering=1))
        if name == "supervisor":
            line = f"{time.strftime('%H:%M:%S')} {line}"
        self._logs[name].write(line + "\n")
