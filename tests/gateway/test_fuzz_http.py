"""A short run of `fuzz_http.py`; the program takes a count for long ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("fuzz_http.py")
MAX_GROWTH_MIB = 100
"""In 300 requests: parsing the largest ones takes so much for a moment."""


def test_malformed_requests_break_nothing(demo_model: Path) -> None:
    command = [sys.executable, str(PROGRAM), f"--model={demo_model}", "--count=300", "--seed=7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["failures"] == []
    assert sum(report["kinds"].values()) == 300
    assert report["statuses"]["200"] >= 20
    assert report["statuses"]["400"] >= 100
    assert report["rss_mib"][-1] - report["rss_mib"][0] < MAX_GROWTH_MIB
