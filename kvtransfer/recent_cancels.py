"""Cancels that may have overtaken the request they are about."""

from __future__ import annotations

import collections

from pageferry.kvtransfer.wire import Cancel, Request


class RecentCancels:
    """Remembers the last `capacity` cancelled request ids.

    A cancel travels by the control stream, its request by a queue and a handoff: either may come
    first. Whoever takes a request in asks here before spending anything on it.
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        self._epochs: collections.OrderedDict[str, int] = collections.OrderedDict()

    def add(self, cancel: Cancel) -> None:
        epoch = max(cancel.epoch, self._epochs.pop(cancel.request_id, cancel.epoch))
        self._epochs[cancel.request_id] = epoch
        if len(self._epochs) > self._capacity:
            self._epochs.popitem(last=False)

    def covers(self, request: Request) -> bool:
        """Whether this request at this epoch was cancelled."""
        return self._epochs.get(request.request_id, -1) >= request.epoch
