"""The private Valkey: settings, secrecy, and nothing left behind."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys

import pytest

from pageferry.compose.embedded_valkey import ScratchDir, valkey_program
from pageferry.compose.local import wait_for_redis
from pageferry.compose.supervisor import Supervisor
from pageferry.kvtransfer.bus import connect


@pytest.fixture
async def server(tmp_path):
    supervisor = Supervisor(lambda line: None)
    with ScratchDir(tmp_path) as scratch:
        program, url = valkey_program(scratch.path)
        await supervisor.start(program)
        await wait_for_redis(url, 20)
        client = connect(url)
        yield client, scratch.path
        await client.aclose()
        await supervisor.stop()


async def test_it_never_evicts_and_stores_nothing_on_disk(server):
    client, scratch = server
    config = await client.config_get("*")
    assert config["maxmemory-policy"] == "noeviction"
    assert int(config["maxmemory"]) > 0
    assert config["save"] == ""
    assert config["appendonly"] == "no"
    assert config["port"] == "0"
    await client.set("k", "v")
    assert {p.name for p in scratch.iterdir()} == {"lock", "valkey.sock"}


async def test_only_this_user_may_enter(server):
    _, scratch = server
    assert stat.S_IMODE(scratch.stat().st_mode) == 0o700


def test_the_directory_is_gone_afterwards(tmp_path):
    with ScratchDir(tmp_path) as scratch:
        assert scratch.path.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_use_stays_and_an_abandoned_one_goes(tmp_path):
    source = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from pageferry.compose.embedded_valkey import ScratchDir\n"
        "with ScratchDir(Path(sys.argv[1])) as s:\n"
        "    (s.path / 'valkey.sock').touch()\n"
        "    print(s.path, flush=True)\n"
        "    time.sleep(60)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", source, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    with owner.stdout:
        abandoned = owner.stdout.readline().strip()
        with ScratchDir(tmp_path):
            assert os.path.isdir(abandoned)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    with ScratchDir(tmp_path) as scratch:
        assert list(tmp_path.iterdir()) == [scratch.path]


def test_foreign_looking_entries_are_left_alone(tmp_path):
    target = tmp_path / "precious"
    target.mkdir()
    (target / "lock").touch()
    (tmp_path / "pageferry-up-link").symlink_to(target)
    (tmp_path / "pageferry-up-nolock").mkdir()
    with ScratchDir(tmp_path):
        pass
    assert (target / "lock").exists()
    assert (tmp_path / "pageferry-up-nolock").exists()
