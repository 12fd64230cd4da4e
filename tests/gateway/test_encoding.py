"""Encoding beside other threads, and the lower bound of token counts against real encodings."""

import json
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pageferry.gateway.encoding import LONG_CHARS, SLICE_CHARS, Encoder, fewest_tokens
from pageferry.gateway.errors import ApiError

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGED = "abcdefghi"


def byte_level(**changes) -> Tokenizer:
    """One token per byte, one of nine bytes, and what `changes` adds."""
    pieces = [*ALPHABET, *(MERGED[:k] for k in range(2, len(MERGED) + 1))]
    merges = [(MERGED[:k], MERGED[k]) for k in range(1, len(MERGED))]
    backend = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for name, value in changes.items():
        setattr(backend, name, value)
    return backend


def byte_fallback() -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁ab"]
    merges = [("▁", "a"), ("▁a", "b")]
    model = models.BPE(
        {p: i for i, p in enumerate(pieces)},
        merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return backend


def with_added(token: AddedToken) -> Tokenizer:
    backend = byte_level()
    backend.add_tokens([token])
    return backend


def bound(backend: Tokenizer, text: str) -> int:
    return fewest_tokens(json.loads(backend.to_str()))(text)


PROVABLE = {
    "byte level": byte_level(),
    "NFC": byte_level(normalizer=normalizers.NFC()),
    "added token": with_added(AddedToken("a long added token")),
    "byte fallback": byte_fallback(),
}


@pytest.mark.parametrize("name", PROVABLE)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=400) | st.text("ab é日 \u0301\u0323" + MERGED, max_size=400))
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    backend = PROVABLE[name]
    ids = backend.encode(text, add_special_tokens=False).ids
    assert bound(backend, text) <= len(ids)


@pytest.mark.parametrize("name", PROVABLE)
def test_the_bound_grows_with_the_text(name: str) -> None:
    assert bound(PROVABLE[name], "a" * 10_000) > 100


def test_the_bound_is_reached_by_the_longest_token() -> None:
    backend = byte_level()
    text = MERGED * 50
    assert bound(backend, text) == 50 == len(backend.encode(text).ids)


@pytest.mark.parametrize(
    "backend",
    [
        with_added(AddedToken("<x>", rstrip=True)),
        with_added(AddedToken("<x>", lstrip=True)),
        byte_level(normalizer=normalizers.Strip()),
        byte_level(normalizer=normalizers.NFKC()),
        byte_level(normalizer=normalizers.Replace("aa", "a")),
        byte_level(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
            )
        ),
        byte_level(pre_tokenizer=pre_tokenizers.Whitespace()),
    ],
    ids=["rstrip", "lstrip", "strip", "NFKC", "shortening", "removed", "white space"],
)
def test_nothing_is_claimed_where_text_may_vanish(backend: Tokenizer) -> None:
    assert bound(backend, "a " * 10_000) == 0


def test_nothing_is_claimed_when_unknown_characters_fuse() -> None:
    pieces = [(p, -1.0) for p in ("<unk>", "a", "b")]
    assert bound(Tokenizer(models.Unigram(pieces, unk_id=0)), "日" * 10_000) == 0


@pytest.mark.parametrize("num_chars", [LONG_CHARS - 10, LONG_CHARS + 10, 4 * LONG_CHARS])
@pytest.mark.parametrize("special", [True, False])
def test_ids_are_those_of_a_plain_encoding(num_chars: int, special: bool) -> None:
    backend = byte_level()
    text = ("hello wörld " * num_chars)[:num_chars]
    expected = backend.encode(text, add_special_tokens=special).ids
    assert Encoder().encode(backend, text, special=special).ids == expected


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """With the interpreter's lock held, the counter could not move between start and end."""
    backend, encoder = byte_level(), Encoder()
    text = "hello world " * 40_000
    encoder.encode(backend, "x" * (LONG_CHARS + 1), special=False)  # the lane has its thread
    done = threading.Event()

    def work() -> None:
        _ = len(encoder.encode(backend, text, special=False))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    turns = 0
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 5


def test_bytes_without_a_token_are_not_counted() -> None:
    """Some vocabularies lack control characters; byte-level BPE drops those."""
    pieces = [sign for sign in ALPHABET if sign != "Ā"]  # the zero byte
    backend = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = "ab\0\0\0c" * 100
    assert bound(backend, text) == 300 == len(backend.encode(text).ids)


@pytest.mark.parametrize("text", ["hello wörld 12345 ", "日本語", "a", " "])
def test_counting_in_slices_is_close_and_ends_early(text: str) -> None:
    backend, encoder = byte_level(), Encoder()
    text *= 4 * SLICE_CHARS // len(text)
    whole = len(backend.encode(text).ids)
    assert encoder.count(backend, text, context_len=len(text)) == 0, "short for this context"
    counted = encoder.count(backend, text, context_len=len(text) // 7)
    assert 0 < counted <= 1.01 * whole
    early = encoder.count(backend, text, context_len=10)
    assert 0 < early <= 0.3 * whole + 10


def test_a_long_text_for_the_context_is_refused_or_encoded_exactly(tokenizer) -> None:
    fits = "a" * (tokenizer.context_len - 1)
    assert len(tokenizer.encode(fits)) == len(fits)
    for length in (40_000, 100_000):  # counted; by its length alone
        with pytest.raises(ApiError, match="maximum context length") as refused:
            tokenizer.encode("a" * length)
        assert refused.value.code == "context_length_exceeded"
