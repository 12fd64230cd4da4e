"""What long prompts do to streams that are already running: the reason to disaggregate.

For each system two phases of equal length:

1. *quiet*: 4 streams at all times (64-token prompts, 256 tokens each, over and over);
2. *storm*: the same, while a long prompt (1,500 to 3,000 tokens, 16 tokens of output) arrives every
   `--interval-s`, whether or not the last one is done.

Systems: Pageferry with one prefill and one decode worker, a pinned core each; the same with the
prefill worker's core lent while that one idles, which is the default; two colocated
replicas of Pageferry on the same two cores, without prefill workers, once per chunk size
(`--max-num-batched-tokens`; 512 is the default); and a peer. Reported are the gaps between tokens
of the 4 streams and, for both sides, throughput and TTFT: what the streams gain may cost the
prompts.

The default interval is 1.25 times what Pageferry's prefill worker needs for a prompt of average
length when nothing else runs, so its queue stays short and every system gets the same prompts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
from peers import DEFAULT_PEERS, PEERS, Setup, pageferry
from systems import Broken, System, Watch, clean_up_on_sigterm

from pageferry.compose.bench_client import Load, Result
from pageferry.compose.bench_figures import Slo, summarise
from pageferry.compose.bench_workload import Request
from pageferry.compose.placement import parse_cores
from pageferry.kernels.prepare import prepare

STREAMS = 4
STREAM = Request(64, 256)
SHORTEST, LONGEST, STORM_OUTPUT = 1500, 3000, 16
AVERAGE = Request((SHORTEST + LONGEST) // 2, STORM_OUTPUT)
BACKLOG = 12
"""Long prompts that a peer's KV cache has room for beside the streams."""
HEADROOM = 1.25


@dataclasses.dataclass(frozen=True)
class Contender:
    name: str
    make: Callable[[Setup], System]
    chunk: int = 0
    """Of the colocated replicas: tokens per step; 0 for all others."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--seconds", type=float, default=40.0, help="of each phase [default: 40]")
    p.add_argument("--interval-s", type=float, default=0.0, help="between prompts [measured]")
    p.add_argument("--chunks", default="64,128,256,512,1024", help="of the colocated replicas")
    p.add_argument("--peer", default="", help=f"of {', '.join(PEERS)} [the first installed], none")
    p.add_argument("--model", default="", help="as for pageferry prepare [the demo model]")
    p.add_argument("--peers", type=Path, default=DEFAULT_PEERS, help="where peers are installed")
    p.add_argument("--cores", default="", help="two cores [the first two allowed ones]")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the results")
    p.add_argument("--flag", action="append", default=[], help="added to pageferry up, repeatable")
    return p


def storm(seconds: float, interval_s: float, seed: int) -> tuple[Request, ...]:
    """Long prompts at fixed times, the first after one interval; lengths are drawn evenly."""
    rng = random.Random(seed)
    count = max(1, int(seconds / interval_s))
    return tuple(
        Request(rng.randint(SHORTEST, LONGEST), STORM_OUTPUT, (i + 1) * interval_s)
        for i in range(count)
        if (i + 1) * interval_s < seconds
    )


def part(result: Result, storm_side: bool) -> dict[str, Any]:
    """Figures of the streams, or of the long prompts."""
    outcomes = [o for o in result.outcomes if o.storm is storm_side]
    return summarise(Result(outcomes, result.wall_s), Slo()).as_json()


def phase(system: System, load: Load) -> dict[str, Any]:
    """One phase; `Broken` when a request failed or nothing was generated."""
    with Watch(system.process.pid) as watch:
        result = system.run(load)
    if errors := [o.error for o in result.outcomes if o.error]:
        raise system.broken(f"{len(errors)} requests failed, the first with: {errors[0]}")
    streams = part(result, storm_side=False)
    if not streams["total_output_tokens"]:
        raise system.broken("its streams got no token")
    return {
        "streams": streams,
        "prompts": part(result, storm_side=True),
        "sent": len(load.open),
        "peak_pss_bytes": watch.peak_pss_bytes,
    }


def prompt_seconds(system: System) -> float:
    """TTFT of a prompt of average length with nothing else running; the better of two."""
    times = []
    for attempt in range(2):
        (seen,) = system.run(Load((AVERAGE,), 1, key=f"alone-{attempt}")).outcomes
        if seen.error:
            raise system.broken(f"a single long prompt failed: {seen.error}")
        times.append(seen.chunks[0][0] - seen.due_s)
    return min(times)


def measure(contender: Contender, setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    """Both phases of one contender. Fixes `args.interval_s` if it is still open."""
    with contender.make(setup) as system:
        system.run(Load((Request(96, 24),) * STREAMS, STREAMS, key="warm"))
        alone_s = prompt_seconds(system)
        args.interval_s = args.interval_s or HEADROOM * alone_s
        arrivals = storm(args.seconds, args.interval_s, args.seed)
        quiet = phase(system, Load((STREAM,), STREAMS, seconds=args.seconds, key="quiet"))
        stormy = phase(
            system,
            Load((STREAM,), STREAMS, arrivals, seconds=args.seconds, key=f"storm-{args.seed}"),
        )
        say(
            f"{contender.name}: ITL p99 {quiet['streams']['itl_ms']['p99']:.1f} ms quiet, "
            f"{stormy['streams']['itl_ms']['p99']:.1f} ms under the storm"
        )
        return {
            "version": system.version,
            "settings": system.settings,
            "chunk": contender.chunk,
            "prompt_alone_s": alone_s,
            "quiet": quiet,
            "storm": stormy,
        }


def contenders(args: argparse.Namespace) -> list[Contender]:
    """Disaggregated Pageferry first, since it sets the interval."""

    def colocated(chunk: int) -> Contender:
        flags = ("--prefill", "0", "--decode", "2", "--max-num-batched-tokens", str(chunk))
        name = f"2 colocated replicas, chunk {chunk}"
        return Contender(name, lambda setup: pageferry(setup, flags, name), chunk)

    split = ("--prefill", "1", "--decode", "1")
    name, lent = "pageferry 1 prefill + 1 decode", "the same, idle prefill core lent"
    apart = (*split, "--lend-cores", "false")
    found = [
        Contender(name, lambda setup: pageferry(setup, apart, name)),
        Contender(lent, lambda setup: pageferry(setup, split, lent)),
    ]
    found += [colocated(int(chunk)) for chunk in args.chunks.split(",") if chunk]
    able = [n for n, p in PEERS.items() if not p.batch and p.installed(args.peers)]
    wanted = args.peer or next(iter(able), "none")
    if wanted == "none":
        say("no peer: install one with benchmarks/install_peers.py")
    elif wanted not in able:
        raise SystemExit(f"--peer {wanted}: installed and able are {', '.join(able) or 'none'}")
    else:
        found.append(Contender(PEERS[wanted].name, PEERS[wanted].make))
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def write(result: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"interference-{result['date']}"
    table = report.interference(result)
    table += (
        f"\n\n{STREAMS} streams of {STREAM.output} tokens for {result['seconds']:.0f} s; under the "
        f"storm a prompt of {SHORTEST} to {LONGEST} tokens every {result['interval_s']:.2f} s."
    )
    print(table)
    stem.with_suffix(".md").write_text(table + "\n")
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    plots = report.plot_interference(result, stem)
    say(f"written: {stem}.md, .json" + "".join(f", {p.name}" for p in plots))


def main() -> int:
    args = parser().parse_args()
    clean_up_on_sigterm()
    model = prepare(args.model)
    cores = parse_cores(args.cores) if args.cores else sorted(os.sched_getaffinity(0))[:2]
    broken = 0
    with tempfile.TemporaryDirectory(prefix="pageferry-bench-") as logs:
        setup = Setup(
            model,
            tuple(cores),
            STREAMS + BACKLOG,
            LONGEST + STORM_OUTPUT,
            Path(logs),
            args.peers,
            tuple(args.flag),
        )
        result: dict[str, Any] = {
            "date": report.today(),
            "machine": report.machine(cores),
            "arguments": report.arguments(args),
            "model": model.name,
            "seconds": args.seconds,
            "systems": {},
        }
        for contender in contenders(args):
            try:
                result["systems"][contender.name] = measure(contender, setup, args)
            except Broken as error:
                say(str(error))
                broken += 1
                if not result["systems"]:
                    return 1  # without the first one there is nothing to compare with
    result["interval_s"] = args.interval_s
    write(result, args.out)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
