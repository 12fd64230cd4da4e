"""The staging store, over a CPU tensor here and over a CUDA one where there is a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pageferry.kvtransfer.cuda_store import TensorStore
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
