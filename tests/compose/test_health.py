"""`pageferry health`: what container health checks get to hear."""

from __future__ import annotations

import dataclasses
import http.server
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pageferry.compose import cli
from pageferry.compose.health import HealthSettings, main, worker_trouble
from pageferry.kvtransfer import alive_file
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


@pytest.fixture(scope="module")
def compose_check() -> Callable[[str], list[str]]:
    """A service's health check in compose.yaml, with this interpreter."""
    services = yaml.safe_load((Path(cli.__file__).parent / "compose.yaml").read_text())["services"]

    def of(service: str) -> list[str]:
        kind, program, *arguments = services[service]["healthcheck"]["test"]
        assert (kind, program) == ("CMD", "python")
        return [sys.executable, *arguments]

    return of


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


class Gateway(http.server.BaseHTTPRequestHandler):
    """Alive at /health, if its server says so."""

    def do_GET(self) -> None:
        self.send_response(self.server.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def test_the_containers_check_of_a_gateway(compose_check):
    """As compose.yaml has it, but for the port."""
    *command, port = compose_check("gateway")
    assert port == "8000"
    with http.server.HTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for server.status, code in ((200, 0), (503, 1)):
            done = subprocess.run([*command, str(server.server_port)], timeout=30, check=False)
            assert done.returncode == code
        server.shutdown()
    done = subprocess.run([*command, "1"], timeout=30, capture_output=True, check=False)
    assert done.returncode == 1
    assert b"gateway: no answer on port 1" in done.stderr


def test_the_containers_check_of_a_worker(compose_check, tmp_path):
    """Whose `alive_file` it is: tests/kvtransfer/test_alive_file.py."""
    *command, path = compose_check("decode")
    assert compose_check("prefill") == [*command, path]
    mine = str(tmp_path / "alive")
    for until, code in ((time.monotonic() + 60, 0), (time.monotonic() - 60, 1)):
        alive_file.write(mine, until, "ready")
        assert subprocess.run([*command, mine], timeout=30, check=False).returncode == code


def test_exit_codes_and_one_sentence(monkeypatch, capsys):
    monkeypatch.setenv("PAGEFERRY_PORT", "1")
    assert main(["gateway"]) == 1
    assert capsys.readouterr().out.count("\n") == 1
    assert main(["nobody"]) == 2
