"""Builds tokenizer.json and tokenizer_config.json from a GGUF file's metadata.

A GGUF file keeps vocabulary, merges and token kinds, but only the *name* of the rule that cuts text
before the merges apply. A wrong rule gives wrong tokens silently, so a name that is not in
`PRE_TOKENIZERS` is refused.

Two kinds exist (`tokenizer.ggml.model`): "gpt2" is byte-level BPE with merges (`build_bpe`),
"llama" is SentencePiece's BPE with scores instead (`build_sentencepiece`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from pageferry.kernels.gguf_file import BadGGUF, GGUFFile

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Values of `tokenizer.ggml.token_type`; the last two are matched before any splitting."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
"""llama.cpp's own "default" rule: four cuts, one after the other."""


def _split(*patterns: str) -> Any:
    """Cut at each pattern in turn, then map bytes to letters without cutting further."""
    cuts = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*cuts, byte_level])


def _digits() -> Any:
    """Each digit on its own, then GPT-2's pattern."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "smollm": _digits,
    "starcoder": _digits,
    "refact": _digits,
    "gpt-2": _gpt2,
    "llama-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
    "default": lambda: _split(*_DEFAULT),
}
"""Value of `tokenizer.ggml.pre` -> rule that cuts text before merging."""

_SPACE = "\u2581"
"""SentencePiece's mark for a space."""

_WHOLE_WORDS = ("llama-bpe",)
"""Rules whose models take a piece that is in the vocabulary as it is, without merging."""

_BEGINS_WITH_BOS = ("llama-bpe",)
"""Rules whose models begin every text with BOS when the file does not say whether to."""


class UnsupportedTokenizer(ValueError):
    """The tokenizer's kind or cutting rule is not known, so its tokens could be wrong."""


def _strings(file: GGUFFile, key: str) -> list[str]:
    value = file.metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BadGGUF(f"{file.path}: {key} is missing or not a list of strings")
    return value


def _vocabulary(file: GGUFFile, tokens: list[str]) -> dict[str, int]:
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise BadGGUF(f"{file.path}: tokenizer.ggml.tokens names a token twice")
    return vocab


def _token_kinds(file: GGUFFile, tokens: list[str]) -> list[int]:
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise BadGGUF(
            f"{file.path}: tokenizer.ggml.token_type is missing or not as long as the vocabulary"
        )
    return kinds


def _merges(file: GGUFFile, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs; checked here because `tokenizers` panics on a pair that it does not expect."""
    pairs = []
    for merge in _strings(file, "tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocab.keys():
            raise BadGGUF(
                f"{file.path}: tokenizer.ggml.merges has {merge!r}, which does not join two tokens "
                "to a third"
            )
        pairs.append((left, right))
    return pairs


def _token_name(file: GGUFFile, tokens: list[str], name: str) -> str | None:
    token_id = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise BadGGUF(
            f"{file.path}: tokenizer.ggml.{name}_token_id is {token_id}, the vocabulary has "
            f"{len(tokens)} tokens"
        )
    return tokens[token_id]


def build_bpe(file: GGUFFile) -> Tokenizer:
    """A byte-level BPE tokenizer. Raises `BadGGUF` or `UnsupportedTokenizer`."""
    pre = file.metadata.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedTokenizer(
            f"{file.path}: tokenizer.ggml.pre is {pre!r}; known are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}. Use the safetensors version of the model."
        )
    tokens = _strings(file, "tokenizer.ggml.tokens")
    vocab = _vocabulary(file, tokens)
    bpe = models.BPE(vocab=vocab, merges=_merges(file, vocab), ignore_merges=pre in _WHOLE_WORDS)
    tokenizer = Tokenizer(bpe)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(file, tokenizer, tokens)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    _add_bos(file, tokenizer, tokens, by_default=pre in _BEGINS_WITH_BOS)
    return tokenizer


def _add_tokens(file: GGUFFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    kinds = _token_kinds(file, tokens)
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    if tokenizer.get_vocab_size() != len(tokens):
        raise BadGGUF(f"{file.path}: special tokens do not fit into the vocabulary")


def _add_bos(file: GGUFFile, tokenizer: Tokenizer, tokens: list[str], *, by_default: bool) -> None:
    bos = _token_name(file, tokens, "bos")
    if bos is None or not file.metadata.get("tokenizer.ggml.add_bos_token", by_default):
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, tokens.index(bos))]
    )


def tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """Names of the special tokens and the chat template, as transformers keeps them."""
    tokens = _strings(file, "tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": file.metadata.get(
            f"{file.metadata.get('general.architecture')}.context_length"
        ),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token := _token_name(file, tokens, key)) is not None:
            config[f"{name}_token"] = token
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise BadGGUF(f"{file.path}: tokenizer.chat_template is not a string")
        config["chat_template"] = template
    return config


def _merges_from_scores(
    tokens: list[str], scores: list[float], kinds: list[int]
) -> list[tuple[str, str]]:
    """The merges that a scored vocabulary stands for, first merge first.

    SentencePiece joins the adjacent pair whose union has the highest score; so every way to cut a
    token into two others is a merge, ranked by the score of the token.
    """
    known = {token for token, kind in zip(tokens, kinds, strict=True) if kind == _NORMAL}
    ranked: list[tuple[float, int, tuple[str, str]]] = []
    for token, score in zip(tokens, scores, strict=True):
        if token in known:
            cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
            ranked += [(-score, -len(cut[0]), cut) for cut in cuts if known.issuperset(cut)]
    return [pair for _, _, pair in sorted(ranked)]


def build_sentencepiece(file: GGUFFile) -> Tokenizer:
    """SentencePiece's BPE with byte fallback. Raises `BadGGUF`.

    As in llama.cpp and in SentencePiece itself, the space that is put before a text is also put
    after a special token, and before a text that begins with a space.
    """
    tokens = _strings(file, "tokenizer.ggml.tokens")
    kinds = _token_kinds(file, tokens)
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise BadGGUF(
            f"{file.path}: tokenizer.ggml.scores is missing or not as long as the vocabulary"
        )
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocabulary(file, tokens),
            merges=_merges_from_scores(tokens, scores, kinds),
            unk_token=_token_name(file, tokens, "unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    undo: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(undo)
    _add_tokens(file, tokenizer, tokens)
    _add_bos(file, tokenizer, tokens, by_default=True)
    return tokenizer


def write_tokenizer(file: GGUFFile, target: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into the directory `target`."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = build_bpe(file)
    elif kind == "llama":
        tokenizer = build_sentencepiece(file)
    else:
        raise UnsupportedTokenizer(
            f"{file.path}: tokenizer.ggml.model is {kind!r}; 'gpt2' and 'llama' are known"
        )
    tokenizer.save(str(target / "tokenizer.json"))
    text = json.dumps(tokenizer_config(file), indent=2, sort_keys=True, ensure_ascii=False)
    (target / "tokenizer_config.json").write_text(text + "\n")
