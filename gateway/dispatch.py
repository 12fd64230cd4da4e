"""Gets generations to workers, keeps them going, takes them back. The only place that resubmits.

    submit ──► queued ──► owned ──► finished        (the way of nearly all requests)
                  ▲          │
                  └─ resubmit┘  worker death, REQUEUE, gap, loss: next epoch, tokens so far kept

Before a generation goes out again, all workers are told to drop the earlier epoch, and the entry of
that epoch leaves its queue. Where it goes: to the shared prefill queues while a prefill worker is
ready and large enough, else straight to the decode worker with the most room. What has tokens is
continued only by workers with the weights that made them: while others read the shared queues too,
by a decode worker alone, and it is taken back from others that got it before they were known.

Without any worker that could take it now it stays parked, until its deadline if the only ones are
short of memory. If nobody who is here could ever take it, it ends after `worker_wait_s`.

When a worker dies, everything that it had may be the cause. After two deaths in a row without two
new tokens between them a generation is a suspect, and suspects go out one at a time: the next one
when the one before has ended or got on by two tokens. So the third death condemns the poisonous
request only, and no bystander that shared its workers before. That is per gateway: suspects of two
gateways may share a worker, and a bystander among them may be condemned with the cause.

Runs on the event loop and never waits for Redis, except in `submit`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pageferry.gateway.endings import (
    condemned,
    dead_letter,
    log_end,
    nobody,
    out_of_time,
    worker_error,
)
from pageferry.gateway.errors import ApiError, unavailable
from pageferry.gateway.fleet import Fleet
from pageferry.gateway.metrics import GatewayMetrics
from pageferry.gateway.outbox import Command, Job, Outbox
from pageferry.gateway.requests import Entry, Generation, Verdict
from pageferry.kvtransfer import metric_names as names
from pageferry.kvtransfer.bus import control_command
from pageferry.kvtransfer.keys import FIELD, PREFILL_GROUP, Keys
from pageferry.kvtransfer.retries import growing_pause
from pageferry.kvtransfer.settings import GatewaySettings
from pageferry.kvtransfer.wire import Cancel, Event, Kind, pack, pack_control

log = logging.getLogger(__name__)

SUBMIT_TIMEOUT_S = 1.5
"""How long a new call waits for Redis before it is refused with 503."""
MAX_DEATHS = 3
"""Deaths of workers, or failed handoffs, in a row after which their request is the cause."""
CAUSES = {
    "step_failed": "worker_failure",
    "internal_error": "worker_failure",
    "handoff_failed": "handoff_failed",
}
"""Causes of resubmission by the code of a REQUEUE event; others are no fault of the request."""
BLAMED = ("worker_death", "worker_failure", "handoff_failed")
FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 2.0
STRANGER_PAUSE_S = 0.1
"""Before what a stranger fetched goes out again; perhaps the next look at the registry shows it."""


class Dispatcher:
    def __init__(
        self,
        outbox: Outbox,
        keys: Keys,
        settings: GatewaySettings,
        fleet: Fleet,
        metrics: GatewayMetrics,
    ) -> None:
        self.generations: dict[str, Generation] = {}
        """Those that have not ended, by id."""
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()
        self.num_waiting = 0
        """How many of `generations` have no token yet."""
        self._outbox = outbox
        self._keys = keys
        self._settings = settings
        self._fleet = fleet
        self._metrics = metrics
        self._isolated: Generation | None = None
        """The suspect that is out now."""
        self._loop = asyncio.get_running_loop()

    # --- what handlers call ----------------------------------------------------------------

    async def submit(self, generations: Sequence[Generation]) -> None:
        """Queue new generations. `ApiError` 503: Redis is away, or no decode worker takes any."""
        if reason := self._fleet.why_not_ready():
            self._metrics.count(names.REQUESTS_REFUSED, 1, "503")
            raise nobody(reason)
        results: list[asyncio.Future[None]] = []
        jobs: list[Job | None] = []
        taken = False
        for generation in generations:
            self.generations[generation.id] = generation
            self.num_waiting += 1
            self.idle.clear()
            self._metrics.count(names.REQUESTS_ACCEPTED)
            if generation.spent:  # Nothing to generate: max_tokens 0 with echo.
                generation.finish, generation.parked = generation.spent, False
                generation.wake.set()
                continue
            result = self._loop.create_future()
            results.append(result)
            jobs.append(self._push(generation, result))
        try:
            async with asyncio.timeout(SUBMIT_TIMEOUT_S):
                await asyncio.gather(*results)
            taken = True
        except TimeoutError:
            pass  # raised below: with this one as its context it would keep these frames
        finally:
            for job in jobs:
                if job is not None:
                    job.wanted = taken
        if not taken:
            raise unavailable("Redis does not answer; try again.", "redis_unavailable", 2)

    def end(self, generation: Generation, outcome: str, error: ApiError | None = None) -> None:
        """Close a generation for good; if a worker has it, that worker is told. Idempotent."""
        if generation.done:
            return
        if generation.active:
            self._recall(generation)
        was_accepted = self.generations.pop(generation.id, None) is not None
        if was_accepted and generation.waiting:
            self.num_waiting -= 1
        generation.close(outcome, error)
        if generation is self._isolated:
            self._next_suspect()
        if not self.generations:
            self.idle.set()
        now = self._loop.time()
        if was_accepted:
            self._metrics.ended(generation, now)
        log_end(generation, now)

    # --- what the token reader and the watcher call ------------------------------------------

    def on_event(self, event: Event, now: float) -> None:
        """Take in one event that was read at `now`. Runs once per token: 2 µs if all is well."""
        generation = self.generations.get(event.request_id)
        if generation is None:
            return
        if not generation.owner and self._is_stranger(event, generation):
            self.resubmit(generation, "other_weights")
            return
        before = len(generation.tokens)
        verdict = generation.apply(event, now)
        if event.kind is Kind.TOKENS:
            gained = len(generation.tokens) - before
            if gained < len(event.token_ids):
                self._metrics.count(names.DUPLICATE_TOKENS, len(event.token_ids) - gained)
            if gained:
                self._note_tokens(generation, gained, now)
        if verdict is not Verdict.TOKENS and verdict is not Verdict.FINISHED:
            self._react(generation, event, verdict)

    def _is_stranger(self, event: Event, generation: Generation) -> bool:
        """Whether it comes from a worker that may not go on with the tokens so far.

        Asked of an epoch's first owner only: it hands over to workers with its own weights.
        """
        return (
            generation.active
            and event.epoch == generation.epoch
            and not self._fleet.may_continue(event.worker, generation.maker)
        )

    def _react(self, generation: Generation, event: Event, verdict: Verdict) -> None:
        """What follows from an event beyond bookkeeping."""
        if verdict is Verdict.GAP:
            self.resubmit(generation, "gap")
        elif verdict is Verdict.REQUEUE:
            self.resubmit(generation, CAUSES.get(event.code, "requeue"))
        elif verdict is Verdict.ERROR:
            self.end(generation, "error", worker_error(event))

    def _note_tokens(self, generation: Generation, gained: int, now: float) -> None:
        if generation.last_token is None:
            self.num_waiting -= 1
            generation.first_token = now
            prompt = len(generation.prompt)
            self._metrics.observe(names.TIME_TO_FIRST_TOKEN, now - generation.arrived)
            self._metrics.count(names.PROMPT_TOKENS, prompt)
            self._metrics.count(names.PREFIX_CACHE_QUERIES, prompt)
            self._metrics.count(names.PREFIX_CACHE_HITS, min(prompt, generation.cached_tokens))
        else:
            self._metrics.token_gap((now - generation.last_token) / gained, gained)
        generation.last_token = now
        if generation is self._isolated and generation.has_progressed:
            self._next_suspect()

    def on_workers_missing(self, live: set[str], seen_at: float, left: set[str]) -> None:
        """Take back what belongs to workers that are not in `live`, as read at `seen_at`.

        What was assigned after `seen_at` is left alone: its worker may be newer than the look.
        Workers in `left` went on purpose: that is no death.
        """
        for generation in list(self.generations.values()):
            holder = generation.holder
            if not generation.active or not holder or holder in live:
                continue
            if generation.assigned < seen_at:
                cause = "requeue" if holder in left else "worker_death"
                self.resubmit(generation, cause)

    def holders(self) -> set[str]:
        """Workers that answer for something, as far as we know."""
        return {g.holder for g in self.generations.values() if g.active and g.holder}

    def on_claim_lost(self, request_id: str, epoch: int) -> None:
        """A dead worker had claimed this request; its entry has been removed already."""
        generation = self.generations.get(request_id)
        if generation is not None and generation.active and generation.epoch == epoch:
            self.resubmit(generation, "worker_death")

    def on_possible_loss(self) -> None:
        """Redis may have lost messages (restart, flush) or our lease lapsed: doubt everything."""
        now = self._loop.time()
        for generation in self.generations.values():
            if generation.active and not generation.parked:
                generation.doubted_since = now

    def tick(self) -> None:
        """Enforce deadlines; end what nobody can take; resubmit what is doubted and silent."""
        now = self._loop.time()
        silence, patience = 2 * self._settings.lease_s + 1, self._settings.worker_wait_s
        for generation in list(self.generations.values()):
            if not generation.active:
                continue
            if self._has_hope(generation):
                generation.hopeless_since = None
            elif generation.hopeless_since is None:
                generation.hopeless_since = now
            if now >= generation.deadline:
                error = out_of_time(self._settings.request_timeout_s)
                self.end(generation, "error", error)
            elif now - (generation.hopeless_since or now) > patience:
                self._end_or_move(generation)
            elif now - (generation.doubted_since or now) > silence:
                self.resubmit(generation, "lost")

    def _has_hope(self, generation: Generation) -> bool:
        """Whether somebody who is here could take it some day, or take it over.

        What a decode worker has is left to it, also while that one drains. A prefill worker hands
        over to decode workers with its own weights.
        """
        holder = self._fleet.records.get(generation.holder)
        maker = holder.id if holder else generation.maker
        is_decoding = holder is not None and holder.role == "decode"
        return is_decoding or not self._fleet.why_nobody(generation.num_tokens, maker)

    def _end_or_move(self, generation: Generation) -> None:
        """Tell the client, unless it is only its holder that cannot get on with it."""
        reason = self._fleet.why_nobody(generation.num_tokens, generation.maker)
        if reason:
            self.end(generation, "error", nobody(reason))
        else:
            self.resubmit(generation, "reroute")

    def reroute(self) -> None:
        """After a look at the registry: move what lies where nobody will fetch it."""
        stranded = self._fleet.has_decode and not self._fleet.has_prefill
        now = self._loop.time()
        for generation in list(self.generations.values()):
            entry = generation.entry
            if generation.parked and generation.resubmissions:
                if generation.send_at <= now:  # else its pause is not over
                    self._send_again(generation, generation.epoch)
            elif stranded and entry is not None and not entry.worker and not generation.owner:
                self.resubmit(generation, "reroute")

    # --- resubmission ------------------------------------------------------------------------

    def resubmit(self, generation: Generation, cause: str) -> None:
        """Take a generation back from whoever has it and send it out under the next epoch."""
        if not generation.active:
            return
        holder = generation.holder
        self._recall(generation)
        by_stranger = cause == "other_weights"
        generation.next_epoch(was_tried=not by_stranger)
        blames = 0
        if cause in BLAMED:
            blames = generation.blame(for_handoff=cause == "handoff_failed")
        self._metrics.count(names.REQUEST_RESUBMISSIONS, 1, cause)
        log.info(
            "resubmit id=%s cause=%s worker=%s epoch=%d tokens=%d",
            generation.id, cause, holder or "-", generation.epoch, len(generation.tokens),
        )  # fmt: skip
        if blames >= MAX_DEATHS:
            self._give_up(generation)
            return
        if generation.spent:
            generation.finish = generation.spent
            generation.parked = False
            generation.wake.set()
            return
        pause = 0.0
        if by_stranger:
            pause = STRANGER_PAUSE_S
        elif generation.fruitless > 1:
            pause = growing_pause(generation.fruitless - 1, FIRST_PAUSE_S, MAX_PAUSE_S)
        generation.send_at = self._loop.time() + pause
        self._loop.call_later(pause, self._send_again, generation, generation.epoch)

    def _send_again(self, generation: Generation, epoch: int) -> None:
        """Send out what is parked, unless it is a suspect and another one is out.

        A suspect that nobody can take now gives way to the next; `reroute` comes back to it.
        """
        if not generation.active or not generation.parked or generation.epoch != epoch:
            return
        if generation.is_suspect:
            if self._isolated is None or not self._isolated.active:
                self._isolated = generation
            if self._isolated is not generation:
                return
        self._push(generation, None)
        if generation.parked and generation is self._isolated:
            self._isolated = None

    def _next_suspect(self) -> None:
        """The isolated one has ended or is cleared: the next one may go out."""
        self._isolated = None
        now = self._loop.time()
        for generation in list(self.generations.values()):
            if generation.is_suspect and generation.parked and generation.send_at <= now:
                self._send_again(generation, generation.epoch)
                if self._isolated is not None:
                    return

    def _give_up(self, generation: Generation) -> None:
        self._outbox.put(Job([dead_letter(generation, self._keys)], keep=True))
        self.end(generation, "error", condemned(MAX_DEATHS))

    def _recall(self, generation: Generation) -> None:
        """Tell all workers to drop the present epoch, and take its entry out of the queue."""
        if generation.parked:
            return
        cancel = pack_control([Cancel(generation.id, generation.epoch)])
        commands: list[Command] = [control_command(self._keys, cancel)]
        if generation.entry is not None:
            commands = [*remove_entry(generation.entry), *commands]
        self._outbox.put(Job(commands, keep=True))

    # --- queueing ----------------------------------------------------------------------------

    def _push(self, generation: Generation, result: asyncio.Future[None] | None) -> Job | None:
        """Send to a queue; without a worker to send to, leave it parked and return None."""
        try:
            worker = self._choose_decode(generation)
        except ApiError as refusal:
            if result is not None:
                result.set_exception(refusal)
            return None
        resumed = "resume" if generation.resubmissions else generation.queue_class
        queue = self._keys.decode_queue(worker) if worker else self._keys.prefill_queue(resumed)
        payload = pack(generation.request(self._loop.time()).to_dict())
        commands: list[Command] = [("XADD", queue, "*", FIELD, payload)]
        if worker:  # The stream of a worker that is no more must not stay for ever.
            lifetime_ms = int(self._settings.request_timeout_s * 1000) + 60_000
            commands.append(("PEXPIRE", queue, lifetime_ms))
        generation.parked = False
        generation.assigned = self._loop.time()
        place = Entry(queue, b"", worker)
        done = partial(self._pushed, generation, generation.epoch, place, result)
        job = Job(commands, done)
        self._outbox.put(job)
        return job

    def _choose_decode(self, generation: Generation) -> str:
        """The decode worker that is to do all of it; empty to leave it to the prefill queues.

        `ApiError` 503 when nobody can take it now."""
        num_tokens, maker = generation.num_tokens, generation.maker
        if reason := self._fleet.why_nobody(num_tokens, maker):
            raise nobody(reason)
        is_long = num_tokens > self._settings.local_prefill_tokens
        if is_long and self._fleet.can_prefill(num_tokens, maker):
            return ""
        record = self._fleet.pick_decode(num_tokens, maker)
        if record is None:
            text = (
                f"No decode worker takes a sequence of {num_tokens} tokens now: the ones that "
                "could hold it are short of memory."
            )
            raise unavailable(text, retry_after=2)
        return record.id

    def _pushed(
        self,
        generation: Generation,
        epoch: int,
        place: Entry,
        result: asyncio.Future[None] | None,
        replies: list[Any],
        error: Exception | None,
    ) -> None:
        current = generation.active and generation.epoch == epoch
        if error is None:
            entry = replace(place, id=replies[0])
            if current:
                generation.entry = entry
            else:
                self._outbox.put(Job(remove_entry(entry), keep=True))
        elif current and result is None:
            # Redis may have taken it or not: only another epoch is sure to run once.
            self._recall(generation)
            generation.next_epoch()
        if result is not None and not result.done():
            if error is None:
                result.set_result(None)
            else:
                text = "Redis does not take requests now; try again."
                result.set_exception(unavailable(text, "redis_unavailable", 2))


def remove_entry(entry: Entry) -> list[Command]:
    """Commands that take a request out of its queue, claimed or not; harmless when it is gone."""
    commands: list[Command] = [("XDEL", entry.queue, entry.id)]
    if not entry.worker:
        commands.insert(0, ("XACK", entry.queue, PREFILL_GROUP, entry.id))
    return commands
