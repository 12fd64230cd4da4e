"""`pageferry up`: a gateway, its workers and a Valkey on this machine, as separate processes.

1. Check what can be checked at once: settings, port, cores.
2. Start Valkey (unless a Redis URL was given) while the model is resolved or converted.
3. Check that weights and KV pools fit into memory.
4. Start the gateway and the workers, wait for /ready, print one line to stdout.
5. Wait for Ctrl-C, SIGTERM or SIGHUP; workers and the gateway that die are started again
   (`supervisor`), the death of the own Valkey ends the run.
6. Stop everything within 5 s. A second signal kills at once.

Exit codes: 0 stopped by a signal after it was ready; 2 a setting that cannot work; 1 anything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from redis.exceptions import BusyLoadingError

from pageferry.compose.embedded_valkey import ScratchDir, valkey_program
from pageferry.compose.placement import (
    allowed_cores,
    check_memory,
    count_gpus,
    divide_cores,
    divide_gpus,
    siblings_together,
)
from pageferry.compose.probe import ANY_ADDRESS, http_get
from pageferry.compose.supervisor import ChildDied, Program, Supervisor, launcher_argv
from pageferry.kvtransfer.bus import TRANSIENT, connect
from pageferry.kvtransfer.host_memory import available_bytes
from pageferry.kvtransfer.model_files import served_name
from pageferry.kvtransfer.settings import (
    ENV_PREFIX,
    DecodeSettings,
    GatewaySettings,
    PrefillSettings,
    SettingsError,
    WorkerSettings,
    env_name,
    from_args,
    setting,
)

T = TypeVar("T")

PROG = "pageferry up"
GRACE_S = 4.0
"""From SIGTERM to SIGKILL for gateway and workers; Valkey gets another half second."""
MAX_WORKERS = 64
REDIS_WAIT_S = 10.0
POLL_S = 0.1


@dataclass(frozen=True)
class UpSettings(GatewaySettings, PrefillSettings, DecodeSettings):
    """What to start, and every setting of the services: each is handed to those that have it."""

    redis_url: str = setting(
        "",
        "Redis or Valkey server to use. Plain REDIS_URL is read too. Default: an own Valkey that "
        "lives as long as this command.",
    )
    cores: str = setting(
        "", 'CPU cores to divide among the workers, e.g. "0-7"; default: all allowed cores.'
    )
    drain_s: float = setting(
        3.0, "Seconds that running requests may take to finish on Ctrl-C (0 to 3)."
    )
    prefill: int = setting(1, "Prefill workers; with 0 the decode workers prefill (0 to 63).")
    decode: int = setting(1, "Decode workers (1 to 63).")
    start_timeout_s: float = setting(
        600.0, "Seconds for the workers to load the model; after that the start has failed."
    )
    lend_cores: bool = setting(
        True, "Let decode workers compute on the cores of prefill workers that idle (CPU only)."
    )
    verbose: bool = setting(False, "Show every log line of the services, not only warnings.")


class Stopped(Exception):
    """A signal asked for the end."""


def check(settings: UpSettings) -> None:
    """`SettingsError` for what cannot work, before anything is started."""
    if settings.prefill < 0 or settings.decode < 1:
        raise SettingsError(
            f"--prefill {settings.prefill} --decode {settings.decode}: "
            "expected at least 0 prefill workers and 1 decode worker"
        )
    if settings.prefill + settings.decode > MAX_WORKERS:
        raise SettingsError(
            f"--prefill {settings.prefill} --decode {settings.decode}: "
            f"more than {MAX_WORKERS} workers on one machine"
        )
    if not 0 <= settings.drain_s <= GRACE_S - 1:
        raise SettingsError(f"--drain-s {settings.drain_s:g}: expected 0 to {GRACE_S - 1:g}")
    if settings.handoff_port and settings.decode > 1:
        raise SettingsError(
            f"--handoff-port {settings.handoff_port}: {settings.decode} decode workers cannot "
            "share one port; leave it at 0"
        )
    if settings.alive_file:
        raise SettingsError("--alive-file: the workers cannot share one; each needs its own")


def choose_port(host: str, port: int) -> int:
    """`port` if it can be bound on `host`, a free one for 0; else `SettingsError`."""
    try:
        if not 0 <= port <= 65535:
            raise OSError(0, "ports are 0 to 65535")
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {host}:{port} ({error.strerror}); "
            "choose another --port, or 0 for a free one"
        ) from error


def service_env(settings: UpSettings, cls: type, **own: object) -> dict[str, str]:
    """Environment of a service: ours, but its settings are exactly those given here.

    The environment carries them, not flags, because every user may read command lines.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX) and k != "REDIS_URL"}
    env["PYTHONUNBUFFERED"] = "1"
    for f in fields(cls):
        value = own.get(f.name, getattr(settings, f.name))
        if value != f.default:
            env[env_name(f.name)] = str(value)
    return env


def service_programs(
    settings: UpSettings, redis_url: str, port: int, scratch: Path
) -> list[Program]:
    """The gateway and the workers; workers get their share of the cores and of the GPUs.

    Decode worker i computes on the cores of prefill worker i too, while that one idles.
    """
    python = [sys.executable, "-P", "-m"]
    workers = settings.prefill + settings.decode
    cores = divide_cores(siblings_together(allowed_cores(settings.cores)), workers)
    devices = [(settings.device, settings.gpu_memory_fraction)] * workers
    gpus = gpus_to_divide(settings)
    if gpus:
        devices = divide_gpus(gpus, workers, settings.gpu_memory_fraction)
    on_cpu = not gpus and not settings.device.startswith("cuda")
    lending = 0
    if settings.lend_cores and on_cpu and len(set(cores)) == workers:
        lending = min(settings.prefill, settings.decode)
    programs = [
        Program(
            "gateway",
            [*python, "pageferry.gateway.main"],
            service_env(settings, GatewaySettings, redis_url=redis_url, port=port),
        )
    ]
    roles: list[tuple[str, int, type[WorkerSettings]]] = [
        *(("prefill", i, PrefillSettings) for i in range(settings.prefill)),
        *(("decode", i, DecodeSettings) for i in range(settings.decode)),
    ]
    for (role, i, cls), share, (device, fraction) in zip(roles, cores, devices, strict=True):
        name = f"{role}-{i}"
        full_name = f"{settings.name}-{name}" if settings.name else name
        argv = [*python, f"pageferry.{role}_worker.main", "--name", full_name]
        own: dict[str, object] = {"device": device, "gpu_memory_fraction": fraction}
        if i < lending:
            own["core_flag"] = scratch / f"cores-{i}"
            own["borrow_cores"] = cores[i]
        env = service_env(settings, cls, redis_url=redis_url, cores=share, name="", **own)
        programs.append(Program(name, argv, env))
    return programs


def gpus_to_divide(settings: UpSettings) -> int:
    """GPUs to place workers on; 0 when a device was named or there is none."""
    return count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) if settings.device == "auto" else 0


async def prepare_model(model: str) -> Path:
    """Resolve or convert `model` in a process of its own; its progress goes to our stderr.

    `SettingsError` if there is no such model, `ChildDied` if the conversion broke; what was wrong
    has been said on stderr by then.
    """
    argv = [sys.executable, "-P", "-m", "pageferry.kernels.prepare", *([model] if model else [])]
    process = await asyncio.create_subprocess_exec(
        *launcher_argv(argv),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it may have a pip of its own running
        await process.wait()
    if process.returncode == 2:
        raise SettingsError(f"--model {model or '(demo)'} cannot be served, see above")
    if process.returncode:
        raise ChildDied("preparing the model failed, see above", 1)
    return Path(output.decode().splitlines()[-1])


async def wait_for_redis(url: str, loading_s: float) -> None:
    """Return once the server answers; `SettingsError` after `REDIS_WAIT_S` without an answer.

    For one that answers that it still loads its data set: after `loading_s`.
    """
    client = connect(url)
    loop = asyncio.get_running_loop()
    begun = answered = loop.time()
    try:
        while True:
            try:
                await client.ping()
                return
            except BusyLoadingError as error:
                answered = loop.time()
                if answered > begun + loading_s:
                    raise SettingsError(
                        f"Redis still loads its data after {loading_s:g} s; raise --start-timeout-s"
                    ) from error
            except TRANSIENT as error:
                if loop.time() > answered + REDIS_WAIT_S:
                    raise SettingsError(
                        f"no answer from Redis in {REDIS_WAIT_S:g} s ({type(error).__name__}: "
                        f"{error}); is it running, and is --redis-url right?"
                    ) from error
            await asyncio.sleep(POLL_S / 2)
    finally:
        await client.aclose()


async def wait_until_ready(
    host: str, port: int, timeout_s: float, *, prefill: int = 0, decode: int = 1, tls: bool = False
) -> None:
    """Poll the gateway's /ready until so many workers are; `ChildDied` after `timeout_s`."""
    last = "no answer"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                with contextlib.suppress(OSError):
                    status, body = await asyncio.to_thread(http_get, host, port, "/ready", tls=tls)
                    last = f"{status} {body[:300]!r}"
                    if status == 200:
                        at = json.loads(body)
                        if at["prefill_workers"] >= prefill and at["decode_workers"] >= decode:
                            return
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise ChildDied(
            f"not ready after {timeout_s:g} s (/ready says: {last}); "
            "see --verbose, or raise --start-timeout-s",
            1,
        ) from error


def with_cluster_key(settings: UpSettings) -> UpSettings:
    """Workers of one run prove to each other that they belong to it, also if no key was given."""
    if settings.cluster_key:
        return settings
    return replace(settings, cluster_key=secrets.token_hex(32))


class Run:
    """One `pageferry up` from start to stop."""

    def __init__(self, settings: UpSettings) -> None:
        self.settings = with_cluster_key(settings)
        self.port = choose_port(settings.host, settings.port)
        self.supervisor = Supervisor(say, verbose=settings.verbose)
        self._signals: asyncio.Queue[None] = asyncio.Queue()
        self._signalled = 0

    async def run(self) -> None:
        """Serve until a signal; raises `Stopped`, `SettingsError` or `ChildDied`."""
        with ScratchDir() as scratch, self._signal_handlers():
            try:
                await self._until_ended(self._start(scratch.path))
                self.supervisor.all_ready = True
                await self._until_ended(asyncio.get_running_loop().create_future())
            finally:
                await self._stop()

    async def _start(self, scratch: Path) -> None:
        settings = self.settings
        redis_url = settings.redis_url
        if not redis_url:
            valkey, redis_url = valkey_program(scratch)
            await self.supervisor.start(valkey)
        model_dir = await prepare_model(settings.model)
        workers = settings.prefill + settings.decode
        if not gpus_to_divide(settings) and not settings.device.startswith("cuda"):
            check_memory(model_dir, settings, workers, *available_bytes())
        await wait_for_redis(redis_url, settings.start_timeout_s)
        say(f"pageferry: starting {settings.prefill} prefill and {settings.decode} decode workers")
        for program in service_programs(settings, redis_url, self.port, scratch):
            await self.supervisor.start(program)
        tls = bool(settings.tls_cert)
        await wait_until_ready(
            settings.host,
            self.port,
            settings.start_timeout_s,
            prefill=settings.prefill,
            decode=settings.decode,
            tls=tls,
        )
        print(ready_line(settings, self.port), flush=True)

    async def _until_ended(self, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
        """`work`'s result, unless a signal or a child's death comes first."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._signals.get())
        try:
            events: list[asyncio.Future[Any]] = [task, stop, self.supervisor.failed]
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                raise Stopped
            if self.supervisor.failed.done():
                raise self.supervisor.failed.result()
            return await task
        finally:
            task.cancel()
            stop.cancel()
            await asyncio.wait(events[:2])

    async def _stop(self) -> None:
        say("pageferry: stopping")
        services = [n for n in self.supervisor.names if n != "valkey"]
        await self.supervisor.stop(services, grace_s=GRACE_S)
        await self.supervisor.stop(grace_s=0.5)

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in wanted:
            loop.add_signal_handler(number, self._on_signal)
        yield
        for number in wanted:
            loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        self._signalled += 1
        if self._signalled > 1:
            self.supervisor.kill()
        self._signals.put_nowait(None)


def ready_line(settings: UpSettings, port: int) -> str:
    """The one line on stdout: where, which model, and a command that works.

    An API key is not in it: the command takes it from the environment of whoever pastes it.
    """
    model = served_name(settings.model, settings.served_model_name)
    shown = ANY_ADDRESS.get(settings.host, settings.host)
    shown = f"[{shown}]" if ":" in shown else shown
    url = f"{'https' if settings.tls_cert else 'http'}://{shown}:{port}"
    keyed = bool(settings.api_key or settings.api_keys_file)
    key = '-H "Authorization: Bearer $PAGEFERRY_API_KEY" ' if keyed else ""
    messages = [{"role": "user", "content": "Hello!"}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 64})
    return (
        f"{url} serves {model}. Try: curl {url}/v1/chat/completions {key}"
        f"-H 'Content-Type: application/json' -d {shlex.quote(body)}"
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def serve(settings: UpSettings) -> int:
    """Run until the end; returns the exit code."""
    run = None
    try:
        check(settings)
        run = Run(settings)
        await run.run()
    except SettingsError as error:
        say(f"{PROG}: {error}")
        return 2
    except ChildDied as error:
        say(f"{PROG}: {error}")
        return 2 if error.code == 2 else 1
    except Stopped:
        return 0 if run is not None and run.supervisor.all_ready else 1
    return 1


def main() -> int:
    description = "Serve a model on this machine with separate prefill and decode workers."
    return asyncio.run(serve(from_args(UpSettings, PROG, description)))


if __name__ == "__main__":
    sys.exit(main())
