"""The import table of the design, kept true: who may import whom, and what the gateway must not."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "kvtransfer", "gateway", "prefill_worker", "decode_worker", "compose")
TENSOR_LIBRARIES = {"torch", "triton", "transformers", "numpy", "safetensors", "gguf"}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).glob("**/*.py"))


def imported(path: Path) -> Iterator[str]:
    """Full names of everything that a file imports, wherever in the file it does."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            if node.module == "pageferry" or node.module in {f"pageferry.{f}" for f in FOLDERS}:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module


def ours(path: Path) -> set[str]:
    """Folder names of our own that a file imports from."""
    return {name.split(".")[1] for name in imported(path) if name.startswith("pageferry.")}


def third_party(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)} - {"pageferry"}


def by_name(name: str) -> Path:
    """File of a module of ours, e.g. `pageferry.kvtransfer.wire`."""
    _, folder, module = name.split(".")[:3]
    return ROOT / folder / f"{module}.py"


def is_torch_free(path: Path) -> bool:
    """Neither it nor anything of ours that it imports needs a tensor library."""
    seen, waiting = set[Path](), [path]
    while waiting:
        path = waiting.pop()
        if third_party(path) & TENSOR_LIBRARIES:
            return False
        seen.add(path)
        found = {by_name(name) for name in imported(path) if name.startswith("pageferry.")}
        waiting += found - seen
    return True


ALLOWED = {
    "kernels": {"kernels"},
    "kvtransfer": {"kvtransfer", "kernels"},
    "gateway": {"gateway", "kvtransfer"},
    "prefill_worker": {"prefill_worker", "kvtransfer", "kernels"},
    "decode_worker": {"decode_worker", "kvtransfer", "kernels"},
    "compose": {"compose", "kvtransfer"},
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_imports_only_what_the_table_allows(folder):
    assert sources(folder), f"{folder} has no sources"
    found = {p.name: ours(p) - ALLOWED[folder] for p in sources(folder)}
    assert {name: extra for name, extra in found.items() if extra} == {}


TORCH_MODULES = {"cuda_store.py", "worker_main.py", "worker_setup.py"}
"""The modules of kvtransfer that only workers may import."""


def test_kvtransfer_is_torch_free_but_for_the_named_modules():
    assert {p.name for p in sources("kvtransfer") if not is_torch_free(p)} <= TORCH_MODULES


@pytest.mark.parametrize("folder", ["gateway", "compose"])
def test_processes_without_a_model_use_only_torch_free_modules(folder):
    for path in sources(folder):
        assert is_torch_free(path), path


@pytest.mark.parametrize(
    "module", ["pageferry.gateway.main", "pageferry.compose.cli", "pageferry.compose.local"]
)
def test_importing_it_loads_no_tensor_library(module):
    script = f"import sys, {module}; print(*(set(sys.modules) & {TENSOR_LIBRARIES!r}))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize("folder", [*FOLDERS, "tests"])
def test_no_package_file_where_folders_are_namespaces(folder):
    assert list((ROOT / folder).glob("**/__init__.py")) == []


UNSAFE_CALLS = {"eval", "exec", "torch.load", "marshal.load", "marshal.loads", "os.system"}
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def calls(path: Path) -> Iterator[str]:
    """Dotted names of the functions that a file calls, where they are plain names."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_that_is_read_can_be_executed(folder):
    for path in sources(folder):
        assert third_party(path) & UNSAFE_MODULES == set(), path
        assert set(calls(path)) & UNSAFE_CALLS == set(), path


FOREIGN_ADDRESS = re.compile(r"https?://(?!127\.0\.0\.1|localhost|0\.0\.0\.0|\[|\{|\$|[a-z]+[:/])")


def test_installing_names_no_package_index():
    files = ["Makefile", "constraints.txt", "pyproject.toml", ".ci/run", "compose/Dockerfile"]
    files += [os.path.relpath(p, ROOT) for p in (ROOT / "compose").glob("*.yaml")]
    for name in files:
        text = (ROOT / name).read_text()
        assert not re.search(r"--(extra-)?index-url|--find-links|--trusted-host", text), name
        assert not FOREIGN_ADDRESS.search(text), name
