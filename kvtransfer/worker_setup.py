"""What every worker builds at start: model, page pool, pool memory, runner, identity.

A torch module: only workers import it.
"""

from __future__ import annotations

import importlib.metadata
import os
import socket
import uuid
from dataclasses import dataclass

import torch

from pageferry.kernels.devices import pick_device, pick_dtype, pin_cores
from pageferry.kernels.model import Decoder, load_model
from pageferry.kernels.runner import ModelRunner
from pageferry.kvtransfer.handoff import Identity, host_id
from pageferry.kvtransfer.host_memory import available_bytes
from pageferry.kvtransfer.keys import Keys
from pageferry.kvtransfer.layout import KVLayout
from pageferry.kvtransfer.memory import PoolMemory
from pageferry.kvtransfer.model_files import resolve_model_dir, served_name
from pageferry.kvtransfer.pool import PagePool
from pageferry.kvtransfer.settings import SettingsError, WorkerSettings
from pageferry.kvtransfer.wire import WorkerRecord

MAX_DEFAULT_KV_MIB = 1024
MIN_PAGES = 4


@dataclass(frozen=True)
class WorkerParts:
    """The fixed parts of one worker process."""

    worker_id: str
    role: str
    settings: WorkerSettings
    keys: Keys
    model: Decoder
    pool: PagePool
    memory: PoolMemory
    runner: ModelRunner
    max_model_len: int
    memory_source: str

    @property
    def identity(self) -> Identity:
        return Identity(
            worker_id=self.worker_id,
            role=self.role,
            fingerprint=self.model.fingerprint,
            layout=self.memory.layout,
            num_pages=self.memory.num_pages,
            cluster_key=self.settings.cluster_key,
        )

    def record(self, state: str) -> WorkerRecord:
        """The registry record with everything that is known without the engine."""
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
            memory_source=self.memory_source,
            version=importlib.metadata.version("pageferry"),
        )


def build(role: str, settings: WorkerSettings) -> WorkerParts:
    """Pin cores, load the model, allocate the pool.

    Raises `SettingsError`, `ModelNotFound`, `UnsupportedModel` or `BadCheckpoint`, each with one
    sentence for the operator.
    """
    check(settings)
    pin_cores(settings.cores)
    device = pick_device(settings.device)
    dtype = pick_dtype(settings.dtype, device)
    if device.type != "cpu":
        raise SettingsError(
            "--device cuda: page pools in GPU memory are not built yet; use --device cpu"
        )
    model = load_model(resolve_model_dir(settings.model), device, dtype)
    config = model.config
    layout = KVLayout(
        dtype=str(dtype).removeprefix("torch."),
        page_size=settings.page_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    free, source = available_bytes()
    memory = PoolMemory.create(layout, _num_pages(settings, layout, free))
    shape = (
        layout.num_layers,
        memory.num_pages,
        2,
        layout.num_kv_heads,
        layout.page_size,
        layout.head_dim,
    )
    kv = torch.frombuffer(memory.buffer, dtype=dtype).view(shape)
    namespace = f"{model.fingerprint}:{layout}".encode()
    longest = min(
        settings.max_model_len or config.max_position_embeddings, config.max_position_embeddings
    )
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
        max_model_len=min(longest, memory.num_pages * layout.page_size),
        memory_source=source,
    )


def check(settings: WorkerSettings) -> None:
    """`SettingsError` for values that no worker can run with."""
    limits = {
        "page_size": (8, 128),
        "max_num_batched_tokens": (1, 1 << 20),
        "max_num_seqs": (1, 4096),
        "lease_s": (0.5, 60),
    }
    for name, (low, high) in limits.items():
        value = getattr(settings, name)
        if not low <= value <= high:
            flag = "--" + name.replace("_", "-")
            raise SettingsError(f"{flag} {value}: expected {low} to {high}")
    if settings.page_size % 8:
        raise SettingsError(f"--page-size {settings.page_size}: expected a multiple of 8")


def _num_pages(settings: WorkerSettings, layout: KVLayout, free_bytes: int) -> int:
    wanted = settings.kv_memory_mib << 20
    if not wanted:
        wanted = min(free_bytes // 10, MAX_DEFAULT_KV_MIB << 20)
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
