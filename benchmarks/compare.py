"""`make bench`: Pageferry and every installed peer, one after another, on the same requests.

Each system is started, warmed up, loaded with closed loops of 1, 8 and 32 streams, and stopped. The
table goes to stdout; table, JSON and plots to `benchmarks/results/`. A system that answers with
another number of tokens than asked ends the run: its figures could not be compared. Peers that are
not installed are named with the command that installs them.

Goodput: the share of requests that keep the SLO. Peak MiB: proportional set size (PSS) of the whole
process tree, sampled every half second while loaded. Servers are loaded over HTTP by this process,
which shares their cores; OpenVINO and transformers run in-process and are spared that.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report
import roofline
from kv_waste import SETTLE_S
from kv_waste import measure as measure_waste
from peers import DEFAULT_PEERS, PEERS, Peer, Setup, pageferry
from systems import Broken, Served, System, Watch, clean_up_on_sigterm
from workload import Source, Workload

from pageferry.compose.bench_client import Load, Result
from pageferry.compose.bench_figures import Slo, summarise, token_gaps, ttft_s
from pageferry.compose.bench_workload import SHAPES, Request, WorkloadError
from pageferry.compose.placement import parse_cores
from pageferry.kernels.prepare import prepare

WARM_UP = Request(96, 24)
OURS = Peer("pageferry", "", (), (), (), pageferry)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--systems", default="", help=f"of pageferry,{','.join(PEERS)} [all installed]")
    p.add_argument("--levels", default="1,8,32", help="streams at a time [default: 1,8,32]")
    p.add_argument("--model", default="", help="as for pageferry prepare [the demo model]")
    p.add_argument("--peers", type=Path, default=DEFAULT_PEERS, help="where peers are installed")
    p.add_argument("--cores", default="", help='for every system, such as "0,1" [all allowed]')
    p.add_argument("--shape", choices=sorted(SHAPES), default="conversation")
    p.add_argument("--trace", type=Path, help="lengths from this .csv or .jsonl file instead")
    p.add_argument("--prompt-scale", type=float, default=0.25, help="[default: 0.25]")
    p.add_argument("--output-scale", type=float, default=0.5, help="[default: 0.5]")
    p.add_argument("--workload", type=Path, help="a workload file of an earlier run")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--slo-ttft-ms", type=float, default=1000.0)
    p.add_argument("--slo-tpot-ms", type=float, default=50.0)
    p.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the results")
    p.add_argument("--flag", action="append", default=[], help="added to pageferry up, repeatable")
    return p


def measure_level(system: System, load: Load, slo: Slo, max_model_len: int) -> dict[str, Any]:
    """One load on a warm system; `Broken` if any output is not exactly as long as asked."""

    def workers() -> Any:
        return system.get("/v1/workers")["data"]

    with Watch(system.process.pid, workers if system.name == OURS.name else None) as watch:
        result = system.run(load)
        if watch.probes:
            time.sleep(SETTLE_S)
    check_exact(system, result)
    waste = measure_waste(result, watch.samples, max_model_len)
    return {
        "figures": summarise(result, slo).as_json(),
        "peak_pss_bytes": watch.peak_pss_bytes,
        "kv_waste": dataclasses.asdict(waste),
        "raw": {
            "ttft_ms": [round(ttft_s(o) * 1e3, 2) for o in result.outcomes],
            "itl_ms": [round(g * 1e3, 2) for o in result.outcomes for g in token_gaps(o)],
        },
    }


def check_exact(system: System, result: Result) -> None:
    for seen in result.outcomes:
        if seen.error:
            raise system.broken(f"a request failed: {seen.error}")
        if seen.output_tokens != seen.request.output:
            raise system.broken(f"asked for {seen.request.output} tokens, got {seen.output_tokens}")
        if isinstance(system, Served) and seen.prompt_tokens != seen.request.prompt:
            raise system.broken(
                f"a prompt of {seen.request.prompt} tokens was counted as {seen.prompt_tokens}"
            )


def measure_system(
    peer: Peer, setup: Setup, levels: list[int], workload: Workload, slo: Slo, limit: int
) -> dict[str, Any]:
    """All levels of one system, from start to stop."""
    with peer.make(setup) as system:
        started = time.perf_counter()
        warm = min(8, setup.streams) if not peer.batch else peer.batch
        first = system.run(Load((WARM_UP,) * warm, warm, key="warm"))
        first_token_s = system.start_s + min(o.chunks[0][0] for o in first.outcomes)
        say(f"{system.name} {system.version}: first token {first_token_s:.1f} s after its start")
        out: dict[str, Any] = {
            "version": system.version,
            "settings": system.settings,
            "start_s": system.start_s,
            "first_token_s": first_token_s,
            "levels": {},
        }
        for streams in [peer.batch] if peer.batch else levels:
            load = workload.level(streams)
            measured = measure_level(system, load, slo, limit)
            out["levels"][str(streams)] = measured
            f = measured["figures"]
            say(f"{system.name}, {streams} streams: {f['output_throughput']:.1f} tok/s")
        out["took_s"] = time.perf_counter() - started
        return out


def choose(args: argparse.Namespace) -> list[Peer]:
    """Pageferry first, then the installed peers that are wanted."""
    known = {"pageferry": OURS, **PEERS}
    wanted = args.systems.split(",") if args.systems else list(known)
    chosen = []
    for name in wanted:
        if name not in known:
            raise SystemExit(f"--systems {name}: known are {', '.join(known)}")
        if known[name].installed(args.peers):
            chosen.append(known[name])
        else:
            where = "" if args.peers == DEFAULT_PEERS else f" --peers {args.peers}"
            say(
                f"{known[name].name} is not installed and skipped; to install it:\n"
                f"    {sys.executable} benchmarks/install_peers.py {name}{where}"
            )
    return chosen


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def machine_part(setup: Setup, levels: list[int], workload: Workload) -> dict[str, Any]:
    """Ceilings, and the limit for each level."""
    machine, size = roofline.measure(setup.cores), roofline.ModelSize.of(setup.model)
    say(
        f"{len(setup.cores)} cores read {machine.read_bytes_per_s / 1e9:.1f} GB/s and multiply "
        f"{machine.gemm_flops_per_s / 1e9:.0f} GFLOP/s (bfloat16)"
    )
    return {
        "read_gb_per_s": machine.read_bytes_per_s / 1e9,
        "gemm_gflops": machine.gemm_flops_per_s / 1e9,
        "model": dataclasses.asdict(size),
        "levels": {
            str(n): roofline.limit(machine, size, workload.level(n).closed, n) for n in levels
        },
    }


def write(result: dict[str, Any], workload: Workload, folder: Path) -> None:
    """Table, JSON, workload and plots; the single values go into the plots only."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"compare-{result['date']}"
    raw = {
        name: {n: level.pop("raw") for n, level in system["levels"].items()}
        for name, system in result["systems"].items()
    }
    table = report.comparison(result) + "\n\n" + report.reservation(result)
    table += f"\nGoodput: share of requests with {result['slo']}. Workload: {workload.source}."
    print(table)
    stem.with_suffix(".md").write_text(table + "\n")
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    workload.save(folder / f"workload-{result['date']}.json")
    plots = report.plot_comparison(result, raw, stem)
    say(f"written: {stem}.md, .json" + "".join(f", {p.name}" for p in plots))
    if not plots:
        say("no plots: matplotlib is not installed (pip install 'pageferry[bench]')")


def main() -> int:
    args = parser().parse_args()
    clean_up_on_sigterm()
    model = prepare(args.model)
    limit = int(json.loads((model / "config.json").read_text())["max_position_embeddings"])
    levels = sorted({int(n) for n in args.levels.split(",")})
    chosen = choose(args)
    shown = sorted({*levels, *(p.batch for p in chosen if p.batch)})
    source = Source(args.shape, args.trace, args.prompt_scale, args.output_scale, args.seed, limit)
    try:
        built = Workload.load(args.workload) if args.workload else source.build(shown[-1])
    except WorkloadError as error:
        say(f"make bench: {error}")
        return 2
    cores = parse_cores(args.cores) if args.cores else sorted(os.sched_getaffinity(0))
    slo = Slo(args.slo_ttft_ms, args.slo_tpot_ms)
    with tempfile.TemporaryDirectory(prefix="pageferry-bench-") as logs:
        setup = Setup(
            model, tuple(cores), shown[-1], built.max_len, Path(logs), args.peers, tuple(args.flag)
        )
        result: dict[str, Any] = {
            "date": report.today(),
            "machine": report.machine(cores),
            "arguments": report.arguments(args),
            "model": model.name,
            "max_model_len": limit,
            "slo": str(slo),
            "workload": {"source": built.source, "requests": len(built.requests)},
            "levels": shown,
            "roofline": machine_part(setup, shown, built),
            "systems": {},
        }
        broken = 0
        for peer in chosen:
            try:
                measured = measure_system(peer, setup, levels, built, slo, limit)
                result["systems"][peer.name] = measured
            except Broken as error:
                say(str(error))
                broken += 1
    if not result["systems"]:
        say("make bench: nothing was measured")
        return 1
    write(result, built, args.out)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
