"""Who gets past the door: API keys for everything but probes, and cross-origin rules for browsers.

In this order, outside of all handlers: a browser's preflight is answered (it never carries a key);
then the key is checked, and for the workers' paths whether it is an administrator's. The headers
that let a browser read an answer go out with every answer, errors and streams included.
"""

from __future__ import annotations

import re
from typing import Any

from aiohttp import web

from pageferry.gateway.api_keys import KeyRing
from pageferry.gateway.errors import ApiError
from pageferry.gateway.metrics import GatewayMetrics
from pageferry.gateway.rate_limits import Tenant
from pageferry.gateway.web_errors import TENANT, Handler
from pageferry.kvtransfer import metric_names as names

OPEN_PATHS = frozenset(("/health", "/ready", "/metrics", "/version"))
"""What load balancers and Prometheus ask for; everything else needs a key."""
ADMIN_PATHS = "/v1/workers"
"""Prefix of the paths for operators: they name hosts, and drain workers."""

_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\[\]:-]{1,255}")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9, _-]{0,2048}")
PREFLIGHT_S = 600
"""How long a browser may remember the answer to a preflight."""


def tenant_of(request: web.Request) -> Tenant:
    """Whose call this is, as `authenticate` found out."""
    return request[TENANT]


def authenticate(keys: KeyRing, cross_origin: CrossOrigin, metrics: GatewayMetrics) -> Any:
    """Middleware: 401 without a valid key, 403 where it is not an administrator's.

    Decides by the route that was found, not by the spelling of the path; fails closed. Web pages of
    other sites may not give orders to workers, even where no key is asked for: a browser on the
    operator's machine would send those.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        path = "" if resource is None else resource.canonical
        if path not in OPEN_PATHS:
            try:
                tenant = keys.tenant(request.headers.getall("Authorization", []))
                if path.startswith(ADMIN_PATHS):
                    check_operator(request, tenant, cross_origin)
            except ApiError as error:
                metrics.count(names.REQUESTS_REFUSED, 1, str(error.status))
                raise
            request[TENANT] = tenant
        return await handler(request)

    return middleware


def check_operator(request: web.Request, tenant: Tenant, cross_origin: CrossOrigin) -> None:
    """`ApiError` 403 unless this call comes from an administrator."""
    if not tenant.admin:
        text = "This path is for operators; the API key is not an administrator's."
        raise ApiError(403, text, "permission_error", "admin_required")
    if request.method == "POST" and cross_origin.is_foreign(request):
        text = "Web pages of other sites may not give orders to workers."
        raise ApiError(403, text, "permission_error", "foreign_origin")


class CrossOrigin:
    """Which web pages may call; none unless origins are given."""

    def __init__(self, origins: str) -> None:
        """`origins`: separated by commas, or "*" for all. Raises `ValueError`."""
        given = [origin.strip().rstrip("/") for origin in origins.split(",") if origin.strip()]
        self._any = given == ["*"]
        self._origins = frozenset(given)
        for origin in given:
            if not self._any and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"--cors-origins has {origin!r}; expected origins such as https://example.org, "
                    "or * alone"
                )

    def _allows(self, request: web.BaseRequest) -> str:
        """Value of Access-Control-Allow-Origin; empty if the page may not call."""
        origin = request.headers.get("Origin", "")
        if not origin:
            return ""
        if self._any:
            return "*"
        return origin if origin in self._origins else ""

    def is_foreign(self, request: web.BaseRequest) -> bool:
        """Sent by a web page that may not call.

        That it calls us by the name it came from proves nothing: a page may bind its name to our
        address (DNS rebinding), and none of our own gives orders."""
        return bool(request.headers.get("Origin")) and not self._allows(request)

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Signal handler: runs before the headers of every answer."""
        if not self._origins:
            return
        if not self._any:
            response.headers["Vary"] = "Origin"
        if allowed := self._allows(request):
            response.headers["Access-Control-Allow-Origin"] = allowed
            response.headers["Access-Control-Expose-Headers"] = "x-request-id, retry-after"

    @web.middleware
    async def preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware: answers OPTIONS of pages that may call. Must come before `authenticate`."""
        asked = request.headers.get("Access-Control-Request-Headers", "")
        if (
            request.method != "OPTIONS"
            or "Access-Control-Request-Method" not in request.headers
            or not self._allows(request)
            or not _HEADER_NAMES.fullmatch(asked)
        ):
            return await handler(request)
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
            "Access-Control-Allow-Headers": asked or "authorization, content-type",
            "Access-Control-Max-Age": str(PREFLIGHT_S),
        }
        return web.Response(status=204, headers=headers)
