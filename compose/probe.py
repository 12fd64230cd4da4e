"""One HTTP GET with a deadline, without a client library and without proxies.

For questions about the own host only: over TLS the certificate is not checked, since it names
whatever clients use.

`python -m pageferry.compose.probe PORT` is a gateway's container health check: exit code 0 if the
gateway on this host answers, else 1 and one sentence. It takes 0.08 s of processor time.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys

TIMEOUT_S = 3.0
MAX_BODY_BYTES = 1 << 20

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
"""Where a server that listens on every address is reached from this host."""


def http_get(
    host: str, port: int, path: str, timeout_s: float = TIMEOUT_S, *, tls: bool = False
) -> tuple[int, bytes]:
    """Status and body (at most 1 MiB) of `http://host:port/path`; `OSError` if there is none."""
    address = ANY_ADDRESS.get(host, host)
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            address, port, timeout=timeout_s, context=context
        )
    else:
        connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read(MAX_BODY_BYTES)
    except http.client.HTTPException as error:
        raise ConnectionError(f"malformed HTTP answer: {error!r}") from error
    finally:
        connection.close()


def gateway_trouble(port: int, *, tls: bool) -> str:
    """Empty if the gateway on this host answers /health with 200."""
    try:
        status, body = http_get("127.0.0.1", port, "/health", tls=tls)
    except OSError as error:
        return f"gateway: no answer on port {port}: {error}"
    return "" if status == 200 else f"gateway: {status} {body[:200]!r}"


if __name__ == "__main__":
    sys.exit(gateway_trouble(int(sys.argv[1]), tls=bool(os.environ.get("PAGEFERRY_TLS_CERT"))) or 0)
