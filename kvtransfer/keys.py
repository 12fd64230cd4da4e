"""Every Redis key, in one place.

The model id is the hash tag, so that Redis Cluster keeps all keys of one model in one slot. The
characters that mean something in a hash tag are percent-encoded in it.

| key | type | who writes | who reads |
|---|---|---|---|
| `prefill:<class>` | stream, group `prefill` | gateways | prefill workers |
| `decode:<worker>` | stream | gateways (local prefill) | that decode worker |
| `tokens:<gateway>` | stream | workers | that gateway |
| `control` | stream, no group | gateways | every worker |
| `worker:<id>` | string with expiry (the lease) | that worker | everyone |
| `left:<id>` | string, a minute | a worker that leaves on purpose | gateways: that was no death |
| `workers` | set of worker ids | workers, gateways (pruning) | everyone |
| `gateway:<id>` | string with expiry (the lease) | that gateway | workers |
| `dead` | stream, bounded | gateways | operators |
"""

from __future__ import annotations

from dataclasses import dataclass

PREFILL_GROUP = "prefill"
"""Consumer group that prefill workers share on every `prefill:<class>` stream."""

CLASSES = ("resume", "interactive", "batch")
"""Queue classes in the order in which they are served: resumed work goes ahead of new work."""

FIELD = b"m"
"""The one field of every stream entry; its value is a msgpack message from `kvtransfer.wire`."""


@dataclass(frozen=True)
class Keys:
    """Names the keys of one served model.

    `model` is the served model id, e.g. `SmolLM2-135M-Instruct`.
    """

    model: str

    def _key(self, tail: str) -> str:
        tag = self.model
        for special in "%{}":
            tag = tag.replace(special, f"%{ord(special):02X}")
        return f"pf:{{{tag}}}:{tail}"

    def prefill_queue(self, queue_class: str) -> str:
        return self._key(f"prefill:{queue_class}")

    @property
    def prefill_queues(self) -> tuple[str, ...]:
        return tuple(self.prefill_queue(c) for c in CLASSES)

    def decode_queue(self, worker_id: str) -> str:
        return self._key(f"decode:{worker_id}")

    def tokens(self, gateway_id: str) -> str:
        return self._key(f"tokens:{gateway_id}")

    @property
    def control(self) -> str:
        return self._key("control")

    def worker(self, worker_id: str) -> str:
        return self._key(f"worker:{worker_id}")

    def left(self, worker_id: str) -> str:
        return self._key(f"left:{worker_id}")

    @property
    def workers(self) -> str:
        return self._key("workers")

    def gateway(self, gateway_id: str) -> str:
        return self._key(f"gateway:{gateway_id}")

    @property
    def dead(self) -> str:
        return self._key("dead")
