"""Flags, environment, defaults; what is unknown or impossible ends with one sentence and code 2."""

from __future__ import annotations

import pytest

from pageferry.kvtransfer.settings import DecodeSettings, GatewaySettings, from_args


def parse(argv: list[str], env: dict[str, str]) -> DecodeSettings:
    return from_args(DecodeSettings, "pageferry decode", "text", argv, env)


def test_flags_win_over_environment_and_environment_over_defaults() -> None:
    env = {"PAGEFERRY_PAGE_SIZE": "32", "PAGEFERRY_MAX_NUM_SEQS": "5", "REDIS_URL": "redis://r/1"}
    settings = parse(["--page-size", "8", "--prefix-cache=off"], env)
    assert settings.page_size == 8
    assert settings.max_num_seqs == 5
    assert settings.prefix_cache is False
    assert settings.redis_url == "redis://r/1"
    assert settings.kv_memory_mib == DecodeSettings().kv_memory_mib


def test_another_services_variable_is_known_here_too() -> None:
    assert parse([], {"PAGEFERRY_MAX_BODY_MIB": "4"}) == DecodeSettings()


@pytest.mark.parametrize(
    ("argv", "env", "sentence"),
    [
        (["--page-sise", "8"], {}, "unrecognized arguments: --page-sise"),
        ([], {"PAGEFERRY_PAGE_SISE": "8"}, "did you mean PAGEFERRY_PAGE_SIZE?"),
        (["--page-size", "big"], {}, "--page-size='big': expected int"),
        ([], {"PAGEFERRY_DTYPE": "int3"}, "PAGEFERRY_DTYPE='int3': expected one of auto"),
        (["--prefix-cache=maybe"], {}, "--prefix-cache='maybe': expected bool"),
        (["--page", "8"], {}, "unrecognized arguments"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    argv: list[str], env: dict[str, str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(argv, env)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert sentence in printed
    assert len(printed.splitlines()) == 1


def test_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        from_args(GatewaySettings, "pageferry gateway", "text", ["--help"], {})
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, default in (("--port", 8000), ("--slow-client-s", 30.0), ("--max-n", 16)):
        assert name in text
        assert f"[default: {default}]" in text
