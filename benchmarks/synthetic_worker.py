"""A decode worker without a model: real registry entry, queue and token messages, known text.

    python benchmarks/synthetic_worker.py --redis-url … --model … --streams 1000 --rate 15000

1. Registers like any decode worker (`WorkerBus`: lease, ledger, record), reads `decode:<id>`.
2. Waits until it has `--streams` requests, says OWNED for each at once, then sends each its first
   token; waits `--idle-s`.
3. Then one step every `streams / rate` seconds: one message with one token for every sequence.
4. When all have `max_tokens`, or on SIGTERM, prints one JSON line (when each step was sent) and
   leaves.

Requests beyond `--streams` get one token, at once; with `--streams 0` there is nothing else.

Which tokens a request gets follows from the first token of its prompt (`answer_ids`): the reader
can check that nothing was lost, doubled or swapped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import tokenizers
import uvloop

from pageferry.kvtransfer.keys import FIELD, Keys
from pageferry.kvtransfer.layout import KVLayout
from pageferry.kvtransfer.tasks import end_tasks
from pageferry.kvtransfer.wire import Cancel, Event, Kind, Ledger, Request, WorkerRecord, unpack
from pageferry.kvtransfer.worker_bus import BusCallbacks, WorkerBus

PAGE_SIZE = 16
START_TIMEOUT_S = 60.0
TABLE_SIZE = 4093


def plain_tokens(model: Path) -> tuple[list[int], list[str]]:
    """`TABLE_SIZE` token ids that are short ASCII text by themselves, and that text."""
    backend = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    ids, texts = [], []
    for token_id in range(1000, backend.get_vocab_size()):
        text = backend.decode([token_id], skip_special_tokens=False)
        if text.isascii() and text.isprintable() and 2 <= len(text) <= 8:
            ids.append(token_id)
            texts.append(text)
        if len(ids) == TABLE_SIZE:
            return ids, texts
    raise RuntimeError(f"{model} has fewer than {TABLE_SIZE} plain tokens")


def answer_places(seed: int, count: int) -> list[int]:
    """Places in the table of the tokens that answer a prompt that begins with token `seed`."""
    return [(seed * 31 + k * 7) % TABLE_SIZE for k in range(count)]


class SyntheticWorker:
    def __init__(self, args: argparse.Namespace) -> None:
        self.id = f"decode-synthetic-{os.getpid()}"
        self._args = args
        self._model = args.model.name
        self._ids, _ = plain_tokens(args.model)
        self._requests: dict[str, Request] = {}
        self._answers: dict[str, list[int]] = {}
        self._sent_at: list[float] = []
        self._complete = asyncio.Event()
        self._stop = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._bus = WorkerBus(
            args.redis_url,
            Keys(self._model),
            args.lease_s,
            BusCallbacks(
                self._record,
                self._cancelled,
                self._stop.set,
                lambda: {r.gateway for r in self._requests.values()},
                lambda gateway: self._requests.clear(),
                self._failed.set_exception,
            ),
        )

    async def run(self) -> None:
        await self._bus.start()
        queue = self._bus.spawn("queue", self._take)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop.set)
        if self._args.streams:
            await self._steps()
        else:
            self._complete.set()
            await self._stop.wait()
        await end_tasks([queue])
        await self._bus.close(self.id)

    async def _steps(self) -> None:
        async with asyncio.timeout(START_TIMEOUT_S):
            await self._complete.wait()
        length = max(r.sampling.max_tokens for r in self._requests.values())
        self._step(0)
        await asyncio.sleep(self._args.idle_s)
        cpu, started = time.process_time(), time.monotonic()
        interval = self._args.streams / self._args.rate
        for k in range(1, length):
            if self._stop.is_set():
                break
            await asyncio.sleep(max(0.0, started + k * interval - time.monotonic()))
            self._step(k)
        cpu_s = time.process_time() - cpu
        print(json.dumps({"sent_at": self._sent_at, "cpu_s": cpu_s}), flush=True)

    def _step(self, k: int) -> None:
        """Token number `k` of every sequence that is not done, in one message."""
        events = []
        for request in self._requests.values():
            if k < request.sampling.max_tokens:
                event = Event(
                    request.request_id,
                    request.epoch,
                    Kind.TOKENS,
                    self.id,
                    index=k,
                    token_ids=(self._answers[request.request_id][k],),
                    finish="length" if k + 1 == request.sampling.max_tokens else None,
                )
                events.append((request.gateway, event))
        self._sent_at.append(time.monotonic())
        self._bus.emit(events)

    async def _take(self) -> None:
        queue = self._bus.keys.decode_queue(self.id)
        reply = await self._bus.client.xread({queue: b"0"}, count=256, block=500)
        entries = reply[0][1] if reply else []
        for _, fields in entries:
            value = unpack(fields[FIELD])
            if self._complete.is_set():  # token ids are left packed: there may be very many
                self._bus.emit([(value["gateway"], self._only_token(value))])
                continue
            request = Request.from_dict(value)
            places = answer_places(request.token_ids[0], request.sampling.max_tokens)
            self._answers[request.request_id] = [self._ids[p] for p in places]
            self._requests[request.request_id] = request
            owned = Event(request.request_id, request.epoch, Kind.OWNED, self.id)
            self._bus.emit([(request.gateway, owned)])
            if len(self._requests) == self._args.streams:
                self._complete.set()
        if entries:
            await self._bus.client.xdel(queue, *(entry_id for entry_id, _ in entries))

    def _only_token(self, request: dict[str, Any]) -> Event:
        return Event(
            request["request_id"],
            request["epoch"],
            Kind.TOKENS,
            self.id,
            token_ids=(self._ids[0],),
            finish="length",
        )

    def _cancelled(self, cancels: list[Cancel]) -> None:
        for cancel in cancels:
            self._requests.pop(cancel.request_id, None)

    def _record(self) -> WorkerRecord:
        live, pages = len(self._requests), self._args.pages
        return WorkerRecord(
            id=self.id,
            role="decode",
            pid=os.getpid(),
            host=socket.gethostname(),
            state="ready",
            model=self._model,
            fingerprint="synthetic",
            layout=KVLayout("bfloat16", PAGE_SIZE, 1, 1, 64).to_dict(),
            ledger=Ledger(pages, pages - live, 0, live, 0, 0, PAGE_SIZE),
            max_model_len=self._args.max_model_len,
            num_running=live,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--model", type=Path, required=True, help="directory with tokenizer.json")
    parser.add_argument("--streams", type=int, default=1000, help="requests to wait for")
    parser.add_argument("--rate", type=float, default=15000, help="tokens/s over all streams")
    parser.add_argument("--idle-s", type=float, default=0.5, help="pause after the first token")
    parser.add_argument("--pages", type=int, default=1 << 20, help="pages in the ledger")
    parser.add_argument("--lease-s", type=float, default=3.0)
    parser.add_argument("--max-model-len", type=int, default=8192)
    worker_args = parser.parse_args()

    async def run() -> None:
        await SyntheticWorker(worker_args).run()

    uvloop.run(run())


if __name__ == "__main__":
    main()
