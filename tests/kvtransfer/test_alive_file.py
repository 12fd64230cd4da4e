"""What a worker leaves on its host for health checks: true while its lease runs, and cheap."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from pageferry.kernels.devices import DeviceError
from pageferry.kvtransfer import alive_file, heartbeat
from pageferry.kvtransfer.bus import connect
from pageferry.kvtransfer.keys import Keys
from pageferry.kvtransfer.settings import SettingsError, WorkerSettings
from pageferry.kvtransfer.wire import Ledger, WorkerRecord
from pageferry.kvtransfer.worker_bus import BusCallbacks, WorkerBus
from pageferry.kvtransfer.worker_setup import build

KEYS = Keys("m")
LEASE_S = 0.4


class Worker:
    """What a bus sees of a worker."""

    def __init__(self, url: str, path: str) -> None:
        self.record = WorkerRecord(
            "w1", "decode", 1, "h", "ready", "m", "f", {}, Ledger(1, 1, 0, 0, 0, 0, 16), 100
        )
        self.stuck = ""
        self.failures: list[BaseException] = []
        unused: Any = None
        callbacks = BusCallbacks(
            record=lambda: self.record,
            cancelled=unused,
            drain=unused,
            active_gateways=set,
            gateway_lost=unused,
            failed=self.failures.append,
            stuck=lambda: self.stuck,
        )
        self.path = path
        self.bus = WorkerBus(url, KEYS, LEASE_S, callbacks, path)

    def read_until(self) -> float:
        return float(Path(self.path).read_text().split()[0])

    async def until(self, condition: Callable[[str], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition(alive_file.trouble(self.path)):
                await asyncio.sleep(0.01)


@pytest.fixture
async def worker(redis_url: str, tmp_path: Path) -> AsyncIterator[Worker]:
    worker = Worker(redis_url, str(tmp_path / "alive"))
    await worker.bus.start()
    await worker.until(lambda trouble: not trouble)
    yield worker
    await worker.bus.close("w1")


async def test_a_worker_that_beats_stays_alive(worker: Worker) -> None:
    first = worker.read_until()
    await worker.until(lambda trouble: not trouble and worker.read_until() > first + 2 * LEASE_S)


async def test_a_stuck_engine_is_told_from_a_busy_one(worker: Worker) -> None:
    worker.stuck = "the engine has not come back for 120 s"
    await worker.until(lambda trouble: "lease ended" in trouble)
    assert [type(f) for f in worker.failures] == [heartbeat.EngineStuck]


async def test_a_loop_that_stands_still_for_long_is_seen(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "LOOP_SILENCE_S", 0.1)
    time.sleep(4 * LEASE_S)  # noqa: ASYNC251 - that is the fault
    assert "lease ended" in alive_file.trouble(worker.path)
    await worker.until(lambda trouble: not trouble)


async def test_redis_that_does_not_answer_is_seen_and_its_return_too(
    worker: Worker, redis_url: str
) -> None:
    async with connect(redis_url) as client:
        await client.client_pause(int(3 * LEASE_S * 1000))
    await worker.until(lambda trouble: "lease ended" in trouble)
    await worker.until(lambda trouble: not trouble)


async def test_a_disk_that_is_full_hides_no_loss(worker: Worker, redis_url: str) -> None:
    worker.bus._alive_file = worker.path + ".missing/alive"
    worker.bus._control_id = b"1-1"
    async with connect(redis_url) as client, asyncio.timeout(30):
        while worker.bus._control_id != b"0-0":
            await client.delete(KEYS.worker("w1"))
            await asyncio.sleep(LEASE_S)


async def test_draining_is_alive_and_unhealthy_is_not(worker: Worker) -> None:
    worker.record = dataclasses.replace(worker.record, state="draining")
    await worker.until(lambda trouble: not trouble and "draining" in Path(worker.path).read_text())
    worker.record = dataclasses.replace(worker.record, state="unhealthy")
    await worker.until(lambda trouble: "unhealthy" in trouble)


def test_files_that_are_missing_or_foreign_are_named(tmp_path: Path) -> None:
    path = tmp_path / "alive"
    assert f"no worker has written {path}" in alive_file.trouble(str(path))
    for text in ("", "soon ready", "1 2 3"):
        path.write_text(text)
        assert f"{path} is no worker's --alive-file" in alive_file.trouble(str(path))


def test_a_file_that_cannot_be_written_is_a_mistake_and_an_old_one_is_over(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "missing" / "alive")
    with pytest.raises(SettingsError, match=r"--alive-file .*missing.*No such file"):
        build("decode", WorkerSettings(alive_file=nowhere))
    path = str(tmp_path / "alive")
    alive_file.write(path, time.monotonic() + 1000, "ready")
    with pytest.raises(DeviceError):
        build("decode", WorkerSettings(alive_file=path, device="no-such"))
    assert "it is starting" in alive_file.trouble(path)


def test_the_check_imports_next_to_nothing() -> None:
    """It runs every few seconds in every container."""
    script = (
        "import sys; before = set(sys.modules); import pageferry.kvtransfer.alive_file;"
        "print(*(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    ours = {"pageferry", "pageferry.kvtransfer", "pageferry.kvtransfer.alive_file"}
    assert set(done.stdout.split()) <= ours
