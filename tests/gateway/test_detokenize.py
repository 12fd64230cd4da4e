"""TextStream against an oracle that looks at the whole text at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageferry.gateway.detokenize import TextStream

SPECIAL = 1000


class Bytes:
    """A vocabulary made of the given byte strings; `SPECIAL` is `<|end|>`."""

    special_ids = frozenset({SPECIAL})

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == SPECIAL:
            return b"<|end|>"
        return self.pieces[token_id] if token_id < len(self.pieces) else b""


def stream(*pieces: bytes, stop=(), **options) -> tuple[TextStream, list[int]]:
    return TextStream(Bytes(*pieces), stop, **options), list(range(len(pieces)))


def shown(text: TextStream, ids: list[int]) -> list[str]:
    return [text.feed([i]) for i in ids]


def oracle(pieces: list[bytes], stop: tuple[str, ...], include: bool, min_tokens: int) -> str:
    """Character by character, comparing whole texts."""
    text = ""
    for count in range(1, len(pieces) + 1):
        complete = b"".join(pieces[:count]).decode("utf-8", "replace")
        # Only what can no longer change: drop a trailing incomplete character.
        if complete.endswith("�") and not _final(b"".join(pieces[:count])):
            complete = complete[:-1]
        while len(text) < len(complete):
            text = complete[: len(text) + 1]
            ended = [s for s in stop if text.endswith(s)]
            if ended and count >= min_tokens:
                return text if include else text[: -max(map(len, ended))]
    return b"".join(pieces).decode("utf-8", "replace")


def _final(data: bytes) -> bool:
    """Whether `data` ends with a whole character or with bytes that can never become one."""
    for length in (1, 2, 3):
        tail = data[-length:]
        if len(tail) == length and tail[0] >= 0xC0:
            try:
                tail.decode()
            except UnicodeDecodeError as error:
                return error.reason != "unexpected end of data"
    return True


WORDS = [b"a", b"b", b"ab", b" a", b"\xe6\x97", b"\xa5", b"\xe6", b"\xff", "П".encode(), b"\n"]


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(WORDS), max_size=14),
    st.lists(st.text("abП \n", min_size=1, max_size=5), max_size=4).map(tuple),
    st.booleans(),
    st.integers(0, 8),
    st.data(),
)
def test_equals_the_oracle_however_the_tokens_are_grouped(pieces, stop, include, least, data):
    options = {"include_stop": include, "min_tokens": least}
    whole, ids = stream(*pieces, stop=stop, **options)
    at_once = whole.feed(ids) + whole.finish()
    assert at_once == oracle(pieces, stop, include, least)

    grouped, ids = stream(*pieces, stop=stop, **options)
    text = ""
    while ids:
        size = data.draw(st.integers(1, len(ids)))
        text += grouped.feed(ids[:size])
        ids = ids[size:]
    assert text + grouped.finish() == at_once
    assert (grouped.stopped, grouped.stop_token_count) == (whole.stopped, whole.stop_token_count)


def test_incomplete_character_is_held_until_complete():
    text, ids = stream(b"\xe6", b"\x97", b"\xa5", b"!")
    assert shown(text, ids) == ["", "", "日", "!"]
    assert text.finish() == ""


@pytest.mark.parametrize("cut", [1, 2])
def test_incomplete_character_at_the_end_is_one_replacement_character(cut):
    text, ids = stream(b"x", *[bytes([b]) for b in "日".encode()[:cut]])
    assert "".join(shown(text, ids)) == "x"
    assert text.finish() == "�"
    assert text.finish() == ""


def test_leading_space_and_spacing_survive():
    text, ids = stream(b" 6", b" ,", b"  7 ", b"\n")
    assert shown(text, ids) == [" 6", " ,", "  7 ", "\n"]


def test_only_a_prefix_of_a_stop_string_is_held_and_then_released():
    text, ids = stream(b" 7", b",", b" 8", b", ", stop=("7, 9", "8, x"))
    assert shown(text, ids) == [" ", "", "7, ", ""]
    assert text.finish() == "8, "
    assert text.stopped is None


def test_text_is_not_delayed_by_the_length_of_a_stop_string():
    text, ids = stream(b"abc", b"def", stop=("x" * 256,))
    assert shown(text, ids) == ["abc", "def"]


@pytest.mark.parametrize(("include", "expected"), [(False, "one "), (True, "one two")])
def test_stop_string_across_tokens(include, expected):
    text, ids = stream(b"one t", b"w", b"o three", b"four", stop=("two",), include_stop=include)
    assert text.feed(ids) + text.finish() == expected
    assert text.stopped == "two"
    assert text.stop_token_count == 3
    assert text.feed(ids) == ""


def test_earliest_end_wins_then_the_longest():
    text, ids = stream(b"abcd", stop=("abcd", "bc"))
    assert (text.feed(ids), text.stopped) == ("a", "bc")
    text, ids = stream(b"xabc", stop=("bc", "abc"))
    assert (text.feed(ids), text.stopped) == ("x", "abc")


def test_self_overlapping_stop_string():
    text, ids = stream(b"a", b"ab", b"aa", b"b", b"ac", stop=("abaac",))
    assert text.feed(ids) + text.finish() == "aabaabac"
    text, ids = stream(b"aab", b"ab", b"aac", stop=("abaac",))
    assert (text.feed(ids), text.stopped) == ("aab", "abaac")


def test_stop_string_before_min_tokens_is_text():
    text, ids = stream(b",", b" 1", b",", b" 2", stop=(",",), min_tokens=2)
    assert text.feed(ids) + text.finish() == ", 1"
    assert text.stop_token_count == 3


def test_a_stop_string_that_came_too_early_may_overlap_the_one_that_counts():
    text, ids = stream(b"aba", b"b", b"a", stop=("aba",), min_tokens=2)
    assert shown(text, ids) == ["ab", "", ""]
    assert (text.stopped, text.stop_token_count) == ("aba", 3)


def test_special_tokens():
    text, _ = stream(b"hi")
    assert text.feed([0, SPECIAL, 0]) == "hihi"
    text, _ = stream(b"hi", skip_special_tokens=False)
    assert text.feed([0, SPECIAL]) == "hi<|end|>"


def test_ids_that_no_vocabulary_has_are_nothing():
    text, ids = stream(b"a", b"b")
    assert text.feed([ids[0], 77, ids[1]]) == "ab"
