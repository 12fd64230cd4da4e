"""One HTTP GET with a deadline, without a client library and without proxies."""

from __future__ import annotations

import http.client

TIMEOUT_S = 2.0
MAX_BODY_BYTES = 1 << 20

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
"""Where a server that listens on every address is reached from this host."""


def http_get(host: str, port: int, path: str, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
    """Status and body (at most 1 MiB) of `http://host:port/path`; `OSError` if there is none."""
    connection = http.client.HTTPConnection(ANY_ADDRESS.get(host, host), port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read(MAX_BODY_BYTES)
    except http.client.HTTPException as error:
        raise ConnectionError(f"malformed HTTP answer: {error!r}") from error
    finally:
        connection.close()
