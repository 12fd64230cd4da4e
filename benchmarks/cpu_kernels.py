"""The CPU kernels against what the core could do: bytes over read bandwidth, FLOPs over GEMM rate.

Per kernel the bound is the larger of (bytes that must be read) / (measured read bandwidth) and
(FLOPs) / (measured bfloat16 GEMM rate); the last column is time over bound, 1 being perfect. The
last lines are whole decode steps and whole prompts of the model. All on one core, the fastest of
several runs, ceilings measured before and after in the same process.

    taskset -c 1 python benchmarks/cpu_kernels.py --model DIR [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import report
import roofline
import torch
from torch import Tensor

from pageferry.kernels import native
from pageferry.kernels.batch import AttentionBatch
from pageferry.kernels.model import load_model
from pageferry.kernels.native_model import NativeDecoder, describe

PAGE = 16
REPEATS = 12


@dataclasses.dataclass(frozen=True)
class Figure:
    kernel: str
    seconds: float
    read_bytes: float
    flops: float

    def over_bound(self, machine: roofline.Machine) -> float:
        bound = max(
            self.read_bytes / machine.read_bytes_per_s, self.flops / machine.gemm_flops_per_s
        )
        return self.seconds / bound


def fastest(work: Callable[[], object], repeats: int = REPEATS) -> float:
    best = math.inf
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def paged(lengths: list[tuple[int, int]]) -> tuple[AttentionBatch, int]:
    """A batch of (new, earlier) tokens over shuffled pages, and the number of pages."""
    ends = [new + old for new, old in lengths]
    used = [-(-end // PAGE) for end in ends]
    order = torch.randperm(sum(used)).int()
    tables = torch.zeros(len(lengths), max(used), dtype=torch.int32)
    positions, slots = [], []
    for i, (new, old) in enumerate(lengths):
        tables[i, : used[i]] = order[sum(used[:i]) : sum(used[: i + 1])]
        where = torch.arange(old, new + old)
        positions.append(where)
        slots.append(tables[i].long()[where // PAGE] * PAGE + where % PAGE)
    counts = torch.tensor([0] + [new for new, _ in lengths]).cumsum(0).int()
    batch = AttentionBatch(
        torch.cat(positions),
        torch.cat(slots),
        counts,
        torch.tensor(ends).int(),
        tables,
        max(new for new, _ in lengths),
        max(ends),
    )
    return batch, sum(used)


def shared_pages(model: NativeDecoder, pages: int) -> Tensor:
    """A pool in shared memory, as the workers' pools are, filled with small numbers."""
    c = model.config
    shape = (c.num_layers, pages, 2, c.num_kv_heads, PAGE, c.head_dim)
    memory = mmap.mmap(-1, math.prod(shape) * 2)
    return torch.frombuffer(memory, dtype=torch.bfloat16).view(shape).normal_()


def matrices(model: NativeDecoder) -> Iterator[Figure]:
    """Each kind of matrix product, over all layers, so that weights come from memory."""
    lib, weights, layers = model.lib, model.weights, model.config.num_layers
    for name in ("qkv", "o", "gate_up", "down"):
        each = [getattr(weights.layers[i], name) for i in range(layers)]
        halves = 2 if name == "gate_up" else 1
        run = lib.pf_linear_silu if halves == 2 else lib.pf_linear
        elements = each[0].inputs * each[0].outputs * halves * layers
        for rows in (1, 8, 16, 32, 64, 512):
            x = torch.randn(rows, each[0].inputs).bfloat16()
            out = torch.empty(rows, each[0].outputs)

            def work(run=run, each=each, x=x, rows=rows, out=out) -> None:  # type: ignore[no-untyped-def]
                for matrix in each:
                    run(native.BFLOAT16, matrix, x.data_ptr(), rows, out.data_ptr())

            label = f"{name}, {rows} rows"
            yield Figure(label, fastest(work), 2 * elements, 2 * elements * rows)


def attentions(model: NativeDecoder) -> Iterator[Figure]:
    """Attention over all layers: decode rows and prefill chunks."""
    c, lib = model.config, model.lib
    model.weights.page_size = PAGE
    cases = {
        "decode attention, 1 x 300": [(1, 299)],
        "decode attention, 8 x 300": [(1, 299)] * 8,
        "decode attention, 32 x 300": [(1, 299)] * 32,
        "decode attention, 8 x 2000": [(1, 1999)] * 8,
        "prefill attention, 512 after 0": [(512, 0)],
        "prefill attention, 512 after 2500": [(512, 2500)],
        "prefill attention, 4 x 128": [(128, 0)] * 4,
    }
    for name, lengths in cases.items():
        batch, pages = paged(lengths)
        kv = shared_pages(model, pages)
        tokens = int(batch.cu_seqlens_q[-1])
        qkv = torch.randn(tokens, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim)
        out = torch.empty(tokens, c.num_heads * c.head_dim)
        place = describe(torch.zeros(tokens, dtype=torch.int64), batch)

        def work(kv=kv, qkv=qkv, out=out, place=place) -> None:  # type: ignore[no-untyped-def]
            for i in range(c.num_layers):
                lib.pf_attention(
                    model.weights,
                    place,
                    model.weights.layers[i],
                    qkv.data_ptr(),
                    kv[i].data_ptr(),
                    out.data_ptr(),
                )

        pairs = sum(new * old + new * (new + 1) / 2 for new, old in lengths)
        flops = 4 * pairs * c.num_heads * c.head_dim * c.num_layers
        read = sum(new + old for new, old in lengths) * kv_bytes(model)
        yield Figure(name, fastest(work), read, flops)


def kv_bytes(model: NativeDecoder) -> int:
    c = model.config
    return 2 * 2 * c.num_layers * c.num_kv_heads * c.head_dim


def passes(model: NativeDecoder, parameters: int) -> Iterator[Figure]:
    """Whole passes with their logits; prompts are measured against 2 FLOPs a parameter."""
    cases = {f"decode step, {n} x 300": [(1, 299)] * n for n in (1, 8, 16, 32)}
    cases |= {f"prompt, {n} tokens": [(n, 0)] for n in (128, 512, 2048)}
    for name, lengths in cases.items():
        batch, pages = paged(lengths)
        kv = shared_pages(model, pages)
        tokens = int(batch.cu_seqlens_q[-1])
        ids = torch.randint(0, model.config.vocab_size, (tokens,))
        last = batch.cu_seqlens_q[1:].long() - 1

        def work(ids=ids, batch=batch, kv=kv, last=last) -> None:  # type: ignore[no-untyped-def]
            model.logits(model.forward(ids, batch, kv)[last])

        read = 2 * parameters + int(batch.seq_lens.sum()) * kv_bytes(model)
        yield Figure(name, fastest(work), read, 2 * parameters * tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    core = sorted(os.sched_getaffinity(0))[-1]
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    model = load_model(arguments.model, torch.device("cpu"), torch.bfloat16, 4096)
    if not isinstance(model, NativeDecoder):
        raise SystemExit("the CPU kernels were not built here: nothing to measure")
    size = roofline.ModelSize.of(arguments.model)
    before = roofline.measure([core])
    figures = [*matrices(model), *attentions(model), *passes(model, size.parameters)]
    after = roofline.measure([core])
    machine = dataclasses.replace(
        before,
        read_bytes_per_s=max(before.read_bytes_per_s, after.read_bytes_per_s),
        gemm_flops_per_s=max(before.gemm_flops_per_s, after.gemm_flops_per_s),
    )
    show(arguments.json, machine, figures, model)


def show(
    path: Path | None, machine: roofline.Machine, figures: list[Figure], model: NativeDecoder
) -> None:
    rows = [
        [
            f.kernel,
            f"{f.seconds * 1e3:.2f}",
            f"{f.read_bytes / f.seconds / 1e9:.1f}",
            f"{f.flops / f.seconds / 1e9:.0f}",
            f"{f.over_bound(machine):.2f}",
        ]
        for f in figures
    ]
    level = native.LEVELS[model.lib.pf_current_level()]
    print(
        f"kernels: {level}; ceilings of this core: {machine.read_bytes_per_s / 1e9:.1f} GB/s read, "
        f"{machine.gemm_flops_per_s / 1e9:.0f} GFLOP/s in a bfloat16 GEMM of torch"
    )
    print(report.grid(["kernel", "ms", "GB/s", "GFLOP/s", "time / bound"], rows))
    if path is not None:
        result = {
            "date": report.today(),
            "machine": report.machine(machine.cores),
            "level": level,
            "ceilings": dataclasses.asdict(machine),
            "figures": [
                dataclasses.asdict(f) | {"over_bound": f.over_bound(machine)} for f in figures
            ],
        }
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
