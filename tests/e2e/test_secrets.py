"""`pageferry up` with every secret there is: nobody who may not know them finds one.

Real workers, all logs at debug level, a Valkey with a password. What is looked through: command
lines of all processes, everything that they print, /v1/workers, /metrics, and Redis when idle.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

MARKER = "zanzibar"
ALICE, BOB = f"sk-{MARKER}-alice", f"sk-{MARKER}-bob"
PASSWORD, CLUSTER_KEY = f"{MARKER}-redis", f"{MARKER}-cluster"
PROMPT = f"The {MARKER} lighthouse was built by nobody in particular. " * 8
READY_S = 120


@pytest.fixture
def locked_redis(redis_url: str) -> Iterator[str]:
    """The test's Valkey, with a password while the test runs."""
    client = redis.Redis.from_url(redis_url)
    client.config_set("requirepass", PASSWORD)
    yield redis_url.replace("redis://", f"redis://:{PASSWORD}@")
    client.config_set("requirepass", "")
    client.close()


@pytest.fixture
def run(demo_model: Path, locked_redis: str, tmp_path: Path) -> Iterator[Run]:
    keys = tmp_path / "keys.toml"
    digest = hashlib.sha256(ALICE.encode()).hexdigest()
    keys.write_text(f'[keys.alice]\nsha256 = "{digest}"\nadmin = true\n[keys.bob]\nkey = "{BOB}"\n')
    started = Run(
        tmp_path / "log",
        {
            "PAGEFERRY_REDIS_URL": locked_redis,
            "PAGEFERRY_API_KEYS_FILE": str(keys),
            "PAGEFERRY_CLUSTER_KEY": CLUSTER_KEY,
            "PAGEFERRY_LOG_LEVEL": "debug",
            "PAGEFERRY_VERBOSE": "true",
            "PAGEFERRY_KV_MEMORY_MIB": "128",
        },
    )
    yield started
    started.process.kill()
    started.process.communicate()


class Run:
    """A running `pageferry up` whose output goes to a file."""

    def __init__(self, log: Path, settings: dict[str, str]) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PAGEFERRY_", "REDIS_"))}
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pageferry.compose.cli", "up", "--port", "0"],
                stdout=subprocess.PIPE,
                stderr=out,
                env=clean | settings,
            )
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline().decode()
        assert self.ready_line, log.read_text()[-3000:]
        self.url = self.ready_line.split()[0]

    def ask(self, path: str, key: str = ALICE, body: Any = None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def complete(self, key: str, **fields: Any) -> tuple[int, Any]:
        body = {"model": "SmolLM2-135M-Instruct", "prompt": PROMPT, "max_tokens": 4, **fields}
        status, text = self.ask("/v1/completions", key, body)
        return status, json.loads(text)

    def command_lines(self) -> str:
        """Of it and its children."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert len(children) == 3
        files = [Path(f"/proc/{p}/cmdline") for p in (str(pid), *children)]
        return b"\n".join(file.read_bytes() for file in files).decode()

    def idle(self) -> bool:
        _, text = self.ask("/v1/workers")
        return not any(w["num_running"] or w["ledger"]["live"] for w in json.loads(text)["data"])


def test_no_secret_and_no_text_is_seen_and_caches_are_apart(run: Run, locked_redis: str) -> None:
    cached = []
    for key in (ALICE, ALICE, BOB, BOB):
        status, answer = run.complete(key, user=MARKER, stop=f"{MARKER}-stop")
        assert status == 200
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert [count > 0 for count in cached] == [False, True, False, True], cached  # KVC-05
    assert run.complete("sk-none")[0] == 401
    assert run.complete(ALICE, temperature=MARKER)[0] == 400
    assert run.complete(ALICE, prompt=MARKER * 20_000)[0] == 400
    assert run.ask("/v1/workers", BOB)[0] == 403
    abort(run)
    deadline = time.monotonic() + 30
    while not run.idle():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    _, workers = run.ask("/v1/workers")
    _, metrics = run.ask("/metrics")
    client = redis.Redis.from_url(locked_redis)
    dump = b"".join(client.dump(key) or b"" for key in client.keys("*"))
    client.close()
    argv = run.command_lines()
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(15) == 0
    log = run.log.read_text()
    seen = {"argv": argv, "log": log, "workers": workers, "metrics": metrics}
    seen |= {"redis": dump.decode("latin-1"), "ready line": run.ready_line}
    assert {name for name, text in seen.items() if MARKER in text} == set()
    assert len(re.findall(r"request_end .*key=(?:alice|bob) ", log)) == 5
    assert len(re.findall(r"call_end .*class=\w+ ", log)) >= 3
    assert "outcome=abort" in log


def abort(run: Run) -> None:
    """Leave a stream after its first bytes."""
    body = {"model": "SmolLM2-135M-Instruct", "prompt": PROMPT, "max_tokens": 500, "stream": True}
    headers = {"Authorization": f"Bearer {ALICE}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{run.url}/v1/completions", json.dumps(body | {"ignore_eos": True}).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.read(10)
