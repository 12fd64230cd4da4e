"""A seeded chaos run against real processes: `chaos.py` says what happens in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MINUTES = float(os.environ.get("CHAOS_MINUTES", "2"))
SEED = os.environ.get("CHAOS_SEED", "1")
AROUND_S = 400
"""For starting the stack, recording the answers, and coming to rest."""


@pytest.mark.timeout(MINUTES * 60 + AROUND_S + 30)
def test_every_answer_is_right_or_honestly_refused(demo_model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, str(Path(__file__).with_name("chaos.py"))),
            *("--minutes", str(MINUTES), "--seed", SEED, "--logs", str(tmp_path)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MINUTES * 60 + AROUND_S,
    )
    print(done.stdout)
    assert done.returncode == 0
