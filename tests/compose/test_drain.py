"""`pageferry drain` of several workers, against a gateway that only keeps a list of workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from pageferry.compose.drain import DrainSettings, main

LEAVES_S = 0.05
COMES_S = 0.4


class Gateway:
    """Drained workers leave; a fresh one named `<id>+` comes later, if its id is not `lost`."""

    def __init__(self) -> None:
        self.states = {"d1": "ready", "d2": "ready", "d3": "ready", "p1": "ready"}
        self.lost: set[str] = set()
        self.url = ""
        self.keys: set[str | None] = set()
        self.told: list[tuple[str, int]] = []
        """(worker, decode workers that were ready when it was told to leave)."""

    def decoders(self) -> int:
        return sum(i[0] == "d" and state == "ready" for i, state in self.states.items())

    async def workers(self, request: web.Request) -> web.Response:
        roles = {"d": "decode", "p": "prefill"}
        data = [{"id": i, "role": roles[i[0]], "state": s} for i, s in self.states.items()]
        return web.json_response({"data": data})

    async def drain(self, request: web.Request) -> web.Response:
        worker = request.match_info["worker"]
        self.keys.add(request.headers.get("Authorization"))
        self.told.append((worker, self.decoders()))
        self.states[worker] = "draining"
        loop = asyncio.get_running_loop()
        loop.call_later(LEAVES_S, self.states.pop, worker)
        if worker not in self.lost:
            loop.call_later(COMES_S, self.states.update, {f"{worker}+": "ready"})
        return web.json_response({}, status=202)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    app = web.Application()
    app.router.add_get("/v1/workers", gateway.workers)
    app.router.add_post("/v1/workers/{worker}/drain", gateway.drain)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    gateway.url = f"http://{host}:{port}"
    yield gateway
    await runner.cleanup()


async def run(*argv: str) -> int:
    return await asyncio.to_thread(main, argv)


async def test_each_waits_for_the_replacement_of_the_one_before(gateway, capsys):
    assert await run("d1", "p1", "d2", "--url", gateway.url) == 0
    assert gateway.told == [("d1", 3), ("p1", 3), ("d2", 3)]
    assert gateway.states.keys() == {"d3", "d1+", "p1+"}  # the last one is not waited for
    said = capsys.readouterr().out.splitlines()
    assert said[1:4] == [
        "d1 has left",
        "waiting for a replacement: 2 of 3 decode workers ready",
        "d1 has been replaced: 3 of 3 decode workers ready",
    ]
    assert said[-1] == "d2 has left"


async def test_replaced_waits_for_the_last_one_too(gateway, capsys):
    assert await run("d1", "--replaced", "--url", gateway.url) == 0
    assert gateway.decoders() == 3
    assert "d1 has been replaced" in capsys.readouterr().out


async def test_without_a_replacement_the_rest_is_not_drained(gateway, capsys):
    gateway.lost = {"d1"}
    assert await run("d1", "d2", "p1", "--timeout-s", "0.5", "--url", gateway.url) == 1
    assert gateway.told == [("d1", 3)]
    said = capsys.readouterr().err
    assert "nothing has replaced d1" in said
    assert "2 of 3 decode workers ready; not drained: d2, p1" in said


async def test_one_that_drains_already_has_to_be_replaced_too(gateway):
    gateway.states["d1"] = "draining"
    gateway.lost = {"d1"}
    assert await run("d1", "d2", "--timeout-s", "0.3", "--url", gateway.url) == 1
    assert gateway.told == [("d1", 2)]


async def test_an_unknown_id_is_found_before_the_first_drain(gateway, capsys):
    assert await run("d1", "d9", "--url", gateway.url) == 1
    assert gateway.told == []
    said = capsys.readouterr().err
    assert "no worker has the id 'd9'" in said
    assert "not drained: d1, d9" in said


async def test_settings_come_from_the_environment(gateway, monkeypatch, capsys):
    monkeypatch.setenv("PAGEFERRY_URL", gateway.url)
    monkeypatch.setenv("PAGEFERRY_API_KEY", "sesame")
    monkeypatch.setenv("PAGEFERRY_PREFILL", "2")  # of `pageferry up`
    assert await run("d1") == 0
    assert gateway.keys == {"Bearer sesame"}
    monkeypatch.setenv("PAGEFERRY_URL", "127.0.0.1:8000")
    assert await run("d2") == 1
    assert "write http://127.0.0.1:8000" in capsys.readouterr().err


async def test_help_and_usage(capsys):
    assert await run() == 2
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--replaced" in capsys.readouterr().out
    assert DrainSettings().replaced is False
