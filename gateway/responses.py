"""The two response shapes of the OpenAI API, streamed and not, built from `Piece`s.

Ids, `created` and `model` in chunks are the server's own, the same over the whole stream. Streamed
chunks are assembled from a prepared head and tail around the JSON text: per token this costs about
a microsecond, where dumping the whole object costs ten. JSON is ASCII-escaped, since some clients
split SSE at U+2028.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from pageferry.gateway.choices import Choice, Piece
from pageferry.gateway.requests import Generation
from pageferry.kvtransfer.wire import TokenLogprob

MAX_EVENT_CHARS = 16_384
"""Longer texts are split over several events: some clients limit the length of a line."""
LOWEST_LOGPROB = -9999.0
"""JSON has no infinity."""

dumps = json.JSONEncoder(separators=(",", ":")).encode
quote = json.encoder.encode_basestring_ascii
"""A string as JSON: what `dumps` does with it, without looking what it is."""


class TokenTexts(Protocol):
    """What the shapes need to know about tokens."""

    def token_bytes(self, token_id: int) -> bytes: ...
    def token_text(self, token_id: int) -> str: ...


class Shape:
    """Common to both endpoints. One instance per call."""

    id_prefix = ""
    object_name = ""
    chunk_object_name = ""

    def __init__(
        self,
        model: str,
        tokens: TokenTexts,
        *,
        logprobs: int,
        usage_chunk: bool,
        continuous_usage: bool = False,
    ) -> None:
        """`usage_chunk`: a stream ends with one; `continuous_usage`: all its chunks have usage."""
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self._tokens = tokens
        self._logprobs = logprobs
        self.usage_chunk = usage_chunk
        self._continuous_usage = continuous_usage
        common = dumps(
            {
                "id": self.id,
                "object": self.chunk_object_name,
                "created": self.created,
                "model": model,
            }
        )
        self._head = "data: " + common[:-1] + ',"choices":['
        self._tail = "]}\n\n" if not usage_chunk else '],"usage":null}\n\n'

    def chunk(self, piece: Piece, generation: Generation) -> str:
        """The SSE event, or events, of one piece that was taken from `generation`."""
        tail = self._tail if not self._continuous_usage else tail_with_usage(generation)
        if len(piece.text) <= MAX_EVENT_CHARS:
            return self._head + self._choice(piece) + tail
        parts: list[Piece] = []
        text = piece.text
        while len(text) > MAX_EVENT_CHARS:
            head, text = text[:MAX_EVENT_CHARS], text[MAX_EVENT_CHARS:]
            parts.append(Piece(piece.index, head, [], [], None, piece.first and not parts))
        first = piece.first and not parts
        last = Piece(piece.index, text, piece.token_ids, piece.logprobs, piece.finish, first)
        return "".join(self._head + self._choice(p) + tail for p in (*parts, last))

    def usage_event(self, usage: dict[str, Any]) -> str:
        """The chunk with empty `choices` that `stream_options.include_usage` asks for."""
        return f'{self._head}],"usage":{dumps(usage)}}}\n\n'

    def body(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer, when it is not streamed."""
        return {
            "id": self.id,
            "object": self.object_name,
            "created": self.created,
            "model": self.model,
            "choices": [self._whole(choice) for choice in choices],
            "usage": usage,
        }

    def _choice(self, piece: Piece) -> str:
        raise NotImplementedError

    def _whole(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError


class CompletionShape(Shape):
    id_prefix = "cmpl"
    object_name = chunk_object_name = "text_completion"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._offsets: dict[int, int] = {}

    def _choice(self, piece: Piece) -> str:
        finish = f'"{piece.finish}"' if piece.finish else "null"
        logprobs = "null" if self._logprobs < 0 else dumps(self._logprob_lists(piece))
        return (
            f'{{"index":{piece.index},"text":{quote(piece.text)},'
            f'"logprobs":{logprobs},"finish_reason":{finish}}}'
        )

    def _whole(self, choice: Choice) -> dict[str, Any]:
        logprobs: dict[str, list[Any]] | None = None
        if self._logprobs >= 0:
            logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            for piece in choice.pieces:
                for name, values in self._logprob_lists(piece).items():
                    logprobs[name].extend(values)
        return {
            "index": choice.index,
            "text": "".join(piece.text for piece in choice.pieces),
            "logprobs": logprobs,
            "finish_reason": choice.finish,
        }

    def _logprob_lists(self, piece: Piece) -> dict[str, list[Any]]:
        lists: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        offset = self._offsets.get(piece.index, 0)
        for token_id, logprob in zip(piece.token_ids, piece.logprobs, strict=False):
            text = self._tokens.token_text(token_id)
            lists["tokens"].append(text)
            lists["token_logprobs"].append(max(LOWEST_LOGPROB, logprob.logprob))
            top = {
                self._tokens.token_text(i): max(LOWEST_LOGPROB, p)
                for i, p in logprob.top[: self._logprobs]
            }
            top.setdefault(text, max(LOWEST_LOGPROB, logprob.logprob))
            lists["top_logprobs"].append(top)
            lists["text_offset"].append(offset)
            offset += len(text)
        self._offsets[piece.index] = offset
        return lists


class ChatShape(Shape):
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def _choice(self, piece: Piece) -> str:
        finish = f'"{piece.finish}"' if piece.finish else "null"
        role = '"role":"assistant",' if piece.first else ""
        logprobs = "null"
        if self._logprobs >= 0:
            logprobs = dumps({"content": self._logprob_items(piece), "refusal": None})
        return (
            f'{{"index":{piece.index},"delta":{{{role}"content":{quote(piece.text)}}},'
            f'"logprobs":{logprobs},"finish_reason":{finish}}}'
        )

    def _whole(self, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if self._logprobs >= 0:
            items = [item for piece in choice.pieces for item in self._logprob_items(piece)]
            logprobs = {"content": items, "refusal": None}
        text = "".join(piece.text for piece in choice.pieces)
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": choice.finish,
        }

    def _logprob_items(self, piece: Piece) -> list[dict[str, Any]]:
        return [
            {
                **self._token(token_id, logprob.logprob),
                "top_logprobs": self._top(logprob),
            }
            for token_id, logprob in zip(piece.token_ids, piece.logprobs, strict=False)
        ]

    def _top(self, logprob: TokenLogprob) -> list[dict[str, Any]]:
        return [self._token(i, p) for i, p in logprob.top[: self._logprobs]]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokens.token_text(token_id),
            "logprob": max(LOWEST_LOGPROB, logprob),
            "bytes": list(self._tokens.token_bytes(token_id)),
        }


def tail_with_usage(generation: Generation) -> str:
    """The end of a chunk with the counts so far of its choice alone, as vLLM has them."""
    prompt, output = len(generation.prompt), generation.delivered
    return (
        f'],"usage":{{"prompt_tokens":{prompt},"completion_tokens":{output},'
        f'"total_tokens":{prompt + output}}}}}\n\n'
    )


def usage_of(choices: Sequence[Choice]) -> dict[str, Any]:
    """Token counts of a call: each prompt once, outputs summed over its choices."""
    prompts: dict[int, tuple[int, int]] = {}
    for choice in choices:
        length = len(choice.generation.prompt)
        _, cached = prompts.get(choice.prompt_index, (0, 0))
        seen = max(cached, min(length, choice.generation.cached_tokens))
        prompts[choice.prompt_index] = (length, seen)
    prompt_tokens = sum(length for length, _ in prompts.values())
    completion_tokens = sum(choice.generation.delivered for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in prompts.values())},
    }
