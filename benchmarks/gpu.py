"""`python benchmarks/gpu.py`: the kernels and whole steps on a GPU, checked and measured.

1. Ceilings: a device copy and a bf16 matrix product, measured in this run.
2. Every Triton kernel against a torch oracle in fp32, and its share of the ceiling.
3. Decode and prefill steps of a random Llama-3-8B, and of the demo model if it is prepared
   (`python -m pageferry.kernels.prepare`), with and without CUDA graphs.
4. Pages between GPU and pinned host memory; between two GPUs where there are two.

NVML is read meanwhile. Figures go to `benchmarks/results/gpu-<date>-<card>.json` and, as a table,
beside it; the table is printed too. Exit status: 0, 1 if a check or measurement failed (the others
are reported), 2 if there is no GPU.

`TRITON_INTERPRET=1 python benchmarks/gpu.py --dry-run` runs every line on the CPU at tiny sizes.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_kernels import measure_kernels
from gpu_measure import TINY, Bench, NvmlWatch, Row, Scale, measure_ceilings
from gpu_model import measure_models, measure_peer

RESULTS = Path(__file__).parent / "results"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for the results")
    parser.add_argument(
        "--budget-s", type=float, default=460, help="nothing is timed after so many seconds"
    )
    parser.add_argument("--device", default="cuda:0", help='"cuda:N"')
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at tiny sizes")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if options.dry_run and not interpreted:
        print("--dry-run interprets the kernels: set TRITON_INTERPRET=1", file=sys.stderr)
        return 2
    if not options.dry_run and (interpreted or not torch.cuda.is_available()):
        print(
            "gpu.py measures a CUDA device and torch sees none here (or TRITON_INTERPRET is set); "
            "TRITON_INTERPRET=1 with --dry-run tries the script itself out on the CPU",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cpu" if options.dry_run else options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    deadline = time.monotonic() + options.budget_s
    bench = Bench(device, TINY if options.dry_run else Scale(), deadline)
    watch = NvmlWatch(device)
    began = time.monotonic()
    watch.start()
    try:
        measure_ceilings(bench)
        measure_kernels(bench)
        measure_models(bench)
        measure_peer(bench)
    finally:
        watch.stop()
        report(bench, watch, time.monotonic() - began, options.out)
    return 1 if bench.failures else 0


def report(bench: Bench, watch: NvmlWatch, seconds: float, out: Path) -> None:
    """Write JSON and table; print the table and what failed."""
    facts = machine(bench.device)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    card = "-".join(str(facts["device"]).lower().replace("/", " ").split())
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"gpu-{date}-{'dry-run' if bench.dry else card}.json"
    content = {
        "date": date,
        "dry_run": bench.dry,
        "seconds": seconds,
        "machine": facts,
        "ceilings": {"bytes_per_s": bench.bytes_per_s, "flop_per_s": bench.flop_per_s},
        "nvml": watch.summary(),
        "checks": bench.checks,
        "failures": bench.failures,
        "rows": [dataclasses.asdict(row) for row in bench.rows],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    text = table(bench, facts, seconds)
    path.with_suffix(".txt").write_text(text)
    print(text)
    print(f"NVML: {json.dumps(content['nvml'])}")
    print(f"written: {path}")


def machine(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "processors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "devices": torch.cuda.device_count(),
        }
    return facts


def table(bench: Bench, facts: dict[str, Any], seconds: float) -> str:
    lines = [
        f"{facts['device']}, torch {facts['torch']}, triton {facts['triton']}, {seconds:.0f} s"
        + (" (dry run: sizes and times mean nothing)" if bench.dry else "")
    ]
    width = max((len(row.name) for row in bench.rows), default=0)
    part = ""
    for row in bench.rows:
        if row.part != part:
            part = row.part
            header = f"{part:<{width}}  {'rate':>12} {'':8} {'ms':>10} {'of ceiling':>10}"
            lines += ["", header.rstrip()]
        lines.append(line(row, width))
    lines += ["", f"{len(bench.checks)} cases passed, {len(bench.failures)} failed"]
    lines += [f"FAILED {name}: {reason}" for name, reason in bench.failures.items()]
    return "\n".join(lines) + "\n"


def line(row: Row, width: int) -> str:
    ms = "" if row.ms is None else f"{row.ms:.4f}"
    share = "" if row.of_ceiling is None else f"{row.of_ceiling:.2f}"
    cells = f"{row.name:<{width}}  {row.value:>12.2f} {row.unit:8} {ms:>10} {share:>10}  {row.note}"
    return cells.rstrip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
