"""One flag, seen by two processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pageferry.kvtransfer.core_flag import CoreFlag

OTHER = """
import sys
from pageferry.kvtransfer.core_flag import CoreFlag
flag = CoreFlag(sys.argv[1])
for line in sys.stdin:
    print(int(flag.busy), flush=True)
    flag.busy = not flag.busy
    print(int(flag.busy), flush=True)
"""


def test_both_processes_see_what_either_writes(tmp_path: Path) -> None:
    path = str(tmp_path / "cores")
    flag = CoreFlag(path)
    assert not flag.busy
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        assert other.stdin is not None
        assert other.stdout is not None
        flag.busy = True
        for _ in range(3):
            print(file=other.stdin, flush=True)
            assert other.stdout.readline() == "1\n"
            assert other.stdout.readline() == "0\n"
            assert not flag.busy
            flag.busy = True
        other.stdin.close()
    assert other.returncode == 0
    assert CoreFlag(path).busy


def test_a_place_without_a_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        CoreFlag(str(tmp_path / "missing" / "cores"))
