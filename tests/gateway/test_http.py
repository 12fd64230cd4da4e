"""The HTTP surface: error shapes, limits, operations endpoints, admission, shutdown."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from typing import Any

import pytest

from pageferry.kvtransfer import metric_names as names

Cluster = Any
MIB = 2**20


def assert_error(body: Any) -> None:
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "raw", [b'{"model":"tiny","prompt":"a"', b"[]", b'"x"', b"", b'{"prompt":"\xe9"}', b"[" * 10000]
)
async def test_malformed_json(service: Cluster, path: str, raw: bytes) -> None:
    async with service.http.post(service.base + path, data=raw) as reply:
        assert reply.status == 400
        assert_error(await reply.json())


async def test_any_content_type_is_json(service: Cluster) -> None:
    data = b'{"model":"tiny","prompt":"abc","max_tokens":3}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json"):
        headers = {"Content-Type": kind}
        url = f"{service.base}/v1/completions"
        async with service.http.post(url, data=data, headers=headers) as reply:
            assert (await reply.json())["choices"][0]["text"] == "abc"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nope", 404),
        ("GET", "/v1/models/", 404),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/completions", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
        ("GET", "/v1/models/other", 404),
    ],
)
async def test_router_errors_are_json(
    service: Cluster, method: str, path: str, status: int
) -> None:
    headers = {"Origin": "http://x"}
    async with service.http.request(method, service.base + path, headers=headers) as reply:
        assert reply.status == status
        assert_error(await reply.json())
        assert ("Allow" in reply.headers) == (status == 405)
        assert not any(name.lower().startswith("access-control") for name in reply.headers)


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models", "/version"])
async def test_head_mirrors_get(service: Cluster, path: str) -> None:
    async with service.http.head(service.base + path) as reply:
        assert reply.status == 200
        assert await reply.read() == b""


async def test_malformed_http_gets_json(service: Cluster) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", service.gateways[0].port)
    writer.write(b"GET /health HTTP/1.1\r\nbad header line secret\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = text.partition("\r\n\r\n")
    assert " 400 " in head.splitlines()[0]
    assert_error(json.loads(body))
    assert "secret" not in text


async def test_oversized_headers_get_json(service: Cluster) -> None:
    headers = {"x-request-id": "i" * 100_000}
    async with service.http.get(f"{service.base}/health", headers=headers) as reply:
        assert reply.status in (400, 431)
        assert_error(await reply.json())


async def test_request_id(service: Cluster) -> None:
    for given, expected in (("abc", "abc"), ("i" * 4000, "i" * 128)):
        async with service.http.get(
            f"{service.base}/health", headers={"x-request-id": given}
        ) as reply:
            assert reply.headers["x-request-id"] == expected
    async with service.http.get(f"{service.base}/health") as reply:
        assert len(reply.headers["x-request-id"]) == 32
    body = {"model": "tiny", "prompt": "ab", "stream": True, "user": "u" * 500}
    async with service.http.post(
        f"{service.base}/v1/completions", json=body, headers={"x-request-id": "mine"}
    ) as reply:
        text = await reply.text()
        assert reply.headers["x-request-id"] == "mine"
    assert "mine" not in text
    assert "uuuu" not in text


async def test_body_limit(cluster: Cluster) -> None:
    await cluster.gateway(max_body_mib=1)
    await cluster.worker("decode")
    for size, status in ((int(0.9 * MIB), 400), (int(1.1 * MIB), 413)):
        async with asyncio.timeout(5):
            data = json.dumps({"model": "tiny", "prompt": " " * size}).encode()
            url = f"{cluster.base}/v1/completions"
            async with cluster.http.post(url, data=io.BytesIO(data)) as reply:
                assert reply.status == status
                assert_error(await reply.json())


async def test_endless_chunked_body_is_cut(cluster: Cluster) -> None:
    await cluster.gateway(max_body_mib=1)
    await cluster.worker("decode")
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.gateways[0].port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"

    async def pour() -> None:
        while True:
            writer.write(chunk)
            await writer.drain()

    pouring = asyncio.create_task(pour())
    async with asyncio.timeout(5):
        assert b" 413 " in await reader.readline()
    pouring.cancel()
    await asyncio.gather(pouring, return_exceptions=True)
    writer.transport.abort()


async def test_compressed_bodies_are_refused(service: Cluster) -> None:
    headers = {"Content-Encoding": "gzip"}
    async with service.http.post(
        f"{service.base}/v1/completions", data=b"not gzip", headers=headers
    ) as reply:
        assert reply.status in (400, 415)
        assert_error(await reply.json())


async def test_internal_fields_are_ignored(service: Cluster) -> None:
    fields = {
        "kv_transfer_params": {"remote_host": "evil"},
        "cache_salt": "x",
        "request_id": "r",
        "zzz": {"q": [1]},
    }
    status, _ = await service.post(prompt="abc", max_tokens=2, **fields)
    assert status in (200, 400)
    if status == 200:
        request = service.workers[1].claimed[0]
        assert request.request_id != "r"
        assert request.salt == ""


async def test_models(service: Cluster) -> None:
    status, body = await service.get("/v1/models")
    assert (status, body["object"]) == (200, "list")
    (model,) = body["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 4096)
    assert isinstance(model["created"], int)
    assert (await service.get("/v1/models/tiny"))[1] == model


async def test_workers(service: Cluster) -> None:
    _, body = await service.get("/v1/workers")
    by_role = {worker["role"]: worker for worker in body["data"]}
    assert set(by_role) == {"prefill", "decode"}
    assert by_role["decode"]["ledger"]["total"] == 1000
    await service.workers[1].die()
    await service.until(lambda: len(service.gateways[0].fleet.records) == 1)
    _, body = await service.get("/v1/workers")
    assert [worker["role"] for worker in body["data"]] == ["decode"]


async def test_readiness(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    status, body = await cluster.get("/ready")
    assert (status, body["ready"]) == (503, False)
    assert "decode" in body["reason"]
    assert_error(body)
    refusal = "prefill-9: dtype: mine 'float32', theirs 'bfloat16'"
    worker = await cluster.worker("decode", refusals=(refusal,))
    status, body = await cluster.get("/ready")
    assert (status, body["ready"]) == (200, True)
    assert refusal in body["refusals"][0]
    worker.state = "draining"
    await cluster.until(lambda: not gateway.fleet.has_decode)
    status, body = await cluster.get("/ready")
    assert (status, body["reason"]) == (503, f"No decode worker is ready: {worker.id} is draining.")
    assert (await cluster.get("/health"))[0] == 200


async def test_no_decode_worker_is_503_with_retry_after(cluster: Cluster) -> None:
    await cluster.gateway()
    body = {"model": "tiny", "prompt": "a", "stream": True}
    async with cluster.http.post(f"{cluster.base}/v1/completions", json=body) as reply:
        assert reply.status == 503
        assert int(reply.headers["Retry-After"]) >= 1
        assert (await reply.json())["error"]["code"] == "no_decode_worker"


async def test_queue_limit_is_429(cluster: Cluster) -> None:
    await cluster.gateway(max_queued_requests=3)
    await cluster.worker("decode")
    await cluster.worker("prefill", prefill_s=1)
    calls = [asyncio.create_task(cluster.post(prompt="ab", max_tokens=2)) for _ in range(2)]
    await cluster.until(lambda: len(cluster.generations()) == 2)
    body = {"model": "tiny", "prompt": "a", "n": 2}
    async with cluster.http.post(f"{cluster.base}/v1/completions", json=body) as reply:
        assert reply.status == 429
        assert int(reply.headers["Retry-After"]) >= 1
        assert_error(await reply.json())
    assert [status for status, _ in await asyncio.gather(*calls)] == [200, 200]
    assert (await cluster.post(prompt="a", n=4))[0] == 400, "four can never be queued"


async def test_every_accepted_sequence_is_counted_once(service: Cluster) -> None:
    """OBS-02: endings + running + waiting = accepted, and tokens add up."""
    decode = service.workers[0]
    usages = [await service.post(prompt="abcd", max_tokens=4, n=2) for _ in range(3)]
    await service.post(prompt="abcd", max_tokens=100)
    await service.post(prompt="abcd", model="other")
    decode.step_s = 0.05
    call = asyncio.create_task(service.events(prompt="abcd" * 9, max_tokens=90))
    await service.until(lambda: [g for g in service.generations() if len(g.tokens) > 2])
    delivered = service.generations()[0]
    assert await service.metric(names.NUM_REQUESTS_RUNNING) == 1
    call.cancel()
    await service.until(lambda: not service.generations())
    counts = {
        reason: await service.metric("request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    }
    assert counts == {"stop": 1, "length": 6, "abort": 1, "error": 0}
    assert await service.metric("requests_accepted_total") == 8
    assert await service.metric("requests_refused_total", status="404") == 1
    tokens = sum(body["usage"]["completion_tokens"] for _, body in usages) + 13
    assert await service.metric("generation_tokens_total") == tokens + delivered.delivered
    for name in (names.NUM_REQUESTS_RUNNING, names.NUM_REQUESTS_WAITING):
        assert await service.metric(name) == 0


async def test_series_are_bounded(service: Cluster) -> None:
    async def size() -> int:
        async with service.http.get(f"{service.base}/metrics") as reply:
            return len((await reply.text()).splitlines())

    await service.post(prompt="a", model="wrong")
    before = await size()
    for i in range(50):
        await service.post(prompt="a", model=f"wrong-{i}", user=f"u{i}")
    assert await size() == before


async def test_worker_figures_are_exposed(service: Cluster) -> None:
    decode = service.workers[0]
    decode.stats = {names.HANDOFFS: 7, "made_up": 1}
    await decode.publish()
    await service.until(lambda: service.gateways[0].fleet.records[decode.id].stats)
    assert await service.metric(names.HANDOFFS, worker=decode.id, role="decode") == 7
    assert await service.metric("made_up") == 0
    assert await service.metric(names.PAGES, worker=decode.id, state="total") == 1000


async def test_metrics_errors_do_not_touch_streams(
    service: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = service.gateways[0].metrics
    monkeypatch.setattr(metrics, "_children", {})
    monkeypatch.setattr(metrics, "_counters", {})
    monkeypatch.setattr(metrics, "_histograms", {})
    status, body = await service.post(prompt="abc", max_tokens=3)
    assert (status, body["choices"][0]["text"]) == (200, "abc")
    assert metrics.contained > 0


async def test_one_line_per_request_and_no_text(
    service: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """OBS-04 and SEC-03: ids, counts and times; never what clients wrote."""
    marker = "zebra-marker"
    with caplog.at_level(logging.DEBUG):
        await service.post(prompt=marker, max_tokens=3, stop="zebra-stop", user="zebra-user")
        await service.post(prompt=marker, temperature="zebra-temperature")
        await service.post(prompt=[[marker]])
    assert "zebra" not in caplog.text
    lines = [r.getMessage() for r in caplog.records if "request_end" in r.getMessage()]
    assert len(lines) == 1
    assert "outcome=length" in lines[0]
    assert "prompt_tokens=12" in lines[0]
    assert f"workers={service.workers[1].id},{service.workers[0].id}" in lines[0]
    client = service.workers[0].client
    dump = [await client.dump(key) for key in await client.keys("*")]
    assert not [data for data in dump if b"zebra" in data]


async def test_drain_lets_streams_finish(cluster: Cluster) -> None:
    gateway = await cluster.gateway(drain_s=10)
    await cluster.worker("decode", step_s=0.02)
    await cluster.worker("prefill")
    call = asyncio.create_task(cluster.events(prompt="abcdefghij" * 3, max_tokens=40))
    await cluster.until(lambda: [g for g in cluster.generations() if g.tokens])
    stopping = asyncio.create_task(gateway.stop())
    await asyncio.sleep(0.05)
    assert (await cluster.get("/ready"))[0] == 503
    status, body = await cluster.post(prompt="a")
    assert (status, body["error"]["code"]) == (503, "shutting_down")
    events = await call
    assert events[-1] == "[DONE]"
    await stopping
    cluster.gateways.clear()
    client = cluster.workers[0].client
    assert not await client.exists(
        gateway.keys.gateway(gateway.id), gateway.keys.tokens(gateway.id)
    )


async def test_drain_ends_what_takes_too_long(cluster: Cluster) -> None:
    gateway = await cluster.gateway(drain_s=0.2)
    decode = await cluster.worker("decode", step_s=0.1)
    await cluster.worker("prefill")
    call = asyncio.create_task(cluster.events(prompt="abcdefghij" * 9, max_tokens=200))
    await cluster.until(lambda: [g for g in cluster.generations() if len(g.tokens) > 1])
    await gateway.stop()
    cluster.gateways.clear()
    events = await call
    assert events[-1]["error"]["code"] == "shutting_down"
    await cluster.until(lambda: not decode.active)
