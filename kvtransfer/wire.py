"""The messages that travel through Redis: requests, token events, cancels, worker records.

All are msgpack maps with short, fixed field names, decoded with strict limits. A message that does
not have the expected shape raises `WireError`; nothing here ever executes what it reads.

Life of a request as seen on the wire (the gateway that holds the client's connection owns it):

1. `Request` is added to `prefill:<class>` (or to `decode:<worker>` for local prefill).
2. A prefill worker claims it and says so: `Event(kind=OWNED, worker=<self>)`.
3. The first token: `Event(kind=TOKENS, index=<len of tokens so far>)` from the prefill worker.
4. After COMMIT the prefill worker says `Event(kind=OWNED, worker=<decode worker>)`, then acks and
   deletes the queue entry.
5. The decode worker sends `TOKENS` events, the last one with a `finish` reason.
6. `REQUEUE` gives the request back (preempted, draining, handoff failed for good): the gateway
   resubmits prompt + tokens so far under the next epoch to the `resume` class. `ERROR` ends it.

Tokens carry (request_id, epoch, index); the gateway drops stale epochs and duplicates, and treats
a gap as loss (resubmits). `index` counts output tokens from the original prompt's end.
"""

from __future__ import annotations

import array
import enum
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

import msgpack  # type: ignore[import-untyped]

from pageferry.kvtransfer.keys import CLASSES

MAX_MESSAGE_BYTES = 16 * 2**20


class WireError(ValueError):
    """A message from another process does not have the agreed shape."""


def pack(value: Any) -> bytes:
    """Serialise plain data (dict, list, str, bytes, int, float, bool, None)."""
    data: bytes = msgpack.packb(value, use_bin_type=True)
    return data


def unpack(data: bytes | memoryview) -> Any:
    """Deserialise plain data; `WireError` for anything malformed or above the size cap."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}")
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not a msgpack message: {type(error).__name__}") from error


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32. From an `array("i")` it is one copy of its memory."""
    packed = array.array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Inverse of `pack_ids`."""
    if not isinstance(data, bytes) or len(data) % 4:
        raise WireError("token ids must be a whole number of int32")
    unpacked = array.array("i", data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()


def _known(cls: type, value: Any) -> dict[str, Any]:
    """The entries of `value` that `cls` has; later versions may add fields (rolling upgrades)."""
    if not isinstance(value, dict):
        raise WireError(f"{cls.__name__} must be a map, got {type(value).__name__}")
    names = {f.name for f in fields(cls)}
    return {k: v for k, v in value.items() if k in names}


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. Validated by the gateway; workers may rely on the ranges.

    Sampling noise is a function of (seed, position) only, so a resumed request continues the same.
    """

    temperature: float = 1.0
    """>= 0; 0 is greedy whatever the other fields say."""
    top_p: float = 1.0
    """(0, 1]."""
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """[0, 1)."""
    seed: int = 0
    """Fixed by the gateway for every request; unsigned 63 bits."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int = -1
    """-1: none wanted; k >= 0: the chosen token's logprob and the k most likely ones."""
    max_tokens: int = 16
    """Output budget counted from the original prompt's end."""
    min_tokens: int = 0
    """`stop_token_ids` (which include EOS) are masked until this many output tokens exist."""
    stop_token_ids: tuple[int, ...] = ()
    """Everything that ends the sequence, the model's EOS set included unless `ignore_eos`."""

    @property
    def is_well_typed(self) -> bool:
        """Whether a worker can compute with every value: a step is shared with other requests."""
        values = [getattr(self, name) for name in _FLOAT_FIELDS] + list(self.logit_bias.values())
        ids = [getattr(self, name) for name in _INT_FIELDS] + list(self.logit_bias)
        return all(type(v) in (int, float) and math.isfinite(v) for v in values) and all(
            type(i) is int and -(2**63) <= i < 2**63 for i in (*ids, *self.stop_token_ids)
        )


_FLOAT_FIELDS = [f.name for f in fields(SamplingParams) if f.type == "float"]
_INT_FIELDS = [f.name for f in fields(SamplingParams) if f.type == "int"]


def ttl_left_ms(ends_at: float, now: float) -> int:
    """`Request.ttl_ms` of one that ends at `ends_at`, both in seconds of one clock; at least 1."""
    return max(1, int((ends_at - now) * 1000))


@dataclass(frozen=True)
class Request:
    """One sequence to generate. A client call with n > 1 or several prompts is several of these."""

    request_id: str
    epoch: int
    """Raised by the gateway at each resubmission; a worker drops lower epochs of the same id."""
    gateway: str
    token_ids: Sequence[int]
    """The prompt, followed by the output tokens that the client already has."""
    prompt_len: int
    """How many of `token_ids` are the original prompt; the rest are output tokens so far."""
    sampling: SamplingParams
    queue_class: str = "interactive"
    salt: str = ""
    """Prefix-cache partition (tenant, adapter)."""
    ttl_ms: int = 600_000
    """Remaining time to live when sent; a duration because hosts' clocks differ."""

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that the client already has; the next token's index."""
        return len(self.token_ids) - self.prompt_len

    def to_dict(self) -> dict[str, Any]:
        value = {f.name: getattr(self, f.name) for f in fields(self)}
        value["token_ids"] = pack_ids(self.token_ids)
        value["sampling"] = asdict(self.sampling)
        return value

    @classmethod
    def from_dict(cls, value: Any) -> Self:
        known = _known(cls, value)
        try:
            sampling = _known(SamplingParams, known["sampling"])
            sampling["stop_token_ids"] = tuple(sampling.get("stop_token_ids", ()))
            known["sampling"] = SamplingParams(**sampling)
            known["token_ids"] = tuple(unpack_ids(known["token_ids"]))
            request = cls(**known)
            well_typed = request.sampling.is_well_typed
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise WireError(f"malformed Request: {error!r}") from error
        ok = (
            well_typed
            and isinstance(request.request_id, str)
            and type(request.epoch) is int
            and 0 <= request.epoch < 2**63
            and isinstance(request.gateway, str)
            and type(request.prompt_len) is int
            and 0 < request.prompt_len <= len(request.token_ids)
            and isinstance(request.salt, str)
            and type(request.ttl_ms) is int
            and request.queue_class in CLASSES
        )
        if not ok:
            raise WireError("malformed Request: field of a wrong type or range")
        return request


class Kind(enum.IntEnum):
    """What an `Event` says."""

    TOKENS = 1
    OWNED = 2
    REQUEUE = 3
    ERROR = 4


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of one emitted token after penalties, before temperature and top-*.

    `top` holds (token id, logprob), most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Event:
    """Worker to gateway, about one request under one epoch. Nobody changes one that exists.

    Not frozen: that makes an instance eight times dearer, and gateways make one per token.
    """

    request_id: str
    epoch: int
    kind: Kind
    worker: str
    """TOKENS, REQUEUE, ERROR: the sender. OWNED: who answers for the request from now on."""
    index: int = 0
    """TOKENS: output index of `token_ids[0]`."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """Empty, or one per token id."""
    finish: str | None = None
    """TOKENS: "stop" (stop token id; it is the last of `token_ids`) or "length"."""
    stop_token_id: int | None = None
    """TOKENS with finish "stop": the id that ended it."""
    code: str = ""
    """ERROR, REQUEUE: a fixed word for machines, e.g. `non_finite_logits`, `preempted`."""
    message: str = ""
    """ERROR: a sentence for the client; never prompt text."""
    num_cached_tokens: int = 0
    """First TOKENS event: prompt tokens that came from a prefix cache."""

    def to_list(self) -> list[Any]:
        return [
            self.request_id,
            self.epoch,
            int(self.kind),
            self.worker,
            self.index,
            list(self.token_ids),
            [[lp.logprob, [list(t) for t in lp.top]] for lp in self.logprobs],
            self.finish,
            self.stop_token_id,
            self.code,
            self.message,
            self.num_cached_tokens,
        ]

    @classmethod
    def from_list(cls, value: Any) -> Self:
        """1 µs for an event with one token and no logprobs."""
        try:
            (rid, epoch, kind, worker, index, ids, lps, finish, stop_id, code, text, cached) = value
            known_kind = _KINDS[kind]
            logprobs = _read_logprobs(lps) if lps else ()
            token_ids = tuple(ids)
        except (TypeError, ValueError, KeyError) as error:
            raise WireError(f"malformed Event: {error!r}") from error
        ok = (
            type(rid) is str
            and type(epoch) is int
            and type(worker) is str
            and type(index) is int
            and set(map(type, token_ids)) <= _ONLY_INT
            and (finish is None or type(finish) is str)
            and (stop_id is None or type(stop_id) is int)
            and type(code) is str
            and type(text) is str
            and type(cached) is int
        )
        if not ok:
            raise WireError("malformed Event: field of a wrong type")
        return cls(
            rid, epoch, known_kind, worker, index, token_ids,
            logprobs, finish, stop_id, code, text, cached,
        )  # fmt: skip


_KINDS = {int(kind): kind for kind in Kind}
_ONLY_INT = {int}


def _read_logprobs(value: Any) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(float(logprob), tuple((int(i), float(p)) for i, p in top))
        for logprob, top in value
    )


def pack_events(events: list[Event]) -> bytes:
    """One `tokens:<gateway>` entry: all of a worker's events of one step for that gateway."""
    return pack([e.to_list() for e in events])


def unpack_events(data: bytes) -> list[Event]:
    value = unpack(data)
    if not isinstance(value, list):
        raise WireError("events must be a list")
    return [Event.from_list(v) for v in value]


@dataclass(frozen=True)
class Cancel:
    """Gateway to all workers (`control` stream): drop `request_id` at this epoch and below."""

    request_id: str
    epoch: int


@dataclass(frozen=True)
class Drain:
    """Gateway to one worker (`control` stream): finish or hand over what you have, then leave."""

    worker: str


Control = Cancel | Drain


def pack_control(messages: Sequence[Control]) -> bytes:
    """One `control` entry."""
    cancels = [[m.request_id, m.epoch] for m in messages if isinstance(m, Cancel)]
    drains = [m.worker for m in messages if isinstance(m, Drain)]
    return pack({"cancel": cancels, "drain": drains})


def unpack_control(data: bytes) -> list[Control]:
    value = unpack(data)
    try:
        cancels = [Cancel(str(rid), int(epoch)) for rid, epoch in value.get("cancel", ())]
        return [*cancels, *(Drain(str(worker)) for worker in value.get("drain", ()))]
    except (AttributeError, TypeError, ValueError) as error:
        raise WireError(f"malformed control message: {error}") from error


@dataclass(frozen=True)
class Ledger:
    """Page counts of one pool. Always: free + reserved + live + cached + quarantined == total."""

    total: int
    free: int
    reserved: int
    live: int
    cached: int
    quarantined: int
    page_size: int
    """Token slots per page."""

    @property
    def available(self) -> int:
        """Pages that a reservation could get now: free ones and evictable cached ones."""
        return self.free + self.cached


@dataclass(frozen=True)
class WorkerRecord:
    """What a worker publishes under its lease; `/v1/workers` shows it as it is."""

    id: str
    """Unique per incarnation: a restarted worker has another id."""
    role: str
    """"prefill" or "decode"."""
    pid: int
    host: str
    state: str
    """"ready", "draining", "unhealthy", or "unconnected": a prefill worker that reaches no decode
    worker gets no requests. A worker registers only after its model is loaded."""
    model: str
    fingerprint: str
    """Digest of config and weights; equal on both sides of a handoff."""
    layout: dict[str, Any]
    """`KVLayout` as a map."""
    ledger: Ledger
    max_model_len: int
    """Tokens, prompt and output together, that one sequence may have on this worker."""
    addresses: dict[str, str] = field(default_factory=dict)
    """Decode only: handoff endpoints by transport, `{"tcp": "host:port", "shm": "..."}`."""
    host_id: str = ""
    """Equal for processes that can share memory (boot id and network namespace)."""
    num_running: int = 0
    num_waiting: int = 0
    memory_source: str = ""
    """Where memory figures come from: "nvml", "cuda", "cgroup" or "host"."""
    refusals: tuple[str, ...] = ()
    """Latest HELLO refusals, newest last, each naming the peer, the field and both values."""
    stats: dict[str, float] = field(default_factory=dict)
    """Counters and gauges by metric name without prefix (see `kvtransfer.metric_names`)."""
    version: str = ""

    def to_bytes(self) -> bytes:
        return pack(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        known = _known(cls, unpack(data))
        try:
            known["ledger"] = Ledger(**_known(Ledger, known["ledger"]))
            known["refusals"] = tuple(known.get("refusals", ()))
            return cls(**known)
        except (KeyError, TypeError) as error:
            raise WireError(f"malformed WorkerRecord: {error!r}") from error
