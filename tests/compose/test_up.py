"""`pageferry up` for real: the demo model, real processes, kill -9 in several places."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

READY_S = 120


def descendants(pid: int) -> dict[str, int]:
    """Name -> pid of a process's children: the last word of the module or the worker's name."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        argv = Path(f"/proc/{child}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
        if "--name" in argv:
            found[argv[-1]] = int(child)
        elif "pageferry.gateway.main" in argv:
            found["gateway"] = int(child)
        elif "valkey-server" in argv[0]:
            found["valkey"] = int(child)
    return found


class Up:
    """A running `pageferry up`, its ready line, and what it left in its temporary directory."""

    def __init__(self, tmp: Path, *flags: str) -> None:
        self.tmp = tmp
        self.stderr = tmp / "stderr"
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PAGEFERRY_", "REDIS_"))}
        with self.stderr.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pageferry.compose.cli", "up", "--port", "0", *flags],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**env, "TMPDIR": str(tmp)},
            )
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline()

    @property
    def url(self) -> str:
        return self.ready_line.split()[0]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    def complete(self, prompt: str) -> str:
        body = {"model": "SmolLM2-135M-Instruct", "prompt": prompt, "temperature": 0}
        return str(self.post("/v1/completions", {**body, "max_tokens": 8})["choices"][0]["text"])

    def leftovers(self) -> list[Path]:
        return list(self.tmp.glob("pageferry-up-*"))


@pytest.fixture
def up(demo_model: Path, tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(*flags: str) -> Up:
        started.append(Up(tmp_path, *flags))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
        assert one.process.stdout is not None
        one.process.stdout.close()


@pytest.fixture
def until() -> Callable[[Callable[[], Any]], Any]:
    """Wait for a true value and return it."""

    def wait(condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + READY_S
        while not (value := condition()):
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.05)
        return value

    return wait


def test_serve_survive_kill_9_and_stop_clean(up, until, alive):
    run = up("--prefill", "1", "--decode", "1", "--kv-memory-mib", "128")
    assert " serves SmolLM2-135M-Instruct. " in run.ready_line, run.stderr.read_text()

    curl = shlex.split(run.ready_line.partition("Try: ")[2])
    assert run.post(curl[1].removeprefix(run.url), json.loads(curl[-1]))["choices"]
    text = run.complete("The capital of France is")
    before = descendants(run.process.pid)
    assert sorted(before) == ["decode-0", "gateway", "prefill-0", "valkey"]

    for name in ("decode-0", "gateway"):
        os.kill(before[name], signal.SIGKILL)

    def replaced() -> bool:
        now = descendants(run.process.pid)
        new = {name for name, pid in now.items() if before[name] != pid}
        return now.keys() == before.keys() and new == {"decode-0", "gateway"}

    until(replaced)

    def answered() -> bool:
        try:
            return run.complete("The capital of France is") == text
        except OSError:
            return False

    until(answered)
    after = descendants(run.process.pid)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(timeout=10) == 0
    assert not [name for name, pid in after.items() if alive(pid)]
    assert run.leftovers() == []
    assert run.process.stdout.read() == "", "more than the one line went to stdout"


def test_kill_9_of_up_leaves_no_process_and_the_next_start_no_directory(up, until, alive):
    first = up("--kv-memory-mib", "64")
    children = descendants(first.process.pid)
    assert len(children) == 4, first.stderr.read_text()
    first.process.kill()
    first.process.wait()
    until(lambda: not any(alive(pid) for pid in children.values()))
    assert len(first.leftovers()) == 1

    second = up("--kv-memory-mib", "0", "--num-pages", "1")
    assert (second.process.wait(timeout=60), second.ready_line) == (2, "")
    assert "KV pool of 1 pages is too small" in second.stderr.read_text()
    assert second.leftovers() == []


def test_death_of_the_own_valkey_ends_the_run_and_says_so(up):
    run = up("--kv-memory-mib", "64")
    os.kill(descendants(run.process.pid)["valkey"], signal.SIGKILL)
    assert run.process.wait(timeout=20) == 1
    assert "pageferry up: valkey ended (signal SIGKILL)" in run.stderr.read_text()
    assert run.leftovers() == []


def test_model_that_does_not_exist_is_exit_code_2_with_its_name(up):
    run = up("--model", "/no/such/model.gguf")
    assert run.process.wait(timeout=60) == 2
    assert "/no/such/model.gguf" in run.stderr.read_text()
    assert run.leftovers() == []
