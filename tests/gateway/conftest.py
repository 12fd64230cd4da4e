"""A tiny model directory; gateways and fake workers (`fake_worker`) on a real Valkey."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pageferry.gateway.app import Gateway
from pageferry.gateway.requests import Generation
from pageferry.gateway.text import Tokenizer
from pageferry.kvtransfer.settings import GatewaySettings
from pageferry.kvtransfer.wire import SamplingParams
from tests.gateway.fake_worker import CONTEXT, EOS, LEASE_S, MODEL, FakeWorker

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token per byte, and two special tokens."""
    path = tmp_path_factory.mktemp("model") / MODEL
    path.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)]
    )
    backend.save(str(path / "tokenizer.json"))
    config = {"max_position_embeddings": CONTEXT, "vocab_size": 258, "eos_token_id": EOS}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    extra = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(extra))
    return path


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(model_dir)


@dataclasses.dataclass
class Cluster:
    """Gateways and fake workers on one Valkey."""

    url: str
    tokenizer: Tokenizer
    http: aiohttp.ClientSession
    gateways: list[Gateway] = dataclasses.field(default_factory=list)
    workers: list[FakeWorker] = dataclasses.field(default_factory=list)
    clients: list[openai.AsyncOpenAI] = dataclasses.field(default_factory=list)

    async def gateway(self, **settings: Any) -> Gateway:
        values = {"redis_url": self.url, "port": 0, "lease_s": LEASE_S, "drain_s": 0.2, **settings}
        gateway = Gateway(GatewaySettings(**values), MODEL, self.tokenizer)
        self.gateways.append(gateway)
        await gateway.start()
        await self.until(lambda: gateway.health.up)
        return gateway

    async def worker(self, role: str, name: str = "", **attributes: Any) -> FakeWorker:
        """A registered worker that the gateways know; prefill workers hand over to all others."""
        peers = [w for w in self.workers if w.role == "decode"]
        worker = FakeWorker(self.url, role, name or f"{role}-{len(self.workers)}", peers)
        self.workers.append(worker)
        for other in self.workers:
            if role == "decode" and other.role == "prefill":
                other.peers.append(worker)
        for attribute, value in attributes.items():
            setattr(worker, attribute, value)
        await worker.start()
        await self.until(lambda: all(worker.id in g.fleet.records for g in self.gateways))
        return worker

    @staticmethod
    async def until(condition: Callable[[], Any], timeout_s: float = 8.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.01)

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.gateways[0].port}"

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(base_url=f"{self.base}/v1", api_key="none", **options)
        self.clients.append(client)
        return client

    async def post(self, path: str = "/v1/completions", **fields: Any) -> tuple[int, Any]:
        """Status and parsed body of one call that is not streamed."""
        body = {"model": MODEL, **fields}
        async with self.http.post(self.base + path, json=body) as reply:
            return reply.status, await reply.json()

    async def events(self, path: str = "/v1/completions", **fields: Any) -> list[Any]:
        """Parsed events of one streamed call; "[DONE]" as a string."""
        body = {"model": MODEL, "stream": True, **fields}
        async with self.http.post(self.base + path, json=body) as reply:
            assert reply.status == 200, await reply.text()
            text = (await reply.read()).decode()
        lines = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def generations(self) -> list[Generation]:
        return [g for gw in self.gateways for g in gw.dispatcher.generations.values()]

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.base + path) as reply:
            return reply.status, await reply.json()

    async def metric(self, name: str, **labels: str) -> float:
        """Value of one series, 0 when it does not exist."""
        async with self.http.get(f"{self.base}/metrics") as reply:
            text = await reply.text()
        for line in text.splitlines():
            series, _, value = line.rpartition(" ")
            wanted = series.startswith(f"pageferry:{name}{{")
            if wanted and all(f'{k}="{v}"' in series for k, v in labels.items()):
                return float(value)
        return 0.0

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        for gateway in self.gateways:
            dispatcher = gateway.dispatcher
            waiting = sum(g.waiting for g in dispatcher.generations.values())
            assert dispatcher.num_waiting == waiting, "the count of waiting sequences is off"
            await gateway.stop()
        for worker in self.workers:
            await worker.close()


@pytest.fixture
async def cluster(redis_url: str, tokenizer: Tokenizer) -> AsyncIterator[Cluster]:
    """No gateways and no workers yet."""
    async with aiohttp.ClientSession() as http:
        cluster = Cluster(redis_url, tokenizer, http)
        try:
            yield cluster
        finally:
            await cluster.close()
    left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
    await asyncio.wait(left, timeout=1) if left else None
    assert not [t for t in left if not t.done()], "tasks were left behind"


@pytest.fixture
async def service(cluster: Cluster) -> Cluster:
    """One gateway, one prefill worker, one decode worker, all ready."""
    await cluster.gateway()
    await cluster.worker("decode")
    await cluster.worker("prefill")
    return cluster


@pytest.fixture
def make_generation() -> Callable[..., Generation]:
    """A queued generation with the prompt 1, 2, 3, outside of any gateway."""

    def make(**fields: Any) -> Generation:
        values: dict[str, Any] = {
            "id": "r",
            "prompt": array("i", (1, 2, 3)),
            "sampling": SamplingParams(max_tokens=10),
            "gateway": "g",
            "queue_class": "interactive",
            "arrived": 0.0,
            "deadline": 100.0,
            "wake": asyncio.Event(),
            **fields,
        }
        return Generation(**values)

    return make


@dataclasses.dataclass
class GatewayProcess:
    """A gateway as a process of its own; its workers are those of the test."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    tls: bool = False

    @property
    def base(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    async def until_ready(self) -> None:
        """Until it knows the test's workers."""
        async with asyncio.timeout(30), aiohttp.ClientSession() as http:
            while True:
                async with http.get(f"{self.base}/ready", ssl=False) as reply:
                    if reply.status == 200:
                        return
                await asyncio.sleep(0.02)

    def rss_mib(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.fixture
async def start_gateway(redis_url: str, model_dir: Path, tmp_path: Path) -> AsyncIterator[Any]:
    """`await start_gateway(env={…}, **settings)`: a `GatewayProcess` that answers /health."""
    started: list[GatewayProcess] = []

    async def start(env: dict[str, str] | None = None, **settings: Any) -> GatewayProcess:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        values = {"redis_url": redis_url, "model": model_dir, "port": port, "lease_s": LEASE_S}
        flags = [f"--{k.replace('_', '-')}={v}" for k, v in (values | settings).items()]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PAGEFERRY_")}
        log = tmp_path / f"gateway-{len(started)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(  # noqa: ASYNC220 - returns at once
                [sys.executable, "-m", "pageferry.gateway.main", *flags],
                stdout=out,
                stderr=out,
                env=clean | (env or {}),
            )
        gateway = GatewayProcess(process, port, log, "tls_cert" in settings)
        started.append(gateway)
        async with asyncio.timeout(30), aiohttp.ClientSession() as http:
            while True:
                assert process.poll() is None, log.read_text()
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(f"{gateway.base}/health", ssl=False):
                        return gateway
                await asyncio.sleep(0.02)

    yield start
    for gateway in started:
        gateway.process.terminate()
        assert await asyncio.to_thread(gateway.process.wait, 20) == 0, gateway.log.read_text()
