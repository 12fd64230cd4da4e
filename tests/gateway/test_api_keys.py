"""API keys: the file, who gets in, limits per key, reload, what a browser needs."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import openai
import pytest

from pageferry.gateway.api_keys import KeyRing, KeysError
from pageferry.gateway.errors import ApiError
from pageferry.gateway.rate_limits import Bucket, Limits, Tenant

Cluster = Any
ALICE, BOB, ROOT = "sk-alice-0123456789", "sk-bob-0123456789", "sk-root-0123456789"


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def keys_file(path: Path, text: str = "", **fields: str) -> Path:
    """A file with the keys of alice (with these fields), bob and root (an administrator)."""
    extra = "".join(f"{name} = {value}\n" for name, value in fields.items())
    path.write_text(
        f'[keys.alice]\nsha256 = "{sha(ALICE)}"\n{extra}'
        f'[keys.bob]\nsha256 = "{sha(BOB).upper()}"\n'
        f'[keys.root]\nkey = "{ROOT}"\nadmin = true\n{text}'
    )
    return path


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# --- the file ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "tables"),
        ("keys = 1", "tables"),
        ("[keys.a]\nkey = 'k'\n[other]\n", "tables"),
        ("[keys.a]\nkey = unquoted-secret", "not TOML"),
        ("[keys.a]\nadmin = true", "either sha256 or key"),
        ("[keys.a]\nkey = 'secret'\nsha256 = 'ab'", "either sha256 or key"),
        ("[keys.a]\nsha256 = 'secret'", "64 hexadecimal"),
        ("[keys.a]\nsha256 = []", "64 hexadecimal"),
        ("[keys.a]\nkey = ''", "printable"),
        ("[keys.a]\nkey = 'secret with spaces'", "printable"),
        ("[keys.a]\nkey = ['secret', 1]", "printable"),
        ("[keys.a]\nkey = 'k'\nadmin = 1", "true or false"),
        ("[keys.a]\nkey = 'k'\nrequests_per_minute = -1", "requests_per_minute"),
        ("[keys.a]\nkey = 'k'\ntokens_per_minute = 1.5", "tokens_per_minute"),
        ("[keys.a]\nkey = 'k'\nconcurrent_requests = true", "concurrent_requests"),
        ("[keys.a]\nkey = 'k'\nrequest_per_minute = 1", "unknown field 'request_per_minute'"),
        ("[keys.'a b']\nkey = 'k'", "names are"),
        ("[keys.a]\nkey = 'secret'\n[keys.b]\nkey = 'secret'", "same key twice"),
    ],
)
def test_mistakes_in_the_file_are_named_without_a_secret(
    tmp_path: Path, text: str, sentence: str
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(KeysError, match=sentence) as wrong:
        KeyRing(file=file)
    assert "secret" not in str(wrong.value)


def test_a_missing_file_and_a_bad_single_key_are_mistakes(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="cannot be read: No such file"):
        KeyRing(file=tmp_path / "none.toml")
    with pytest.raises(KeysError, match="--api-key must be"):
        KeyRing("a b")


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ([f"Bearer {ALICE}"], "alice"),
        ([f"bearer   {BOB} "], "bob"),
        ([f"Bearer {ROOT}"], "root"),
        (["Bearer single"], "default"),
        ([f"Bearer {ALICE[:-1]}"], None),
        ([f"Bearer {ALICE}0"], None),
        ([f"Bearer {sha(ALICE)}"], None),
        ([f"Basic {ALICE}"], None),
        ([ALICE], None),
        (["Bearer"], None),
        (["Bearer \udce9\udcff"], None),
        ([f"Bearer {ALICE}", f"Bearer {ALICE}"], None),
        ([], None),
    ],
)
def test_whose_key_it_is(tmp_path: Path, headers: list[str], name: str | None) -> None:
    keys = KeyRing("single", keys_file(tmp_path / "k.toml"))
    if name is not None:
        assert keys.tenant(headers).name == name
        return
    with pytest.raises(ApiError) as refused:
        keys.tenant(headers)
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
    assert ALICE[:-1] not in refused.value.message


def test_two_keys_of_one_name_are_one_tenant(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text(f'[keys.a]\nsha256 = ["{sha(ALICE)}", "{sha(BOB)}"]\n')
    keys = KeyRing(file=file)
    assert keys.tenant([f"Bearer {ALICE}"]) is keys.tenant([f"Bearer {BOB}"])


def test_reload_keeps_what_was_used_and_survives_mistakes(tmp_path: Path) -> None:
    file = keys_file(tmp_path / "k.toml", requests_per_minute="2")
    keys = KeyRing(file=file)
    alice = keys.tenant([f"Bearer {ALICE}"])
    with alice.visit() as visit:
        visit.start()
        visit.spend(10)
    file.write_text("broken")
    with pytest.raises(KeysError):
        keys.load()
    assert keys.tenant([f"Bearer {ALICE}"]) is alice
    file.write_text(f'[keys.alice]\nsha256 = "{sha(BOB)}"\nrequests_per_minute = 3\nadmin = true\n')
    keys.load()
    assert keys.tenant([f"Bearer {BOB}"]) is alice
    assert alice.admin
    with pytest.raises(ApiError):
        keys.tenant([f"Bearer {ALICE}"])
    for _ in range(2):
        with alice.visit() as visit:
            visit.start()
    with alice.visit() as visit, pytest.raises(ApiError, match="requests_per_minute"):
        visit.start()


# --- limits -----------------------------------------------------------------------------------


def test_a_bucket_refills_evenly_and_can_be_overdrawn() -> None:
    bucket = Bucket(60, now=0)
    bucket.take(90, now=0)
    assert bucket.wait_s(1, now=0) == pytest.approx(31)
    assert bucket.wait_s(1, now=30.5) == pytest.approx(0.5)
    assert bucket.wait_s(1, now=31) == 0
    assert bucket.wait_s(60, now=10_000) == 0
    assert bucket.wait_s(61, now=10_000) > 0, "more than a minute's worth is never there"


def test_without_a_rate_nothing_waits() -> None:
    bucket = Bucket(0, now=0)
    bucket.take(10**9, now=0)
    assert bucket.wait_s(10**9, now=0) == 0


def refusal(tenant: Tenant) -> ApiError:
    with tenant.visit() as visit, pytest.raises(ApiError) as refused:
        visit.start()
    return refused.value


def test_the_refusal_names_the_limit_and_when_to_come_back() -> None:
    now = [0.0]
    tenant = Tenant("t", Limits(requests_per_minute=2, tokens_per_minute=100), clock=lambda: now[0])
    for _ in range(2):
        with tenant.visit() as visit:
            visit.start()
    error = refusal(tenant)
    assert (error.status, error.code, error.param) == (
        429,
        "rate_limit_exceeded",
        "requests_per_minute",
    )
    assert error.retry_after == 30
    now[0] = 30
    with tenant.visit() as visit:
        visit.start()
        visit.spend(299)
    now[0] = 90
    error = refusal(tenant)
    assert (error.param, error.retry_after) == ("tokens_per_minute", 60)
    now[0] = 150
    with tenant.visit() as visit:
        visit.start()


def test_every_sequence_counts_as_concurrent_until_the_call_ends() -> None:
    tenant = Tenant("t", Limits(concurrent_requests=3))
    with tenant.visit() as first:
        first.start()
        first.grow(2)
        with tenant.visit() as second:
            second.start()
            with pytest.raises(ApiError) as refused:
                second.grow(2)
            assert (refused.value.status, refused.value.param) == (429, "concurrent_requests")
            assert refusal(tenant).param == "concurrent_requests"
        assert tenant.in_use == 2
    with tenant.visit() as visit:
        visit.start()
        with pytest.raises(ApiError) as refused:
            visit.grow(4)
    assert refused.value.status == 400, "four can never run"
    assert tenant.in_use == 0


# --- over HTTP --------------------------------------------------------------------------------


@pytest.fixture
async def guarded(cluster: Cluster, tmp_path: Path) -> Cluster:
    """A gateway with alice's, bob's and root's keys, and workers."""
    file = keys_file(tmp_path / "keys.toml", concurrent_requests="2")
    await cluster.gateway(api_keys_file=str(file), cors_origins="https://page.example")
    await cluster.worker("decode", step_s=0.01)
    await cluster.worker("prefill")
    return cluster


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/health", (200, 200, 200)),
        ("GET", "/ready", (200, 200, 200)),
        ("GET", "/metrics", (200, 200, 200)),
        ("HEAD", "/health", (200, 200, 200)),
        ("GET", "/version", (200, 200, 200)),
        ("GET", "/v1/models", (401, 200, 200)),
        ("GET", "/v1/models/tiny", (401, 200, 200)),
        ("POST", "/v1/completions", (401, 400, 400)),
        ("POST", "/v1/chat/completions", (401, 400, 400)),
        ("OPTIONS", "/v1/completions", (401, 405, 405)),
        ("GET", "/v1/nope", (401, 404, 404)),
        ("GET", "/nope", (401, 404, 404)),
        ("GET", "//v1/workers", (401, 404, 404)),
        ("GET", "/v1/%77orkers", (401, 403, 200)),
        ("GET", "/v1/workers", (401, 403, 200)),
        ("POST", "/v1/workers/none/drain", (401, 403, 404)),
    ],
)
async def test_what_needs_which_key(
    guarded: Cluster, method: str, path: str, expected: tuple[int, int, int]
) -> None:
    for headers, status in zip(({}, bearer(ALICE), bearer(ROOT)), expected, strict=True):
        async with guarded.http.request(method, guarded.base + path, headers=headers) as reply:
            assert reply.status == status, headers
            assert ("WWW-Authenticate" in reply.headers) == (status == 401)
            if status >= 400 and method != "HEAD":
                assert set((await reply.json())["error"]) == {"message", "type", "param", "code"}


async def test_sdk_sees_the_right_exceptions(guarded: Cluster) -> None:
    """CLI-03."""

    def client(key: str) -> openai.AsyncOpenAI:
        made = openai.AsyncOpenAI(base_url=f"{guarded.base}/v1", api_key=key, max_retries=0)
        guarded.clients.append(made)
        return made

    with pytest.raises(openai.AuthenticationError) as refused:
        await client("wrong").models.list()
    assert refused.value.code == "invalid_api_key"
    with pytest.raises(openai.PermissionDeniedError):
        await client(ALICE).get("/workers", cast_to=object)
    reply = await client(ALICE).completions.create(model="tiny", prompt="ab", max_tokens=2)
    assert reply.choices[0].text == "ab"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client(ALICE).completions.create(model="tiny", prompt="ab", n=3)
    assert wrong.value.param == "n"


async def test_a_neighbour_does_not_notice_another_keys_limit(guarded: Cluster) -> None:
    """Concurrency: alice's two slots are taken; bob's call and alice's running ones go on."""
    body = {"model": "tiny", "prompt": "abcdef" * 4, "max_tokens": 60}
    url = f"{guarded.base}/v1/completions"

    async def ask(key: str, **fields: Any) -> tuple[int, str | None, Any]:
        async with guarded.http.post(url, json=body | fields, headers=bearer(key)) as reply:
            return reply.status, reply.headers.get("Retry-After"), await reply.json()

    running = [asyncio.create_task(ask(ALICE)) for _ in range(2)]
    await guarded.until(lambda: len(guarded.generations()) == 2)
    status, retry_after, refused = await ask(ALICE)
    assert (status, retry_after) == (429, "1")
    assert refused["error"]["code"] == "rate_limit_exceeded"
    assert refused["error"]["param"] == "concurrent_requests"
    assert (await ask(BOB, max_tokens=1))[0] == 200
    assert [status for status, _, _ in await asyncio.gather(*running)] == [200, 200]
    assert (await ask(ALICE, max_tokens=1))[0] == 200, "slots come back"


async def test_prefix_caches_are_salted_with_the_keys_name_only(guarded: Cluster) -> None:
    """KVC-05: from the authenticated key, never from the body."""
    for key in (ALICE, BOB):
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 1, "salt": "x", "cache_salt": ""}
        url = f"{guarded.base}/v1/completions"
        async with guarded.http.post(url, json=body, headers=bearer(key)) as reply:
            assert reply.status == 200
    prefill = guarded.workers[1]
    assert [request.salt for request in prefill.claimed] == ["alice", "bob"]


async def test_everybody_shares_where_no_keys_are_asked_for(service: Cluster) -> None:
    assert (await service.post(prompt="abc", max_tokens=1))[0] == 200
    assert service.workers[1].claimed[0].salt == ""


async def test_tokens_are_charged_as_in_the_usage(cluster: Cluster, tmp_path: Path) -> None:
    file = keys_file(tmp_path / "k.toml", tokens_per_minute="20")
    await cluster.gateway(api_keys_file=str(file))
    await cluster.worker("decode")
    await cluster.worker("prefill")
    url = f"{cluster.base}/v1/completions"
    answers = []
    for stream in (True, False):
        body = {"model": "tiny", "prompt": "abcde", "max_tokens": 5, "stream": stream}
        async with cluster.http.post(url, json=body, headers=bearer(ALICE)) as reply:
            answers.append(reply.status)
            await reply.read()
    async with cluster.http.post(url, json=body, headers=bearer(ALICE)) as reply:
        error = (await reply.json())["error"]
        assert (reply.status, error["param"]) == (429, "tokens_per_minute")
        assert 1 <= int(reply.headers["Retry-After"]) <= 4
    assert answers == [200, 200]


async def test_rotation_without_restart(guarded: Cluster, tmp_path: Path) -> None:
    gateway = guarded.gateways[0]
    new = "sk-alice-new-key"
    file = Path(gateway.settings.api_keys_file)

    async def status(key: str) -> int:
        url = f"{guarded.base}/v1/models"
        async with guarded.http.get(url, headers=bearer(key)) as reply:
            return int(reply.status)

    keys_file(file, f'[keys.next]\nsha256 = "{sha(new)}"\n')
    assert await status(new) == 401, "not read yet"
    gateway.front.reload()
    assert [await status(key) for key in (new, ALICE, BOB, "old")] == [200, 200, 200, 401]
    os.remove(file)
    gateway.front.reload()
    assert await status(new) == 200, "a reload that fails changes nothing"


# --- browsers ---------------------------------------------------------------------------------

PAGE = {"Origin": "https://page.example"}
PREFLIGHT = {
    **PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


def allowed(reply: Any) -> str | None:
    value: str | None = reply.headers.get("Access-Control-Allow-Origin")
    return value


async def test_preflight_needs_no_key_and_every_answer_can_be_read(guarded: Cluster) -> None:
    """API-17."""
    url = f"{guarded.base}/v1/chat/completions"
    async with guarded.http.options(url, headers=PREFLIGHT) as reply:
        assert (reply.status, allowed(reply)) == (204, PAGE["Origin"])
        assert "POST" in reply.headers["Access-Control-Allow-Methods"]
        granted = reply.headers["Access-Control-Allow-Headers"]
        assert granted == PREFLIGHT["Access-Control-Request-Headers"]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "stream": True}
    for headers, fields, status in (
        ({}, body, 401),
        (bearer(ALICE), {}, 400),
        (bearer(ALICE), body | {"model": "x"}, 404),
        (bearer(ALICE), body | {"max_tokens": 2}, 200),
    ):
        async with guarded.http.post(url, json=fields, headers=PAGE | headers) as reply:
            assert (reply.status, allowed(reply)) == (status, PAGE["Origin"])
            assert reply.headers["Vary"] == "Origin"
            await reply.read()
    async with guarded.http.get(f"{guarded.base}/v1/nope", headers=PAGE) as reply:
        assert allowed(reply) == PAGE["Origin"]


async def test_other_pages_get_nothing(guarded: Cluster) -> None:
    url = f"{guarded.base}/v1/chat/completions"
    foreign = {"Origin": "https://page.example.evil"}
    async with guarded.http.options(url, headers=PREFLIGHT | foreign) as reply:
        assert (reply.status, allowed(reply)) == (401, None)
    async with guarded.http.get(f"{guarded.base}/health", headers=foreign) as reply:
        assert (reply.status, allowed(reply)) == (200, None)


async def test_web_pages_cannot_drain_workers_where_no_keys_are_asked_for(service: Cluster) -> None:
    """A page that the operator has open could otherwise send it, without reading the answer."""
    url = f"{service.base}/v1/workers/none/drain"
    for origin, status in (("https://evil.example", 403), (service.base, 403), (None, 404)):
        headers = {"Origin": origin} if origin else {}
        async with service.http.post(url, headers=headers) as reply:
            assert reply.status == status, origin


@pytest.mark.parametrize("origins", ["page.example", "https://a.example, *", "https://a/path"])
async def test_origins_that_can_never_match_are_a_mistake(cluster: Cluster, origins: str) -> None:
    with pytest.raises(ValueError, match="--cors-origins"):
        await cluster.gateway(cors_origins=origins)
