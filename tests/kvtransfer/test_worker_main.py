"""How a worker process says what ended it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from redis.exceptions import AuthenticationError

from pageferry.kvtransfer.bus import connect
from pageferry.kvtransfer.settings import SettingsError
from pageferry.kvtransfer.worker_main import live

NO_REDIS = "pageferry decode: Redis at --redis-url cannot be used: "


def dying_of(error: Exception) -> Callable[[], Coroutine[Any, Any, None]]:
    async def life() -> None:
        raise error

    return life


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (AuthenticationError("invalid password"), 1, NO_REDIS + "invalid password\n"),
        (SettingsError("--page-size 3: no"), 2, "pageferry decode: --page-size 3: no\n"),
    ],
)
def test_what_the_operator_can_mend_is_one_sentence(
    capsys: pytest.CaptureFixture[str], error: Exception, code: int, sentence: str
) -> None:
    with pytest.raises(SystemExit) as end:
        live("pageferry decode", dying_of(error))
    assert end.value.code == code
    assert capsys.readouterr().err == sentence


@pytest.mark.parametrize("error", [OSError(22, "Invalid argument"), TimeoutError("too slow")])
def test_other_errors_are_not_put_on_redis(
    capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    """They are raised: Python ends with 1 and the traceback."""
    with pytest.raises(type(error), match=str(error.args[-1])):
        live("pageferry decode", dying_of(error))
    assert "Redis" not in capsys.readouterr().err


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "unix:///nowhere/redis.sock"])
def test_errors_of_the_connection_are_put_on_redis(
    capsys: pytest.CaptureFixture[str], url: str
) -> None:
    async def life() -> None:
        async with connect(url) as client:
            await client.ping()

    with pytest.raises(SystemExit) as end:
        live("pageferry decode", life)
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith(NO_REDIS)
