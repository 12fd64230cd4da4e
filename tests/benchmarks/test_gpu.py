"""The GPU benchmark tried out without a GPU: every line runs, and failures are not lost."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton has no wheel for this platform")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"

BROKEN = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
import gpu_kernels, gpu_model
gpu_kernels.triton_ops.silu_mul = lambda x: x[:, : x.shape[1] // 2] * 0
gpu_kernels.measure_kernels = lambda bench: gpu_kernels._rows(bench, 3)
gpu_model.measure_models = lambda bench: None
sys.argv = ["gpu.py", *sys.argv[2:]]
runpy.run_path(sys.path[0] + "/gpu.py", run_name="__main__")
"""


def run(*arguments: str, interpret: str = "1") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "TRITON_INTERPRET": interpret},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_dry_run_checks_and_writes_everything(tmp_path: Path) -> None:
    done = run(str(SCRIPT), "--dry-run", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = tmp_path.glob("*.json")
    content = json.loads(written.read_text())
    assert content["failures"] == {}
    assert content["dry_run"] is True
    names = {row["part"]: [] for row in content["rows"]}
    for row in content["rows"]:
        names[row["part"]].append(row["name"])
    assert set(names) == {"ceilings", "kernels", "model", "staging"}
    for word in ("decode attention", "prefill attention", "rope_store", "gather_pages", "draw"):
        assert any(word in name for name in names["kernels"]), word
    for word in ("eager", "graphs", "prefill"):
        assert any(word in name for name in names["model"]), word
    assert "decode attention" in written.with_suffix(".txt").read_text()


def test_a_wrong_kernel_fails_alone_and_loudly(tmp_path: Path) -> None:
    done = run("-c", BROKEN, str(SCRIPT.parent), "--dry-run", "--out", str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    (written,) = tmp_path.glob("*.json")
    content = json.loads(written.read_text())
    assert list(content["failures"]) == ["kernels: silu_mul, 3 x 96"]
    assert "FAILED kernels: silu_mul" in done.stdout
    assert any(row["name"].startswith("rms_norm") for row in content["rows"])
    assert not any(row["name"].startswith("silu_mul") for row in content["rows"])


def test_time_that_is_over_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    measure = importlib.import_module("gpu_measure")
    bench = measure.Bench(torch.device("cpu"), measure.TINY, deadline=0.0)
    measure.measure_ceilings(bench)
    assert bench.rows == []
    assert set(bench.failures) == {"ceilings: copy", "ceilings: bf16 GEMM"}
    assert "the time for this benchmark is over" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_sentence_and_status_2(tmp_path: Path) -> None:
    done = run(str(SCRIPT), "--out", str(tmp_path), interpret="0")
    assert done.returncode == 2
    assert "torch sees none here" in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_needs_the_interpreter(tmp_path: Path) -> None:
    done = run(str(SCRIPT), "--dry-run", "--out", str(tmp_path), interpret="0")
    assert done.returncode == 2
    assert "set TRITON_INTERPRET=1" in done.stderr
