"""Text to token ids and back, for one model, without torch or transformers.

`Tokenizer.from_dir` reads tokenizer.json and the small JSON files beside it. Raw prompts get the
tokenizer's own special tokens (a BOS if it adds one); chat prompts get those of the template and no
others, and markers in message text are plain text (see `markers`).

The EOS set is the union of generation_config.json, config.json and the token with which the chat
template closes an assistant turn. What tokenizer_config.json calls EOS counts only if those say
nothing: in converted models it is known to be wrong (a SmolLM2 copy names the token that *opens* a
turn).

All methods are thread-safe; encoding belongs into a thread pool (see `encoding`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from pageferry.gateway.chat import ChatTemplate, find_template, no_template
from pageferry.gateway.encoding import SLACK, Encoder, byte_level_alphabet, fewest_tokens
from pageferry.gateway.errors import ApiError, bad_request
from pageferry.gateway.markers import MarkerGuard
from pageferry.kvtransfer.model_files import ModelNotFound

_TOKEN_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_PROBE = "\U000fe001probe\U000fe002"
"""Stands for an assistant's answer when looking for what closes it."""


def too_long(context_len: int, num_tokens: int, param: str, at_least: bool = False) -> ApiError:
    """The 400 that clients recognise when a prompt does not fit."""
    count = f"at least {num_tokens}" if at_least else str(num_tokens)
    return bad_request(
        f"this model's maximum context length is {context_len} tokens, but the {param} "
        f"{'have' if param == 'messages' else 'has'} {count} tokens",
        param,
        code="context_length_exceeded",
    )


def _read_json(file: Path) -> dict[str, Any]:
    """The object in `file`; {} if there is no such file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelNotFound(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelNotFound(f"{file} must hold a JSON object")
    return value


def _load_backend(directory: Path) -> Backend:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ModelNotFound(
            f"{directory} has no tokenizer.json; convert the model's tokenizer to the fast format"
        )
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelNotFound(f"{file} cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for d in decoder["decoders"] for step in _decoder_steps(d)]
    return [decoder]


class _Pieces:
    """Token text as the vocabulary spells it -> the bytes it stands for.

    Two spellings cover decoder-only models: byte-level BPE, and SentencePiece (a character for the
    space, `<0xE6>` for single bytes).
    """

    def __init__(self, decoder: Any) -> None:
        steps = _decoder_steps(decoder)
        kinds = {step["type"] for step in steps}
        self._alphabet = byte_level_alphabet() if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        self._spaces: list[tuple[str, str]] = []
        for step in steps:
            if step["type"] == "Metaspace":
                self._spaces.append((step["replacement"], " "))
            elif step["type"] == "Replace" and "String" in step["pattern"]:
                self._spaces.append((step["pattern"]["String"], step["content"]))
        if self._alphabet is None and not self._spaces:
            raise ModelNotFound(
                f"the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is not supported; "
                "supported are ByteLevel, Metaspace and Replace with ByteFallback"
            )

    def to_bytes(self, piece: str) -> bytes:
        if self._alphabet is not None:
            try:
                return bytes([self._alphabet[character] for character in piece])
            except KeyError:  # an added token, spelt as it is
                return piece.encode()
        if self._byte_fallback and len(piece) == 6 and piece.startswith("<0x"):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                pass
        for written, meant in self._spaces:
            piece = piece.replace(written, meant)
        return piece.encode()


def _special_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like -> text; later files win."""
    found = {}
    for config in configs:
        for name in (f"{kind}_token" for kind in _TOKEN_NAMES):
            token = config.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                found[name] = text
    return found


def _ids(value: Any) -> list[int]:
    """An `eos_token_id` entry: absent, an id or a list of ids."""
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, int) and not isinstance(item, bool)]


def _read_config(directory: Path) -> dict[str, Any]:
    """config.json; models that are part of a larger one keep their values in `text_config`."""
    config = _read_json(directory / "config.json")
    nested = config.get("text_config")
    return {**nested, **config} if isinstance(nested, dict) else config


def _context_len(directory: Path, config: Mapping[str, Any], limit: Any) -> int:
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length"):
        if isinstance(length := config.get(name), int) and length > 0:
            return length
    if isinstance(limit, int) and 0 < limit < 10**9:
        return limit
    raise ModelNotFound(f"{directory / 'config.json'} does not name max_position_embeddings")


class Tokenizer:
    """Encodes prompts and decodes single tokens of one model."""

    def __init__(self, backend: Backend, directory: Path) -> None:
        config = _read_config(directory)
        tokenizer_config = _read_json(directory / "tokenizer_config.json")
        special = _special_tokens(
            _read_json(directory / "special_tokens_map.json"), tokenizer_config
        )
        vocabulary = backend.get_vocab(with_added_tokens=True)
        spec = json.loads(backend.to_str())
        self._backend = backend
        self._encoder = Encoder()
        self._pieces = _Pieces(spec["decoder"])
        self._bytes: dict[int, bytes] = {}
        self._guard = MarkerGuard(backend)
        self._fewest_tokens = fewest_tokens(spec)
        self.vocab_size = max(vocabulary.values()) + 1
        """Ids from 0 up to here; no more than the model has embeddings for."""
        if isinstance(rows := config.get("vocab_size"), int):
            self.vocab_size = min(self.vocab_size, rows)
        self.context_len = _context_len(directory, config, tokenizer_config.get("model_max_length"))
        """Tokens, prompt and output together, that the model can attend to."""
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        template = find_template(directory, tokenizer_config)
        self._template = ChatTemplate(template, special) if template else None
        named = _ids(_read_json(directory / "generation_config.json").get("eos_token_id"))
        named += _ids(config.get("eos_token_id")) + self._end_of_turn()
        if not named and (eos := backend.token_to_id(special.get("eos_token", ""))) is not None:
            named = [eos]
        self.eos_token_ids = tuple(dict.fromkeys(named))
        """Everything that ends a sequence by itself; empty if the model names nothing."""

    @classmethod
    def from_dir(cls, path: Path) -> Tokenizer:
        """The tokenizer in a model directory; `ModelNotFound` says what is missing or broken."""
        return cls(_load_backend(path), path)

    def warm_up(self) -> None:
        """Do now what would stop other threads for long when the first prompt needs it."""
        if self._template is not None:
            self._guard.warm_up()

    def encode(self, text: str, param: str = "prompt") -> list[int]:
        """Ids of a raw prompt, with the special tokens that the tokenizer adds by itself.

        Raises `ApiError` 400 without encoding if the text cannot fit into the context.
        """
        self._refuse_hopeless(text, param)
        return self._ids(self._backend, text, param, special=True)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation; raises `ApiError` 400 if the template refuses it."""
        if self._template is None:
            raise no_template()
        protected, mark = self._guard.protect([*messages, dict(template_kwargs or {})])
        rendered = self._template.render(
            protected[:-1],
            add_generation_prompt=add_generation_prompt,
            template_kwargs=protected[-1],
        )
        self._refuse_hopeless(rendered, "messages")
        backend = self._backend
        if mark:
            backend, rendered = self._guard.unmark(rendered, mark)
        return self._ids(backend, rendered, "messages", special=False)

    def check_ids(self, token_ids: Sequence[int], param: str = "prompt") -> None:
        """`ApiError` 400 if a token id is none of this model's."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            wrong = next(i for i in token_ids if not 0 <= i < self.vocab_size)
            raise bad_request(
                f"{param} has token id {wrong}; this model's ids go from 0 to "
                f"{self.vocab_size - 1}",
                param,
            )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for: part of a character perhaps; b"" for unknown ids."""
        found = self._bytes.get(token_id)
        if found is None:
            piece = self._backend.id_to_token(token_id) if token_id >= 0 else None
            found = b"" if piece is None else self._pieces.to_bytes(piece)
            self._bytes[token_id] = found
        return found

    def token_text(self, token_id: int) -> str:
        """A token by itself as text, for logprobs; U+FFFD for parts of characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _refuse_hopeless(self, text: str, param: str) -> None:
        """Megabytes of text take seconds to encode; most need not be looked at to be refused."""
        at_least = self._fewest_tokens(text)
        if at_least > self.context_len:
            raise too_long(self.context_len, at_least, param, at_least=True)

    def _ids(self, backend: Backend, text: str, param: str, *, special: bool) -> list[int]:
        """The ids, made into Python integers only if they fit into the context."""
        counted = self._encoder.count(backend, text, self.context_len)
        if counted > SLACK * self.context_len:
            raise too_long(self.context_len, int(counted / SLACK), param, at_least=True)
        encoding = self._encoder.encode(backend, text, special=special)
        if len(encoding) > self.context_len:
            raise too_long(self.context_len, len(encoding), param)
        ids: list[int] = encoding.ids
        return ids

    def _end_of_turn(self) -> list[int]:
        """The special token that the template puts right behind an assistant's answer, if any."""
        if self._template is None:
            return []
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}]
        try:
            rendered = self._template.render(turns, add_generation_prompt=False)
        except ApiError:  # a template with other expectations; the configuration files have to do
            return []
        _, found, behind = rendered.rpartition(_PROBE)
        if not found:
            return []
        ids = self._backend.encode(behind.lstrip(), add_special_tokens=False).ids
        return ids[:1] if ids and ids[0] in self.special_ids else []
