"""Redis URLs: what each form means, and that no mistake gets through or shows a secret."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.crc import key_slot

from pageferry.compose.local import UpSettings
from pageferry.kvtransfer.bus import connect
from pageferry.kvtransfer.keys import Keys
from pageferry.kvtransfer.redis_url import parse
from pageferry.kvtransfer.settings import (
    DecodeSettings,
    GatewaySettings,
    PrefillSettings,
    from_args,
)


def test_every_form(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.touch()
    one = parse("redis://:s%2Fcret@box/3")
    assert (one.kind, one.tls, one.hosts) == ("server", False, (("box", 6379),))
    assert one.options == {"password": "s/cret", "db": 3}
    assert parse("redis://[::1]:7000").hosts == (("::1", 7000),)
    secure = parse(f"rediss://me:pw@box:1/?ssl_ca_certs={ca}&ssl_check_hostname=false")
    assert secure.tls
    assert secure.options == {
        "username": "me", "password": "pw", "ssl_ca_certs": str(ca), "ssl_check_hostname": False
    }  # fmt: skip
    local = parse("unix://:pw@/run/a%20b.sock?db=2")
    assert (local.kind, local.path, local.options) == (
        "unix", "/run/a b.sock", {"password": "pw", "db": 2}
    )  # fmt: skip
    cluster = parse("rediss+cluster://a:1,b,[::2]:3")
    assert (cluster.kind, cluster.tls) == ("cluster", True)
    assert cluster.hosts == (("a", 1), ("b", 6379), ("::2", 3))
    sentinel = parse(
        f"rediss+sentinel://me:pw@a,b:7/my%20name/4?sentinel_password=x&ssl_ca_certs={ca}"
    )
    assert (sentinel.kind, sentinel.service) == ("sentinel", "my name")
    assert sentinel.hosts == (("a", 26379), ("b", 7))
    assert sentinel.options["db"] == 4
    assert sentinel.options["password"] == "pw"
    assert sentinel.sentinel_options == {"password": "x", "ssl_ca_certs": str(ca)}


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://x", "must begin with"),
        ("redis+ring://x", "must begin with"),
        ("redis:///0", "no host"),
        ("redis://a,b", "several hosts"),
        ("redis://h:99999", "port"),
        ("redis://:sesame/x@h", "percent-encoded"),
        ("redis://:sesame#x@h", "percent-encoded"),
        ("redis://me:1?sesame@h", "percent-encoded"),
        ("redis+sentinel://me:1/sesame@h/s", "percent-encoded"),
        ("unix://:1/sesame@/run/x.sock", "absolute path"),
        ("redis://[::1:7000", "percent-encoded"),
        ("redis://h/sesame", "database"),
        ("redis://h?socket_timeout=1", "socket_timeout"),
        ("redis://h?ssl_cert_reqs=none", "needs rediss"),
        ("rediss://h?ssl_cert_reqs=sometimes", "sometimes"),
        ("rediss://h?ssl_check_hostname=perhaps", "perhaps"),
        ("rediss://h?ssl_ca_certs=/no/such/file", "/no/such/file"),
        ("unix://relative.sock", "absolute path"),
        ("redis+cluster://h/2", "number 0"),
        ("redis+sentinel://h:26379", "service"),
    ],
)
def test_mistakes(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        parse(url)
    assert "sesame" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", [GatewaySettings, PrefillSettings, DecodeSettings, UpSettings])
def test_services_refuse_a_bad_url_with_2_and_a_sentence(
    settings: type, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, env in (
        (["--redis-url", "redis://:sesame/x@h"], {}),
        ([], {"REDIS_URL": "redis://:sesame/x@h"}),
    ):
        with pytest.raises(SystemExit) as end:
            from_args(settings, "pageferry x", "", arguments, env)
        said = capsys.readouterr().err
        assert end.value.code == 2
        assert (arguments[0] if arguments else "REDIS_URL") in said
        assert len(said.strip().splitlines()) == 1
        assert "sesame" not in said


async def test_nothing_that_is_printed_shows_a_password() -> None:
    for url in ("redis://u:sesame@h", "redis+sentinel://:sesame@h/s?sentinel_password=sesame"):
        client = connect(url)
        assert "sesame" not in repr(client) + repr(client.connection_pool) + repr(parse(url))
        await client.aclose()


@pytest.mark.parametrize(
    "model", ["plain", "org/model name", "{x}", "}", "{", "a}b", "a{b", "%7D", "", "日本 語"]
)
def test_all_keys_of_a_model_lie_in_one_slot(model: str) -> None:
    keys = Keys(model)
    names = [keys.control, keys.dead, keys.workers, *keys.prefill_queues]
    names += [f("x{y}z") for f in (keys.worker, keys.gateway, keys.tokens, keys.decode_queue)]
    assert len({key_slot(name.encode()) for name in names}) == (1 if model else len(names))
    assert len(set(names)) == len(names)


def test_models_never_share_keys() -> None:
    names = ("a", "{a}", "%7Ba%7D", "a}:workers", "a}", "}a", "a ")
    assert len({Keys(name).workers for name in names}) == len(names)
