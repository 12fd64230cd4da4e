"""One log format for every process. Prompt text never goes into a log line."""

from __future__ import annotations

import logging
import sys


def configure(level: str, process: str) -> None:
    """Log to stderr at `level` ("debug" … "error"); `process` names the source."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s",
        force=True,
    )
