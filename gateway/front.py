"""The HTTP side of a gateway: its port, TLS, API keys and routes.

`open` binds the port; `reload` reads keys and certificate again, for new calls and connections;
`close` lets handlers end for a moment and closes what is left.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from aiohttp import web

from pageferry.gateway.access import CrossOrigin, authenticate
from pageferry.gateway.api_keys import KeyRing
from pageferry.gateway.calls import Calls
from pageferry.gateway.metrics import GatewayMetrics
from pageferry.gateway.operations import Operations
from pageferry.gateway.web_errors import JsonRunner, add_request_id, errors_as_json
from pageferry.kvtransfer.settings import GatewaySettings
from pageferry.kvtransfer.sockets import LOOPBACK

log = logging.getLogger(__name__)

KEEPALIVE_S = 75.0
"""Seconds without a request after which a client's idle connection is closed."""
CLOSING_S = 2.0
"""For handlers to send their last bytes."""


class Front:
    def __init__(self, settings: GatewaySettings) -> None:
        """`ValueError` or `OSError` when keys, certificate or origins cannot be used."""
        self._settings = settings
        self._access = KeyRing(
            settings.api_key, Path(settings.api_keys_file) if settings.api_keys_file else None
        )
        self._cross_origin = CrossOrigin(settings.cors_origins)
        self._tls = tls_context(settings)
        self._runner: JsonRunner | None = None
        self.url = ""
        self.port = 0
        """Where it listens, once it is open."""

    async def open(self, calls: Calls, operations: Operations, metrics: GatewayMetrics) -> None:
        """Serve from now on. `OSError` when the address cannot be had."""
        self._runner = JsonRunner(
            self._application(calls, operations, metrics),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=CLOSING_S,
            keepalive_timeout=KEEPALIVE_S,
            auto_decompress=False,
        )
        await self._runner.setup()
        host = self._settings.host
        site = web.TCPSite(self._runner, host, self._settings.port, ssl_context=self._tls)
        try:
            await site.start()
        except OSError:
            await self._runner.cleanup()
            raise
        self.port = self._runner.addresses[0][1]
        self.url = f"{'http' if self._tls is None else 'https'}://{host}:{self.port}"
        if not self._access.required and not host.startswith(LOOPBACK):
            log.warning(
                "no API keys: everybody who can reach %s:%d may call (see --api-keys-file)",
                host,
                self.port,
            )

    def _application(
        self, calls: Calls, operations: Operations, metrics: GatewayMetrics
    ) -> web.Application:
        limit = int(self._settings.max_body_mib * 2**20)
        middlewares = [
            errors_as_json(metrics),
            self._cross_origin.preflight,
            authenticate(self._access, self._cross_origin, metrics),
        ]
        app = web.Application(middlewares=middlewares, client_max_size=limit)
        app.on_response_prepare.append(add_request_id)
        app.on_response_prepare.append(self._cross_origin.add_headers)
        app.router.add_post("/v1/completions", calls.completions)
        app.router.add_post("/v1/chat/completions", calls.chat)
        app.router.add_get("/v1/models", operations.models)
        app.router.add_get("/v1/models/{model:.+}", operations.one_model)
        app.router.add_get("/v1/workers", operations.workers)
        app.router.add_post("/v1/workers/{worker}/drain", operations.drain)
        app.router.add_get("/health", operations.health)
        app.router.add_get("/ready", operations.ready)
        app.router.add_get("/metrics", operations.metrics)
        app.router.add_get("/version", operations.version)
        return app

    @property
    def can_reload(self) -> bool:
        """There are files that `reload` reads."""
        return bool(self._settings.api_keys_file) or self._tls is not None

    def reload(self) -> None:
        """Read API keys and certificate again; what cannot be used leaves the old ones valid."""
        try:
            self._access.load()
            log.info("API keys read: %d", len(self._access))
            if self._tls is not None:
                load_certificate(self._tls, self._settings)
                log.info("certificate read")
        except (ValueError, OSError) as error:
            log.error("reload failed, the old state stays: %s", error)

    async def close(self) -> None:
        """Also when it never opened."""
        if self._runner is not None:
            await self._runner.cleanup()


def tls_context(settings: GatewaySettings) -> ssl.SSLContext | None:
    """TLS 1.2 or later with the configured certificate; None without one.

    `ValueError` or `OSError` (which `ssl.SSLError` is) when it cannot be used.
    """
    if not settings.tls_cert and not settings.tls_key:
        return None
    if not (settings.tls_cert and settings.tls_key):
        raise ValueError("--tls-cert and --tls-key are needed together")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, settings)
    return context


def load_certificate(context: ssl.SSLContext, settings: GatewaySettings) -> None:
    """Also into a context that is in use: new connections get the new certificate."""
    context.load_cert_chain(settings.tls_cert, settings.tls_key, password=no_password)


def no_password() -> str:
    raise ValueError("--tls-key is encrypted; it must not be")
