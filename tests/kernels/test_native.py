"""Each CPU kernel against torch in float64 or the reference, at each level of this processor."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pageferry.kernels import native, reference
from pageferry.kernels.batch import AttentionBatch
from pageferry.kernels.model import load_model
from pageferry.kernels.native import BFLOAT16, FLOAT32, LayerWeights, Matrix, ModelWeights
from pageferry.kernels.native_model import NativeDecoder, describe

LIBRARY = native.library()
BEST = LIBRARY.pf_best_level() if LIBRARY is not None else -1
TORCH = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16}
TOLERANCE = {FLOAT32: 2e-5, BFLOAT16: 1.5e-2}
"""Largest error, relative to the largest value of the result."""

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the CPU kernels were not built")


@pytest.fixture(params=native.LEVELS[: BEST + 1])
def lib(request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    assert LIBRARY is not None
    assert LIBRARY.pf_use_level(native.LEVELS.index(request.param)) <= BEST
    yield LIBRARY
    LIBRARY.pf_use_level(BEST)


@pytest.fixture(params=[FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> int:
    value: int = request.param
    return value


def activations(lib: ctypes.CDLL, dtype: int, *shape: int) -> Tensor:
    """Empty, of the type that the level computes in."""
    half = dtype == BFLOAT16 and lib.pf_current_level() >= native.LEVELS.index("avx512_bf16")
    return torch.full(shape, float("nan"), dtype=torch.bfloat16 if half else torch.float32)


def close(actual: Tensor, expected: Tensor, dtype: int) -> None:
    error = (actual.double() - expected.double()).abs().max().item()
    assert error <= TOLERANCE[dtype] * max(1e-3, expected.abs().max().item())


class Packed:
    def __init__(
        self, lib: ctypes.CDLL, dtype: int, weight: Tensor, bias: Tensor | None, halves: int
    ):
        outputs, inputs = weight.shape[0] // halves, weight.shape[1]
        size = lib.pf_packed_bytes(dtype, outputs, inputs, halves)
        self.data = torch.full((size,), 255, dtype=torch.uint8)  # NaN where it is not written
        lib.pf_pack(dtype, weight.data_ptr(), outputs, inputs, halves, self.data.data_ptr())
        width = lib.pf_blocks(outputs, halves) * native.WIDTH // halves
        self.bias = torch.zeros(halves, width)
        if bias is not None:
            self.bias[:, :outputs] = bias.float().view(halves, outputs)
        self.matrix = Matrix(
            data=self.data.data_ptr(),
            bias=None if bias is None else self.bias.data_ptr(),
            outputs=outputs,
            inputs=inputs,
        )


@pytest.mark.parametrize("rows", [1, 3, 8, 16, 17, 32, 47, 70])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 16), (40, 1), (576, 70), (97, 130)])
def test_linear(lib: ctypes.CDLL, dtype: int, rows: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(rows)
    weight = torch.randn(outputs, inputs).to(TORCH[dtype])
    bias = torch.randn(outputs)
    x = torch.randn(rows, inputs).to(TORCH[dtype])
    packed = Packed(lib, dtype, weight, bias, 1)
    out = torch.full((rows, outputs), float("nan"))
    lib.pf_linear(dtype, packed.matrix, x.data_ptr(), rows, out.data_ptr())
    close(out, x.double() @ weight.double().T + bias, dtype)


@pytest.mark.parametrize("rows", [1, 5, 16, 33])
@pytest.mark.parametrize(("inputs", "inner"), [(32, 16), (72, 50), (576, 96)])
def test_linear_with_silu(lib: ctypes.CDLL, dtype: int, rows: int, inputs: int, inner: int) -> None:
    torch.manual_seed(rows)
    weight = (torch.randn(2 * inner, inputs) * inputs**-0.5 * 3).to(TORCH[dtype])
    bias = torch.randn(2 * inner)
    x = torch.randn(rows, inputs).to(TORCH[dtype])
    packed = Packed(lib, dtype, weight, bias, 2)
    out = activations(lib, dtype, rows, inner)
    lib.pf_linear_silu(dtype, packed.matrix, x.data_ptr(), rows, out.data_ptr())
    gate, up = (x.double() @ weight.double().T + bias).split(inner, dim=1)
    close(out, torch.nn.functional.silu(gate) * up, dtype)


@pytest.mark.parametrize("width", [1, 15, 64, 577])
def test_rms_norm(lib: ctypes.CDLL, dtype: int, width: int) -> None:
    x, weight = torch.randn(5, width) * 3, torch.randn(width)
    out = activations(lib, dtype, 5, width)
    lib.pf_rms_norm(dtype, x.data_ptr(), weight.data_ptr(), 5, width, 1e-5, out.data_ptr())
    close(out, reference.rms_norm(x.double(), weight.double(), 1e-5), dtype)


class Case:
    """A ragged batch over shuffled pages of a pool that is NaN elsewhere."""

    def __init__(self, dtype: int, heads: tuple[int, int, int], lengths: list[tuple[int, int]]):
        """heads: query heads, KV heads, head_dim; lengths: (new, earlier) tokens per sequence."""
        self.num_heads, self.num_kv_heads, self.head_dim = heads
        self.page_size = 16
        self.dtype = dtype
        used = [-(-(new + old) // 16) for new, old in lengths]
        order = torch.randperm(sum(used) + 2)[2:].int()
        tables = torch.zeros(len(lengths), max(used) + 1, dtype=torch.int32)
        positions, slots, held = [], [], []
        for i, (new, old) in enumerate(lengths):
            pages = order[sum(used[:i]) : sum(used[: i + 1])]
            tables[i, : used[i]] = pages
            where = torch.arange(new + old)
            slot = pages.long()[where // 16] * 16 + where % 16
            positions.append(where[old:])
            slots.append(slot[old:])
            held.append(slot)
        counts = torch.tensor([0] + [new for new, _ in lengths])
        ends = torch.tensor([new + old for new, old in lengths])
        self.batch = AttentionBatch(
            torch.cat(positions),
            torch.cat(slots),
            counts.cumsum(0).int(),
            ends.int(),
            tables,
            max(new for new, _ in lengths),
            int(ends.max()),
        )
        self.tokens = int(counts.sum())
        self.kv = torch.full(
            (sum(used) + 2, 2, self.num_kv_heads, 16, self.head_dim), float("nan")
        ).to(TORCH[dtype])
        for slot in held:
            fill = torch.randn(len(slot), 2, self.num_kv_heads, self.head_dim).to(TORCH[dtype])
            self.kv[slot // 16, :, :, slot % 16] = fill
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv = torch.randn(self.tokens, width).to(TORCH[dtype]).float()
        self.table = torch.randn(512, self.head_dim)

    def model(self) -> ModelWeights:
        return ModelWeights(
            dtype=self.dtype,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=16,
            eps=1e-5,
            attention_scale=self.head_dim**-0.5,
            rope_table=self.table.data_ptr(),
        )

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """float32 views [tokens, heads, head_dim] of q, k and v."""
        parts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = self.qkv.view(self.tokens, -1, self.head_dim).split(parts, dim=1)
        return q, k, v


RAGGED = [(1, 0), (1, 15), (1, 200), (3, 30), (40, 0), (33, 100), (100, 3)]


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize(
    "heads", [(9, 3, 64), (4, 4, 80), (5, 1, 128), (8, 2, 30), (16, 1, 256)], ids=str
)
def test_attention(
    lib: ctypes.CDLL, dtype: int, heads: tuple[int, int, int], window: int | None
) -> None:
    torch.manual_seed(1)
    case = Case(dtype, heads, RAGGED)
    out = activations(lib, dtype, case.tokens, case.num_heads, case.head_dim)
    ids = torch.zeros(case.tokens, dtype=torch.int64)
    lib.pf_attention(
        case.model(),
        describe(ids, case.batch),
        LayerWeights(window=window or 0),
        case.qkv.data_ptr(),
        case.kv.data_ptr(),
        out.data_ptr(),
    )
    q = case.heads()[0].double()
    expected = reference.paged_attention(
        q, case.kv.double(), case.batch, case.head_dim**-0.5, window
    )
    close(out, expected, dtype)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads", [(9, 3, 64), (2, 1, 30)], ids=str)
def test_rope_and_store(
    lib: ctypes.CDLL, dtype: int, heads: tuple[int, int, int], normed: bool
) -> None:
    torch.manual_seed(2)
    case = Case(dtype, heads, RAGGED)
    case.batch.slot_mapping[4] = -1
    weights = torch.randn(2, case.head_dim) if normed else None
    q, k, v = (t.double() for t in case.heads())
    if weights is not None:
        q = reference.rms_norm(q, weights[0].double(), 1e-5)
        k = reference.rms_norm(k, weights[1].double(), 1e-5)
    q, k = reference.rope(q, k, case.table.double(), case.batch.positions)
    expected = case.kv.double()
    reference.store_kv(k, v, expected, case.batch.slot_mapping)
    layer = LayerWeights(
        q_norm=None if weights is None else weights[0].data_ptr(),
        k_norm=None if weights is None else weights[1].data_ptr(),
    )
    lib.pf_rope_store(
        case.model(),
        describe(torch.zeros(case.tokens, dtype=torch.int64), case.batch),
        layer,
        case.qkv.data_ptr(),
        case.kv.data_ptr(),
    )
    close(case.heads()[0], q, FLOAT32)
    untouched = expected.isnan()
    assert torch.equal(untouched, case.kv.isnan())
    close(case.kv.double()[~untouched], expected[~untouched], dtype)


def test_not_a_number_in_a_page_reaches_its_own_sequence_alone(lib: ctypes.CDLL) -> None:
    case = Case(BFLOAT16, (9, 3, 64), [(1, 50), (1, 50), (40, 10)])
    case.kv[case.batch.block_tables[0, 1], :, :, 3] = float("nan")
    out = activations(lib, BFLOAT16, case.tokens, 9, 64)
    lib.pf_attention(
        case.model(),
        describe(torch.zeros(case.tokens, dtype=torch.int64), case.batch),
        LayerWeights(),
        case.qkv.data_ptr(),
        case.kv.data_ptr(),
        out.data_ptr(),
    )
    assert out[0].isnan().all()
    assert not out[1:].isnan().any()


def test_threads_give_the_same_bits(make_model: Any) -> None:
    assert LIBRARY is not None
    model = make_model("qwen3").load(torch.bfloat16)
    ids = torch.arange(40)
    case = Case(BFLOAT16, (1, 1, 2), [(1, 0), (39, 0)])
    kv = torch.zeros(
        (model.config.num_layers, 6, 2, model.config.num_kv_heads, 16, model.config.head_dim),
        dtype=torch.bfloat16,
    )
    alone = model.logits(model.forward(ids, case.batch, kv))
    LIBRARY.pf_set_threads(3)
    try:
        for _ in range(20):
            assert torch.equal(alone, model.logits(model.forward(ids, case.batch, kv)))
    finally:
        LIBRARY.pf_set_threads(1)


def test_borrowed_cores_give_the_same_bits(make_model: Any) -> None:
    assert LIBRARY is not None
    model = make_model("qwen3").load(torch.bfloat16)
    ids = torch.arange(40)
    case = Case(BFLOAT16, (1, 1, 2), [(1, 0), (39, 0)])
    c = model.config
    kv = torch.zeros((c.num_layers, 6, 2, c.num_kv_heads, 16, c.head_dim), dtype=torch.bfloat16)
    alone = model.logits(model.forward(ids, case.batch, kv))
    busy = ctypes.c_int64(1)
    cores = sorted(os.sched_getaffinity(0))
    threads = len(os.listdir("/proc/self/task"))
    assert native.borrow_cores(ctypes.addressof(busy), [cores[0], cores[-1]])
    try:
        assert len(os.listdir("/proc/self/task")) == threads + 2
        for turn in range(40):
            busy.value = turn % 3 == 0
            assert torch.equal(alone, model.logits(model.forward(ids, case.batch, kv)))
    finally:
        native.borrow_cores(0, [])
    assert len(os.listdir("/proc/self/task")) == threads


def test_bfloat16_is_as_near_to_the_truth_as_torch(
    lib: ctypes.CDLL, make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = make_model("smollm2")
    packed = tiny.load(torch.bfloat16)
    monkeypatch.setattr(native, "library", lambda: None)
    torches, exact = tiny.load(torch.bfloat16), tiny.load(torch.float32)
    ids = torch.arange(70) % 50
    case = Case(BFLOAT16, (1, 1, 2), [(70, 0)])

    def logits(model: Any) -> Tensor:
        c = model.config
        shape = (c.num_layers, 7, 2, c.num_kv_heads, 16, c.head_dim)
        hidden = model.forward(ids, case.batch, torch.zeros(shape, dtype=model.dtype))
        result: Tensor = model.logits(hidden)
        return result

    truth = logits(exact)
    error = (logits(packed) - truth).abs().mean()
    assert 0 < error <= 1.1 * (logits(torches) - truth).abs().mean()


def test_exception_of_on_layer_is_raised(make_model: Any) -> None:
    model = make_model("llama").load()
    assert isinstance(model, NativeDecoder)
    case = Case(FLOAT32, (1, 1, 2), [(3, 0)])
    c = model.config
    kv = torch.zeros(c.num_layers, 3, 2, c.num_kv_heads, 16, c.head_dim)
    seen: list[int] = []

    def on_layer(layer: int) -> None:
        seen.append(layer)
        raise KeyError("told so")

    with pytest.raises(KeyError, match="told so"):
        model.forward(torch.arange(3), case.batch, kv, on_layer)
    assert seen == [0]
    with pytest.raises(ValueError, match="int64"):
        model.forward(torch.arange(3, dtype=torch.int32), case.batch, kv)


def test_choice_of_kernels(monkeypatch: pytest.MonkeyPatch, make_model: Any) -> None:
    path: Path = make_model("llama").path
    try:
        for value, packed in (("torch", False), ("base", True), ("auto", True)):
            native.library.cache_clear()
            monkeypatch.setenv(native.VARIABLE, value)
            model = load_model(path, torch.device("cpu"), torch.float32)
            assert isinstance(model, NativeDecoder) is packed
        native.library.cache_clear()
        monkeypatch.setenv(native.VARIABLE, "mmx")
        with pytest.raises(native.BadKernelChoice, match="mmx"):
            native.library()
    finally:
        monkeypatch.undo()
        native.library.cache_clear()
        native.library()


def test_library_of_another_version_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = native.find_library()
    assert path is not None
    monkeypatch.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
    assert native._open(path, "auto") is None
    assert "another version" in caplog.text
    assert native._open(Path(__file__), "auto") is None
    assert "cannot be used" in caplog.text
