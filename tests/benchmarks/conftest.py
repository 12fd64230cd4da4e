"""The benchmark programs import each other by plain names, as scripts in one folder do.

They are imported here, once, so that the folder need not stay on `sys.path`: other tests must not
find its modules under names such as `kernels`, for which transformers looks.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

FOLDER = str(Path(__file__).resolve().parents[2] / "benchmarks")

sys.path.insert(0, FOLDER)
for name in ("compare", "interference"):  # and with them all that they use
    importlib.import_module(name)
sys.path.remove(FOLDER)
