"""How whole workers end: their engine's thread does not come back, or they cannot begin."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as Seq
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pageferry.decode_worker import worker as decode
from pageferry.kernels.runner import Chunk, Sampled
from pageferry.kvtransfer.bus import connect
from pageferry.kvtransfer.device_health import HealthMonitor
from pageferry.kvtransfer.heartbeat import EngineStuck
from pageferry.kvtransfer.keys import FIELD, Keys
from pageferry.kvtransfer.layout import KVLayout
from pageferry.kvtransfer.memory import PoolMemory
from pageferry.kvtransfer.pool import PagePool
from pageferry.kvtransfer.settings import DecodeSettings, PrefillSettings, SettingsError
from pageferry.kvtransfer.wire import Request, SamplingParams, pack, unpack_events
from pageferry.kvtransfer.worker_setup import WorkerParts
from pageferry.prefill_worker import worker as prefill

KEYS = Keys("m")
LAYOUT = KVLayout(dtype="float32", page_size=8, num_layers=1, num_kv_heads=1, head_dim=4)
NUM_PAGES = 16
LEASE_S = 1.0
STUCK_AT = 9
"""Position before which the engine hangs."""


class StickingRunner:
    """Answers each wanted row with its position, up to one where it waits to be let go."""

    kernel_seconds = 0.0

    def __init__(self) -> None:
        self.is_stuck = threading.Event()
        self.let_go = threading.Event()

    def execute(self, chunks: Seq[Chunk]) -> list[Sampled | None]:
        positions = [chunk.start + len(chunk.token_ids) for chunk in chunks]
        if STUCK_AT in positions:
            self.is_stuck.set()
            self.let_go.wait()
        return [Sampled(position, None, (), "") for position in positions]


@pytest.fixture
def runner() -> Iterator[StickingRunner]:
    runner = StickingRunner()
    yield runner
    runner.let_go.set()


@pytest.fixture
def make(redis_url: str, runner: StickingRunner) -> Iterator[Callable[..., Any]]:
    memory = PoolMemory.create(LAYOUT, NUM_PAGES)

    def worker(role: str, **more: Any) -> Any:
        kinds: dict[str, Any] = {
            "decode": (decode.DecodeWorker, DecodeSettings),
            "prefill": (prefill.PrefillWorker, PrefillSettings),
        }
        worker_class, settings_class = kinds[role]
        settings = settings_class(redis_url=redis_url, lease_s=LEASE_S, transport="tcp", **more)
        model: Any = SimpleNamespace(fingerprint="f")
        stub: Any = runner
        parts = WorkerParts(
            worker_id="w",
            role=role,
            settings=settings,
            keys=KEYS,
            model=model,
            pool=PagePool(NUM_PAGES, LAYOUT.page_size),
            memory=memory,
            runner=stub,
            max_model_len=100,
            health=HealthMonitor.create("cpu"),
            core_flag=None,
            tls=None,
        )
        return worker_class(parts, settings)

    yield worker
    memory.close()


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Any]:
    opened = connect(redis_url, KEYS)
    await opened.set(KEYS.gateway("gw"), b"1")
    yield opened
    await opened.aclose()


async def ends_stuck(worker: Any, client: Any, hang: Callable[[], Any]) -> None:
    """Run the worker, hang it when it is there, and see it leave the registry and end."""
    life = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(30):
            while not await client.exists(KEYS.worker("w")):
                await asyncio.sleep(0.02)
            await hang()
            worker._engine.clock._turned -= 10_000  # so long has it been so
            with pytest.raises(EngineStuck):
                await life
    finally:
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError, EngineStuck):
            await life
    assert not await client.exists(KEYS.worker("w"))
    assert not await client.sismember(KEYS.workers, "w"), "its lease has lapsed: it did not leave"


@pytest.mark.parametrize(("role", "module"), [("decode", decode), ("prefill", prefill)])
async def test_a_worker_does_not_wait_for_its_stuck_engine(
    make: Callable[..., Any],
    client: Any,
    runner: StickingRunner,
    monkeypatch: pytest.MonkeyPatch,
    role: str,
    module: ModuleType,
) -> None:
    monkeypatch.setattr(module, "JOIN_S", 100.0)
    worker = make(role)
    monkeypatch.setattr(worker._engine, "run", runner.let_go.wait)

    async def hang() -> None:
        pass

    await ends_stuck(worker, client, hang)


async def test_what_a_stuck_engine_says_later_goes_nowhere(
    make: Callable[..., Any], client: Any, runner: StickingRunner
) -> None:
    worker = make("decode")
    request = Request("r", 3, "gw", tuple(range(6)), 6, SamplingParams(max_tokens=20))

    async def hang() -> None:
        await client.xadd(KEYS.decode_queue("w"), {FIELD: pack(request.to_dict())})
        await asyncio.to_thread(runner.is_stuck.wait, 20)

    async def said() -> list[int]:
        entries = await client.xrange(KEYS.tokens("gw"))
        events = [event for _, fields in entries for event in unpack_events(fields[FIELD])]
        return [token for event in events for token in event.token_ids]

    before = set(threading.enumerate())
    await ends_stuck(worker, client, hang)
    assert await said() == list(range(6, STUCK_AT)), "what it said in time must not be lost"
    length = await client.xlen(KEYS.tokens("gw"))
    runner.let_go.set()
    for thread in set(threading.enumerate()) - before:
        if thread.name == "engine":
            await asyncio.to_thread(thread.join, 30)
            assert not thread.is_alive()
    assert worker._engine.num_generated_tokens > STUCK_AT - 6, "it has gone on"
    assert await client.xlen(KEYS.tokens("gw")) == length


async def test_a_port_that_cannot_be_had_is_named(make: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"--handoff-port {port}: .*already in use"):
            await make("decode", handoff_port=port).run()
