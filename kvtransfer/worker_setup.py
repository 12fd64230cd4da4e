"""What every worker builds at start: model, page pool, pool memory, runner, identity.

A torch module: only workers import it.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import socket
import time
import uuid
from dataclasses import dataclass

import torch

from pageferry.kernels import native
from pageferry.kernels.config import ModelConfig
from pageferry.kernels.cuda_graphs import GraphLimits, graphed
from pageferry.kernels.devices import parse_cores, pick_device, pick_dtype, pin_cores
from pageferry.kernels.model import Model, load_model
from pageferry.kernels.runner import ModelRunner
from pageferry.kvtransfer import alive_file
from pageferry.kvtransfer.core_flag import CoreFlag
from pageferry.kvtransfer.cuda_store import TensorStore
from pageferry.kvtransfer.device_health import Cuda, HealthMonitor
from pageferry.kvtransfer.ferry import Ferry
from pageferry.kvtransfer.handoff import Identity, host_id
from pageferry.kvtransfer.handoff_client import ClientOptions
from pageferry.kvtransfer.host_memory import available_bytes, default_pool_bytes
from pageferry.kvtransfer.keys import Keys
from pageferry.kvtransfer.layout import KVLayout
from pageferry.kvtransfer.memory import PageStore, PoolMemory
from pageferry.kvtransfer.model_files import resolve_model_dir, served_name
from pageferry.kvtransfer.nvml_devices import CudaId
from pageferry.kvtransfer.pool import PagePool
from pageferry.kvtransfer.settings import DecodeSettings, SettingsError, WorkerSettings
from pageferry.kvtransfer.tls import Tls
from pageferry.kvtransfer.wire import WorkerRecord

MIN_PAGES = 4
HEALTH_INTERVAL_S = 1.0


@dataclass(frozen=True)
class WorkerParts:
    """The fixed parts of one worker process."""

    worker_id: str
    role: str
    settings: WorkerSettings
    keys: Keys
    model: Model
    pool: PagePool
    memory: PageStore
    runner: ModelRunner
    max_model_len: int
    health: HealthMonitor
    core_flag: CoreFlag | None
    tls: Tls | None

    @property
    def identity(self) -> Identity:
        return Identity(
            worker_id=self.worker_id,
            role=self.role,
            fingerprint=self.model.fingerprint,
            layout=self.memory.layout,
            num_pages=self.memory.num_pages,
            cluster_key=self.settings.cluster_key,
            tls=self.tls,
        )

    @property
    def transports(self) -> tuple[str, ...]:
        """What this worker can offer: shared memory only where the pool lies in it."""
        if self.settings.transport != "auto":
            return (self.settings.transport,)
        return ("shm", "tcp") if isinstance(self.memory, PoolMemory) else ("tcp",)

    def ferry(self) -> Ferry:
        """For a worker that hands pages over."""
        transport = "auto" if len(self.transports) > 1 else self.transports[0]
        options = ClientOptions(transport, self.settings.handoff_timeout_s)
        return Ferry(self.identity, self.memory, self.keys, options)

    @property
    def blocked(self) -> str:
        """Why the device should get no more work; "" when it may."""
        last = self.health.last
        return f"device: {last.reason}" if last.verdict in ("stop", "unhealthy") else ""

    async def watch_health(self) -> None:
        """Poll the device once and wait. NVML calls may block, so in a thread."""
        await asyncio.to_thread(self.health.poll)
        await asyncio.sleep(HEALTH_INTERVAL_S)

    def record(self, state: str) -> WorkerRecord:
        """The registry record with everything that is known without the engine."""
        if state == "ready" and self.health.last.verdict == "unhealthy":
            state = "unhealthy"
        return WorkerRecord(
            id=self.worker_id,
            role=self.role,
            pid=os.getpid(),
            host=socket.gethostname(),
            state=state,
            model=self.keys.model,
            fingerprint=self.model.fingerprint,
            layout=self.memory.layout.to_dict(),
            ledger=self.pool.ledger(),
            max_model_len=self.max_model_len,
            host_id=host_id(),
            memory_source=self.health.source,
            version=importlib.metadata.version("pageferry"),
        )


def build(role: str, settings: WorkerSettings) -> WorkerParts:
    """Pin cores, load the model, allocate the pool.

    Raises `SettingsError`, `DeviceError`, `ModelNotFound`, `UnsupportedModel` or `BadCheckpoint`,
    each with one sentence for the operator.
    """
    check(settings)
    tls = Tls.from_settings(
        settings.handoff_tls_cert, settings.handoff_tls_key, settings.handoff_tls_ca
    )
    _begin_alive_file(settings.alive_file)
    pin_cores(settings.cores)
    device = _pick_device(settings)
    dtype = pick_dtype(settings.dtype, device)
    model, longest = _load_model(settings, device, dtype)
    layout = _layout(settings.page_size, model.config, dtype)
    kv, memory = _allocate(settings, layout, device)
    capacity = min(longest, memory.num_pages * layout.page_size)
    if role == "decode":
        model = graphed(model, kv, GraphLimits(settings.max_num_seqs, capacity, layout.page_size))
    namespace = f"{model.fingerprint}:{layout}".encode()
    return WorkerParts(
        worker_id=f"{settings.name or role}-{uuid.uuid4().hex[:8]}",
        role=role,
        settings=settings,
        keys=Keys(served_name(settings.model, settings.served_model_name)),
        model=model,
        pool=PagePool(
            memory.num_pages, layout.page_size, namespace, prefix_cache=settings.prefix_cache
        ),
        memory=memory,
        runner=ModelRunner(model, kv, layout.page_size),
        max_model_len=capacity,
        health=HealthMonitor.create(str(device), cuda=_lend(device)),
        core_flag=_core_flag(settings),
        tls=tls,
    )


def _begin_alive_file(path: str) -> None:
    """What an earlier worker wrote there is over, and this one can write there."""
    try:
        if path:
            alive_file.write(path, time.monotonic(), "starting")
    except OSError as error:
        raise SettingsError(
            f"--alive-file {path}: cannot be written ({error.strerror}); name a file in a "
            "directory that exists"
        ) from error


def _pick_device(settings: WorkerSettings) -> torch.device:
    device = pick_device(settings.device)
    if settings.transport == "shm" and device.type != "cpu":
        raise SettingsError(
            f"--transport shm: the pool of {device} is not in shared memory; use tcp"
        )
    return device


def _load_model(
    settings: WorkerSettings, device: torch.device, dtype: torch.dtype
) -> tuple[Model, int]:
    """The model, and the longest sequence in tokens that it is to compute."""
    path = resolve_model_dir(settings.model)
    native_len = ModelConfig.from_dir(path).max_position_embeddings
    longest = min(settings.max_model_len or native_len, native_len)
    os.environ[native.VARIABLE] = settings.cpu_kernels
    return load_model(path, device, dtype, longest, settings.deterministic), longest


def _layout(page_size: int, config: ModelConfig, dtype: torch.dtype) -> KVLayout:
    return KVLayout(
        dtype=str(dtype).removeprefix("torch."),
        page_size=page_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def _core_flag(settings: WorkerSettings) -> CoreFlag | None:
    """The flag that this worker shares with another; a borrower begins to look at it."""
    if not settings.core_flag:
        return None
    try:
        flag = CoreFlag(settings.core_flag)
    except OSError as error:
        raise SettingsError(
            f"--core-flag {settings.core_flag}: cannot be used ({error.strerror}); name a file in "
            "a directory that exists"
        ) from error
    if isinstance(settings, DecodeSettings) and settings.borrow_cores:
        native.borrow_cores(flag.address, parse_cores(settings.borrow_cores))
    return flag


def _allocate(
    settings: WorkerSettings, layout: KVLayout, device: torch.device
) -> tuple[torch.Tensor, PageStore]:
    """The pool as a tensor of KVLayout's shape, and the same bytes as the handoff sees them.

    On a CPU they lie in shared memory, on a GPU in its own memory, reached through staging.
    """
    if device.type == "cpu":
        free, _ = available_bytes()
        budget = default_pool_bytes(free)
    else:
        free, total = torch.cuda.mem_get_info(device)
        # Counted by what we took ourselves, so that workers sharing a card do not depend on
        # who loads first.
        budget = int(settings.gpu_memory_fraction * total) - torch.cuda.memory_reserved(device)
    num_pages = _num_pages(settings, layout, budget, free)
    shape = (
        layout.num_layers,
        num_pages,
        2,
        layout.num_kv_heads,
        layout.page_size,
        layout.head_dim,
    )
    dtype = getattr(torch, layout.dtype)
    if device.type == "cpu":
        memory = PoolMemory.create(layout, num_pages)
        return torch.frombuffer(memory.buffer, dtype=dtype).view(shape), memory
    kv = torch.zeros(shape, dtype=dtype, device=device)
    return kv, TensorStore(kv, layout)


def _lend(device: torch.device) -> Cuda | None:
    """What the health monitor may ask of torch about a GPU."""
    if device.type == "cpu":
        return None
    return Cuda(
        CudaId(uuid=str(torch.cuda.get_device_properties(device).uuid)),
        lambda: torch.cuda.mem_get_info(device),
        lambda: torch.cuda.memory_reserved(device),
    )


def check(settings: WorkerSettings) -> None:
    """`SettingsError` for values that no worker can run with."""
    limits = {
        "page_size": (8, 128),
        "max_num_batched_tokens": (1, 1 << 20),
        "max_num_seqs": (1, 4096),
        "lease_s": (0.5, 60),
        "engine_timeout_s": (1, 86_400),
        "drain_s": (0, 86_400),
        "handoff_timeout_s": (0.5, 3600),
        "max_inflight_handoffs": (1, 4096),
        "watermark_pages": (0, 1 << 20),
        "handoff_port": (0, 65_535),
    }
    for name, (low, high) in limits.items():
        value = getattr(settings, name, low)  # a role has not all of them
        if not low <= value <= high:
            flag = "--" + name.replace("_", "-")
            raise SettingsError(f"{flag} {value}: expected {low} to {high}")
    if settings.page_size % 8:
        raise SettingsError(f"--page-size {settings.page_size}: expected a multiple of 8")


def _num_pages(
    settings: WorkerSettings, layout: KVLayout, budget_bytes: int, free_bytes: int
) -> int:
    """Pages of the pool: as set, else what `budget_bytes` holds; never more than is free."""
    wanted = (settings.kv_memory_mib << 20) or budget_bytes
    pages = settings.num_pages or wanted // layout.bytes_per_page
    if pages < MIN_PAGES:
        raise SettingsError(
            f"a KV pool of {pages} pages is too small: one page takes {layout.bytes_per_page} "
            f"bytes and {MIN_PAGES} are needed; raise --kv-memory-mib"
        )
    if layout.pool_bytes(pages) > free_bytes:
        raise SettingsError(
            f"a KV pool of {layout.pool_bytes(pages) >> 20} MiB does not fit into the "
            f"{free_bytes >> 20} MiB that are available; lower --kv-memory-mib"
        )
    return pages
