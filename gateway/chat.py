"""Chat templates: messages to the text that the model was trained on.

A template comes with the model (`chat_template.jinja`, or `chat_template` in
tokenizer_config.json, where a list of named ones means the one called "default"). It is a program
by a stranger, so it runs in Jinja's immutable sandbox with bounds on steps, time and size of text
(`template_limits`). It sees what transformers gives it:
`messages`, `add_generation_prompt`, `tools` and `documents` as None, the special tokens by name,
`raise_exception`, `strftime_now`, `tojson` without HTML escapes, `{% generation %}` blocks, and
`break`/`continue`.

Whatever goes wrong while rendering is the fault of these messages with this template: 400.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser

from pageferry.gateway.errors import ApiError, bad_request
from pageferry.gateway.template_limits import BUDGET, BoundedEnvironment, Budget, TooMuch
from pageferry.kvtransfer.model_files import ModelNotFound

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]


class _Refusal(jinja2.TemplateError):
    """The template called raise_exception; its message is meant for the client."""


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class ChatTemplate:
    """A compiled template. Thread-safe: rendering keeps its state to itself."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: `bos_token` and the like -> their text. Raises `ModelNotFound`."""
        environment = BoundedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlocks, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.bounded_template(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelNotFound(
                f"the model's chat template does not compile: {error.message} (line {error.lineno})"
            ) from error
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text, special tokens included. Raises `ApiError` 400."""
        prepared = [self._prepare(message) for message in messages]
        budget = Budget(sum(len(v) for m in prepared for v in m.values() if isinstance(v, str)))
        variables = {
            **self._special_tokens,
            **(template_kwargs or {}),
            "messages": prepared,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "range": budget.range,
        }
        token = BUDGET.set(budget)
        try:
            return "".join(budget.take(chunk) for chunk in self._template.generate(variables))
        except _Refusal as error:
            raise _refused(str(error)[:300]) from None
        except TooMuch as error:
            raise _refused(f"rendering takes too much ({error})") from None
        except SecurityError as error:
            raise _refused("it does what a template must not do") from error
        except Exception as error:  # a stranger's program: any type may come out of it
            raise _refused(f"it fails with {type(error).__name__}") from error
        finally:
            BUDGET.reset(token)

    def _prepare(self, message: Message) -> dict[str, Any]:
        """Names as templates expect them (transformers 5 fills in the same two)."""
        prepared = dict(message)
        if prepared["role"] == "developer" and not self._knows_developer:
            prepared["role"] = "system"
        for name in _REASONING_NAMES:
            if prepared.get(name) is not None:
                prepared["reasoning_content"] = prepared[name]
                prepared.setdefault("thinking", prepared[name])
                break
        return prepared


def _refused(reason: str) -> ApiError:
    return bad_request(f"the model's chat template refuses these messages: {reason}", "messages")


def no_template() -> ApiError:
    """For chat calls to a model without a chat template."""
    return bad_request(
        "this model has no chat template, so it cannot take messages; use /v1/completions",
        "messages",
        code="no_chat_template",
    )


def find_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Source of the model's (default) chat template; None if it has none."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = tokenizer_config.get("chat_template")
    if isinstance(found, str):
        return found
    if isinstance(found, list):
        named = {
            entry["name"]: entry["template"]
            for entry in found
            if isinstance(entry, dict) and isinstance(entry.get("template"), str)
            if isinstance(entry.get("name"), str)
        }
        return named.get("default")
    return None
