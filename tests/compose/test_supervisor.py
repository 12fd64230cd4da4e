"""The supervisor with real child processes: output, restarts, stopping, kill -9 of the parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pageferry.compose import supervisor as module
from pageferry.compose.supervisor import Supervisor, describe_exit

SLEEPER = "import time; print('up'); time.sleep(60)"
POLITE = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('bye')))\n"
    "print('up')\n"
    "time.sleep(60)\n"
)
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); "
    "time.sleep(60)"
)


@pytest.fixture
async def shown():
    return []


@pytest.fixture
async def supervisor(shown):
    made = Supervisor(shown.append)
    yield made
    await made.stop(grace_s=0.0)


async def test_lines_are_prefixed_and_routine_ones_hidden(
    supervisor, shown, python_program, eventually
):
    source = (
        "import sys, time\n"
        "print('2026-11-29 17:47:22,604 INFO decode-0 x: routine')\n"
        "print('2026-11-29 17:47:22,604 WARNING decode-0 x: careful', file=sys.stderr)\n"
        "print('Traceback (most recent call last):')\n"
        "sys.stdout.write('no newline'); sys.stdout.flush()\n"
    )
    await supervisor.start(python_program("decode-0", source))
    await eventually(supervisor.failed.done)
    assert shown == [
        "[decode-0] 2026-11-29 17:47:22,604 WARNING decode-0 x: careful",
        "[decode-0] Traceback (most recent call last):",
        "[decode-0] no newline",
    ]
    text = str(supervisor.failed.result())
    assert text == (
        "decode-0 ended (exit code 0); its latest log lines:\n"
        "[decode-0] 2026-11-29 17:47:22,604 INFO decode-0 x: routine"
    )


async def test_verbose_shows_every_line(shown, python_program, eventually):
    supervisor = Supervisor(shown.append, verbose=True)
    line = "2026-11-29 17:47:22,604 INFO gateway x: routine"
    await supervisor.start(python_program("gateway", f"print({line!r})"))
    await eventually(supervisor.failed.done)
    assert shown == [f"[gateway] {line}"]


async def test_endless_line_is_cut_not_buffered(supervisor, shown, python_program, eventually):
    source = f"import sys; sys.stdout.write('x' * {3 * module.MAX_LINE_BYTES})"
    await supervisor.start(python_program("p", source))
    await eventually(supervisor.failed.done)
    lengths = [len(line.removeprefix("[p] ")) for line in shown]
    assert sum(lengths) == 3 * module.MAX_LINE_BYTES
    assert max(lengths) < 2 * module.MAX_LINE_BYTES


async def test_death_before_ready_ends_the_run_with_its_code(
    supervisor, python_program, eventually
):
    await supervisor.start(python_program("prefill-0", "raise SystemExit(2)"))
    await eventually(supervisor.failed.done)
    assert supervisor.failed.result().code == 2


async def test_worker_that_dies_later_is_started_again(
    supervisor, shown, python_program, eventually, alive
):
    await supervisor.start(python_program("decode-0", SLEEPER))
    supervisor.all_ready = True
    first = supervisor.pid("decode-0")
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: supervisor.pid("decode-0") != first)
    assert alive(supervisor.pid("decode-0"))
    assert not supervisor.failed.done()
    assert any("decode-0 ended (signal SIGKILL)" in line for line in shown)


async def test_repeated_quick_deaths_end_the_run(
    supervisor, shown, python_program, eventually, monkeypatch
):
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    supervisor.all_ready = True
    await supervisor.start(python_program("decode-0", "raise SystemExit(7)"))
    await eventually(supervisor.failed.done)
    assert str(supervisor.failed.result()) == "decode-0 ended 5 times in a row (exit code 7)"
    assert len([line for line in shown if "starting it again" in line]) == 4


async def test_long_lives_do_not_add_up(supervisor, python_program, eventually, monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "QUICK_DEATH_S", 0.0)
    supervisor.all_ready = True
    await supervisor.start(python_program("decode-0", "raise SystemExit(7)"))
    pids: set[int] = set()
    await eventually(lambda: pids.add(supervisor.pid("decode-0")) or len(pids) > 6)
    assert not supervisor.failed.done()


async def test_death_of_a_child_that_cannot_be_restarted_ends_the_run(
    supervisor, python_program, eventually
):
    supervisor.all_ready = True
    await supervisor.start(python_program("valkey", SLEEPER, restart=False))
    os.kill(supervisor.pid("valkey"), signal.SIGKILL)
    await eventually(supervisor.failed.done)
    assert "valkey ended (signal SIGKILL)" in str(supervisor.failed.result())


async def test_stop_terminates_then_kills(supervisor, shown, python_program, eventually, alive):
    await supervisor.start(python_program("polite", POLITE))
    await supervisor.start(python_program("stubborn", STUBBORN))
    await eventually(lambda: len(shown) == 2)
    pids = [supervisor.pid("polite"), supervisor.pid("stubborn")]
    started = time.monotonic()
    await supervisor.stop(grace_s=0.5)
    assert time.monotonic() - started >= 0.5
    assert "[polite] bye" in shown
    assert not any(alive(pid) for pid in pids)
    assert supervisor.names == []


async def test_stop_during_the_pause_before_a_restart(
    supervisor, shown, python_program, eventually, monkeypatch
):
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 30.0)
    monkeypatch.setattr(module, "MAX_PAUSE_S", 30.0)
    supervisor.all_ready = True
    await supervisor.start(python_program("decode-0", "pass"))
    await eventually(lambda: any("starting it again" in line for line in shown))
    started = time.monotonic()
    await supervisor.stop(grace_s=10.0)
    assert time.monotonic() - started < 5


async def test_stop_takes_the_childs_own_children_along(
    supervisor, shown, python_program, eventually, alive
):
    source = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(p.pid)\n"
        "time.sleep(60)\n"
    )
    await supervisor.start(python_program("p", source))
    await eventually(lambda: shown != [])
    grandchild = int(shown[0].removeprefix("[p] "))
    assert alive(grandchild)
    os.kill(supervisor.pid("p"), signal.SIGKILL)
    await eventually(lambda: not alive(grandchild))


async def test_children_die_when_the_parent_is_killed(eventually, alive):
    source = (
        "import asyncio, os, sys\n"
        "from pageferry.compose.supervisor import Program, Supervisor\n"
        "async def main():\n"
        "    s = Supervisor(lambda line: None)\n"
        "    argv = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "    await s.start(Program('p', argv, dict(os.environ)))\n"
        "    print(s.pid('p'), flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", source, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    # Once the launcher has become the program, the death signal has been set.
    await eventually(lambda: b"launch.py" not in Path(f"/proc/{child}/cmdline").read_bytes())
    assert alive(child)
    parent.kill()
    await parent.wait()
    await eventually(lambda: not alive(child))


def test_launcher_refuses_when_the_parent_is_already_gone():
    argv = [sys.executable, "-I", "-S", str(module.LAUNCHER), "1", "/bin/true"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the parent 1 is gone" in done.stderr


@pytest.mark.parametrize(
    ("code", "text"), [(3, "exit code 3"), (-9, "signal SIGKILL"), (-250, "signal 250")]
)
def test_describe_exit(code, text):
    assert describe_exit(code) == text
