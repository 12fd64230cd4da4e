"""`make chaos MINUTES=n SEED=s`: inject faults into a real stack under load and judge every answer.

1. Start Valkey, two gateways, two prefill and two decode workers of the demo model.
2. Record what each request of the catalogue answers, undisturbed; ask every third again, in other
   company and not streamed: the answers must agree.
3. For `--minutes`: clients ask at random, the injector follows the schedule of the seed.
4. Let open requests end, wait until everything is idle, look at ledgers, queues, gauges and logs.
5. Print the table, write the record. Exit code 0, or 1 with all that was wrong.

The seed fixes the schedule, not the timing of the processes: a failure comes back
often, not always.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aftermath
import report
from catalogue import CASES, PROBE, STALL, STALL_N, STALL_ONE, STALL_PROMPTS, Case
from client import Answer
from faults import BAG, Injector, schedule
from load import Load
from oracle import Expected, Fault, judge
from processes import Options, Stack

from pageferry.compose.supervisor import ChildDied
from pageferry.kvtransfer.tasks import end_tasks

MAX_SHOWN = 20
SAMPLE_S = 10.0
MIN_RIGHT = 0.05
"""With fewer right answers the run says nothing."""


class Run:
    def __init__(self, arguments: argparse.Namespace, log_dir: Path) -> None:
        self.arguments = arguments
        self.log_dir = log_dir
        self.problems: list[str] = []
        self.expected: dict[str, Expected] = {}
        self.samples: list[dict[str, Any]] = []
        self.begun = self.begun_wall = 0.0
        """When the load began, by the loop's clock and by the wall's."""
        options = Options(
            gateways=arguments.gateways, deterministic=arguments.deterministic == "true"
        )
        self.stack = Stack(options, log_dir)
        self.cases = [c for c in CASES if c.wide or options.deterministic]

    async def run(self) -> dict[str, Any]:
        """The whole of it; returns the record."""
        try:
            say("starting the stack")
            await self.stack.start()
            await self._record_expected()
            if self.problems:
                return {"problems": self.problems}
            return await self._disturb()
        finally:
            await self.stack.stop()

    async def _record_expected(self) -> None:
        load = Load(self.stack.urls, self.cases, self.arguments.seed)
        begun = time.monotonic()
        everything = [*self.cases, STALL_ONE]
        for stream, width, wanted in ((True, 16, everything), (False, 4, self.cases[::3])):
            gate = asyncio.Semaphore(width)

            async def one(case: Case, gate: asyncio.Semaphore = gate, stream: bool = stream) -> Any:
                async with gate:
                    return await load.one(case, stream)

            for answer in await asyncio.gather(*(one(case) for case in wanted)):
                if not answer.complete:
                    self.problems.append(f"undisturbed: {answer}")
                elif stream:
                    self.expected[answer.case.name] = Expected.of(answer)
                else:
                    problem = judge(answer, self.expected[answer.case.name], [])[1]
                    if problem:
                        name = answer.case.name
                        self.problems.append(f"undisturbed, second time: {name}: {problem}")
        await load.stop()
        if STALL_ONE.name in self.expected:
            expected = self.expected[STALL_ONE.name].times(STALL_PROMPTS, STALL_N)
            self.expected[STALL.name] = expected
        say(f"{len(everything)} answers recorded in {time.monotonic() - begun:.0f} s")

    async def _disturb(self) -> dict[str, Any]:
        arguments, stack = self.arguments, self.stack
        kinds = arguments.kinds.split(",")
        plan = schedule(arguments.seed, arguments.minutes, arguments.per_minute, kinds)
        load = Load(stack.urls, self.cases, arguments.seed)
        injector = Injector(stack, load)
        before = aftermath.usage(stack)
        loop = asyncio.get_running_loop()
        self.begun, self.begun_wall = loop.time(), time.time()
        sampling = asyncio.create_task(self._sample())
        load.start(arguments.clients)
        faulting = asyncio.create_task(injector.run(plan))
        events: list[asyncio.Future[Any]] = [faulting, stack.supervisor.failed]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        if stack.supervisor.failed.done():
            faulting.cancel()
            self.problems.append(f"the stack ended: {stack.supervisor.failed.result()}")
        else:
            await faulting
            await asyncio.sleep(self.begun + arguments.minutes * 60 - loop.time())
        say("the load ends")
        await load.stop()
        seconds = loop.time() - self.begun
        self.problems += injector.problems
        self.problems += await aftermath.settle(stack)
        await self._probe()
        await end_tasks([sampling])
        memory = {"before": before, "after": aftermath.usage(stack), "samples": self.samples}
        return self._record(load, injector, seconds, memory)

    def _record(
        self, load: Load, injector: Injector, seconds: float, memory: dict[str, Any]
    ) -> dict[str, Any]:
        judged = self._judge(load, injector.faults)
        right = sum(outcome == "right" for _, outcome in judged)
        if right < MIN_RIGHT * len(judged):
            self.problems.append(f"only {right} of {len(judged)} requests were served at all")
        with (self.log_dir / "requests.jsonl").open("w") as lines:
            for answer, outcome in judged:
                lines.write(json.dumps(report.line_of(answer, outcome, self.begun)) + "\n")
        self.problems += aftermath.log_problems(self.log_dir, injector.kills)
        return {
            "seed": self.arguments.seed,
            "minutes": self.arguments.minutes,
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "cores": len(os.sched_getaffinity(0)),
            "options": vars(self.stack.options),
            "seconds": round(seconds, 1),
            "num_faults": len(injector.faults),
            "skipped": dict(injector.skipped),
            "totals": report.totals(judged),
            "by_kind": report.by_kind(injector.faults, judged),
            "faults": [report.fault_of(fault, self.begun) for fault in injector.faults],
            "memory": memory,
            "warnings": aftermath.warnings(self.log_dir),
            "problems": self.problems,
        }

    async def _sample(self) -> None:
        """Note the resident memory of every process now and then."""
        while True:
            now = asyncio.get_running_loop().time() - self.begun
            usage = aftermath.usage(self.stack)
            sizes = {name: [of["pid"], of["rss_kib"]] for name, of in usage.items()}
            self.samples.append({"at": round(now, 1), **sizes})
            await asyncio.sleep(SAMPLE_S)

    def _judge(self, load: Load, faults: list[Fault]) -> list[tuple[Answer, str]]:
        judged = []
        for answer in load.answers:
            if answer.case is STALL and not self.stack.options.deterministic:
                continue
            outcome, problem = judge(answer, self.expected[answer.case.name], faults)
            judged.append((answer, outcome))
            if problem:
                self.problems.append(self._describe(answer, outcome, problem, faults))
        return judged

    def _describe(self, answer: Answer, outcome: str, problem: str, faults: list[Fault]) -> str:
        start, end = answer.started - self.begun, answer.ended - self.begun
        near = [
            f"{fault.kind} {fault.target} at {fault.at - self.begun:.1f} ({fault.note})"
            for fault in faults
            if answer.started - 5 < fault.until and fault.at < answer.ended
        ]
        clock = time.strftime("%H:%M:%S", time.localtime(self.begun_wall + start))
        how = "streamed" if answer.stream else "whole"
        return (
            f"{outcome}: {answer.case.name} ({how}) to {answer.gateway} from {start:.1f} ({clock}) "
            f"to {end:.1f} s: {problem}\n    faults: {'; '.join(near)}"
        )

    async def _probe(self) -> None:
        load = Load(self.stack.urls, [PROBE], 0)
        for gateway in range(len(self.stack.urls)):
            answer = await load.one(PROBE, True, gateway)
            outcome, problem = judge(answer, self.expected[PROBE.name], [])
            if outcome != "right":
                self.problems.append(f"the probe after the run: {outcome} {problem}")
        await load.stop()


def say(text: str) -> None:
    print(f"chaos: {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-minute", type=float, default=22.0, help="planned faults per minute")
    parser.add_argument("--kinds", default=",".join(BAG), help="kinds of faults, by commas")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--deterministic", choices=("true", "false"), default="true")
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--logs", type=Path, help="directory for the logs; kept")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.kinds.split(",")) - set(BAG):
        parser.error(f"--kinds {','.join(sorted(unknown))}: expected some of {', '.join(BAG)}")
    return arguments


async def run(arguments: argparse.Namespace, log_dir: Path) -> dict[str, Any]:
    """One run; its record, which has at least `problems`."""
    run = Run(arguments, log_dir)
    try:
        return await run.run()
    except (TimeoutError, ChildDied) as error:
        return {"problems": [*run.problems, f"{type(error).__name__}: {error}"]}


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="pageferry-chaos-"))
    logs.mkdir(parents=True, exist_ok=True)
    record = asyncio.run(run(arguments, logs))
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    if "totals" in record:
        print(report.show(record))
    if not record["problems"]:
        print(f"chaos: seed {arguments.seed}: every answer was right or honestly refused")
        return 0
    print(f"\nchaos: FAILED with {len(record['problems'])} problems; the logs are in {logs}")
    for problem in record["problems"][:MAX_SHOWN]:
        print(f"- {problem}")
    print(f"Again: make chaos MINUTES={arguments.minutes:g} SEED={arguments.seed}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
