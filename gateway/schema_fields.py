"""Reading JSON bodies: number and text types with limits, prompts, messages, unsupported fields.

1. `load_object` turns bytes into a dict without nulls (null is the same as absent), or refuses.
2. `refuse_unsupported` refuses fields that ask for something this server does not do.
3. The annotated types below check one field each, in time linear in the size of the body; lengths
   are checked before elements are looked at.

Validators raise `ValueError` with a clause that continues the field's name ("must be ..."). No
message quotes prompt or message text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import orjson
from pydantic import PlainValidator

from pageferry.gateway.errors import bad_request
from pageferry.gateway.json_limits import TooManyValues, check_weight

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
MAX_MESSAGES = 4096
MAX_PROMPTS = 1024
"""Hard limits on lists; a gateway's settings may allow less."""
MAX_SHOWN_NAME = 64
MAX_INT = 2**63
"""Whole numbers beyond this are refused everywhere; no field has a use for them."""

MAX_SECOND_LOOK = 64 * 1024
"""Characters of a body that the slower parser may look at."""

_LOGIT_BIAS_KEY = re.compile(r"0|[1-9][0-9]{0,9}")
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,31}")
_SHOWABLE = frozenset(
    ("tool", "function", "text", "refusal", "image", "image_url", "input_image", "input_text",
     "input_audio", "audio", "audio_url", "video", "video_url", "file", "thinking")
)  # fmt: skip
"""Keywords of clients that a message may repeat; anything else could be text in a wrong place."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"], []),
    "audio": (),
    "web_search_options": (),
    # vLLM and SGLang
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "ebnf": (),
    "grammar": ("",),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "prompt_embeds": ([],),
    "prompt_logprobs": (),
    "regex": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    # between our own processes only; never taken from outside
    "cache_salt": ("",),
    "data_parallel_rank": (),
    "kv_transfer_params": (),
    "priority": (0,),
    "remote_host": (),
}
"""Field -> values that ask for nothing. Anything else is refused: never silently ignored."""

_SET_BY_SERVER = ("messages", "add_generation_prompt", "tools", "documents", "range")
_UNSUPPORTED_PREFIXES = ("guided_", "bootstrap_", "remote_")


# --- the body ---------------------------------------------------------------------------------


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _load_json(text: str) -> Any:
    """Any JSON value; `ValueError` says what is wrong.

    A parser holds the interpreter's lock until it is done: 1.5 MB of token ids stop the event loop
    for 19 ms with orjson, for 145 ms with the standard library's. What orjson refuses and the
    latter may accept, numbers beyond a double, has a field whose name the client should be told.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        if len(text) > MAX_SECOND_LOOK:
            raise
    value = json.loads(text, parse_constant=_refuse_constant)
    json.dumps(value, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    return value


def load_object(body: bytes) -> dict[str, Any]:
    """The body as a dict without null entries; 400 for anything that is not one JSON object."""
    try:
        check_weight(body)
        value = _load_json(body.decode("utf-8-sig"))
    except TooManyValues as error:
        raise bad_request(f"the body {error}") from None
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8 (byte {error.start})") from None
    except UnicodeEncodeError:
        raise bad_request("the body contains half of a surrogate pair (\\ud800-\\udfff)") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise bad_request(
            f"the body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except ValueError as error:  # NaN, Infinity, or an integer of thousands of digits
        raise bad_request(f"the body is not valid JSON: {str(error)[:80]}") from None
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object")
    return {key: item for key, item in value.items() if item is not None}


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)


def refuse_unsupported(body: dict[str, Any], extra: dict[str, tuple[Any, ...]]) -> None:
    """400 naming the first field whose value asks for something that is not implemented."""
    for name, value in body.items():
        neutral = extra.get(name, UNSUPPORTED.get(name))
        if neutral is None and name.startswith(_UNSUPPORTED_PREFIXES):
            neutral = ()
        if neutral is not None and not _is_neutral(value, neutral):
            shown = name[:MAX_SHOWN_NAME]
            raise bad_request(
                f"{shown} is not supported by this server with the value given; leave it out",
                param=shown,
                code="unsupported_parameter",
            )


# --- numbers and flags ------------------------------------------------------------------------


def _as_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _as_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    if not abs(value) < MAX_INT:  # NaN as well
        raise ValueError("must be a finite number")
    return float(value)


def as_whole(value: Any) -> int:
    """10 and 10.0 are 10; 10.5, "10" and true are refused."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a whole number")
    if isinstance(value, float) and not value.is_integer():
        raise ValueError("must be a whole number")
    if abs(value) > MAX_INT:
        raise ValueError("must be a whole number of at most 64 bits")
    return int(value)


def _whole(low: int, high: int) -> PlainValidator:
    def check(value: Any) -> int:
        number = as_whole(value)
        if not low <= number <= high:
            bounds = f"at least {low}" if high == MAX_INT else f"from {low} to {high}"
            raise ValueError(f"must be {bounds}, not {number}")
        return number

    return PlainValidator(check)


def _number(shown: str, allowed: Callable[[float], bool]) -> PlainValidator:
    def check(value: Any) -> float:
        number = _as_number(value)
        if not allowed(number):
            raise ValueError(f"must be {shown}, not {number:g}")
        return number

    return PlainValidator(check)


Flag = Annotated[bool, PlainValidator(_as_flag)]
Count = Annotated[int, _whole(0, MAX_INT)]
Choices = Annotated[int, _whole(1, 128)]
TopCount = Annotated[int, _whole(0, MAX_LOGPROBS)]
TopK = Annotated[int, _whole(-1, MAX_INT)]
Seed = Annotated[int, _whole(-(2**63), MAX_INT)]
Temperature = Annotated[float, _number("from 0 to 2", lambda v: 0 <= v <= 2)]
TopP = Annotated[float, _number("above 0 and at most 1", lambda v: 0 < v <= 1)]
MinP = Annotated[float, _number("at least 0 and below 1", lambda v: 0 <= v < 1)]
Penalty = Annotated[float, _number("from -2 to 2", lambda v: -2 <= v <= 2)]
RepetitionPenalty = Annotated[float, _number("above 0 and at most 2", lambda v: 0 < v <= 2)]


# --- text -------------------------------------------------------------------------------------


def _as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string")
    return value


def _as_stop(value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise ValueError("must be a string or a list of strings")
    if len(items) > MAX_STOP_STRINGS:
        raise ValueError(f"may have at most {MAX_STOP_STRINGS} items, not {len(items)}")
    for item in items:
        if not isinstance(item, str):
            raise ValueError("must be a string or a list of strings")
        if not 1 <= len(item) <= MAX_STOP_CHARS:
            raise ValueError(f"items must have 1 to {MAX_STOP_CHARS} characters, not {len(item)}")
    return tuple(dict.fromkeys(items))


def _as_stop_token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError("must be a list of token ids")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise ValueError(f"may have at most {MAX_STOP_TOKEN_IDS} items, not {len(value)}")
    return tuple(as_whole(item) for item in value)


def _as_logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("must be an object of token id -> bias")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"may have at most {MAX_LOGIT_BIAS} keys, not {len(value)}")
    biases = {}
    for key, item in value.items():
        if not _LOGIT_BIAS_KEY.fullmatch(key):
            raise ValueError('keys must be token ids, such as "50"')
        try:
            bias = _as_number(item)
        except ValueError as error:
            raise ValueError(f"values {error}") from None
        if not -100 <= bias <= 100:
            raise ValueError("values must be from -100 to 100")
        biases[int(key)] = bias
    return biases


def _as_stream_options(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    options = {key: item for key, item in value.items() if item is not None}
    for name in ("include_usage", "continuous_usage_stats"):
        if not isinstance(options.get(name, False), bool):
            raise ValueError(f"must have true or false as {name}")
    return options


Text = Annotated[str, PlainValidator(_as_text)]
Stop = Annotated[tuple[str, ...], PlainValidator(_as_stop)]
StopTokenIds = Annotated[tuple[int, ...], PlainValidator(_as_stop_token_ids)]
LogitBias = Annotated[dict[int, float], PlainValidator(_as_logit_bias)]
StreamOptions = Annotated[dict[str, Any], PlainValidator(_as_stream_options)]


# --- prompts and messages ---------------------------------------------------------------------


def _is_ids(items: list[Any]) -> bool:
    return set(map(type, items)) == {int}


def _as_prompts(value: Any) -> list[str | list[int]]:
    """One string, one list of ids, or a list of either; always as a list of prompts."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of token ids, or a list of those")
    prompts: list[str | list[int]] = [value] if _is_ids(value) else value
    if not prompts:
        raise ValueError("must not be empty")
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"may have at most {MAX_PROMPTS} items, not {len(prompts)}")
    for prompt in prompts:
        if not isinstance(prompt, str | list):
            raise ValueError("must be a string, a list of token ids, or a list of those")
        if not prompt:
            raise ValueError("must not be empty")
        if isinstance(prompt, list):
            if not _is_ids(prompt):
                raise ValueError("must have whole numbers as token ids")
            if min(prompt) < 0 or max(prompt) >= 2**31:
                raise ValueError("has a token id that no vocabulary contains")
    return prompts


def _shown(word: Any) -> str:
    """A client's keyword, if it is a known one."""
    return f" {word!r}" if isinstance(word, str) and word in _SHOWABLE else ""


def _content(value: Any, where: str) -> str:
    """A string as it is, or the text parts of a list joined with nothing in between."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"{where}.content must be a string or a list of text parts")
    if not value:
        raise ValueError(f"{where}.content must not be an empty list")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"{where}.content has a part of type{_shown(kind)} that is not text")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{where}.content has a text part without a string as text")
        texts.append(part["text"])
    return "".join(texts)


def _message(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object")
    role = value.get("role")
    if role not in ("system", "developer", "user", "assistant"):
        raise ValueError(
            f"{where}.role{_shown(role)} must be one of system, developer, user and assistant "
            "(tool calls are not supported)"
        )
    for name in ("tool_calls", "function_call", "audio"):
        if value.get(name):
            raise ValueError(f"{where}.{name} is not supported by this server")
    if value.get("content") is None:
        raise ValueError(f"{where}.content is missing")
    message = {"role": role, "content": _content(value["content"], where)}
    for name in ("name", "reasoning_content", "reasoning"):
        if (item := value.get(name)) is not None:
            if not isinstance(item, str):
                raise ValueError(f"{where}.{name} must be a string")
            message[name] = item
    return message


def _as_messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list with at least one message")
    if len(value) > MAX_MESSAGES:
        raise ValueError(f"may have at most {MAX_MESSAGES} items, not {len(value)}")
    return [_message(item, f"[{index}]") for index, item in enumerate(value)]


def _as_template_kwargs(value: Any) -> dict[str, Any]:
    """Switches for the chat template, such as `{"enable_thinking": false}`; plain values only."""
    if not isinstance(value, dict) or len(value) > 32:
        raise ValueError("must be an object with at most 32 keys")
    for key, item in value.items():
        if not _NAME.fullmatch(key) or key in _SET_BY_SERVER:
            raise ValueError("has a key that is not a name, or that the server itself sets")
        if not isinstance(item, str | int | float | bool | None):
            raise ValueError("values must be strings, numbers, true, false or null")
    return value


Prompts = Annotated[list[str | list[int]], PlainValidator(_as_prompts)]
Messages = Annotated[list[dict[str, str]], PlainValidator(_as_messages)]
TemplateKwargs = Annotated[dict[str, Any], PlainValidator(_as_template_kwargs)]
