"""`pageferry health`: what container health checks get to hear."""

from __future__ import annotations

import dataclasses
import socket

import pytest

from pageferry.compose.health import HealthSettings, gateway_trouble, main, worker_trouble
from pageferry.kvtransfer.bus import connect, publish_worker
from pageferry.kvtransfer.keys import Keys
from pageferry.kvtransfer.wire import Ledger, WorkerRecord

RECORD = WorkerRecord(
    id="decode-1",
    role="decode",
    pid=1,
    host=socket.gethostname(),
    state="ready",
    model="tiny",
    fingerprint="00",
    layout={},
    ledger=Ledger(1, 1, 0, 0, 0, 0, 16),
    max_model_len=16,
)


@pytest.fixture
async def publish(redis_url):
    client = connect(redis_url)

    async def one(**changes: str) -> None:
        record = dataclasses.replace(RECORD, **changes)
        await publish_worker(client, Keys("tiny"), record, 60)

    yield one
    await client.aclose()


@pytest.fixture
def settings(redis_url):
    return HealthSettings(redis_url=redis_url, served_model_name="tiny")


async def test_worker_with_a_lease_is_alive(settings, publish):
    await publish()
    assert await worker_trouble(settings, "decode") == ""
    assert "no running lease of a prefill worker" in await worker_trouble(settings, "prefill")


async def test_worker_of_another_host_does_not_count(settings, publish):
    await publish(host="elsewhere")
    assert "no running lease" in await worker_trouble(settings, "decode")


async def test_draining_is_alive_and_unhealthy_is_not(settings, publish):
    await publish(state="draining")
    assert await worker_trouble(settings, "decode") == ""
    await publish(state="unhealthy")
    assert "reports itself unhealthy" in await worker_trouble(settings, "decode")


async def test_redis_that_is_away_is_named():
    settings = HealthSettings(redis_url="redis://127.0.0.1:1/0")
    assert "no answer from Redis" in await worker_trouble(settings, "decode")


def test_gateway_that_is_away_is_named():
    assert "no answer on port 1" in gateway_trouble(HealthSettings(port=1))


def test_exit_codes_and_one_sentence(monkeypatch, capsys):
    monkeypatch.setenv("PAGEFERRY_PORT", "1")
    assert main(["gateway"]) == 1
    assert capsys.readouterr().out.count("\n") == 1
    assert main(["nobody"]) == 2
