"""One log format for every process. Prompt text never goes into a log line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable


def configure(
    level: str, process: str, formatter: Callable[[str], logging.Formatter] = logging.Formatter
) -> None:
    """Log to stderr at `level` ("debug" … "error"); `process` names the source."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
