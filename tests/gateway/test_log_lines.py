"""One line for each call that ends; never what clients wrote, in no log, metric or Redis key."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from typing import Any

import pytest

from pageferry.gateway import log_lines

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


def check_lines(log: str) -> None:
    """One line for each call that ended, with id, outcome and, for errors, a class."""
    lines = re.findall(r"(?:request_end|call_end) (.*)", log)
    pairs = [dict(pair.split("=", 1) for pair in line.split()) for line in lines]
    assert len(pairs) == 13
    assert all(p["id"] and p["key"] for p in pairs)
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
