"""Run the CASES of one test file in a process of its own and print one JSON line per case.

Whether Triton interprets or compiles is settled when it is first imported, so one process cannot do
both: `python triton_child.py FILE` runs under the environment that the test file chose for it. A
case is a function without arguments; what it returns is reported, what it raises is its failure.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback


def main(path: str) -> None:
    spec = importlib.util.spec_from_file_location("cases", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cases"] = module
    spec.loader.exec_module(module)
    for name, case in module.CASES.items():
        line = {"case": name, "value": None, "error": ""}
        try:
            line["value"] = case()
        except Exception:
            line["error"] = traceback.format_exc()
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
