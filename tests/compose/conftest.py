"""Helpers for tests that start real processes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from pageferry.compose.supervisor import Program


@pytest.fixture
def python_program() -> Callable[..., Program]:
    """`python_program(name, source, **options)`: a child that runs `source`."""

    def make(name: str, source: str, **options: bool) -> Program:
        argv = [sys.executable, "-I", "-S", "-u", "-c", source]
        return Program(name, argv, {"PATH": os.environ["PATH"]}, **options)

    return make


@pytest.fixture
def eventually() -> Callable[..., Awaitable[None]]:
    """`await eventually(condition)`: wait until it is true, fail after 20 s."""

    async def wait(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.02)

    return wait


@pytest.fixture
def alive() -> Callable[[int], bool]:
    """Whether a process exists and is not a zombie."""

    def check(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    return check
