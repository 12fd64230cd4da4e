"""One HTTP GET with a deadline, without a client library and without proxies.

For questions about the own host only: over TLS the certificate is not checked, since it names
whatever clients use.
"""

from __future__ import annotations

import http.client
import ssl

TIMEOUT_S = 2.0
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
