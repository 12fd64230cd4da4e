"""Print what pyproject.toml asks for, one requirement a line: `requirements.py [EXTRA...]`.

Lets an image install dependencies in a layer of their own, before the sources are copied in.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path


def requirements(pyproject: Path, extras: Sequence[str]) -> list[str]:
    """The project's dependencies and those of `extras`. `KeyError` for an unknown extra."""
    project = tomllib.loads(pyproject.read_text())["project"]
    found: list[str] = list(project["dependencies"])
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return found


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml"), sys.argv[1:])))
