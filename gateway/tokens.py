"""Reads `tokens:<gateway>`, the one stream on which all workers answer this gateway.

One task, one connection of its own. The stream exists before the first request goes out, entries
are numbered, and events carry indexes: whatever is lost shows as a gap, whatever is repeated is
dropped by `Generation.apply`. Entries that were read are trimmed, so the stream stays short.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pageferry.gateway.outbox import Follower, RedisHealth
from pageferry.kvtransfer.bus import TRANSIENT, Client
from pageferry.kvtransfer.keys import FIELD
from pageferry.kvtransfer.retries import growing_pause
from pageferry.kvtransfer.wire import Event, WireError, unpack_events

log = logging.getLogger(__name__)

BLOCK_S = 1.0
READ_COUNT = 512
TRIM_EVERY = 256
"""Entries read between two trims; an idle stream is trimmed too."""
START = b"0-0"

TRIM = """
if #redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1]) == 1 then
  redis.call('XTRIM', KEYS[1], 'MINID', ARGV[2])
end
return 0
"""
"""Only if the entry read last is still there: after a flush, and with a clock that went back, the
ids of unread entries may be below it."""


class TokenReader:
    def __init__(
        self,
        client: Client,
        stream: str,
        on_event: Callable[[Event, float], None],
        losses: Callable[[], int],
        health: RedisHealth,
    ) -> None:
        """`on_event` gets each event and the loop time at which it was read.

        `losses` counts the times when Redis may have lost data; its ids start anew then."""
        self._client = client
        self._stream = stream
        self._on_event = on_event
        self._losses = losses
        self._loop = asyncio.get_running_loop()
        self._health = health
        self._follower = Follower(client, health)
        self._last = START
        self._seen_losses = 0
        self._untrimmed = 0
        self.malformed = 0

    async def run(self) -> None:
        """The task; ends only by cancellation."""
        failures = 0
        while True:
            try:
                await self._read()
                failures = 0
            except TRANSIENT as error:
                self._health.bad("token reader", error)
                failures += 1
                await asyncio.sleep(growing_pause(failures))

    async def _read(self) -> None:
        if self._losses() != self._seen_losses:
            self._seen_losses = self._losses()
            self._last = START
        await self._follower.follow()
        reply = await self._client.xread(
            {self._stream: self._last}, count=READ_COUNT, block=int(BLOCK_S * 1000)
        )
        entries = reply[0][1] if reply else []
        for entry_id, fields in entries:
            self._last = entry_id
            self._take(entry_id, fields)
        self._untrimmed += len(entries)
        if self._untrimmed >= TRIM_EVERY or (self._untrimmed and not entries):
            milliseconds, _, sequence = self._last.partition(b"-")
            oldest_kept = b"%s-%d" % (milliseconds, int(sequence) + 1)
            await self._client.eval(TRIM, 1, self._stream, self._last, oldest_kept)
            self._untrimmed = 0

    def _take(self, entry_id: bytes, fields: dict[bytes, bytes]) -> None:
        try:
            events = unpack_events(fields[FIELD])
        except (WireError, KeyError) as error:
            self.malformed += 1
            log.warning("token entry %s ignored: %s", entry_id.decode(), error)
            return
        now = self._loop.time()
        for event in events:
            self._on_event(event, now)
