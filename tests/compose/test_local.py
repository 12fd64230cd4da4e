"""`pageferry up` without a model: settings, ports, what each service is told."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shlex
import socket
import subprocess
from pathlib import Path

import pytest
import redis.asyncio

from pageferry.compose import local
from pageferry.compose.embedded_valkey import server_binary
from pageferry.compose.local import (
    UpSettings,
    check,
    choose_port,
    ready_line,
    serve,
    service_env,
    service_programs,
    wait_for_redis,
    wait_until_ready,
    with_cluster_key,
)
from pageferry.compose.supervisor import ChildDied
from pageferry.kvtransfer.settings import (
    DecodeSettings,
    GatewaySettings,
    PrefillSettings,
    SettingsError,
    from_args,
)


def parse(*argv: str, env: dict[str, str] | None = None) -> UpSettings:
    return from_args(UpSettings, "pageferry up", "", argv, env or {})


def test_flags_of_the_services_and_switches():
    settings = parse("--prefill", "2", "--dtype", "float32", "--page-size", "32", "--verbose")
    assert (settings.prefill, settings.decode) == (2, 1)
    assert (settings.dtype, settings.page_size, settings.verbose) == ("float32", 32, True)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--decode", "0"], "at least 0 prefill workers and 1 decode worker"),
        (["--prefill", "-1"], "at least 0 prefill workers"),
        (["--decode", "64"], "more than 64 workers"),
        (["--drain-s", "20"], "--drain-s 20: expected 0 to 3"),
        (["--handoff-port", "7000", "--decode", "2"], "cannot share one port"),
        (["--alive-file", "alive"], "cannot share one"),
    ],
)
def test_impossible_settings_are_refused_before_anything_starts(argv, sentence):
    with pytest.raises(SettingsError, match=sentence):
        check(parse(*argv))


async def test_port_in_use_is_one_sentence_and_exit_code_2(capfd):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert await serve(UpSettings(port=port)) == 2
    error = capfd.readouterr().err
    assert error == (
        f"pageferry up: cannot listen on 127.0.0.1:{port} (Address already in use); "
        "choose another --port, or 0 for a free one\n"
    )


def test_port_0_is_a_free_port_and_nonsense_is_refused():
    assert choose_port("127.0.0.1", 0) > 0
    for host, port in [("127.0.0.1", 70000), ("256.1.1.1", 80)]:
        with pytest.raises(SettingsError, match="cannot listen on"):
            choose_port(host, port)


def test_each_service_gets_only_its_own_settings(monkeypatch):
    monkeypatch.setenv("PAGEFERRY_PREFILL", "2")
    monkeypatch.setenv("PAGEFERRY_DTYPE", "float16")
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere")
    settings = parse("--dtype", "float32", "--port", "9000", "--cluster-key", "secret")
    for cls in (GatewaySettings, PrefillSettings, DecodeSettings):
        env = service_env(settings, cls, redis_url="unix:///x/valkey.sock")
        rebuilt = from_args(cls, "p", "", [], env)
        assert rebuilt.redis_url == "unix:///x/valkey.sock"
        own = {f.name for f in dataclasses.fields(cls)} - {"redis_url"}
        assert {n: getattr(rebuilt, n) for n in own} == {n: getattr(settings, n) for n in own}
        assert env["PATH"] == os.environ["PATH"]


def test_workers_get_names_and_cores_and_no_secrets_on_the_command_line(monkeypatch):
    monkeypatch.setattr(local, "allowed_cores", lambda text: [0, 1, 2])
    monkeypatch.setattr(local, "siblings_together", lambda cores: cores)
    keys = ("--cluster-key", "secret", "--api-key", "secret-too")
    settings = parse("--prefill", "1", "--decode", "2", *keys)
    programs = service_programs(settings, "unix:///x", 8123, Path("/scratch"))
    assert [p.name for p in programs] == ["gateway", "prefill-0", "decode-0", "decode-1"]
    assert [p.env.get("PAGEFERRY_CORES") for p in programs] == [None, "0", "1", "2"]
    assert programs[0].env["PAGEFERRY_PORT"] == "8123"
    assert "PAGEFERRY_CLUSTER_KEY" not in programs[0].env
    assert programs[0].env["PAGEFERRY_API_KEY"] == "secret-too"
    for program in programs[1:]:
        assert program.env["PAGEFERRY_CLUSTER_KEY"] == "secret"
        assert "PAGEFERRY_API_KEY" not in program.env
        assert program.argv[-2:] == ["--name", program.name]
        assert "secret" not in " ".join(program.argv)


def test_idle_prefill_cores_are_lent_to_decode_workers(monkeypatch):
    monkeypatch.setattr(local, "count_gpus", lambda visible: 0)
    monkeypatch.setattr(local, "siblings_together", lambda cores: cores)

    def borrowed(cores: int, *flags: str) -> list[tuple[str | None, str | None]]:
        monkeypatch.setattr(local, "allowed_cores", lambda text: list(range(cores)))
        programs = service_programs(parse(*flags), "unix:///x", 8123, Path("/scratch"))[1:]
        names = ("PAGEFERRY_BORROW_CORES", "PAGEFERRY_CORE_FLAG")
        return [tuple(p.env.get(name) for name in names) for p in programs]

    flag = "/scratch/cores-0"
    assert borrowed(2) == [(None, flag), ("0", flag)]
    assert borrowed(6, "--prefill", "1", "--decode", "2") == [
        (None, flag),
        ("0,1", flag),
        (None, None),
    ]
    assert borrowed(1) == [(None, None)] * 2
    assert borrowed(2, "--lend-cores", "false") == [(None, None)] * 2
    assert borrowed(2, "--device", "cuda:0") == [(None, None)] * 2


async def test_redis_that_does_not_answer_is_a_settings_error(monkeypatch):
    monkeypatch.setattr(local, "REDIS_WAIT_S", 0.2)
    with pytest.raises(SettingsError, match=r"no answer from Redis in 0\.2 s"):
        await wait_for_redis("redis://127.0.0.1:1/0", 20)


async def test_a_redis_that_loads_its_data_is_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(local, "REDIS_WAIT_S", 0.1)
    socket_path = tmp_path / "v.sock"
    url = f"unix://{socket_path}"
    argv = [server_binary(), "--port", "0", "--unixsocket", str(socket_path), "--save", ""]
    argv += ["--dir", str(tmp_path), "--enable-debug-command", "yes"]
    slowly = ["--loading-process-events-interval-bytes", "1024", "--key-load-delay", "800"]

    def start(*more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*argv, *more], stdout=subprocess.DEVNULL)

    server = start()
    try:
        await wait_for_redis(url, 20)
        async with redis.asyncio.Redis(unix_socket_path=str(socket_path)) as client:
            await client.execute_command("DEBUG", "POPULATE", 1000, "junk", 64)
            await client.save()
            server.kill()
            server.wait(10)
            socket_path.unlink()
            server = start(*slowly)
            while not socket_path.exists():
                await asyncio.sleep(0.01)
            with pytest.raises(SettingsError, match=r"still loads its data after 0\.2 s"):
                await wait_for_redis(url, 0.2)
            await wait_for_redis(url, 20)
            assert await client.dbsize() == 1000
    finally:
        server.kill()
        server.wait(10)


@pytest.fixture
async def fake_gateway():
    """A server that gives the answers in turn, status and body; yields (port, answers)."""
    answers: list[tuple[int, str]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readuntil(b"\r\n\r\n")).split()[1] == b"/ready"
        status, body = answers.pop(0)
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body.encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], answers


async def test_ready_when_all_workers_are(fake_gateway):
    port, answers = fake_gateway
    one, two = (f'{{"prefill_workers": 1, "decode_workers": {n}}}' for n in (1, 2))
    answers += [(503, "loading"), (200, one), (200, two), (200, two)]
    await wait_until_ready("127.0.0.1", port, 30, prefill=1, decode=2)
    assert answers == [(200, two)]


async def test_never_ready_says_what_the_gateway_said(fake_gateway):
    port, answers = fake_gateway
    answers += [(503, "loading")] * 1000
    with pytest.raises(ChildDied, match=r"not ready after 0\.5 s .*503 b'loading'"):
        await wait_until_ready("127.0.0.1", port, 0.5)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
    ],
)
def test_ready_line_is_one_line_whose_curl_can_be_pasted(host, url):
    line = ready_line(parse("--host", host, "--served-model-name", 'it\'s "tiny"'), 80)
    assert "\n" not in line
    assert line.startswith(f"{url} serves ")
    argv = shlex.split(line.partition("Try: ")[2])
    assert argv[:2] == ["curl", f"{url}/v1/chat/completions"]
    assert json.loads(argv[-1])["model"] == 'it\'s "tiny"'


def test_ready_line_with_keys_and_tls_shows_no_secret():
    settings = parse("--api-key", "secret", "--tls-cert", "c.pem", "--tls-key", "k.pem")
    line = ready_line(settings, 80)
    assert "secret" not in line
    assert "curl https://127.0.0.1:80/" in line
    assert "Bearer $PAGEFERRY_API_KEY" in line


def test_a_run_without_a_cluster_key_gets_one_of_its_own():
    first, second = (with_cluster_key(parse()).cluster_key for _ in range(2))
    assert len(first) == 64
    assert first != second
    assert with_cluster_key(parse("--cluster-key", "k")).cluster_key == "k"
