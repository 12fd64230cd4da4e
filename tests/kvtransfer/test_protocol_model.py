"""All interleavings of two prefill workers, two decode workers and one gateway, as hypothesis finds
them: messages late or lost, cancels, lapsed leases, frozen and woken and killed processes, decode
workers that hand over to each other.

`PROTOCOL_MODEL_EXAMPLES` (default 80) is the number of schedules.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.kvtransfer.protocol_links import MAX_TOKENS, SEEN
from tests.kvtransfer.protocol_world import World, settle_down

LINKS, WORKERS, DECODERS = st.integers(0, 5), st.integers(0, 3), st.integers(0, 1)


class Protocol(RuleBasedStateMachine):
    """One step of one thread, or a round of all that are not slow."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    # --- how it usually goes

    @rule(rounds=st.integers(1, 3))
    def go_on(self, rounds: int) -> None:
        for _ in range(rounds):
            self.world.round()

    @rule(worker=WORKERS)
    def slow_worker(self, worker: int) -> None:
        self.world.round(slow=self.world.workers[worker])

    @rule(link=LINKS)
    def slow_link(self, link: int) -> None:
        self.world.round(slow=self.world.links[link])

    @rule(links=st.sampled_from([range(2), range(2, 4), range(4, 6), range(6)]), cut=st.booleans())
    def lost_answers(self, links: range, cut: bool) -> None:
        """COMMIT, for one, is on its way when the connection ends."""
        for _ in range(2):
            self.world.round(deaf=[self.world.links[link] for link in links])
        for link in links:
            self.end(link, hang_up=not cut)

    @rule()
    def slow_tokens(self) -> None:
        self.world.round(slow=self.world.gateway)

    # --- one thread's step

    @rule(worker=WORKERS)
    def work(self, worker: int) -> None:
        self.world.workers[worker].step()

    @rule(link=LINKS, count=st.integers(0, 4))
    def send(self, link: int, count: int) -> None:
        self.world.links[link].take()
        for _ in range(count):
            self.world.links[link].execute()

    @rule(link=LINKS, count=st.integers(1, 4))
    def receive(self, link: int, count: int) -> None:
        for _ in range(count):
            self.world.links[link].arrive()

    @rule(link=LINKS)
    def answer(self, link: int) -> None:
        self.world.links[link].hear()

    @rule(worker=WORKERS, count=st.integers(1, 3))
    def flush(self, worker: int, count: int) -> None:
        for _ in range(count):
            self.world.gateway.flush(self.world.workers[worker])
            self.world.gateway.read()

    @rule(worker=WORKERS)
    def read_control(self, worker: int) -> None:
        self.world.workers[worker].read_control()

    @rule()
    def look(self) -> None:
        self.world.gateway.look()

    @rule(worker=DECODERS)
    def drain(self, worker: int) -> None:
        self.world.receivers[worker].depart()

    @rule()
    def drain_both(self) -> None:
        for receiver in self.world.receivers:
            receiver.depart()

    # --- faults

    @rule(seconds=st.sampled_from([0.5, 1.5, 3.5, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(link=LINKS, hang_up=st.booleans())
    def end(self, link: int, hang_up: bool) -> None:
        found = self.world.links[link]
        if not hang_up:
            found.cut()
        elif found.receiver.is_awake:
            found.receiver_hangs_up()

    @rule(worker=WORKERS, seconds=st.sampled_from([0.0, 3.5, 6.0]))
    def freeze(self, worker: int, seconds: float) -> None:
        self.world.workers[worker].freeze()
        self.world.advance(seconds)

    @rule(worker=WORKERS)
    def thaw(self, worker: int) -> None:
        self.world.workers[worker].thaw()

    @rule(worker=WORKERS)
    def die_and_restart(self, worker: int) -> None:
        self.world.workers[worker].die()
        self.world.workers[worker].restart()

    @rule(name=st.sampled_from("ab"))
    def client_leaves(self, name: str) -> None:
        if self.world.gateway.generations[name].epoch > 1:  # else few requests would get far
            self.world.gateway.end(name)

    @invariant()
    def promises_hold(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        settle_down(self.world)


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(
    max_examples=int(os.environ.get("PROTOCOL_MODEL_EXAMPLES", "80")),
    stateful_step_count=50,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking would take minutes
    suppress_health_check=list(HealthCheck),
    deadline=None,
)


def test_without_faults_both_requests_are_decoded_under_their_first_epoch() -> None:
    world = World()
    settle_down(world)
    assert [len(g.tokens) for g in world.gateway.generations.values()] == [MAX_TOKENS] * 2
    assert all(g.epoch == 0 for g in world.gateway.generations.values())


def test_two_decode_workers_hand_over_to_each_other_at_once() -> None:
    before = SEEN["Commit, decode to decode"]
    world = World()
    d0, d1 = world.receivers
    d0.unwelcome, d1.unwelcome = "b", "a"
    for _ in range(20):
        if d0.running and d1.running:
            break
        world.round()
    d0.unwelcome = d1.unwelcome = ""
    d0.depart()
    d1.depart()
    settle_down(world)
    assert SEEN["Commit, decode to decode"] == before + 2
    assert all(g.epoch == 0 for g in world.gateway.generations.values())
