"""What the health checks of compose.yaml say."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pageferry.compose import cli
from pageferry.kvtransfer import alive_file


@pytest.fixture(scope="module")
def compose_check() -> Callable[[str], list[str]]:
    """A service's health check in compose.yaml, with this interpreter."""
    services = yaml.safe_load((Path(cli.__file__).parent / "compose.yaml").read_text())["services"]

    def of(service: str) -> list[str]:
        kind, program, *arguments = services[service]["healthcheck"]["test"]
        assert (kind, program) == ("CMD", "python")
        return [sys.executable, *arguments]

    return of


class Gateway(http.server.BaseHTTPRequestHandler):
    """Alive at /health, if its server says so."""

    def do_GET(self) -> None:
        self.send_response(self.server.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def test_the_containers_check_of_a_gateway(compose_check):
    """As compose.yaml has it, but for the port."""
    *command, port = compose_check("gateway")
    assert port == "8000"
    with http.server.HTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for server.status, code in ((200, 0), (503, 1)):
            done = subprocess.run([*command, str(server.server_port)], timeout=30, check=False)
            assert done.returncode == code
        server.shutdown()
    done = subprocess.run([*command, "1"], timeout=30, capture_output=True, check=False)
    assert done.returncode == 1
    assert b"gateway: no answer on port 1" in done.stderr


def test_the_containers_check_of_a_worker(compose_check, tmp_path):
    """Whose `alive_file` it is: tests/kvtransfer/test_alive_file.py."""
    *command, path = compose_check("decode")
    assert compose_check("prefill") == [*command, path]
    mine = str(tmp_path / "alive")
    for until, code in ((time.monotonic() + 60, 0), (time.monotonic() - 60, 1)):
        alive_file.write(mine, until, "ready")
        assert subprocess.run([*command, mine], timeout=30, check=False).returncode == code
