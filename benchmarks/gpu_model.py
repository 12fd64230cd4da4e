"""Whole steps of a model on a GPU, and the ways of its pages to and from host memory."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import count

import torch
from gpu_kernels import Greedy
from gpu_measure import Bench, Row, Scale
from torch import Tensor

from pageferry.kernels.config import ModelConfig, RopeConfig
from pageferry.kernels.cuda_graphs import CudaCapture, GraphedDecoder, GraphLimits
from pageferry.kernels.model import Decoder, Layer, load_model
from pageferry.kernels.rope import cos_sin_table
from pageferry.kernels.runner import Chunk, ModelRunner, SampleSpec, build_batch
from pageferry.kvtransfer.cuda_store import TensorStore
from pageferry.kvtransfer.layout import KVLayout
from pageferry.kvtransfer.model_files import ModelNotFound, resolve_model_dir

DEMO = "SmolLM2-135M-Instruct"

WEIGHTS_SHARE = 0.45
"""Of the free memory; a smaller card gets fewer layers."""

POOL_SHARE = 0.7
"""Of what the weights leave."""


def config_of(scale: Scale, layers: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=layers,
        hidden_size=scale.hidden,
        num_heads=scale.heads,
        num_kv_heads=scale.kv_heads,
        head_dim=scale.head_dim,
        intermediate_size=scale.inner,
        vocab_size=scale.vocab,
        max_position_embeddings=longest(scale),
        rms_eps=1e-5,
        rope=RopeConfig(theta=5e5),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_embeddings=False,
        windows=(None,) * layers,
        attention_scale=scale.head_dim**-0.5,
    )


def longest(scale: Scale) -> int:
    """Tokens that the longest sequence of the benchmark grows to."""
    return max(*scale.prompts, max(scale.contexts) + 2 * scale.steps + 8)


def random_decoder(bench: Bench) -> Decoder:
    """Weights made on the device: every product keeps the size of what it is given."""
    s, device, dtype = bench.scale, bench.device, bench.dtype
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    per_layer = (q + 2 * kv) * s.hidden + q * s.hidden + 3 * s.inner * s.hidden
    layers = s.layers
    if not bench.dry:
        free, _ = torch.cuda.mem_get_info(device)
        room = free * WEIGHTS_SHARE / dtype.itemsize - 2 * s.vocab * s.hidden
        layers = max(1, min(layers, int(room // per_layer)))
    config = config_of(s, layers)

    def matrix(rows: int, columns: int) -> Tensor:
        weight = torch.empty(rows, columns, device=device, dtype=dtype)
        return weight.normal_(0, columns**-0.5)

    def layer() -> Layer:
        ones = torch.ones(s.hidden, device=device, dtype=dtype)
        return Layer(
            input_norm=ones,
            qkv=matrix(q + 2 * kv, s.hidden),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            o=matrix(s.hidden, q),
            o_bias=None,
            post_norm=ones,
            gate_up=matrix(2 * s.inner, s.hidden),
            gate_up_bias=None,
            down=matrix(s.hidden, s.inner),
            down_bias=None,
        )

    return Decoder(
        config=config,
        fingerprint="random",
        embedding=matrix(s.vocab, s.hidden),
        layers=tuple(layer() for _ in range(layers)),
        final_norm=torch.ones(s.hidden, device=device, dtype=dtype),
        lm_head=matrix(s.vocab, s.hidden),
        rope_table=cos_sin_table(config.rope, s.head_dim, longest(s)).to(device),
    )


@dataclass(frozen=True)
class Served:
    """A model with a pool full of finite values; sequences may share pages, as timing allows."""

    name: str
    model: Decoder
    kv: Tensor
    page_size: int

    @property
    def num_pages(self) -> int:
        return self.kv.shape[1]

    def chunk(self, sequence: int, start: int, tokens: int) -> Chunk:
        """The next `tokens` of a sequence that has `start` already, to be sampled greedily."""
        pages = -(-(start + tokens) // self.page_size)
        table = [(sequence * pages + i) % self.num_pages for i in range(pages)]
        ids = array("i", [(7 * sequence + i) % 251 for i in range(tokens)])
        spec = SampleSpec(Greedy(), array("i", [0]) * (start + tokens), start + tokens)
        return Chunk(ids, start, array("i", table), spec)


def serve(bench: Bench, name: str, model: Decoder) -> Served:
    """With a pool as large as the largest batch needs, or as the memory allows."""
    s, c = bench.scale, model.config
    wanted = max(s.batches) * -(-longest(s) // s.page_size)
    page = 2 * c.num_kv_heads * s.page_size * c.head_dim
    if not bench.dry:
        free, _ = torch.cuda.mem_get_info(bench.device)
        fits = int(free * POOL_SHARE) // (page * c.num_layers * bench.dtype.itemsize)
        wanted = max(1, min(wanted, fits))
    shape = (c.num_layers, wanted, 2, c.num_kv_heads, s.page_size, c.head_dim)
    kv = torch.empty(shape, dtype=bench.dtype, device=bench.device)
    for layer in kv:
        layer.normal_()
    return Served(name, model, kv, s.page_size)


def again(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """The dry run's stand-in for a captured graph: the pass itself, run again."""
    output = run().clone()

    def replay() -> None:
        output.copy_(run())

    return replay, output


def with_graphs(bench: Bench, served: Served) -> Served:
    s = bench.scale
    limits = GraphLimits(max(s.batches), max(s.contexts) + 2 * s.steps + 8, s.page_size)
    capture = again if bench.dry else CudaCapture(bench.device)
    began = time.monotonic()
    graphed = GraphedDecoder(served.model, served.kv, limits, capture)
    bench.sync()
    seconds = time.monotonic() - began
    bench.rows.append(Row("model", f"{served.name}: capture of all graphs", seconds, "s"))
    return Served(served.name, graphed, served.kv, served.page_size)


def check_graphs(bench: Bench, eager: Served, graphed: Served) -> None:
    """A padded step, replayed, against the same step run eagerly."""
    with bench.case("model", f"{eager.name}: a replayed step equals the eager one"):
        context = bench.scale.contexts[0]
        chunks = [eager.chunk(i, context - 7 * i, 1) for i in range(3)]
        with torch.inference_mode():
            ids, batch = build_batch(chunks, eager.page_size, bench.device)
            want = eager.model.forward(ids, batch, eager.kv).float()
            ids, batch = build_batch(chunks, eager.page_size, bench.device)
            assert isinstance(graphed.model, GraphedDecoder)
            assert graphed.model.graph_for(batch) is not None, "no graph serves this step"
            got = graphed.model.forward(ids, batch, graphed.kv).float()
        assert want.isfinite().all(), "the eager step is not finite"
        # cuBLAS may choose another kernel for the padded size, so not bitwise.
        worst = float((got - want).abs().max() / want.square().mean().sqrt())
        assert worst < 0.1, f"differs by {worst:.3f} of the root mean square"


def decode_step(runner: ModelRunner, chunks: list[Chunk], context: int) -> Callable[[], None]:
    """One more token for every sequence at each call, from `context` on."""
    starts = count(context)

    def step() -> None:
        start = next(starts)
        for chunk in chunks:  # their tables reach as far as the last step needs
            chunk.start = start
        results = runner.execute(chunks)
        assert all(r is not None and not r.error for r in results), results

    return step


def measure_decode(bench: Bench, served: Served, mode: str) -> None:
    """Whole steps through the runner: tensors, model, sampling, and the tokens back on the host."""
    runner = ModelRunner(served.model, served.kv, served.page_size)
    c = served.model.config
    token_bytes = c.num_layers * 2 * c.num_kv_heads * c.head_dim * bench.dtype.itemsize
    head = served.model.embedding.numel() * bench.dtype.itemsize
    tied = served.model.lm_head is served.model.embedding
    weights = served.model.num_bytes - (0 if tied else head)
    for context in bench.scale.contexts:
        for sequences in bench.scale.batches:
            name = f"{served.name}: decode {sequences} x {context}, {mode}"
            with bench.case("model", name):
                last = context + 2 * bench.scale.steps + 8
                chunks = [served.chunk(i, last - 1, 1) for i in range(sequences)]

                step = decode_step(runner, chunks, context)
                seconds = bench.wall_seconds(step, bench.scale.steps)
                least = weights + token_bytes * sequences * (context + bench.scale.steps // 2)
                bound = least / bench.bytes_per_s if bench.bytes_per_s else math.nan
                bench.rows.append(
                    Row("model", name, sequences / seconds, "tok/s", seconds * 1e3, bound / seconds)
                )


def measure_prefill(bench: Bench, served: Served) -> None:
    runner = ModelRunner(served.model, served.kv, served.page_size)
    c, model = served.model.config, served.model
    parameters = sum(
        t.numel()
        for layer in model.layers
        for f in fields(layer)
        if (t := getattr(layer, f.name)) is not None and t.dim() == 2
    )
    for tokens in bench.scale.prompts:
        if tokens > model.max_positions:
            continue
        name = f"{served.name}: prefill of {tokens}"
        with bench.case("model", name):
            chunk = served.chunk(0, 0, tokens)

            def step(chunk: Chunk = chunk) -> None:
                (result,) = runner.execute([chunk])
                assert result is not None, "no token"
                assert not result.error, result.error

            seconds = bench.wall_seconds(step, 5 if not bench.dry else 1)
            attention = 2 * c.num_heads * c.head_dim * tokens**2 * c.num_layers
            flops = 2 * parameters * tokens + attention + 2 * model.lm_head.numel()
            rate = flops / seconds / bench.flop_per_s if bench.flop_per_s else None
            bench.rows.append(Row("model", name, tokens / seconds, "tok/s", seconds * 1e3, rate))


def measure_staging(bench: Bench, served: Served) -> None:
    """`TensorStore` between pool and pinned memory, against a plain pinned copy."""
    c = served.model.config
    layout = KVLayout(
        str(bench.dtype).removeprefix("torch."),
        served.page_size,
        c.num_layers,
        c.num_kv_heads,
        c.head_dim,
    )
    _pinned_copies(bench)
    with bench.case("staging", "pages come back as they were"):
        store = TensorStore(served.kv, layout)
        pages = list(range(0, min(2 * store.max_pages, served.num_pages), 2))[: store.max_pages]
        before = served.kv[1, pages].clone()
        (view,) = store.gather(1, pages)
        kept = bytes(view)
        served.kv[1, pages] = 0
        (landing,) = store.landing(1, pages)
        landing[:] = kept
        store.land(1, pages)
        assert torch.equal(served.kv[1, pages], before)  # on the computing stream
    for size in (1 << 20, 4 << 20):
        at_once = max(1, min(size // layout.page_bytes, served.num_pages))
        name = f"{at_once * layout.page_bytes / 2**20:.2f} MiB a call"
        calls = bench.scale.staging_calls
        with bench.case("staging", name):
            store = TensorStore(served.kv, layout)
            lists = [
                [(7 * call + 2 * i) % served.num_pages for i in range(at_once)]
                for call in range(calls)
            ]
            for direction, move in (("out", _send), ("in", _receive)):
                move(store, lists[:2])
                bench.sync()
                began = time.perf_counter()
                move(store, lists)
                bench.sync()
                seconds = time.perf_counter() - began
                speed = calls * at_once * layout.page_bytes / seconds / 1e9
                bench.rows.append(
                    Row("staging", f"{direction}, {name}", speed, "GB/s", seconds / calls * 1e3)
                )


def _send(store: TensorStore, lists: list[list[int]]) -> None:
    for number, pages in enumerate(lists):
        store.gather(0, pages)
        if number + 1 < len(lists):
            store.prepare(0, lists[number + 1])


def _receive(store: TensorStore, lists: list[list[int]]) -> None:
    for pages in lists:
        store.landing(0, pages)
        store.land(0, pages)


def _pinned_copies(bench: Bench) -> None:
    size = bench.scale.copy_bytes // 4
    with bench.case("staging", "plain pinned copies"):
        host = torch.ones(size, dtype=torch.uint8, pin_memory=not bench.dry)
        there = torch.empty(size, dtype=torch.uint8, device=bench.device)
        for name, target, source in (("out", host, there), ("in", there, host)):
            seconds = bench.wall_seconds(lambda t=target, s=source: t.copy_(s), 5)
            bench.rows.append(
                Row(
                    "staging",
                    f"{name}, one pinned copy",
                    size / seconds / 1e9,
                    "GB/s",
                    seconds * 1e3,
                )
            )


def measure_peer(bench: Bench) -> None:
    if bench.dry or torch.cuda.device_count() < 2:
        bench.rows.append(Row("staging", "peer copy", 0, "GB/s", note="one GPU: not measured"))
        return
    with bench.case("staging", "peer copy"):
        other = torch.device("cuda", 1 - (bench.device.index or 0))
        direct = torch.cuda.can_device_access_peer(bench.device, other)
        source = torch.ones(bench.scale.copy_bytes, dtype=torch.uint8, device=bench.device)
        target = torch.empty_like(source, device=other)
        seconds = bench.wall_seconds(lambda: target.copy_(source), 5)
        note = "direct" if direct else "through the host"
        bench.rows.append(
            Row("staging", "peer copy", source.numel() / seconds / 1e9, "GB/s", note=note)
        )


def measure_models(bench: Bench) -> None:
    """A random model of the scale's size, then the demo model if it is prepared."""
    with bench.case("model", "a random model is made"):
        served = serve(bench, f"{bench.scale.layers} layers", random_decoder(bench))
        layers = served.model.config.num_layers
        size = served.model.num_bytes / 1e9
        bench.rows.append(
            Row("model", "weights", size, "GB", note=f"{layers} layers, {served.num_pages} pages")
        )
        _measure(bench, served)
        measure_staging(bench, served)
        del served
    if bench.dry:
        return
    torch.cuda.empty_cache()
    with bench.case("model", f"{DEMO} is loaded"):
        try:
            path = resolve_model_dir(DEMO)
        except ModelNotFound as missing:
            bench.rows.append(Row("model", DEMO, 0, "", note=f"not measured: {missing}"))
            return
        model = load_model(path, bench.device, bench.dtype, max_positions=longest(bench.scale))
        assert isinstance(model, Decoder), type(model)
        _measure(bench, serve(bench, DEMO, model))


def _measure(bench: Bench, served: Served) -> None:
    measure_decode(bench, served, "eager")
    with bench.case("model", f"{served.name}: graphs are captured"):
        graphed = with_graphs(bench, served)
        check_graphs(bench, served, graphed)
        measure_decode(bench, graphed, "graphs")
    measure_prefill(bench, served)
