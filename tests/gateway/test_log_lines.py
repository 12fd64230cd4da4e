"""One line for each call that ends; never what clients wrote, in no log, metric or Redis key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from typing import Any

import pytest

from pageferry.gateway import bodies, log_lines
from pageferry.gateway.choices import Choice
from pageferry.gateway.schema import CompletionCall

Cluster = Any

MARKER = "zanzibar"


async def provoke(cluster: Cluster, base: str) -> dict[str, int]:
    """Calls that end in every way, with the marker in all their text; their statuses."""
    http = cluster.http
    headers = {"Authorization": f"Bearer {MARKER}-key"}
    good = {"model": "tiny", "prompt": f"{MARKER} prompt", "max_tokens": 3, "user": MARKER}
    calls = {
        "success": good | {"stop": f"{MARKER}-stop"},
        "stream": good | {"stream": True},
        "bad value": good | {"temperature": MARKER},
        "bad prompt": good | {"prompt": [[MARKER]]},
        "bad role": {"model": "tiny", "messages": [{"role": MARKER, "content": MARKER}]},
        "bad part": {
            "model": "tiny",
            "messages": [{"role": "user", "content": [{"type": MARKER}]}],
        },
        "bad field": good | {"guided_regex": MARKER},
        "too long": good | {"prompt": MARKER * 1000},
        "poison": good | {"seed": 666},
    }
    statuses = {}
    for name, body in calls.items():
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        async with http.post(base + path, json=body, headers=headers) as reply:
            statuses[name] = reply.status
            text = await reply.text()
            assert reply.status == 200 or MARKER not in text, name
    raw = b'{"model":"tiny","prompt":"' + MARKER.encode()
    async with http.post(f"{base}/v1/completions", data=raw, headers=headers) as reply:
        statuses["malformed"] = reply.status
    async with http.get(f"{base}/v1/{MARKER}", headers=headers) as reply:
        statuses["no such path"] = reply.status
    async with http.get(
        f"{base}/v1/models", headers={"Authorization": f"Bearer {MARKER}"}
    ) as reply:
        statuses["no key"] = reply.status
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.3):
            body = good | {"stream": True, "prompt": MARKER * 20, "max_tokens": 400}
            async with http.post(f"{base}/v1/completions", json=body, headers=headers) as reply:
                await reply.read()
    statuses["abort"] = 0
    return statuses


async def test_no_text_in_logs_redis_and_metrics(cluster: Cluster, start_gateway: Any) -> None:
    env = {"PAGEFERRY_API_KEY": f"{MARKER}-key"}
    gateway = await start_gateway(env, log_level="debug")
    await cluster.worker("decode", step_s=0.01)
    for i in range(5):
        await cluster.worker("prefill", f"prefill-{i}")
    await gateway.until_ready()
    statuses = await provoke(cluster, gateway.base)
    assert statuses == {
        "success": 200,
        "stream": 200,
        "bad value": 400,
        "bad prompt": 400,
        "bad role": 400,
        "bad part": 400,
        "bad field": 400,
        "too long": 400,
        "poison": 500,
        "malformed": 400,
        "no such path": 404,
        "no key": 401,
        "abort": 0,
    }
    await cluster.until(lambda: gateway.log.read_text().count("outcome=abort") == 1)
    await cluster.until(lambda: not cluster.workers[0].active)
    log = gateway.log.read_text()
    async with cluster.http.get(f"{gateway.base}/metrics") as reply:
        assert MARKER not in await reply.text()
    client = cluster.workers[0].client
    await asyncio.sleep(0.3)
    dump = b"".join([await client.dump(key) or b"" for key in await client.keys("*")])
    assert len(dump) > 0
    assert MARKER.encode() not in dump
    assert f"{MARKER}-key" not in log
    assert "Traceback" not in log
    assert MARKER not in log
    check_lines(log)


async def test_prompts_are_logged_when_asked_for(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.gateway(log_prompts=True)
    await cluster.worker("decode")
    with caplog.at_level(logging.INFO):
        await cluster.post(prompt="what is asked", max_tokens=4)
    assert "prompt='what is asked' answer='what'" in caplog.text


BODY: dict[str, Any] = {"model": "tiny", "prompt": "abc" * 20, "max_tokens": 50}
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: {}\r\nAuthorization: Bearer k\r\n"


class Calls:
    """Sends calls under an id each, and finds the lines that they leave."""

    def __init__(self, cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
        self.cluster = cluster
        self._caplog = caplog

    async def post(self, client_id: str, headers: Any = (), **fields: Any) -> int:
        """The answer's status, once all of it is here."""
        given = {"X-Request-Id": client_id, "Authorization": "Bearer k", **dict(headers)}
        url = f"{self.cluster.base}/v1/completions"
        async with self.cluster.http.post(url, json=BODY | fields, headers=given) as reply:
            await reply.read()
            assert reply.headers["X-Request-Id"] == client_id
            return int(reply.status)

    async def raw(self, client_id: str, data: bytes) -> tuple[Any, Any]:
        """A connection on which `data` follows the first headers of a call."""
        port = self.cluster.gateways[0].port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD.format(client_id).encode() + data)
        return reader, writer

    async def line(self, client_id: str) -> str:
        """Its only line, once it is there: kind, key, outcome, status and class."""

        def lines() -> list[str]:
            messages = [record.getMessage() for record in self._caplog.records]
            ends = [m for m in messages if m.startswith(("request_end ", "call_end "))]
            return [m for m in ends if f" client_id={client_id} " in m]

        await self.cluster.until(lines)
        await asyncio.sleep(0.02)
        (line,) = lines()
        kind, *pairs = line.split()
        values = dict(pair.split("=", 1) for pair in pairs)
        assert float(values["total_s"]) >= 0
        return " ".join([kind, *(values[name] for name in ("key", "outcome", "status", "class"))])


@pytest.fixture
async def calls(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> Calls:
    """To a gateway that asks for a key, with one worker of each role."""
    caplog.set_level(logging.INFO)
    await cluster.gateway(api_key="k", max_body_mib=0.01, max_queued_requests=2)
    await cluster.worker("decode", step_s=0.01)
    await cluster.worker("prefill")
    return Calls(cluster, caplog)


async def test_one_line_for_a_call_that_is_refused(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, prefill = calls.cluster.gateways[0], calls.cluster.workers[1]
    refused = "call_end default refused {} ApiError"
    assert await calls.post("no-key", {"Authorization": "Bearer wrong"}) == 401
    assert await calls.line("no-key") == "call_end - refused 401 ApiError"
    assert await calls.post("gzip", {"Content-Encoding": "gzip"}) == 415
    assert await calls.line("gzip") == refused.format(415)
    assert await calls.post("large", prompt="a" * 20_000) == 413
    assert await calls.line("large") == refused.format(413)
    assert await calls.post("value", temperature="hot") == 400
    assert await calls.line("value") == refused.format(400)
    assert await calls.post("model", model="other") == 404
    assert await calls.line("model") == refused.format(404)
    assert await calls.post("tokens", prompt="a" * 5000) == 400
    assert await calls.line("tokens") == refused.format(400)
    assert await calls.post("never", {"Expect": "never"}) == 417
    assert await calls.line("never") == "call_end - refused 417 ApiError"
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.1)
    reader, writer = await calls.raw("late", b"Content-Length: 9\r\n\r\n{")
    assert b" 408 " in await reader.readline()
    assert await calls.line("late") == refused.format(408)
    writer.transport.abort()
    prefill.prefill_s = 0.3
    waiting = asyncio.create_task(calls.post("waits", n=2, max_tokens=1))
    await calls.cluster.until(lambda: len(calls.cluster.generations()) == 2)
    assert await calls.post("crowd") == 429
    assert await calls.line("crowd") == refused.format(429)
    assert await waiting == 200
    gateway.admission.draining = True
    assert await calls.post("drain") == 503
    assert await calls.line("drain") == "call_end default error 503 ApiError"


async def test_one_line_for_malformed_http(calls: Calls) -> None:
    reader, writer = await calls.raw("x", b"no header\r\n\r\n")
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    assert " 400 " in head
    client_id = head.lower().split("x-request-id: ")[1].split()[0]  # the given one was not read
    assert await calls.line(client_id) == "call_end - refused 400 BadHttpMessage"
    writer.transport.abort()
    reader, writer = await calls.raw("chunk", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n")
    await calls.cluster.until(lambda: calls.cluster.gateways[0].admission.preparing)
    writer.write(b"zz\r\n")
    async with asyncio.timeout(10):
        assert b" 400 " in await reader.readline(), "whoever waits for the body must be told"
    assert await calls.line("chunk") == "call_end default refused 400 ApiError"
    writer.transport.abort()


async def test_a_pipelined_body_that_breaks_off_is_refused_in_its_turn(calls: Calls) -> None:
    calls.cluster.workers[1].prefill_s = 0.4
    body = json.dumps(BODY | {"max_tokens": 1}).encode()
    first = b"Content-Length: %d\r\n\r\n" % len(body) + body
    chunked = HEAD.format("second").encode() + b"Transfer-Encoding: chunked\r\n\r\n"
    _, writer = await calls.raw("first", first + chunked)
    await calls.cluster.until(calls.cluster.generations)
    writer.write(b"zz\r\n")
    assert await calls.line("second") == "call_end default refused 400 ApiError"
    assert await calls.line("first") == "request_end default length 200 -"
    writer.transport.abort()


async def test_one_line_for_a_call_that_fails(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise KeyError("zanzibar")

    with monkeypatch.context() as patch:
        patch.setattr(CompletionCall, "sampling", fail)
        assert await calls.post("parsed") == 500
    assert await calls.line("parsed") == "call_end default error 500 KeyError"
    with monkeypatch.context() as patch:
        patch.setattr(Choice, "take", fail)
        assert await calls.post("tokens") == 500
        assert await calls.post("first", stream=True) == 500
    for client_id in ("tokens", "first"):
        assert await calls.line(client_id) == "request_end default error 500 KeyError"
    with monkeypatch.context() as patch:
        patch.setattr(Choice, "take", fail_after(3, Choice.take))
        assert await calls.post("stream", stream=True) == 200
    assert await calls.line("stream") == "request_end default error 500 IndexError"
    assert await calls.cluster.metric("internal_errors_total") == 4
    calls.cluster.workers[0].state = "draining"
    await calls.cluster.until(lambda: not calls.cluster.gateways[0].fleet.has_decode)
    assert await calls.post("nobody") == 503
    assert await calls.line("nobody") == "request_end default error 503 ApiError"


def fail_after(times: int, function: Any) -> Any:
    left = [1] * times

    def counted(*args: Any) -> Any:
        left.pop()
        return function(*args)

    return counted


async def test_one_line_for_a_call_that_is_given_up(calls: Calls) -> None:
    length = f"Content-Length: {len(json.dumps(BODY))}\r\n\r\n".encode()
    _, writer = await calls.raw("upload", length + b"{")
    await calls.cluster.until(lambda: calls.cluster.gateways[0].admission.preparing)
    writer.transport.abort()
    assert await calls.line("upload") == "call_end default abort - CancelledError"
    _, writer = await calls.raw("stream", length + json.dumps(BODY).encode())
    await calls.cluster.until(lambda: [g for g in calls.cluster.generations() if g.tokens])
    writer.transport.abort()
    assert await calls.line("stream") == "request_end default abort 200 ClientGone"


async def test_one_line_for_each_sequence_of_a_call_that_succeeds(
    calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    assert await calls.post("one", max_tokens=2) == 200
    assert await calls.line("one") == "request_end default length 200 -"
    assert await calls.post("two", max_tokens=2, n=2, stream=True) == 200
    assert caplog.text.count(" client_id=two key=default outcome=length ") == 2
    assert "call_end" not in caplog.text


def check_lines(log: str) -> None:
    """One line for each call that ended, with id, outcome and, for errors, a class."""
    lines = re.findall(r"(?:request_end|call_end) (.*)", log)
    pairs = [dict(pair.split("=", 1) for pair in line.split()) for line in lines]
    assert len(pairs) == 13
    assert all(p["client_id"] and p["key"] and float(p["total_s"]) >= 0 for p in pairs)
    failed = [p for p in pairs if p["outcome"] not in ("stop", "length")]
    assert len(failed) == 11
    assert all(len(p["class"]) > 1 for p in failed)
    codes = sorted(p["error"] for p in failed)
    for code in ("request_failed", "invalid_api_key", "not_found", "context_length_exceeded"):
        assert code in codes
    assert {p["outcome"] for p in failed} == {"refused", "error", "abort"}


def test_tracebacks_show_places_and_classes_only(caplog: pytest.LogCaptureFixture) -> None:
    try:
        try:
            raise KeyError("zanzibar")
        except KeyError as error:
            raise ValueError(f"{error} zanzibar") from error
    except ValueError as error:
        text = log_lines.NoValues("%(message)s").format(
            logging.LogRecord(
                "x", 40, "x.py", 1, "broke", (), (type(error), error, error.__traceback__)
            )
        )
    assert "zanzibar" not in text.replace('KeyError("zanzibar")', "").replace(
        "{error} zanzibar", ""
    )
    assert "ValueError" in text
    assert "test_log_lines.py" in text


async def test_errors_that_nobody_awaits_are_logged_without_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    try:
        raise ValueError("zanzibar")
    except ValueError as error:
        log_lines.contain(asyncio.get_running_loop(), {"message": "zanzibar", "exception": error})
    assert "unawaited ValueError at" in caplog.text
    assert "zanzibar" not in caplog.text
