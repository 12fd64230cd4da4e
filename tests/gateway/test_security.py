"""What a client must not be able to do: read others' text, cost much, reach inside."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import json
import pickle
import random
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pageferry.gateway import json_limits, web_errors
from pageferry.gateway.json_limits import TooManyValues, check_weight

Cluster = Any
ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


@contextlib.asynccontextmanager
async def neighbour(base: str) -> AsyncIterator[None]:
    """A stream that runs all the while, and must be complete and right in the end."""
    body = {"model": "tiny", "prompt": "abcdefgh", "max_tokens": 25, "stream": True}
    started = asyncio.Event()

    async def read() -> str:
        text, last = "", b""
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{base}/v1/completions", json=body) as reply,
        ):
            async for line in reply.content:
                started.set()
                if line.startswith(b"data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                last = line.strip() or last
        assert last == b"data: [DONE]"
        return text

    task = asyncio.create_task(read())
    await started.wait()
    yield
    async with asyncio.timeout(30):
        assert await task == "abcdefgh" * 3


# --- SEC-04 -----------------------------------------------------------------------------------

INTERNAL = {
    "kv_transfer_params": {"remote_host": "127.0.0.1", "remote_port": 1, "do_remote_prefill": True},
    "remote_host": "127.0.0.1",
    "remote_block_ids": [0],
    "bootstrap_host": "127.0.0.1",
    "bootstrap_room": 7,
    "data_parallel_rank": 1,
    "priority": -1,
    "cache_salt": "alice",
    "salt": "alice",
    "request_id": "mine",
    "epoch": 9,
    "gateway": "other",
    "queue_class": "resume",
    "ttl_ms": 10**9,
    "prompt_len": 0,
}


@pytest.mark.parametrize("name", INTERNAL)
async def test_internal_fields_are_refused_or_mean_nothing(service: Cluster, name: str) -> None:
    status, body = await service.post(prompt="abc", max_tokens=2, **{name: INTERNAL[name]})
    claimed = service.workers[1].claimed
    if status == 400:
        assert body["error"]["param"] == name
        assert claimed == []
        return
    assert (status, body["choices"][0]["text"]) == (200, "ab")
    (request,) = claimed
    assert request.request_id != "mine"
    assert (request.epoch, request.gateway) == (0, service.gateways[0].id)
    assert (request.salt, request.queue_class, request.prompt_len) == ("", "interactive", 3)
    assert request.ttl_ms <= 600_000


# --- SEC-05, SEC-06 ---------------------------------------------------------------------------


def completion(prompt: Any = "a", **fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": prompt, **fields}).encode()


EXPENSIVE = {
    "n": completion(n=10**6),
    "stop strings": completion(stop=["x"] * 10**6),
    "long stop string": completion(stop="x" * 10**6),
    "stop ids": completion(stop_token_ids=[1] * 10**6),
    "logit_bias": completion(logit_bias={str(i): 1 for i in range(10**5)}),
    "prompts": completion(["a"] * 10**5),
    "prompts of ids": completion([[1]] * 10**5),
    "ids": completion([1] * (2 * 10**6)),
    "messages": completion(messages=[{"role": "user", "content": "a"}] * 10**5),
    "spaces": b" " * (7 * MIB) + b"{}",
    "space prompt": completion(" " * (7 * MIB)),
    "too large": completion(" " * (9 * MIB)),
    "regex": completion(regex="(a*)*b" * 1000),
    "nested": b'{"model":' + b"[" * MIB + b"]" * MIB + b"}",
    "arrays": b'{"a":[' + b"[]," * (2 * MIB) + b"[]]}",
    "objects": b'{"a":[' + b"{}," * (2 * MIB) + b"{}]}",
    "keys": b"{" + b",".join(b'"%d":1' % i for i in range(500_000)) + b"}",
    "digits": b'{"seed":' + b"9" * (4 * MIB) + b"}",
    "escapes": b'{"model":"' + rb"\u0041" * MIB + b'"}',
    "model": completion(model="m" * (4 * MIB)),
    "field name": completion(**{"guided_" + "x" * (4 * MIB): 1}),
}


async def test_expensive_requests_are_refused_early_beside_a_neighbour(
    cluster: Cluster, start_gateway: Any
) -> None:
    gateway = await start_gateway(max_n=16)
    await cluster.worker("decode", step_s=0.2)
    await cluster.worker("prefill")
    url = f"{gateway.base}/v1/completions"
    await gateway.until_ready()
    async with neighbour(gateway.base):
        before = gateway.rss_mib()
        for name, body in EXPENSIVE.items():
            async with asyncio.timeout(20), cluster.http.post(url, data=io.BytesIO(body)) as reply:
                answer = await reply.read()
                assert reply.status in (400, 404, 413), name
                assert len(answer) < 1000, name
        assert gateway.rss_mib() < before + 100
    assert cluster.workers[1].claimed[1:] == []


async def test_large_headers_and_ids_come_back_small(service: Cluster) -> None:
    url = f"{service.base}/v1/completions"
    for headers in (
        {"x-request-id": "i" * 100_000},
        {"x-request-id": "i" * 4000},
        {f"x-{i}": "h" for i in range(1000)},
        {f"x-{i}": "h" * 8000 for i in range(100)},
    ):
        async with service.http.post(
            url, data=completion(user="u" * 100_000), headers=headers
        ) as reply:
            assert reply.status in (200, 400, 431)
            assert len(reply.headers.get("x-request-id", "")) <= 128
            assert len(await reply.read()) < 1000


async def test_a_connection_that_never_sends_a_request_is_closed(
    service: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_errors, "FIRST_REQUEST_S", 0.3)
    port = service.gateways[0].port
    for sent in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: "):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


# --- what a parser would make -----------------------------------------------------------------


def weight_of(text: bytes) -> int:
    """As `check_weight` counts, one character at a time."""
    weight = at = 0
    in_string = False
    while at < len(text):
        sign = text[at : at + 1]
        if in_string:
            at += sign == b"\\"
            in_string = sign != b'"'
        elif sign == b'"':
            in_string = True
        else:
            weight += json_limits.HEAVY * (sign in b"[{:") + (sign == b",")
        at += 1
    return weight


def test_weight_does_not_depend_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    monkeypatch.setattr(json_limits, "SMALL_BYTES", 0)
    for _ in range(3000):
        monkeypatch.setattr(json_limits, "WINDOW", rng.randint(2, 12))
        text = bytes(rng.choice(b'"\\[{:,ab') for _ in range(rng.randint(0, 40)))
        weight = weight_of(text)
        monkeypatch.setattr(json_limits, "MAX_WEIGHT", weight)
        check_weight(text)
        if weight:
            monkeypatch.setattr(json_limits, "MAX_WEIGHT", weight - 1)
            with pytest.raises(TooManyValues):
                check_weight(text)


def test_text_weighs_nothing() -> None:
    check_weight(b'{"prompt":"' + rb"[]{}:,\"\\" * MIB + b'"}')


# --- TLS and SIGHUP ---------------------------------------------------------------------------


def certificate(folder: Path, name: str) -> None:
    """cert.pem and key.pem in `folder`, replaced at once."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")],
        check=True, capture_output=True, timeout=20,
    )  # fmt: skip


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
async def test_tls_and_rotation_by_sighup(
    cluster: Cluster, start_gateway: Any, tmp_path: Path
) -> None:
    certificate(tmp_path, "first")
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys.a]\nkey = "old"\n')
    gateway = await start_gateway(
        tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem", api_keys_file=keys
    )

    async def models(key: str) -> int:
        trusted = ssl.create_default_context(cafile=tmp_path / "cert.pem")
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{gateway.base}/v1/models", headers=headers, ssl=trusted) as reply,
        ):
            return reply.status

    assert [await models("old"), await models("new")] == [200, 401]
    with pytest.raises((aiohttp.ClientError, ConnectionError)):
        async with cluster.http.get(f"http://127.0.0.1:{gateway.port}/health"):
            pass
    old = ssl.create_default_context()
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(aiohttp.ClientError):
        async with cluster.http.get(f"{gateway.base}/health", ssl=old):
            pass
    certificate(tmp_path, "second")
    keys.write_text('[keys.a]\nkey = "new"\n')
    gateway.process.send_signal(signal.SIGHUP)
    await cluster.until(lambda: "certificate read" in gateway.log.read_text())
    assert [await models("old"), await models("new")] == [401, 200]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tls_cert": "/nowhere.pem"}, "--tls-key"),
        ({"tls_key": "/nowhere.pem"}, "--tls-cert"),
        ({"tls_cert": "/nowhere.pem", "tls_key": "/nowhere.pem"}, "No such file"),
        ({"api_keys_file": "/nowhere.toml"}, "/nowhere.toml"),
        ({"cors_origins": "x"}, "--cors-origins"),
    ],
)
async def test_what_cannot_protect_does_not_start(
    cluster: Cluster, settings: dict[str, str], sentence: str
) -> None:
    with pytest.raises((ValueError, OSError), match=sentence):
        await cluster.gateway(**settings)


def test_mistakes_end_the_process_with_2(model_dir: Path) -> None:
    command = [sys.executable, "-m", "pageferry.gateway.main", f"--model={model_dir}", "--port=0"]
    done = subprocess.run(
        [*command, "--api-keys-file=/nowhere.toml"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "/nowhere.toml cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


# --- SEC-02 -----------------------------------------------------------------------------------


class Exploit:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


async def test_pickles_are_only_bytes(service: Cluster, tmp_path: Path) -> None:
    """In a body, on the token stream and in the registry."""
    file = tmp_path / "owned"
    payload = pickle.dumps(Exploit(file))
    gateway, client = service.gateways[0], service.workers[0].client
    async with service.http.post(f"{service.base}/v1/completions", data=payload) as reply:
        assert reply.status == 400
    await client.xadd(gateway.keys.tokens(gateway.id), {"m": payload})
    await client.set(gateway.keys.worker("evil"), payload)
    await client.sadd(gateway.keys.workers, "evil")
    await service.until(lambda: gateway.reader.malformed == 1)
    assert (await service.post(prompt="abc", max_tokens=2))[0] == 200
    assert (await service.get("/ready"))[0] == 200
    assert not file.exists()
    pickle.loads(payload)  # noqa: S301 - made above
    assert file.exists(), "the payload is no exploit, so this test tests nothing"


SOURCES = [
    path
    for folder in (
        *("kernels", "kvtransfer", "gateway", "prefill_worker", "decode_worker"),
        *("compose", "benchmarks"),
    )
    for path in sorted((ROOT / folder).glob("*.py"))
]
UNSAFE_NAMES = {
    "pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "send_pyobj",
    "recv_pyobj", "eval", "exec", "__import__",
}  # fmt: skip
UNSAFE_ARGUMENTS = {"trust_remote_code", "allow_pickle", "shell"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nothing_unsafe_is_named(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & UNSAFE_NAMES, where
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").split(".")[0], *(alias.name for alias in node.names)}
            assert not names & UNSAFE_NAMES, where
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func).split(".")
            assert called[-1] not in UNSAFE_NAMES - {"eval"}, where
            assert called != ["eval"], where
            for keyword in node.keywords:
                if keyword.arg in UNSAFE_ARGUMENTS:
                    assert ast.unparse(keyword.value) == "False", where
            if called[-2:] == ["torch", "load"]:
                assert any(k.arg == "weights_only" for k in node.keywords), where
