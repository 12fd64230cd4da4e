"""Systems under test: runners are driven and stopped, outcomes matched, process trees watched."""

from __future__ import annotations

import os
import sys
import textwrap
import time

import pytest
from systems import Broken, InProcess, Watch, descendants, tree_pss_bytes

from pageferry.compose.bench_client import Load
from pageferry.compose.bench_workload import Request, prompt_ids

ECHO = """
    import json, sys
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        outcomes = [
            {
                "kind": kind, "index": i, "due_s": item["at_s"], "cut": False,
                "chunks": [[item["ids"][0], item["output"]]], "end_s": item["ids"][0],
            }
            for kind in ("open", "closed") for i, item in enumerate(job[kind])
        ]
        print(json.dumps({"wall_s": 2.5, "outcomes": outcomes}), flush=True)
"""


@pytest.fixture
def runner(tmp_path):
    def make(source, **options):
        path = tmp_path / "runner.py"
        path.write_text(textwrap.dedent(source))
        argv = [sys.executable, str(path)]
        return InProcess("fake", "1", argv, {}, tmp_path / "log", {}, **options)

    return make


def test_a_runner_gets_prompts_and_its_outcomes_find_their_requests(runner):
    closed, opened = Request(3, 5), Request(4, 6, arrival_s=1.5)
    with runner(ECHO) as system:
        result = system.run(Load((closed,), 1, (opened,), key="k"))
    assert result.wall_s == 2.5
    first, second = result.outcomes
    assert (first.request, first.storm, first.due_s) == (opened, True, 1.5)
    assert (second.request, second.storm, second.output_tokens) == (closed, False, 5)
    assert second.chunks[0][0] == prompt_ids(3, "k-c0")[0]


def test_a_runner_that_ends_is_broken_with_its_log(runner):
    source = 'import sys; print("no such model", file=sys.stderr); sys.exit(3)'
    with pytest.raises(Broken, match=r"exit code 3(.|\n)*no such model"), runner(source):
        pass


def test_a_runner_that_never_gets_ready_is_killed_at_the_deadline(runner):
    started = time.monotonic()
    source = "import time; time.sleep(60)"
    with pytest.raises(Broken), runner(source, start_timeout_s=0.5):
        pass
    assert time.monotonic() - started < 30


def test_leaving_ends_the_whole_tree(runner, tmp_path):
    source = """
        import json, subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(json.dumps({"ready": True}), flush=True)
        sys.stdin.read()
    """
    with runner(source) as system:
        tree = descendants(system.process.pid)
        assert len(tree) == 2
    time.sleep(0.2)
    assert not [pid for pid in tree if os.path.exists(f"/proc/{pid}/exe")]


def test_watch_sees_the_peak_of_the_tree_and_what_the_probe_says(runner):
    source = """
        import json, sys
        block = bytearray(64 * 2**20)
        print(json.dumps({"ready": True}), flush=True)
        sys.stdin.read()
    """
    with runner(source) as system:
        with Watch(system.process.pid, lambda: "seen") as watch:
            pass
        assert watch.peak_pss_bytes >= 64 * 2**20
        assert watch.peak_pss_bytes == pytest.approx(tree_pss_bytes(system.process.pid), rel=0.2)
    assert [probed for _, probed in watch.samples] == ["seen"]


def test_watch_does_not_hide_that_the_probe_failed():
    def probe():
        raise OSError("refused")

    with pytest.raises(Broken), Watch(os.getpid(), probe):
        time.sleep(0.1)
