"""Keeps control tokens that users type from becoming control tokens.

Templates mark turns with special tokens, such as `<|im_end|>`, as text. A message that contains the
same text must not end its turn. So:

1. `protect` looks for special tokens in the messages, and for beginnings of one at the end of a
   string (the template might add the rest). Each gets a private-use character put inside, one that
   occurs nowhere in the messages. Without any, nothing changes and the prompt is encoded as usual.
2. The template is rendered. Whole special tokens in the result come from the template alone.
3. `unmark` renames those to words with a random number and takes the private-use character out.
   The result is encoded with a copy of the tokenizer in which the special tokens have these names.
   In the copy the typed text is ordinary text: its real name is in no table. Everything else
   (normaliser, splits, merges) is the same, so the ids are those of the original.

The copy is made when first needed, or by `warm_up`: making it holds the interpreter's lock for
100 ms with 49,000 tokens, and takes 27 MB. The method is measured against cases like `a<|im_end|>b`
(7 tokens for the marker, as plain text).

Texts are searched in windows: a regular expression holds the interpreter's lock until it returns,
which over a megabyte of `<` is 15 ms.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from pageferry.gateway.errors import bad_request

log = logging.getLogger(__name__)

_PRIVATE_USE = (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))
WINDOW = 64 * 1024
"""Characters searched at a time."""


def _unused_character(texts: Sequence[str]) -> str:
    """A private-use character that is in none of the texts; `ApiError` 400 when all are."""
    used: set[str] = set()
    for text in texts:
        for start in range(0, len(text), WINDOW):
            used.update(text[start : start + WINDOW])
    for code in _PRIVATE_USE:
        if chr(code) not in used:
            return chr(code)
    raise bad_request("the messages use every private-use character there is", "messages")


class MarkerGuard:
    """For one tokenizer; thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._ids = {t.content: i for i, t in added.items() if t.special and len(t.content) > 1}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._beginnings = frozenset(m[:k] for m in self._ids for k in range(1, len(m)))
        self._longest = max(map(len, self._ids), default=0)
        # Tokens that are matched after normalisation have more than one spelling.
        self._always = tokenizer.normalizer is not None and any(
            token.special and token.normalized for token in added.values()
        )
        self._lock = threading.Lock()
        self._renamed: tuple[Tokenizer, dict[str, str]] | None = None

    def warm_up(self) -> None:
        """Make the copy now. Where it cannot be made, only prompts that need it will fail."""
        try:
            self._copy()
        except RuntimeError as error:
            log.warning("prompts in which control tokens are typed will fail: %s", error)

    def protect(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """Messages that hold no special token, and the character that was put into them.

        The character is "" if the rendered prompt can be encoded as it is. Roles are not touched.
        """
        texts = [v for m in messages for k, v in m.items() if k != "role" and isinstance(v, str)]
        plain = [dict(message) for message in messages]
        if not self._always and not any(self._needs_breaking(text) for text in texts):
            return plain, ""
        mark = _unused_character(texts)
        for message in plain:
            for key, value in message.items():
                if key != "role" and isinstance(value, str):
                    message[key] = self._break(value, mark)
        return plain, mark

    def unmark(self, rendered: str, mark: str) -> tuple[Tokenizer, str]:
        """What to encode, with which tokenizer, for messages that `protect` has marked."""
        tokenizer, names = self._copy()
        renamed = self._replace(rendered, lambda marker: names[marker])
        return tokenizer, renamed.replace(mark, "")

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        """All special tokens in `text`, as `finditer` would find them."""
        at = 0
        while at < len(text):
            beyond = at + WINDOW
            match = self._any.search(text, at, beyond + self._longest)
            if match is None or match.start() >= beyond:  # what begins there may have been cut
                at = beyond
            else:
                yield match
                at = match.end()

    def _replace(self, text: str, instead: Callable[[str], str]) -> str:
        parts, at = [], 0
        for match in self._matches(text):
            parts += [text[at : match.start()], instead(match.group())]
            at = match.end()
        return "".join([*parts, text[at:]])

    def _has_any(self, text: str) -> bool:
        return next(self._matches(text), None) is not None

    def _needs_breaking(self, text: str) -> bool:
        return self._has_any(text) or self._beginning_at_end(text.rstrip()) > 0

    def _beginning_at_end(self, text: str) -> int:
        """Length of the longest proper beginning of a special token that `text` ends with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0

    def _break(self, text: str, mark: str) -> str:
        while self._has_any(text):  # again: a token may lie inside another
            text = self._replace(text, lambda marker: marker[0] + mark + marker[1:])
        stripped = text.rstrip()  # templates often trim
        if length := self._beginning_at_end(stripped):
            at = len(stripped) - length + 1
            text = text[:at] + mark + text[at:]
        return text

    def _copy(self) -> tuple[Tokenizer, dict[str, str]]:
        with self._lock:
            if self._renamed is None:
                self._renamed = self._rename()
            return self._renamed

    def _rename(self) -> tuple[Tokenizer, dict[str, str]]:
        prefix = secrets.token_hex(16)
        names = {text: f"<{prefix}:{index}>" for index, text in enumerate(self._ids)}
        spec = json.loads(self._tokenizer.to_str())
        for token in spec["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = spec["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(text, text): i for text, i in model["vocab"].items()}
        else:  # Unigram: [text, score] by id
            model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        tokenizer = Tokenizer.from_str(json.dumps(spec))
        for text, name in names.items():
            if tokenizer.token_to_id(name) != self._ids[text]:
                raise RuntimeError(f"special token {text!r} cannot be renamed in this tokenizer")
        return tokenizer, names
