"""Tables and plots of `compare.py` and `interference.py`, from the dictionaries they write.

matplotlib is optional (`pip install pageferry[bench]`); without it there are tables only.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
HAS_PLOTS = importlib.util.find_spec("matplotlib") is not None
MIN_SAMPLES = 20
"""Of the page ledgers: 10 s."""
COLOURS = ("#1f6fb2", "#d9822b", "#3d9970", "#8e5ea2", "#b23a48", "#6b6b6b", "#c4a000")


def arguments(args: argparse.Namespace) -> dict[str, str]:
    """For a result file: what was asked for. Directories say nothing to others."""
    return {k: str(v) for k, v in vars(args).items() if k not in ("peers", "out")}


def today() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


def machine(cores: Sequence[int]) -> dict[str, Any]:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in info)}
    flags = fields.get("flags", "").split()
    memory = Path("/proc/meminfo").read_text().split("\n", 1)[0].split()[1]
    return {
        "processor": fields.get("model name", platform.processor()),
        "cores": list(cores),
        "cores_of_the_machine": os.cpu_count(),
        "instructions": [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags],
        "memory_gib": round(int(memory) / 2**20, 1),
        "kernel": platform.release(),
        "load_average_at_start": os.getloadavg()[0],
    }


def grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; the first one is left-aligned."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = (
        "|"
        + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths))
        + "|"
    )
    return "\n".join([line(header), rule, *map(line, rows)])


def seconds(ms: float) -> str:
    """Seconds with two digits; a dash where nothing was measured."""
    return f"{ms / 1e3:.2f}" if ms else "-"


def comparison(result: dict[str, Any]) -> str:
    """One row per system and level; systems with the most tokens/s first within a level."""
    ours = "pageferry"
    header = [
        *("system", "streams", "output tok/s", f"{ours} is", "TTFT p50 / p99, s"),
        *("ITL p50 / p99, ms", "goodput", "peak MiB", "KV waste"),
    ]
    rows = []
    for streams in result["levels"]:
        level = str(streams)
        found = [
            (n, s["levels"][level]) for n, s in result["systems"].items() if level in s["levels"]
        ]
        base = next((x["figures"]["output_throughput"] for n, x in found if n == ours), None)
        for name, x in sorted(found, key=lambda i: -i[1]["figures"]["output_throughput"]):
            f, waste = x["figures"], paged(x["kv_waste"])
            ratio = "" if base is None or name == ours else f"{base / f['output_throughput']:.2f} x"
            rows.append(
                [
                    *(name, level, f"{f['output_throughput']:.1f}", ratio),
                    f"{seconds(f['ttft_ms']['p50'])} / {seconds(f['ttft_ms']['p99'])}",
                    f"{f['itl_ms']['p50']:.1f} / {f['itl_ms']['p99']:.0f}",
                    *(f"{f['good_share']:.0%}", f"{x['peak_pss_bytes'] / 2**20:.0f}"),
                    waste,
                ]
            )
        top = result["roofline"]["levels"][level]["output_tokens_per_s"]
        share = "" if base is None else f"{base / top:.2f} x"
        rows.append(
            [
                f"limit of the machine ({len(result['machine']['cores'])} cores)",
                level,
                f"{top:.1f}",
                share,
                *[""] * 5,
            ]
        )
    return grid(header, rows)


def paged(waste: dict[str, Any]) -> str:
    """Measured KV waste; empty where it was not measured, or not often enough for an average."""
    if waste["paged"] is None or waste["samples"] < MIN_SAMPLES:
        return ""
    return f"{waste['paged']:.1%}"


def reservation(result: dict[str, Any]) -> str:
    """The sentence on KV waste beside reservations, for the largest level of Pageferry."""
    levels = result["systems"].get("pageferry", {}).get("levels", {})
    if not levels:
        return ""
    level = max(levels, key=int)
    w = levels[level]["kv_waste"]
    return (
        f"KV waste at {level} streams: {paged(w) or 'not measured'} in pages; reserving "
        f"{result['max_model_len']} tokens for each request would waste "
        f"{w['reserved_context']:.1%}, reserving exactly its prompt and output "
        f"{w['reserved_exactly']:.1%}."
    )


def plot_comparison(
    result: dict[str, Any], raw: dict[str, dict[str, Any]], stem: Path
) -> list[Path]:
    """Throughput by streams, and the distributions of TTFT and ITL at the middle level.

    `raw`: system -> level -> {"ttft_ms": [...], "itl_ms": [...]}, every single value.
    """
    if not HAS_PLOTS:
        return []
    from matplotlib.figure import Figure

    levels = [str(n) for n in result["levels"]]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    names = list(result["systems"])
    for colour, name in zip(COLOURS, names, strict=False):
        own = [n for n in levels if n in result["systems"][name]["levels"]]
        values = [result["systems"][name]["levels"][n]["figures"]["output_throughput"] for n in own]
        axes.plot([int(n) for n in own], values, "o-", color=colour, label=name)
    limits = [result["roofline"]["levels"][n]["output_tokens_per_s"] for n in levels]
    axes.plot([int(n) for n in levels], limits, "k--", lw=1, label="limit of the machine")
    axes.set(xscale="log", xlabel="streams at a time", ylabel="output tokens/s", ylim=(0, None))
    axes.set_xticks([int(n) for n in levels], levels)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    paths = [stem.with_name(stem.name + "-throughput.png")]
    figure.savefig(paths[0], dpi=130)

    level = levels[len(levels) // 2]
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    for axes, key, label in zip(
        figure.subplots(1, 2), ("ttft_ms", "itl_ms"), ("TTFT, ms", "ITL, ms"), strict=True
    ):
        for colour, name in zip(COLOURS, names, strict=False):
            values = sorted(v for v in raw.get(name, {}).get(level, {}).get(key, []) if v > 0)
            share = [(i + 1) / len(values) for i in range(len(values))]
            axes.plot(values, share, color=colour, label=name)
        axes.set(xscale="log", xlabel=label, ylabel=f"share below, {level} streams", ylim=(0, 1))
        axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, loc="lower right")
    paths.append(stem.with_name(stem.name + "-latency.png"))
    figure.savefig(paths[1], dpi=130)
    return paths


def interference(result: dict[str, Any]) -> str:
    """One row per system: quiet and storm side by side."""
    header = [
        *("system", "ITL p50 quiet / storm, ms", "ITL p99 quiet / storm, ms", "p99 ratio"),
        *("against ours", "stream tok/s quiet / storm", "stream TTFT p50 quiet / storm, s"),
        *("prompt TTFT p50 / p99, s", "prompts done / sent"),
    ]
    rows = []
    ours = next(iter(result["systems"].values()))["storm"]["streams"]["itl_ms"]["p99"]
    for name, x in result["systems"].items():
        quiet, storm, prompts = x["quiet"]["streams"], x["storm"]["streams"], x["storm"]["prompts"]
        q, s = quiet["itl_ms"], storm["itl_ms"]
        rows.append(
            [
                name,
                f"{q['p50']:.1f} / {s['p50']:.1f}",
                f"{q['p99']:.1f} / {s['p99']:.1f}",
                f"{s['p99'] / q['p99']:.2f} x" if q["p99"] else "",
                f"{s['p99'] / ours:.2f} x",
                f"{quiet['output_throughput']:.1f} / {storm['output_throughput']:.1f}",
                f"{seconds(quiet['ttft_ms']['p50'])} / {seconds(storm['ttft_ms']['p50'])}",
                f"{seconds(prompts['ttft_ms']['p50'])} / {seconds(prompts['ttft_ms']['p99'])}",
                f"{prompts['completed']} / {x['storm']['sent']}",
            ]
        )
    return grid(header, rows)


def plot_interference(result: dict[str, Any], stem: Path) -> list[Path]:
    """ITL p99 under the storm by chunk size, with the systems that have none as lines."""
    if not HAS_PLOTS:
        return []
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    chunked = [x for x in result["systems"].values() if x["chunk"]]
    sizes = [x["chunk"] for x in chunked]
    for axes, part, key, label in (
        (panels[0], "streams", "itl_ms", "ITL p99 of the running streams, ms"),
        (panels[1], "prompts", "ttft_ms", "TTFT p99 of the long prompts, ms"),
    ):
        values = [x["storm"][part][key]["p99"] for x in chunked]
        axes.plot(sizes, values, "o-", color=COLOURS[1], label="two colocated replicas")
        others = [(n, x) for n, x in result["systems"].items() if not x["chunk"]]
        for colour, (name, x) in zip((COLOURS[0], *COLOURS[2:]), others, strict=False):
            axes.axhline(x["storm"][part][key]["p99"], color=colour, ls="--", label=name)
        axes.set(xscale="log", yscale="log", xlabel="chunk size, tokens", ylabel=label)
        axes.set_xticks(sizes, [str(n) for n in sizes])
        axes.grid(alpha=0.3, which="both")
    panels[0].legend(fontsize=8)
    path = stem.with_name(stem.name + ".png")
    figure.savefig(path, dpi=130)
    return [path]
