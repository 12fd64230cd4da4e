"""Token ids of one sequence to the text that may be shown, as the tokens arrive.

Each token's bytes pass three stages, each O(1) amortised per character:

1. an incremental UTF-8 decoder holds back an incomplete character; bytes that can never become one
   turn into U+FFFD, one per maximal ill-formed part (Unicode 16, section 3.9, "U+FFFD Substitution
   of Maximal Subparts");
2. a Knuth-Morris-Pratt matcher per stop string knows how long a prefix of it the text ends with;
3. the longest such prefix is held back, the rest is released.

The stop string whose last character comes first wins, the longer one if two end together. Nothing
is trimmed. Both streamed and whole answers are made by this class, and the result does not depend
on how the ids are divided into `feed` calls: so their texts are equal.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class TokenBytes(Protocol):
    """What a `TextStream` needs from a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class _StopMatcher:
    """Knuth-Morris-Pratt automaton for one stop string."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """Length of the longest prefix of `text` that what was pushed so far ends with."""
        self._borders = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._borders[length - 1]
            if text[i] == text[length]:
                length += 1
            self._borders[i] = length

    @property
    def pending(self) -> int:
        """Length of the text's end that may still become the stop string."""
        # Complete and yet asked: the match came too early to count (min_tokens).
        complete = self.matched == len(self.text)
        return self._borders[self.matched - 1] if complete else self.matched

    def push(self, character: str) -> bool:
        """True if the stop string ends with this character."""
        text, matched = self.text, self.pending
        while matched and text[matched] != character:
            matched = self._borders[matched - 1]
        if text[matched] == character:
            matched += 1
        self.matched = matched
        return matched == len(text)


class TextStream:
    """Incremental detokenisation and stop strings for one sequence.

    `min_tokens`: stop strings that end before this many tokens were fed do not count.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        stop: tuple[str, ...],
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self.stopped: str | None = None
        """The stop string that was found; nothing is shown after it."""
        self.stop_token_count = 0
        """Tokens consumed up to and including the one that completed the stop string."""
        self._tokenizer = tokenizer
        self._matchers = [_StopMatcher(text) for text in stop]
        self._include_stop = include_stop
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._incomplete = False  # the decoder holds the beginning of a character
        self._held = ""  # never shown yet; a proper prefix of some stop string
        self._num_tokens = 0

    def feed(self, token_ids: Iterable[int]) -> str:
        """Text that may be shown now; "" once stopped. Tokens after the stop are not consumed."""
        shown = []
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self._num_tokens += 1
            if token_id in self._skipped:
                continue
            piece = self._decode(self._tokenizer.token_bytes(token_id))
            shown.append(self._release(piece) if self._matchers else piece)
        return "".join(shown)

    def finish(self) -> str:
        """What was held back; an incomplete character at the end is one U+FFFD."""
        if self.stopped is not None:
            return ""
        rest = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return rest

    def _decode(self, data: bytes) -> str:
        if data.isascii() and not self._incomplete:  # most tokens; a fifth of the decoder's time
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self._incomplete = bool(self._decoder.getstate()[0])
        return text

    def _release(self, piece: str) -> str:
        for index, character in enumerate(piece):
            ended = [m.text for m in self._matchers if m.push(character)]
            if ended and self._num_tokens >= self._min_tokens:
                return self._end(max(ended, key=len), self._held + piece[: index + 1])
        text = self._held + piece
        longest = max(matcher.pending for matcher in self._matchers)
        keep = len(text) - longest
        self._held = text[keep:]
        return text[:keep]

    def _end(self, stop: str, text: str) -> str:
        self.stopped = stop
        self.stop_token_count = self._num_tokens
        self._held = ""
        return text if self._include_stop else text[: len(text) - len(stop)]
