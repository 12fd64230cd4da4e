"""Fake workers that speak the real protocol over a real Valkey.

The fake model repeats its prompt three times and then ends: every token of an answer tells which
prompt it belongs to, and a resumed answer is recognisably the same one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from pageferry.kvtransfer.bus import (
    TRANSIENT,
    connect,
    ensure_groups,
    publish_worker,
    retire_worker,
)
from pageferry.kvtransfer.keys import FIELD, PREFILL_GROUP, Keys
from pageferry.kvtransfer.layout import KVLayout
from pageferry.kvtransfer.tasks import end_tasks
from pageferry.kvtransfer.wire import (
    Drain,
    Event,
    Kind,
    Ledger,
    Request,
    TokenLogprob,
    WorkerRecord,
    pack_events,
    unpack,
    unpack_control,
)

CONTEXT = 4096
EOS = 257
CYCLES = 3
MODEL = "tiny"
LEASE_S = 0.6


def answer(prompt: tuple[int, ...], index: int) -> int:
    """Output token number `index` of the fake model."""
    return EOS if index >= CYCLES * len(prompt) else prompt[index % len(prompt)]


class FakeWorker:
    """One worker of either role; its attributes are its ways to misbehave."""

    def __init__(self, url: str, role: str, name: str, peers: list[FakeWorker]) -> None:
        self.id = name
        self.role = role
        self.keys = Keys(MODEL)
        self.client = connect(url, self.keys, max_block_s=0.2)
        self.peers = peers
        """Prefill: the decode workers to hand over to."""
        self.state = "ready"
        self.num_pages = 1000
        self.max_model_len = CONTEXT
        self.fingerprint = "f"
        self.refusals: tuple[str, ...] = ()
        self.stats: dict[str, float] = {}
        self.step_s = 0.002
        self.prefill_s = 0.0
        self.claims = True
        self.mangle: Callable[[Event], list[Event]] = lambda event: [event]
        self.claimed: list[Request] = []
        self.accepted: list[Request] = []
        self.active: dict[str, asyncio.Task[None]] = {}
        self._endings: list[asyncio.Task[None]] = []
        self.cancelled: list[tuple[str, int]] = []
        self.drains: list[str] = []
        self.dead = False
        self._tasks: list[asyncio.Task[None]] = []

    def record(self) -> WorkerRecord:
        return WorkerRecord(
            id=self.id,
            role=self.role,
            pid=1,
            host="here",
            state=self.state,
            model=MODEL,
            fingerprint=self.fingerprint,
            layout=KVLayout("float32", 16, 1, 1, 8).to_dict(),
            ledger=Ledger(self.num_pages, self.num_pages, 0, 0, 0, 0, 16),
            max_model_len=self.max_model_len,
            refusals=self.refusals,
            stats=self.stats,
        )

    async def start(self) -> None:
        await ensure_groups(self.client, self.keys)
        await self.publish()
        loops = [self._heartbeat(), self._control()]
        loops.append(self._claim() if self.role == "prefill" else self._local())
        self._tasks = [asyncio.create_task(self._patiently(loop)) for loop in loops]

    async def publish(self) -> None:
        await publish_worker(self.client, self.keys, self.record(), LEASE_S)

    async def die(self) -> None:
        """As kill -9: no goodbye; the lease lapses."""
        self.dead = True
        await end_tasks([*self._tasks, *self.active.values()])
        await asyncio.gather(*self._endings)
        self.active.clear()

    async def retire(self) -> None:
        await self.die()
        await retire_worker(self.client, self.keys, self.id)

    async def close(self) -> None:
        await self.die()
        await self.client.aclose()

    async def emit(self, request: Request, **fields: Any) -> None:
        kind = fields.pop("kind", Kind.TOKENS)
        worker = fields.pop("worker", self.id)
        event = Event(request.request_id, request.epoch, kind, worker, **fields)
        for each in self.mangle(event):
            stream = self.keys.tokens(request.gateway)
            while True:
                try:
                    await self.client.xadd(stream, {FIELD: pack_events([each])})
                    break
                except TRANSIENT:
                    await asyncio.sleep(0.05)

    async def _patiently(self, loop: AsyncIterator[None]) -> None:
        """Run a loop; a missing Redis is waited for."""
        async for _ in loop:
            pass

    async def _heartbeat(self) -> AsyncIterator[None]:
        while True:
            with contextlib.suppress(*TRANSIENT):
                await self.publish()
            await asyncio.sleep(LEASE_S / 3)
            yield

    async def _control(self) -> AsyncIterator[None]:
        last = b"0-0"
        while True:
            try:
                reply = await self.client.xread({self.keys.control: last}, block=100)
            except TRANSIENT:
                await asyncio.sleep(0.05)
                reply = []
            for _, entries in reply or ():
                for last, fields in entries:  # noqa: B007
                    for cancel in unpack_control(fields[FIELD]):
                        if isinstance(cancel, Drain):
                            self.drains.append(cancel.worker)
                            continue
                        self.cancelled.append((cancel.request_id, cancel.epoch))
                        task = self.active.get(cancel.request_id)
                        if task is not None and task.get_name() <= f"{cancel.epoch:09}":
                            # Once is not enough: redis-py may lose a cancel.
                            self._endings.append(asyncio.create_task(end_tasks([task])))
            yield

    async def _claim(self) -> AsyncIterator[None]:
        while True:
            if not self.claims:
                await asyncio.sleep(0.02)
                yield
                continue
            try:
                reply = await self.client.xreadgroup(
                    PREFILL_GROUP,
                    self.id,
                    dict.fromkeys(self.keys.prefill_queues, ">"),
                    count=8,
                    block=50,
                )
            except TRANSIENT:
                await asyncio.sleep(0.05)
                with contextlib.suppress(*TRANSIENT):
                    await ensure_groups(self.client, self.keys)
                reply = []
            for queue, entries in reply or ():
                for entry_id, fields in entries:
                    request = Request.from_dict(unpack(fields[FIELD]))
                    self.claimed.append(request)
                    self._begin(request, self._prefill(queue, entry_id, request))
            yield

    def _begin(self, request: Request, work: Any) -> None:
        if any(i == request.request_id and e >= request.epoch for i, e in self.cancelled):
            work.close()  # Its cancel came before it did.
            return
        task = asyncio.create_task(work, name=f"{request.epoch:09}")
        self.active[request.request_id] = task

        def ended(done: asyncio.Task[None]) -> None:
            if self.active.get(request.request_id) is done:
                del self.active[request.request_id]

        task.add_done_callback(ended)

    async def _prefill(self, queue: bytes, entry_id: bytes, request: Request) -> None:
        await self.emit(request, kind=Kind.OWNED)
        if request.sampling.seed == 666:  # The poisonous request.
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self.die()))
            return
        await asyncio.sleep(self.prefill_s)
        finished = await self._token(request, request.num_output_tokens)
        peers = [
            peer
            for peer in self.peers
            if not peer.dead and peer.state == "ready" and peer.fingerprint == self.fingerprint
        ]
        if not finished:
            await self.emit(request, kind=Kind.OWNED, worker=peers[0].id)
            peers[0].accept(request, request.num_output_tokens + 1)
        await self.client.xack(queue, PREFILL_GROUP, entry_id)
        await self.client.xdel(queue, entry_id)

    async def _local(self) -> AsyncIterator[None]:
        queue, last = self.keys.decode_queue(self.id), b"0-0"
        while True:
            try:
                reply = await self.client.xread({queue: last}, block=50)
            except TRANSIENT:
                await asyncio.sleep(0.05)
                reply = []
            for _, entries in reply or ():
                for last, fields in entries:
                    request = Request.from_dict(unpack(fields[FIELD]))
                    await self.client.xdel(queue, last)
                    await self.emit(request, kind=Kind.OWNED)
                    self.accept(request, request.num_output_tokens)
            yield

    def accept(self, request: Request, index: int) -> None:
        self.accepted.append(request)
        self._begin(request, self._decode(request, index))

    async def _decode(self, request: Request, index: int) -> None:
        while not await self._token(request, index):
            index += 1
            await asyncio.sleep(self.step_s)

    async def _token(self, request: Request, index: int) -> bool:
        """Emit one output token; True when it was the last."""
        prompt = request.token_ids[: request.prompt_len]
        token = answer(prompt, index)
        finish = None
        if token in request.sampling.stop_token_ids:
            finish = "stop"
        elif index + 1 >= request.sampling.max_tokens:
            finish = "length"
        logprobs: tuple[TokenLogprob, ...] = ()
        if request.sampling.logprobs >= 0:
            top = tuple((token + i, -0.5 - i) for i in range(request.sampling.logprobs))
            logprobs = (TokenLogprob(-0.5, top),)
        await self.emit(
            request,
            index=index,
            token_ids=(token,),
            logprobs=logprobs,
            finish=finish,
            stop_token_id=token if finish == "stop" else None,
            num_cached_tokens=4,
        )
        return finish is not None
