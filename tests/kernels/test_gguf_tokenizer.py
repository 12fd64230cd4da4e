"""Tokenizers built from GGUF metadata: cutting rules, merges, special tokens, bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import transformers
from tokenizers import Tokenizer

from pageferry.kernels.gguf_file import BadGGUF, GGUFFile
from pageferry.kernels.gguf_tokenizer import UnsupportedTokenizer, build_bpe, build_sentencepiece

VOCAB = 280  # 256 bytes, three more tokens, padding
Edit = Callable[[gguf.GGUFWriter], None]


def byte_letters() -> list[str]:
    """The 256 letters that byte-level BPE writes bytes as."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]


def add_tokenizer(writer: gguf.GGUFWriter, pre: str = "smollm") -> None:
    tokens = [*byte_letters(), "<|end|>", "<|start|>", "th"]
    tokens += [f"<pad{i}>" for i in range(VOCAB - len(tokens))]
    kinds = [1] * 256 + [3, 3, 1] + [5] * (VOCAB - 259)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(257)


def metadata_only(path: Path, edit: Edit) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


@pytest.mark.parametrize("pre", [None, "tekken", "deepseek-coder"])
def test_unknown_cutting_rule_is_refused(tmp_path: Path, pre: str | None) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer, pre or "x")

    file = metadata_only(tmp_path / "m.gguf", edit)
    if pre is None:
        del file.metadata["tokenizer.ggml.pre"]
    with pytest.raises(UnsupportedTokenizer, match=r"tokenizer\.ggml\.pre"):
        build_bpe(file)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["ab", "Ġ", "1", "2", "3", "4", "'s", "ĠC", "ĊĊ"]),
        ("gpt-2", ["ab", "Ġ1234", "'s", "ĠC", "ĊĊ"]),
        ("llama-bpe", ["ab", "Ġ", "123", "4", "'s", "ĠC", "ĊĊ"]),
        ("qwen2", ["ab", "Ġ", "1", "2", "3", "4", "'s", "ĠC", "ĊĊ"]),
        ("default", ["ab", "Ġ", "123", "4", "'", "s", "ĠC", "ĊĊ"]),
    ],
)
def test_text_is_cut_as_each_family_does(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    tokenizer = build_bpe(metadata_only(tmp_path / "m.gguf", lambda w: add_tokenizer(w, pre)))
    cut = tokenizer.pre_tokenizer.pre_tokenize_str("ab 1234's C\n\n")
    assert [piece for piece, _ in cut] == pieces


def test_merges_and_special_tokens(tmp_path: Path) -> None:
    tokenizer = build_bpe(metadata_only(tmp_path / "m.gguf", add_tokenizer))
    assert tokenizer.encode("the<|end|>").tokens == ["th", "e", "<|end|>"]
    assert tokenizer.decode(tokenizer.encode("the<|end|>").ids) == "the"  # special: not shown


@pytest.mark.parametrize("merge", ["t e", "th", "t  h", " h", "t ", "", "zz h", "t h e"])
def test_merges_that_join_no_tokens_are_refused(tmp_path: Path, merge: str) -> None:
    file = metadata_only(tmp_path / "m.gguf", add_tokenizer)
    file.metadata["tokenizer.ggml.merges"] = [merge]
    with pytest.raises(BadGGUF, match=r"tokenizer\.ggml\.merges"):
        build_bpe(file)


@pytest.mark.parametrize(("pre", "wanted"), [("llama-bpe", True), ("smollm", False)])
def test_bos_is_added_where_the_family_does(tmp_path: Path, pre: str, wanted: bool) -> None:
    tokenizer = build_bpe(metadata_only(tmp_path / "m.gguf", lambda w: add_tokenizer(w, pre)))
    assert (tokenizer.encode("a").tokens[0] == "<|start|>") is wanted


def sentencepiece(writer: gguf.GGUFWriter) -> None:
    words = ["▁", "a", "b", "c", "ab", "abc", "▁a", "▁ab", "bc"]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{i:02X}>" for i in range(256)], *words]
    scores = [0.0] * 259 + [-9.0, -8.0, -7.0, -6.0, -3.0, -5.0, -4.0, -1.0, -2.0]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(words))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def test_sentencepiece_follows_scores_and_falls_back_to_bytes(tmp_path: Path) -> None:
    file = metadata_only(tmp_path / "m.gguf", sentencepiece)
    tokenizer = build_sentencepiece(file)
    # bc (-2) goes before ab (-3), and then ▁a (-4) before abc (-5).
    assert tokenizer.encode("abc").tokens == ["<s>", "▁a", "bc"]
    assert tokenizer.encode("ab é").tokens == ["<s>", "▁ab", "▁", "<0xC3>", "<0xA9>"]
    file.metadata["tokenizer.ggml.scores"][263] = -1.5  # now ab goes first, and then ▁ab (-1)
    assert build_sentencepiece(file).encode("abc").tokens == ["<s>", "▁ab", "c"]
    for text in ("abc ab  é日", " ab", "a</s>b"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False).replace("</s> ", "</s>") == text


def test_demo_tokenizer_agrees_with_transformers(demo_model: Path) -> None:
    fast = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    slow = transformers.AutoTokenizer.from_pretrained(demo_model)
    assert slow.eos_token_id == 2
    for text in (
        "Hello  world\n\n\tfoo 12345 ½ ²³",
        "日本語のテスト",
        "Привет, мир!",
        "def f(x):\n    return x**2  # don't\r\n",
        "🦙<|im_start|> x<|im_end|>",
    ):
        ids = fast.encode(text).ids
        assert ids == slow(text)["input_ids"]
        assert fast.decode(ids, skip_special_tokens=False) == text
    assert fast.encode("1234").tokens == list("1234")
    chat = [{"role": "user", "content": "Say hi."}]
    assert len(slow.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]) == 33
