"""What operators and load balancers ask: models, workers, health, readiness, metrics, version."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from pageferry.gateway.admission import Admission
from pageferry.gateway.errors import ApiError, unavailable
from pageferry.gateway.fleet import Fleet
from pageferry.gateway.metrics import GatewayMetrics
from pageferry.gateway.outbox import RedisHealth
from pageferry.gateway.web_errors import error_response
from pageferry.kvtransfer.bus import TRANSIENT
from pageferry.kvtransfer.wire import Drain, pack_control

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


CONTROL_TIMEOUT_S = 1.5
"""How long an operator's order waits for Redis before it is refused with 503."""


class Operations:
    def __init__(
        self,
        model: str,
        parts: tuple[Fleet, RedisHealth, Admission, GatewayMetrics],
        send_control: Callable[[bytes], Awaitable[Any]],
    ) -> None:
        """`send_control` puts a message on the stream that all workers read."""
        self._model = model
        self._fleet, self._health, self._admission, self._metrics = parts
        self._send_control = send_control
        self._created = int(time.time())

    def _model_object(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "pageferry",
            "max_model_len": self._admission.context_len,
        }

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model_object()]})

    async def one_model(self, request: web.Request) -> web.Response:
        if request.match_info["model"] != self._model:
            text = f"The model does not exist here; this gateway serves {self._model!r}."
            raise ApiError(404, text, code="model_not_found", param="model")
        return web.json_response(self._model_object())

    async def workers(self, request: web.Request) -> web.Response:
        """The registry as the gateway last read it: live workers only."""
        records = [dataclasses.asdict(record) for record in self._fleet.records.values()]
        return web.json_response({"object": "list", "data": records})

    async def drain(self, request: web.Request) -> web.Response:
        """202: the worker takes nothing more, finishes or hands over what it has, and leaves.

        Asking twice is harmless. 404 for an id that is not in the registry."""
        worker = request.match_info["worker"]
        record = self._fleet.records.get(worker)
        if record is None:
            text = f"No worker has the id {worker[:128]!r}; GET /v1/workers lists them."
            raise ApiError(404, text, code="worker_not_found", param="worker")
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                await self._send_control(pack_control([Drain(worker)]))
        except TRANSIENT:
            raise unavailable("Redis does not answer; try again.", "redis_unavailable", 2) from None
        answer = {"id": worker, "object": "worker", "role": record.role, "state": "draining"}
        return web.json_response(answer, status=202)

    async def health(self, request: web.Request) -> web.Response:
        """200 as long as this process runs its event loop."""
        return web.json_response({"status": "ok"})

    def why_not_ready(self) -> str:
        """Empty when a request sent now would be served."""
        if self._admission.draining:
            return "This gateway is shutting down."
        if not self._health.up:
            return f"Redis does not answer ({self._health.error})."
        return self._fleet.why_not_ready()

    async def ready(self, request: web.Request) -> web.Response:
        """200, or 503 with the reason; HELLO refusals between workers are shown either way."""
        reason = self.why_not_ready()
        details = {
            "ready": not reason,
            "reason": reason or None,
            "prefill_workers": len(self._fleet.ready("prefill")),
            "decode_workers": len(self._fleet.ready("decode")),
            "refusals": self._fleet.refusals(),
        }
        if not reason:
            return web.json_response(details)
        error = unavailable(reason, "not_ready", 2)
        headers = error_response(error).headers
        return web.json_response(
            {**error.body(), **details},
            status=error.status,
            headers={"Retry-After": headers["Retry-After"]},
        )

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.expose(), headers={"Content-Type": METRICS_TYPE})

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": importlib.metadata.version("pageferry")})
