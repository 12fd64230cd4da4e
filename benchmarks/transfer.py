"""Hand synthetic prompts from a prefill process to a decode process and measure what it costs.

    python benchmarks/transfer.py --prefill-core 0 --decode-core 1

Both sides are the real ones (`HandoffClient`, `HandoffServer`, page pools in shared memory) with
the demo model's layout; only the model is a stand-in, which keeps its core busy with matrix
products for a fixed amount of work per layer. Prefills with and without a handoff alternate, so
that the part of the transfer which takes time from the compute is seen too. Per handoff:

- exposed: from the last layer's end to COMMIT;
- cost: compute with a handoff, to COMMIT, minus compute alone. Exposed time is part of it; the rest
  is processor time that sending took from the compute on the same core;
- overlap: 1 - exposed / time spent sending;
- digest: time in xxh3 on both sides, and its rate;
- CPU: processor time of the handoff threads of each side;
- the decode side's steps, if `--decode-step-ms` is set: p50 and p99 while handoffs arrive.

With `--raw` nothing is computed: pages are pushed as fast as they go.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import arguments, grid, machine, today

from pageferry.kvtransfer import metric_names
from pageferry.kvtransfer.handoff import TRANSPORTS, Identity, Intake, host_id
from pageferry.kvtransfer.handoff_client import ClientOptions, HandoffClient
from pageferry.kvtransfer.handoff_server import HandoffServer, ServerOptions
from pageferry.kvtransfer.layout import KVLayout
from pageferry.kvtransfer.memory import PoolMemory
from pageferry.kvtransfer.pool import PagePool
from pageferry.kvtransfer.transfer_stats import figures
from pageferry.kvtransfer.wire import Event, Kind, Request, SamplingParams, WorkerRecord

LAYOUT = KVLayout(dtype="bfloat16", page_size=16, num_layers=30, num_kv_heads=3, head_dim=64)
"""SmolLM2-135M at the default page size: 12 KiB per page and layer, 23 KiB per token."""

FINGERPRINT = "synthetic"
WAIT_S = 60.0
GB = 1e9


@dataclasses.dataclass(frozen=True)
class Case:
    transport: str
    placement: str
    """`contiguous`, or `scattered`: no two pages adjacent on either side."""
    tokens: int
    layer_s: float
    """Compute per layer; 0 for none."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One handoff; seconds unless the name says otherwise."""

    compute: float
    """From the start to the end of the last layer."""
    exposed: float
    sending: float
    digest_sent: float
    digest_received: float
    cpu_sent: float
    cpu_received: float
    bytes: float
    frames: float
    syscalls: float


# --- the stand-in for a model


class Stove:
    """Keeps one core busy for a known amount of work, without the interpreter lock."""

    def __init__(self, seconds: float = 0.5) -> None:
        self._a, self._b = torch.rand(64, 256), torch.rand(256, 256)
        self._out = torch.empty(64, 256)
        turns, begun = 0, time.thread_time()
        while time.thread_time() - begun < seconds:
            self._burn(50)
            turns += 50
        self._turns_per_s = turns / (time.thread_time() - begun)

    def burn(self, seconds: float) -> None:
        """Work that takes `seconds` on an undisturbed core."""
        self._burn(round(seconds * self._turns_per_s))

    def _burn(self, turns: int) -> None:
        for _ in range(turns):
            torch.mm(self._a, self._b, out=self._out)


# --- the decode side, a process of its own


class Landing:
    """A listener that lets every sequence end at once."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool

    def admit(self, request: Request, num_pages: int) -> str:
        return ""

    def sealed(self, intake: Intake) -> None:
        self._pool.release(intake.page_ids)


class Steps(threading.Thread):
    """Decode steps of a fixed amount of work, one after another."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.over = threading.Event()
        self.times: list[float] = []
        self._step_s = step_s

    def cpu_seconds(self) -> float:
        return (
            0.0
            if self.ident is None
            else time.clock_gettime(time.pthread_getcpuclockid(self.ident))
        )

    def run(self) -> None:
        stove = Stove()
        while not self.over.is_set():
            begun = time.perf_counter()
            stove.burn(self._step_s)
            self.times.append(time.perf_counter() - begun)


def decode_side(args: argparse.Namespace) -> None:
    """Serve until stdin ends; answer each line with counters as JSON. `scatter` and `gather` first
    change which pages are free: every second one, or all. `steps` adds the latest step times."""
    num_pages = args.num_pages * 2
    pool = PagePool(num_pages, LAYOUT.page_size, b"benchmark")
    memory = PoolMemory.create(LAYOUT, num_pages)
    touch(memory)
    identity = Identity("decode", "decode", FINGERPRINT, LAYOUT, num_pages)
    server = HandoffServer(identity, pool, memory, Landing(pool), ServerOptions())
    server.start()
    record = WorkerRecord(
        id="decode", role="decode", pid=os.getpid(), host="", state="ready", model="",
        fingerprint=FINGERPRINT, layout=LAYOUT.to_dict(), ledger=pool.ledger(), max_model_len=0,
        addresses=server.addresses, host_id=host_id(),
    )  # fmt: skip
    print(record.to_bytes().hex(), flush=True)
    steps = Steps(args.decode_step_ms / 1000)
    if args.decode_step_ms:
        steps.start()
    held: list[int] = []
    for line in sys.stdin:
        if line.strip() in ("scatter", "gather"):
            pool.release(held)
            held = []
        if line.strip() == "scatter":
            pages = pool.allocate(num_pages)
            held = pages[::2]
            pool.release(pages[1::2])
        answer: dict[str, object] = dict(server.stats())
        # Without the steps and without this thread, which only talks to the benchmark.
        answer["cpu_s"] = time.process_time() - time.thread_time() - steps.cpu_seconds()
        if line.strip() == "steps":
            answer["steps"], steps.times = steps.times, []
        print(json.dumps(answer), flush=True)
    steps.over.set()
    server.close()


def touch(memory: PoolMemory) -> None:
    """Have the kernel map every page now: faults of a new pool are not what is measured."""
    for start in range(0, len(memory.buffer), 4096):
        memory.buffer[start] = 1


class DecodeSide:
    def __init__(self, args: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--decode-side", f"--num-pages={args.num_pages}"]
        command += [f"--decode-step-ms={args.decode_step_ms}", f"--decode-core={args.decode_core}"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.record = WorkerRecord.from_bytes(bytes.fromhex(self._read()))

    def ask(self, word: str = "stats") -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        counters: dict[str, Any] = json.loads(self._read())
        return counters

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the decode side ended early")
        return line.strip()

    def close(self) -> None:
        self._process.communicate(timeout=WAIT_S)


# --- the prefill side: this process


class Prefill:
    def __init__(self, memory: PoolMemory, client: HandoffClient, decode: DecodeSide) -> None:
        self._memory = memory
        self._client = client
        self._decode = decode
        self._stove = Stove()
        self._serial = 0
        self._kv = memoryview(os.urandom(memory.num_pages * LAYOUT.page_bytes))

    def _counters(self) -> dict[str, float]:
        return self._client.counts() | figures({self._client.transport: self._client.tally()})

    def alone(self, case: Case) -> float:
        """Seconds of compute without a handoff."""
        pages = self._pages(case)
        begun = time.perf_counter()
        for layer in range(LAYOUT.num_layers):
            self._compute(case, layer, pages)
        return time.perf_counter() - begun

    def _compute(self, case: Case, layer: int, pages: list[int]) -> None:
        """The stand-in of one layer. It writes its pages, so that they are in the cache or not, as
        they would be."""
        self._stove.burn(case.layer_s)
        for view in self._memory.gather(layer, pages):
            view[:] = self._kv[: len(view)]

    def _pages(self, case: Case) -> list[int]:
        count = LAYOUT.pages_for(case.tokens)
        if case.placement == "scattered":
            return random.Random(self._serial).sample(range(0, self._memory.num_pages, 2), count)
        return list(range(count))

    def handed_over(self, case: Case) -> Sample:
        pages = self._pages(case)
        self._serial += 1
        name, prompt = f"{case.transport}-{self._serial}", tuple(range(case.tokens))
        request = Request(name, 1, "gateway", prompt, case.tokens, SamplingParams())
        first_token = Event(request.request_id, 1, Kind.TOKENS, "prefill", token_ids=(1,))
        there, here = self._decode.ask(), self._counters()
        handoff = self._client.reserve(request, []).result(WAIT_S)
        process, thread, begun = time.process_time(), time.thread_time(), time.perf_counter()
        for layer in range(LAYOUT.num_layers):
            if case.layer_s:
                self._compute(case, layer, pages)
            handoff.push(layer, 0, pages)
        computed = time.perf_counter()
        sealed = handoff.seal(first_token)
        sealed.result(WAIT_S)
        committed = time.perf_counter()
        process, thread = time.process_time() - process, time.thread_time() - thread
        there_now, here_now = self._decode.ask(), self._counters()

        def grown(name: str) -> float:
            return here_now[name] - here[name]

        def grown_there(name: str) -> float:
            return there_now[name] - there[name]

        def counter(name: str) -> str:
            return metric_names.of_transport(name, case.transport)

        return Sample(
            compute=computed - begun,
            exposed=committed - computed,
            sending=grown(counter(metric_names.TRANSFER_SECONDS)),
            digest_sent=grown(counter(metric_names.TRANSFER_DIGEST_SECONDS)),
            digest_received=grown_there(counter(metric_names.TRANSFER_DIGEST_SECONDS)),
            cpu_sent=process - thread,
            cpu_received=grown_there("cpu_s"),
            bytes=grown(counter(metric_names.TRANSFER_BYTES)),
            frames=grown("frames_sent"),
            syscalls=grown("socket_calls") + grown_there("socket_calls"),
        )


def measure(prefill: Prefill, decode: DecodeSide, case: Case, rounds: int) -> dict[str, Any]:
    """Medians over `rounds`, after one round that is thrown away."""
    decode.ask("scatter" if case.placement == "scattered" else "gather")
    alone, samples = [], []
    for turn in range(rounds + 1):
        quiet = prefill.alone(case) if case.layer_s else 0.0
        sample = prefill.handed_over(case)
        if turn:
            alone.append(quiet)
            samples.append(sample)

    def median(of: Callable[[Sample], float]) -> float:
        return statistics.median(of(sample) for sample in samples)

    # Percentages are of what the prefill takes on an undisturbed core.
    alone_s, compute_s = statistics.median(alone), case.layer_s * LAYOUT.num_layers
    digest_s = max(median(lambda s: s.digest_sent), median(lambda s: s.digest_received))
    exposed_s, sending_s = median(lambda s: s.exposed), median(lambda s: s.sending)
    whole_s = median(lambda s: s.compute + s.exposed)
    size = median(lambda s: s.bytes)
    if size != LAYOUT.bytes_per_page * LAYOUT.pages_for(case.tokens):
        raise RuntimeError(f"{case}: {size} bytes were sent")
    figures = {
        "mb": size / 1e6,
        "compute_ms": alone_s * 1e3,
        "sending_ms": sending_s * 1e3,
        "gb_per_s": size / (sending_s if case.layer_s else whole_s) / GB,
        "overlap_ratio": max(0.0, 1 - exposed_s / sending_s) if case.layer_s else None,
        "exposed_ms": exposed_s * 1e3,
        "exposed_pct": 100 * exposed_s / compute_s if compute_s else None,
        "cost_ms": (whole_s - alone_s) * 1e3,
        "cost_pct": 100 * (whole_s - alone_s) / compute_s if compute_s else None,
        "digest_ms": digest_s * 1e3,
        "digest_pct": 100 * digest_s / compute_s if compute_s else None,
        "digest_gb_per_s": size / digest_s / GB,
        "cpu_sent_ms": median(lambda s: s.cpu_sent) * 1e3,
        "cpu_sent_pct": 100 * median(lambda s: s.cpu_sent) / compute_s if compute_s else None,
        "cpu_received_ms": median(lambda s: s.cpu_received) * 1e3,
        "frames": median(lambda s: s.frames),
        "syscalls": median(lambda s: s.syscalls),
    }
    return {**dataclasses.asdict(case), **figures}


def step_times(prefill: Prefill, decode: DecodeSide, case: Case, rounds: int) -> dict[str, Any]:
    """Decode step times with nothing arriving, and while one handoff after another arrives."""
    decode.ask("steps")
    time.sleep(rounds * case.layer_s * LAYOUT.num_layers)
    quiet = decode.ask("steps")["steps"]
    for _ in range(rounds):
        prefill.handed_over(case)
    busy = decode.ask("steps")["steps"]
    figures = {}
    for name, times in (("quiet", quiet), ("receiving", busy)):
        if len(times) < 20:
            raise RuntimeError(f"only {len(times)} decode steps were seen; ask for more --rounds")
        cuts = statistics.quantiles(times, n=100)
        figures |= {f"{name}_p50_ms": cuts[49] * 1e3, f"{name}_p99_ms": cuts[98] * 1e3}
    return {**dataclasses.asdict(case), **figures}


# --- the program


COLUMNS = {
    "transport": "transport", "placement": "pages", "tokens": "tokens", "mb": "MB",
    "compute_ms": "compute ms",
    "gb_per_s": "GB/s", "overlap_ratio": "overlap", "exposed_ms": "exposed ms",
    "exposed_pct": "exposed %", "cost_pct": "cost %", "digest_ms": "digest ms",
    "digest_pct": "digest %", "digest_gb_per_s": "digest GB/s", "cpu_sent_ms": "CPU sender ms",
    "cpu_sent_pct": "CPU sender %",
    "cpu_received_ms": "CPU receiver ms", "frames": "frames", "syscalls": "syscalls",
}  # fmt: skip


def table(rows: list[dict[str, Any]], columns: dict[str, str]) -> str:
    def shown(value: object) -> str:
        return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)

    return grid(list(columns.values()), [[shown(row[c]) for c in columns] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=TRANSPORTS)
    parser.add_argument(
        "--placements",
        nargs="+",
        default=["contiguous", "scattered"],
        choices=["contiguous", "scattered"],
        help="how pages lie in both pools",
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 1500, 3000])
    parser.add_argument(
        "--ms-per-512", type=float, default=150.0, help="compute time of 512 prompt tokens"
    )
    parser.add_argument("--raw", action="store_true", help="no compute: pages as fast as they go")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--decode-step-ms", type=float, default=0.0, help="keep the decode side busy with steps"
    )
    parser.add_argument("--num-pages", type=int, default=512)
    parser.add_argument("--prefill-core", type=int, default=-1, help="-1: any")
    parser.add_argument("--decode-core", type=int, default=-1, help="-1: any")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--decode-side", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    core = args.decode_core if args.decode_side else args.prefill_core
    if core >= 0:
        os.sched_setaffinity(0, {core})
    if args.decode_side:
        decode_side(args)
        return
    decode = DecodeSide(args)
    memory = PoolMemory.create(LAYOUT, args.num_pages)
    touch(memory)
    rows, steps = [], []
    for transport in args.transports:
        identity = Identity("prefill", "prefill", FINGERPRINT, LAYOUT, args.num_pages)
        client = HandoffClient(identity, decode.record, memory, ClientOptions(transport))
        client.connect()
        prefill = Prefill(memory, client, decode)
        for placement in args.placements:
            for tokens in args.tokens:
                layer_s = args.ms_per_512 * tokens / 512 / LAYOUT.num_layers / 1000
                case = Case(transport, placement, tokens, 0.0 if args.raw else layer_s)
                rows.append(measure(prefill, decode, case, args.rounds))
                if args.decode_step_ms:
                    steps.append(step_times(prefill, decode, case, args.rounds))
        client.close()
    decode.close()
    print(table(rows, COLUMNS))
    if steps:
        print(table(steps, {name: name.replace("_", " ") for name in steps[0]}))
    if args.json:
        result = {
            "date": today(),
            "machine": machine([args.prefill_core, args.decode_core]),
            "arguments": arguments(args),
            "handoffs": rows,
            "decode_steps": steps,
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
