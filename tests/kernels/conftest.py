"""Tiny random models of each family, and pools that would betray a read of a slot nobody wrote."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pageferry.kernels.batch import AttentionBatch
from pageferry.kernels.model import Decoder, load_model
from pageferry.kernels.runner import Chunk, build_batch

PAGE_SIZE = 16

SMALL: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 256,
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 80, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
    "llama_biases": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        },
    ),
    "smollm2": (
        "Llama",
        {
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "hidden_size": 144,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 16}),
    "qwen2": ("Qwen2", {"rope_parameters": {**YARN, "rope_theta": 1e6}}),
    "qwen2_window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen2_no_window": (
        "Qwen2",
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.11,
            "residual_multiplier": 0.3,
            "logits_scaling": 4.0,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint written by transformers and the model that wrote it."""

    path: Path
    reference: Any

    def load(self, dtype: torch.dtype = torch.float32) -> Decoder:
        return load_model(self.path, torch.device("cpu"), dtype)

    def reference_logits(self, token_ids: list[int]) -> Tensor:
        """float32 [len, vocab]."""
        with torch.inference_mode():
            logits: Tensor = self.reference(torch.tensor([token_ids])).logits[0]
        return logits.float()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_model(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., TinyModel]:
    """`make_model(family, **overrides)`: random weights, also in biases and norms."""
    made: dict[str, TinyModel] = {}
    # Takes seconds; the other tests of this folder do without.
    transformers = importlib.import_module("transformers")

    def make(family: str, **overrides: Any) -> TinyModel:
        key = f"{family} {overrides!r}"
        if key not in made:
            name, special = FAMILIES[family]
            config = getattr(transformers, f"{name}Config")(**{**SMALL, **special, **overrides})
            torch.manual_seed(len(made))
            model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    spread = 0.2 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5
                    parameter.normal_(1.0 if _is_norm(parameter, model) else 0.0, spread)
            path = tmp_path_factory.mktemp(family)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*generation.*", category=UserWarning)
                model.save_pretrained(path)
            made[key] = TinyModel(path, model)
        return made[key]

    return make


def _is_norm(parameter: Tensor, model: torch.nn.Module) -> bool:
    return any(p is parameter and "norm" in name for name, p in model.named_parameters())


@pytest.fixture(params=sorted(FAMILIES))
def tiny(request: pytest.FixtureRequest, make_model: Callable[..., TinyModel]) -> TinyModel:
    return make_model(request.param)


@dataclass
class PagedModel:
    """Runs sequences through a decoder over a poisoned pool, pages handed out in disorder."""

    model: Decoder
    num_pages: int = 64
    page_size: int = PAGE_SIZE
    poison: float = float("nan")
    tables: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        c = self.model.config
        shape = (c.num_layers, self.num_pages, 2, c.num_kv_heads, self.page_size, c.head_dim)
        self.kv = torch.full(shape, self.poison, dtype=self.model.dtype)
        order = torch.randperm(self.num_pages, generator=torch.Generator().manual_seed(3))
        self._free: list[int] = order.tolist()

    def table(self, sequence: int, length: int) -> list[int]:
        """The sequence's block table, grown to hold `length` tokens."""
        table = self.tables.setdefault(sequence, [])
        while len(table) * self.page_size < length:
            table.append(self._free.pop())
        return table

    def batch(self, parts: list[tuple[int, int, list[int]]]) -> tuple[Tensor, AttentionBatch]:
        """(sequence, start, new tokens) each -> input ids and batch."""
        chunks = [Chunk(t, s, self.table(i, s + len(t)), None) for i, s, t in parts]
        return build_batch(chunks, self.page_size, self.model.device)

    def logits(self, parts: list[tuple[int, int, list[int]]]) -> list[Tensor]:
        """Logits of all new tokens, one [len, vocab] per part."""
        with torch.inference_mode():
            hidden = self.model.forward(*self.batch(parts), self.kv)
            return list(self.model.logits(hidden).split([len(t) for _, _, t in parts]))

    def chunked(self, token_ids: list[int], size: int, sequence: int = 0) -> Tensor:
        """Logits of a whole sequence computed in chunks of `size`."""
        starts = range(0, len(token_ids), size)
        return torch.cat([self.logits([(sequence, s, token_ids[s : s + size])])[0] for s in starts])


@pytest.fixture
def paged() -> type[PagedModel]:
    return PagedModel


@pytest.fixture
def tokens() -> Callable[[int, int], list[int]]:
    """`tokens(count, seed)`: random ids of the tiny vocabulary."""

    def make(count: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        ids: list[int] = torch.randint(
            0, SMALL["vocab_size"], (count,), generator=generator
        ).tolist()
        return ids

    return make


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
    """Error text, or "", of each of the module's CASES, run by triton_child in one process that
    interprets Triton's kernels, or uses the GPU if there is one."""
    interpret = "0" if torch.cuda.is_available() else "1"
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("triton_child.py")), request.module.__file__],
        env={**os.environ, "TRITON_INTERPRET": interpret},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    ending = f"not reached: exit status {child.returncode}\n{child.stderr[-4000:]}"
    errors = {line["case"]: line["error"] for line in lines}
    return dict.fromkeys(request.module.CASES, ending) | errors
