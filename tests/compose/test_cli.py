"""`pageferry COMMAND`: replaces itself by the program, knows its commands, helps with typos."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pageferry.compose import cli

CLI = [sys.executable, "-P", "-m", "pageferry.compose.cli"]


def run(*argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *argv], capture_output=True, text=True, check=False, cwd=cwd)


def test_version():
    for spelling in ("version", "--version"):
        done = run(spelling)
        assert done.returncode == 0
        assert done.stdout.startswith("pageferry 0.")


def test_help_names_every_command_in_a_line():
    done = run("--help")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    for name in [*cli.COMMANDS, "version"]:
        assert len([line for line in lines if line.startswith(f"  {name} ")]) == 1
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(("typed", "meant"), [("gatewya", "gateway"), ("decod", "decode")])
def test_unknown_command_names_the_nearest(typed, meant):
    done = run(typed)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"pageferry: unknown command {typed!r}; did you mean {meant!r}? (see pageferry --help)\n"
    )


def test_unknown_command_without_a_neighbour_and_no_command():
    assert "did you mean" not in run("zzz").stderr
    assert run().returncode == 2


def test_every_command_names_a_module_file():
    root = Path(cli.__file__).resolve().parent.parent
    for command in cli.COMMANDS.values():
        package, folder, module = command.module.split(".")
        assert package == "pageferry"
        assert (root / folder / f"{module}.py").is_file()


def test_the_process_is_replaced_and_flags_go_through():
    process = subprocess.Popen(
        [*CLI, "gateway", "nobody"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    expected = "unrecognized arguments: nobody (see pageferry gateway --help)"
    assert errors == f"pageferry gateway: {expected}\n"


def test_modules_in_the_current_directory_are_not_imported(tmp_path):
    (tmp_path / "redis.py").write_text("raise SystemExit('imported the wrong redis')")
    done = run("gateway", "nobody", cwd=tmp_path)
    assert "wrong redis" not in done.stderr
    assert done.returncode == 2
