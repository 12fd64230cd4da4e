"""The gateway as a process: start-up mistakes, signals, imports."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

MODULE = "pageferry.gateway.main"


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("PAGEFERRY_")}


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", MODULE, *flags],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
    )


def test_heavy_libraries_stay_out() -> None:
    script = (
        "import sys, pageferry.gateway.main\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--model=/nowhere/at/all",), "/nowhere/at/all"),
        (("--port=70000",), "70000"),
        (("--port=x",), "--port"),
        (("--lease-s=0",), "--lease-s"),
        (("--redis-url=http://x",), "--redis-url"),
        (("--max-n=0",), "--max-n"),
        (("--no-such-flag=1",), "--no-such-flag"),
    ],
)
def test_mistakes_exit_with_2_and_a_sentence(flags: tuple[str, ...], word: str) -> None:
    done = run(*flags)
    assert done.returncode == 2
    assert done.stdout == ""
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_port_in_use(model_dir: Path, redis_url: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(f"--model={model_dir}", f"--port={port}", f"--redis-url={redis_url}")
    assert done.returncode == 2
    assert str(port) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("redis", ["there", "absent"])
def test_starts_answers_and_leaves_on_sigterm(
    model_dir: Path, redis_url: str, redis: str, tmp_path: Path
) -> None:
    url = redis_url if redis == "there" else f"unix://{tmp_path}/none.sock"
    log = tmp_path / "log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [f"--model={model_dir}", f"--port={port}", f"--redis-url={url}"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, *flags],
            stdout=subprocess.PIPE,
            stderr=out,
            env=environment(),
        )
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                base = f"http://127.0.0.1:{port}"
                assert json.load(urllib.request.urlopen(f"{base}/health"))["status"] == "ok"
                break
            except urllib.error.URLError:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{base}/ready")
        with refused.value as reply:
            assert reply.code == 503
        process.send_signal(signal.SIGTERM)
        out_bytes, _ = process.communicate(timeout=20)
        assert process.returncode == 0, log.read_text()
        assert out_bytes == b""
        assert "Traceback" not in log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
