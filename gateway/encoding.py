"""Encoding text of any length without stopping the event loop, and refusing what cannot fit.

Of the library's ways to encode, only the batch calls let go of the interpreter's lock (`encode`
holds it all the time: a megabyte stops every other thread for about a second). `encode_batch_fast`
also leaves out offsets, which nobody here needs.

Long texts go through a lane of their own: few threads, of low priority, so that on a gateway with a
single core the streams come first. Nothing but the encoding runs there, since a thread of low
priority must not be caught holding the lock.

A text that cannot fit is refused as cheaply as possible:

1. `fewest_tokens`: by its length alone, where the longest token bounds what a token can stand for.
2. `Encoder.count`: texts that are long for the context are encoded in slices, and only until their
   tokens exceed the context by `SLACK`.
3. Encoded whole. What comes here has no more tokens than that, or few characters for the context.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

LONG_CHARS = 32 * 1024
"""Longer texts take the lane: they cost 30 ms and more."""
MAX_LANES = 4
LOW_PRIORITY = 10
NEVER_IN_UTF8 = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))
SLICE_CHARS = 16 * 1024
LONG_FOR_CONTEXT = 6
"""Characters per token of the context above which a text is counted before it is encoded; prose has
4 to 5."""
SLACK = 1.25
"""What a cut can add to the number of tokens is a few per slice, far less than this."""
NFC_SHRINKS = 4
"""No character decomposes canonically into more than four (Unicode 16, UnicodeData.txt)."""

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library's own threads: not ours to slow down


def num_lanes() -> int:
    """One core is for the event loop, as far as there are several."""
    return max(1, min(MAX_LANES, len(os.sched_getaffinity(0)) - 1))


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)


class Encoder:
    """Encodes with any backend. Thread-safe; blocks the caller, never other threads."""

    def __init__(self) -> None:
        self._lane = ThreadPoolExecutor(num_lanes(), "encode", _lower_priority)

    def encode(self, backend: Backend, text: str, *, special: bool) -> Encoding:
        """`special`: with the special tokens that the tokenizer adds by itself."""
        if len(text) <= LONG_CHARS:
            return _encode(backend, text, special)
        return self._lane.submit(_encode, backend, text, special).result()

    def count(self, backend: Backend, text: str, context_len: int) -> int:
        """Tokens of `text`, approximately, or 0 if that needs no look: it may fit.

        Counting ends above `SLACK` times `context_len`.
        """
        if len(text) <= max(SLICE_CHARS, LONG_FOR_CONTEXT * context_len):
            return 0
        return self._lane.submit(_count, backend, text, int(SLACK * context_len)).result()


def _count(backend: Backend, text: str, enough: int) -> int:
    num_tokens = 0
    for start in range(0, len(text), SLICE_CHARS):
        num_tokens += len(_encode(backend, text[start : start + SLICE_CHARS], False))
        if num_tokens > enough:
            break
    return num_tokens


def _encode(backend: Backend, text: str, special: bool) -> Encoding:
    return backend.encode_batch_fast([text], add_special_tokens=special)[0]


# --- a lower bound of the number of tokens ------------------------------------------------------


def fewest_tokens(spec: dict[str, Any]) -> Callable[[str], int]:
    """A function that tells, from a text's length alone, how many tokens it has at least.

    `spec` is the tokenizer as JSON. The bound is text length over the longest token's length. It
    holds only if nothing is dropped on the way and no token stands for more text than it spells;
    where that cannot be shown from `spec`, the function returns 0.
    """
    byte_level = "ByteLevel" in {step["type"] for step in _steps(spec["pre_tokenizer"])}
    added = [token["content"] for token in spec["added_tokens"]]
    if not (_keeps_all_text(spec) and _covers_all_bytes(spec["model"], byte_level)):
        return lambda text: 0
    unknown = unknown_bytes(spec["model"]["vocab"]) if byte_level else b""
    pieces = [*spec["model"]["vocab"], *added]
    if isinstance(spec["model"]["vocab"], list):  # Unigram: [text, score]
        pieces = [*(text for text, _ in spec["model"]["vocab"]), *added]
    longest = max(len(piece.encode()) for piece in pieces)
    if any(step["type"] == "NFC" for step in _steps(spec["normalizer"], "normalizers")):
        if set(unknown) - NEVER_IN_UTF8:  # composing may make such bytes out of others
            return lambda text: 0
        return lambda text: len(text) // (NFC_SHRINKS * longest)
    if byte_level:  # the vocabulary spells each byte as one character
        longest = max(max(map(len, pieces)), *(len(text.encode()) for text in added), 1)
        return lambda text: len(text.encode().translate(None, unknown)) // longest
    return lambda text: len(text) // longest


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's byte-level BPE: printable Latin-1 as itself, the rest shifted.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


def unknown_bytes(vocab: dict[str, Any]) -> bytes:
    """Bytes without a token of their own: byte-level BPE drops them, or makes them one token."""
    return bytes(byte for sign, byte in byte_level_alphabet().items() if sign not in vocab)


def _steps(spec: Any, inside: str = "pretokenizers") -> list[dict[str, Any]]:
    if not isinstance(spec, dict):
        return []
    if spec["type"] == "Sequence":
        return [step for part in spec[inside] for step in _steps(part, inside)]
    return [spec]


def _keeps_all_text(spec: dict[str, Any]) -> bool:
    """No step between text and model takes characters away, but for NFC."""
    if any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"]):
        return False  # such a token swallows any amount of white space
    for step in _steps(spec["normalizer"], "normalizers"):
        if step["type"] == "Replace":
            if len(step["pattern"].get("String", "")) not in range(1, len(step["content"]) + 1):
                return False
        elif step["type"] not in ("Prepend", "NFC"):
            return False
    return all(
        step["type"] in ("ByteLevel", "Digits", "Metaspace")
        or (step["type"] in ("Split", "Punctuation") and step["behavior"] != "Removed")
        for step in _steps(spec["pre_tokenizer"])
    )


def _covers_all_bytes(model: dict[str, Any], byte_level: bool) -> bool:
    """Unknown characters are neither dropped nor fused into one token, but for `unknown_bytes`."""
    if byte_level:
        return bool(model["type"] == "BPE")
    vocab = model["vocab"]
    known = vocab if isinstance(vocab, dict) else {text for text, _ in vocab}
    every = all(f"<0x{byte:02X}>" in known for byte in range(256))
    return bool(model.get("byte_fallback")) and every
