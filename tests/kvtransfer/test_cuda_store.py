"""The staging store, over a CPU tensor here and over a CUDA one where there is a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pageferry.kvtransfer import cuda_store
from pageferry.kvtransfer.cuda_store import HostLane, TensorStore, Turns
from pageferry.kvtransfer.handoff import Identity
from pageferry.kvtransfer.handoff_client import ClientOptions, HandoffClient
from pageferry.kvtransfer.handoff_server import HandoffServer, ServerOptions
from pageferry.kvtransfer.pool import PagePool

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def make_kv(layout, num_pages, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (
        layout.num_layers,
        num_pages,
        2,
        layout.num_kv_heads,
        layout.page_size,
        layout.head_dim,
    )
    return torch.randn(shape, generator=generator).to(device)


def test_pages_leave_in_order_and_land_where_they_should(world, device):
    source, target = make_kv(world.layout, 9, device), make_kv(world.layout, 7, device, 1)
    before = target.clone()
    out, into = TensorStore(source, world.layout), TensorStore(target, world.layout)
    for layer, pages, places in [(0, [8, 0, 3], [1, 6, 2]), (2, [5], [0])]:
        out.mark_ready(layer)
        (view,) = out.gather(layer, pages)
        (landing,) = into.landing(layer, places)
        landing[:] = view
        into.land(layer, places)
        assert torch.equal(target[layer, places], source[layer, pages])
    assert torch.equal(target[1], before[1])
    assert torch.equal(target[0, [0, 3, 4, 5]], before[0, [0, 3, 4, 5]])


def test_pages_outside_and_tensors_of_another_layout_are_errors(world, device):
    kv = make_kv(world.layout, 4, device)
    store = TensorStore(kv, world.layout)
    for pages in ([4], [-1]):
        with pytest.raises(IndexError):
            store.gather(0, pages)
    with pytest.raises(ValueError, match="does not have the layout"):
        TensorStore(kv, replace(world.layout, head_dim=8))
    with pytest.raises(ValueError, match="float32, the layout says float16"):
        TensorStore(kv, replace(world.layout, dtype="float16"))


def test_a_handoff_from_tensor_to_tensor_over_tcp(world, device):
    source, target = make_kv(world.layout, 6, device), make_kv(world.layout, 8, device, 1)
    before = target.clone()
    pool, inbox = PagePool(8, world.layout.page_size), world.Inbox()
    mine = Identity("d-1", "decode", "f" * 8, world.layout, 8, "key")
    memory = TensorStore(target, world.layout)
    with pytest.raises(ValueError, match="shm needs a PoolMemory"):
        HandoffServer(mine, pool, memory, inbox, ServerOptions())
    server = HandoffServer(mine, pool, memory, inbox, ServerOptions(transports=("tcp",)))
    server.start()
    world.stack.callback(server.close)
    record = replace(world.receiver().record, addresses=server.addresses)
    client = HandoffClient(
        replace(mine, worker_id="p", num_pages=6),
        record,
        TensorStore(source, world.layout),
        ClientOptions("tcp", 5.0),
    )
    world.stack.callback(client.close)
    client.connect()
    request = world.make_request(tokens=10)
    handoff = client.reserve(request, []).result(5)
    for layer in range(world.layout.num_layers):
        handoff.push(layer, 0, [5, 1, 2])
    handoff.seal(world.first_token(request)).result(5)
    (intake,) = inbox.intakes
    assert torch.equal(target[:, intake.page_ids], source[:, [5, 1, 2]])
    others = [page for page in range(8) if page not in intake.page_ids]
    assert torch.equal(target[:, others], before[:, others])


class LateLane(HostLane):
    """Copies when it is waited for and no earlier, as a GPU might at worst."""

    def __init__(self, store):
        super().__init__(store)
        self.waiting = {}

    def fetch(self, slot, layer, pages):
        assert slot not in self.waiting, "the slot is in use"
        self.waiting[slot] = lambda: HostLane.fetch(self, slot, layer, list(pages))

    def put(self, slot, layer, pages):
        assert slot not in self.waiting, "the slot is in use"
        self.waiting[slot] = lambda: HostLane.put(self, slot, layer, list(pages))

    def settle(self, slot):
        self.waiting.pop(slot, lambda: None)()


@pytest.fixture
def late(world):
    """A store whose copies are late, its tensor, and its one thread's lane."""
    kv = make_kv(world.layout, 9, "cpu")
    lanes = []

    def make_lane(store):
        lanes.append(LateLane(store))
        return lanes[-1]

    store = TensorStore(kv, world.layout, make_lane)
    store.gather(0, [0])
    return store, kv, lanes[0]


def bytes_of(kv, layer, pages):
    return kv[layer, pages].contiguous().view(torch.uint8).flatten().tolist()


def test_what_gather_returns_has_arrived_prepared_or_not(late):
    store, kv, lane = late
    (first,) = store.gather(0, [8, 2])
    store.prepare(1, [3, 4, 1])
    assert list(first) == bytes_of(kv, 0, [8, 2])  # still valid
    assert len(lane.waiting) == 1  # under way, not done
    (second,) = store.gather(1, [3, 4, 1])
    assert list(second) == bytes_of(kv, 1, [3, 4, 1])


def test_a_prepared_layer_that_was_written_since_is_fetched_again(late):
    store, kv, lane = late
    store.prepare(1, [3, 4])
    lane.settle(1)
    lane.settle(0)
    kv[1, 3] = 5.0
    store.mark_ready(1)
    (view,) = store.gather(1, [3, 4])
    assert list(view) == bytes_of(kv, 1, [3, 4])


def test_a_preparation_serves_the_next_call_only(late):
    store, kv, _ = late
    store.prepare(1, [3])
    (view,) = store.gather(1, [4])
    assert list(view) == bytes_of(kv, 1, [4])
    kv[1, 3] = 5.0  # nobody said so: what was fetched before may not be used
    (view,) = store.gather(1, [3])
    assert list(view) == bytes_of(kv, 1, [3])


def test_landing_waits_for_the_copy_out_of_its_buffer(late):
    store, kv, lane = late
    for page in range(5):
        (view,) = store.landing(2, [page])
        view[:] = bytes([page]) * len(view)
        store.land(2, [page])
    for slot in (0, 1):
        lane.settle(slot)
    for page in range(5):
        assert set(bytes_of(kv, 2, [page])) == {page}


def test_one_copy_is_under_way_while_the_next_buffer_fills(late):
    store, _, lane = late
    store.landing(0, [1])
    store.land(0, [1])
    store.landing(0, [2])
    assert len(lane.waiting) == 1


def test_a_call_beyond_the_staging_is_refused(world, monkeypatch):
    monkeypatch.setattr(cuda_store, "STAGING_BYTES", 3 * world.layout.page_bytes + 1)
    store = TensorStore(make_kv(world.layout, 9, "cpu"), world.layout)
    store.gather(0, [1, 2, 3])
    for call in (store.gather, store.prepare, store.landing, store.land):
        with pytest.raises(ValueError, match=r"4 pages of .* staging holds 3"):
            call(0, [1, 2, 3, 4])
        with pytest.raises(IndexError, match="layer 7"):
            call(7, [1])


def test_turns_alternate_and_forget():
    turns = Turns()
    assert [turns.take("a") for _ in range(3)] == [(1, False), (0, False), (1, False)]
    assert turns.prepare("b") == 0
    assert turns.take("b") == (0, True)
    assert turns.take("b") == (1, False)
    turns.prepare("c")
    assert turns.take(None) == (0, False)
    assert turns.take("c") == (1, False)
