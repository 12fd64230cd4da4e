"""`pageferry health gateway|prefill|decode`: is the process on this host alive?

The gateway is asked over HTTP; a worker is alive if Redis holds a running lease for its role and
host name. A worker that is busy keeps its lease (the heartbeat does not wait for the model), one
that hangs loses it. Exit code 0: alive; 1: not, with one sentence on stdout.

What runs every few seconds in every container is cheaper: `compose.probe` for gateways,
`kvtransfer.alive_file` for workers.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pageferry.compose.probe import gateway_trouble
from pageferry.kvtransfer.bus import TRANSIENT, connect, list_workers
from pageferry.kvtransfer.keys import Keys
from pageferry.kvtransfer.model_files import served_name
from pageferry.kvtransfer.settings import CommonSettings, from_args, setting

ROLES = ("gateway", "prefill", "decode")
REPLY_S = 3.0


@dataclass(frozen=True)
class HealthSettings(CommonSettings):
    port: int = setting(8000, "TCP port of the gateway's HTTP server.")
    tls_cert: str = setting("", "The gateway's own setting: if not empty, it is asked over TLS.")


async def worker_trouble(settings: HealthSettings, role: str) -> str:
    """Empty if a worker of this role on this host has a running lease and is not unhealthy."""
    keys = Keys(served_name(settings.model, settings.served_model_name))
    client = connect(settings.redis_url, keys)
    host = socket.gethostname()
    try:
        async with asyncio.timeout(REPLY_S):
            records = await list_workers(client, keys)
    except TRANSIENT as error:
        return f"{role}: no answer from Redis: {type(error).__name__}: {error}"
    finally:
        await client.aclose()
    here = [r for r in records if r.role == role and r.host == host]
    if not here:
        return f"{role}: no running lease of a {role} worker on host {host}"
    if all(r.state == "unhealthy" for r in here):
        return f"{role}: {here[0].id} reports itself unhealthy"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    role = argv[0] if argv else ""
    if role not in ROLES:
        print(f"pageferry health: expected one of {', '.join(ROLES)}", file=sys.stderr)
        return 2
    settings = from_args(HealthSettings, f"pageferry health {role}", __doc__ or "", argv[1:])
    if role == "gateway":
        trouble = gateway_trouble(settings.port, tls=bool(settings.tls_cert))
    else:
        trouble = asyncio.run(worker_trouble(settings, role))
    if trouble:
        print(trouble)
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main())
