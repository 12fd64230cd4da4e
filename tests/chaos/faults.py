"""What goes wrong, and when: a schedule drawn by the seed, and the injector that carries it out.

The schedule is a shuffled bag of all kinds, dealt again and again, so that each two minutes see
every kind. Faults overlap: a worker may be frozen while another is killed and Redis restarts.
"""

from __future__ import annotations

import asyncio
import collections
import random
import signal
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from load import Load
from oracle import Fault
from processes import PROXIED, Stack
from redis.exceptions import RedisError

from pageferry.compose.supervisor import MAX_QUICK_DEATHS, QUICK_DEATH_S

BAG = {
    "prefill_kill": 3,
    "decode_kill": 3,
    "both_decode_kill": 1,
    "prefill_freeze": 3,
    "decode_freeze": 3,
    "worker_term": 3,
    "worker_drain": 2,
    "gateway_kill": 1,
    "gateway_term": 1,
    "client_cut": 6,
    "client_stall": 1,
    "burst": 2,
    "redis_pause": 3,
    "redis_drop": 3,
    "redis_restart": 1,
    "redis_flush": 2,
    "redis_full": 1,
    "link_cut": 3,
    "link_stall": 1,
    "link_delay": 1,
    "link_flip": 3,
}
"""How often each kind occurs in one bag."""

TERM_S = 20.0
"""A worker or gateway that was told to stop must be gone by then."""
BURST_WAIT_S = 15.0
LAST_DECODE = 0.2
"""How often a decode worker is hit although it is the last that serves."""
MAX_MEMORY = "512mb"
REDIS_AT_HAND_S = 30.0


class Skipped(Exception):
    """This fault cannot be injected now."""


@dataclass(frozen=True)
class Planned:
    at: float
    """Seconds from the start of the load."""
    kind: str
    seed: str


def schedule(
    seed: int, minutes: float, per_minute: float, kinds: Collection[str] = BAG
) -> list[Planned]:
    """Same arguments, same plan."""
    rng = random.Random(f"{seed} schedule")
    plan: list[Planned] = []
    bag: list[str] = []
    at = 1.5
    while at < minutes * 60 - 1:
        if not bag:
            bag = [kind for kind in BAG for _ in range(BAG[kind]) if kind in kinds]
            rng.shuffle(bag)
        plan.append(Planned(at, bag.pop(), f"{seed} fault {len(plan)}"))
        at += 60 / per_minute * rng.uniform(0.2, 1.8)
    return plan


Action: TypeAlias = Callable[[Fault, random.Random], Awaitable[None]]


class Injector:
    """Carries out a plan on a stack under load."""

    def __init__(self, stack: Stack, load: Load) -> None:
        self.faults: list[Fault] = []
        self.skipped: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []
        self.kills: collections.Counter[str] = collections.Counter()
        """SIGKILLs by program."""
        self._stack = stack
        self._load = load
        self._loop = asyncio.get_running_loop()
        self._short_lives: collections.Counter[str] = collections.Counter()
        self._redis_turn = asyncio.Lock()

    async def run(self, plan: Sequence[Planned]) -> None:
        begun = self._loop.time()
        async with asyncio.TaskGroup() as group:
            for planned in plan:
                await asyncio.sleep(begun + planned.at - self._loop.time())
                group.create_task(self._inject(planned))

    async def _inject(self, planned: Planned) -> None:
        rng = random.Random(planned.seed)
        action: Action = getattr(self, "_" + planned.kind)
        now = self._loop.time()
        fault = Fault(planned.kind, "", now, now)
        try:
            await action(fault, rng)
        except (Skipped, ProcessLookupError):
            self.skipped[planned.kind] += 1

    def _begin(self, fault: Fault, target: str, seconds: float = 0.0, note: str = "") -> None:
        """It happens now: note it before the effects show."""
        fault.target, fault.note = target, note
        fault.at = self._loop.time()
        fault.until = fault.at + seconds
        self.faults.append(fault)

    # --- processes

    def _pick(self, role: str, rng: random.Random, *, frozen: bool = False) -> str:
        """A living program of that role which may be killed: the supervisor gives up on one that
        dies young again and again."""
        names = self._stack.gateways if role == "gateway" else self._stack.workers
        fit = [
            name
            for name in names
            if name.startswith(role)
            and (frozen or name not in self._stack.frozen)
            and self._may_die(name)
        ]
        if not fit:
            raise Skipped
        return rng.choice(fit)

    def _may_die(self, name: str) -> bool:
        age = self._stack.age_s(name)
        if age is None:
            return False
        if age > QUICK_DEATH_S:
            self._short_lives[name] = 0
        return self._short_lives[name] < MAX_QUICK_DEATHS - 3

    def _kill(self, name: str) -> None:
        self._short_lives[name] += 1
        self.kills[name] += 1
        self._stack.signal(name, signal.SIGKILL)

    async def _kill_one(self, fault: Fault, role: str, rng: random.Random) -> None:
        name = self._pick(role, rng, frozen=True)
        self._begin(fault, name, note=f"age {self._stack.age_s(name):.0f} s")
        self._kill(name)

    async def _role(self, rng: random.Random) -> str:
        """Whom a fault may hit that is meant for a decode worker: mostly one that is not the last,
        because while there is none, other faults find nothing to disturb."""
        serving = [name for name in await self._stack.serving() if name.startswith("decode")]
        return "decode" if len(serving) > 1 or rng.random() < LAST_DECODE else "prefill"

    async def _prefill_kill(self, fault: Fault, rng: random.Random) -> None:
        await self._kill_one(fault, "prefill", rng)

    async def _decode_kill(self, fault: Fault, rng: random.Random) -> None:
        role = await self._role(rng)
        fault.kind = f"{role}_kill"
        await self._kill_one(fault, role, rng)

    async def _both_decode_kill(self, fault: Fault, rng: random.Random) -> None:
        names = [n for n in self._stack.workers if n.startswith("decode") and self._may_die(n)]
        if not names:
            raise Skipped
        self._begin(fault, ",".join(names))
        for name in names:
            self._kill(name)

    async def _freeze(self, fault: Fault, role: str, rng: random.Random) -> None:
        name = self._pick(role, rng)
        seconds = rng.uniform(0.1, 2 * self._stack.lease_s)
        self._begin(fault, name, seconds, f"{seconds:.1f} s")
        await self._stopped(name, seconds)

    async def _stopped(self, name: str, seconds: float) -> None:
        self._stack.frozen.add(name)
        try:
            self._stack.signal(name, signal.SIGSTOP)
            await asyncio.sleep(seconds)
        finally:
            self._stack.signal(name, signal.SIGCONT)
            self._stack.frozen.discard(name)

    async def _prefill_freeze(self, fault: Fault, rng: random.Random) -> None:
        await self._freeze(fault, "prefill", rng)

    async def _decode_freeze(self, fault: Fault, rng: random.Random) -> None:
        role = await self._role(rng)
        fault.kind = f"{role}_freeze"
        await self._freeze(fault, role, rng)

    async def _pick_ready(self, rng: random.Random) -> tuple[str, str]:
        """A worker that serves: its program and its id in the registry."""
        name = self._pick(rng.choice(["prefill", await self._role(rng)]), rng)
        serving = await self._stack.serving()
        if name not in serving:
            raise Skipped
        return name, serving[name]

    async def _worker_term(self, fault: Fault, rng: random.Random) -> None:
        name, _ = await self._pick_ready(rng)
        pid = self._stack.pid(name)
        self._begin(fault, name, TERM_S)
        self._stack.signal(name, signal.SIGTERM)
        await self._gone(fault, name, pid)

    async def _worker_drain(self, fault: Fault, rng: random.Random) -> None:
        name, worker_id = await self._pick_ready(rng)
        pid = self._stack.pid(name)
        self._begin(fault, name, TERM_S)
        if await self._stack.drain(worker_id) == 202:
            await self._gone(fault, name, pid)
        else:
            fault.until, fault.note = self._loop.time(), "refused"

    async def _gateway_term(self, fault: Fault, rng: random.Random) -> None:
        name = self._pick("gateway", rng)
        pid = self._stack.pid(name)
        if not await self._stack.answers(name):
            raise Skipped
        self._begin(fault, name, TERM_S)
        self._stack.signal(name, signal.SIGTERM)
        await self._gone(fault, name, pid)

    async def _gone(self, fault: Fault, name: str, pid: int) -> None:
        """Wait until a process that was told to stop has ended, and note how long it took."""
        while self._stack.pid(name) == pid and self._stack.age_s(name) is not None:
            if self._loop.time() > fault.at + TERM_S:
                self.problems.append(f"{name} still runs {TERM_S:g} s after it was told to stop")
                break
            await asyncio.sleep(0.05)
        fault.until = self._loop.time()
        fault.note = f"gone after {fault.until - fault.at:.1f} s"

    async def _gateway_kill(self, fault: Fault, rng: random.Random) -> None:
        await self._kill_one(fault, "gateway", rng)

    # --- clients

    async def _client_cut(self, fault: Fault, rng: random.Random) -> None:
        count = rng.randint(1, 4)
        if not self._load.open:
            raise Skipped
        self._begin(fault, "clients", note=f"{self._load.cut(count, rng)} connections")

    async def _client_stall(self, fault: Fault, rng: random.Random) -> None:
        gateway = rng.randrange(len(self._stack.urls))
        seconds = rng.uniform(8, 12)
        self._begin(fault, self._stack.gateways[gateway], seconds)
        answer, size = await self._load.stall(gateway, seconds)
        fault.until = self._loop.time()
        end = "complete" if answer.complete else answer.broken or f"status {answer.status}"
        fault.note = f"silent for {seconds:.1f} s, then {size} bytes, {end}"

    async def _burst(self, fault: Fault, rng: random.Random) -> None:
        count = rng.randint(50, 200)
        patience = self._loop.time() + BURST_WAIT_S
        while self._loop.time() < patience:  # refused in a moment, it would be no load
            if any(name.startswith("decode") for name in await self._stack.serving()):
                break
            await asyncio.sleep(0.5)
        self._begin(fault, "gateways", note=f"{count} requests")
        answers = await self._load.burst(count, rng)
        fault.until = self._loop.time()
        right = sum(answer.complete for answer in answers)
        fault.note = f"{count} requests, {right} served, {fault.until - fault.at:.1f} s"

    # --- Redis; one fault at a time, because the others need its answers

    async def _redis_command(self, fault: Fault, *command: str) -> None:
        async with self._redis_turn:
            self._begin(fault, "valkey")
            try:
                await self._stack.redis.execute_command(*command)
            except (RedisError, OSError) as error:  # it may have happened all the same
                fault.note = type(error).__name__

    async def _redis_pause(self, fault: Fault, rng: random.Random) -> None:
        seconds = rng.uniform(0.1, 2.5 * self._stack.lease_s)
        async with self._redis_turn:
            self._begin(fault, "valkey", seconds, f"{seconds:.1f} s")
            await self._stopped("valkey", seconds)

    async def _redis_drop(self, fault: Fault, rng: random.Random) -> None:
        await self._redis_command(fault, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    async def _redis_flush(self, fault: Fault, rng: random.Random) -> None:
        await self._redis_command(fault, "FLUSHALL")

    async def _redis_restart(self, fault: Fault, rng: random.Random) -> None:
        async with self._redis_turn:
            if not self._may_die("valkey"):
                raise Skipped
            self._begin(fault, "valkey", 1.0)
            self._kill("valkey")
            await asyncio.sleep(1.0)

    async def _redis_full(self, fault: Fault, rng: random.Random) -> None:
        seconds = rng.uniform(0.3, 3.0)
        async with self._redis_turn:
            self._begin(fault, "valkey", seconds, f"{seconds:.1f} s")
            await self._set_max_memory("1")
            await asyncio.sleep(seconds)
            await self._set_max_memory(MAX_MEMORY)
            fault.until = self._loop.time()

    async def _set_max_memory(self, value: str) -> None:
        deadline = self._loop.time() + REDIS_AT_HAND_S
        while True:
            try:
                await self._stack.redis.config_set("maxmemory", value)
                return
            except (RedisError, OSError):
                if self._loop.time() > deadline:
                    raise
                await asyncio.sleep(0.2)

    # --- the link to one decode worker

    async def _link_cut(self, fault: Fault, rng: random.Random) -> None:
        self._begin(fault, PROXIED)
        fault.note = f"{self._stack.proxy.cut()} connections"

    async def _link_stall(self, fault: Fault, rng: random.Random) -> None:
        seconds = rng.uniform(0.5, 4.0)
        self._begin(fault, PROXIED, seconds, f"{seconds:.1f} s")
        self._stack.proxy.stall()
        await asyncio.sleep(seconds)
        self._stack.proxy.resume()

    async def _link_delay(self, fault: Fault, rng: random.Random) -> None:
        seconds, delay = rng.uniform(2, 6), rng.uniform(0.002, 0.03)
        self._begin(fault, PROXIED, seconds, f"{1000 * delay:.0f} ms a chunk for {seconds:.1f} s")
        self._stack.proxy.delay_s = delay
        await asyncio.sleep(seconds)
        self._stack.proxy.delay_s = 0.0

    async def _link_flip(self, fault: Fault, rng: random.Random) -> None:
        count = rng.randint(1, 3)
        what = rng.choice(["bits", "pages"])
        self._begin(fault, PROXIED, 5.0, f"{count} {what}")
        if what == "bits":
            self._stack.proxy.flips += count
        else:
            self._stack.proxy.page_flips += count
