"""Every metric name, in one place: vLLM's names after our prefix, so that dashboards carry over.

Gateways expose all of them under `/metrics`. What workers know, they publish as
`WorkerRecord.stats`, keyed by the names in `WORKER_STATS` without prefix; the gateways show those
with the labels `role` and `worker`. A key that is not listed here is not exposed, so the number of
series is bounded by the number of live workers.
"""

from __future__ import annotations

from pageferry.kvtransfer.device_health import STATS as DEVICE_STATS

PREFIX = "pageferry:"

MODEL_LABEL = "model_name"
WORKER_LABELS = (MODEL_LABEL, "role", "worker")

# --- computed by the gateway -------------------------------------------------------------------

NUM_REQUESTS_RUNNING = "num_requests_running"
NUM_REQUESTS_WAITING = "num_requests_waiting"
NUM_WORKERS = "num_workers"
REDIS_UP = "redis_up"
PROMPT_TOKENS = "prompt_tokens"
GENERATION_TOKENS = "generation_tokens"
PREFIX_CACHE_QUERIES = "prefix_cache_queries"
PREFIX_CACHE_HITS = "prefix_cache_hits"
REQUESTS_ACCEPTED = "requests_accepted"
REQUEST_SUCCESS = "request_success"
REQUESTS_REFUSED = "requests_refused"
REQUEST_RESUBMISSIONS = "request_resubmissions"
DUPLICATE_TOKENS = "duplicate_tokens_dropped"
WORKER_DEATHS = "worker_deaths"
INTERNAL_ERRORS = "internal_errors"
TIME_TO_FIRST_TOKEN = "time_to_first_token_seconds"
INTER_TOKEN_LATENCY = "inter_token_latency_seconds"
TIME_PER_OUTPUT_TOKEN = "request_time_per_output_token_seconds"
E2E_LATENCY = "e2e_request_latency_seconds"
QUEUE_TIME = "request_queue_time_seconds"
PREFILL_TIME = "request_prefill_time_seconds"
DECODE_TIME = "request_decode_time_seconds"
REQUEST_PROMPT_TOKENS = "request_prompt_tokens"
REQUEST_GENERATION_TOKENS = "request_generation_tokens"

GATEWAY_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    PROMPT_TOKENS: ("Prompt tokens of requests whose first token arrived.", ()),
    GENERATION_TOKENS: ("Tokens delivered to clients; the sum over all requests, aborted too.", ()),
    PREFIX_CACHE_QUERIES: ("Prompt tokens looked up in prefix caches.", ()),
    PREFIX_CACHE_HITS: ("Prompt tokens found in a prefix cache.", ()),
    REQUESTS_ACCEPTED: ("Sequences accepted; each ends under exactly one finished_reason.", ()),
    REQUEST_SUCCESS: (
        "Sequences ended, by reason: stop, length, abort (client left or cut off) or error.",
        ("finished_reason",),
    ),
    REQUESTS_REFUSED: ("Calls answered with an error before they were queued.", ("status",)),
    REQUEST_RESUBMISSIONS: (
        "Sequences given to another worker, by cause: worker_death, worker_failure, "
        "handoff_failed, requeue, gap, lost (Redis lost it), "
        "reroute (nobody would have fetched it, or taken it over from its prefill worker), "
        "other_weights (one fetched it that has other weights than began it, or is not in the "
        "registry yet).",
        ("cause",),
    ),
    DUPLICATE_TOKENS: ("Tokens dropped because they were stale or had arrived before.", ()),
    WORKER_DEATHS: ("Workers whose lease lapsed without goodbye.", ("role",)),
    INTERNAL_ERRORS: ("Unexpected exceptions that were answered with 500 or contained.", ()),
}
"""Name -> (help, labels beside `model_name`). Exposed with the suffix `_total`."""

LATENCY_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
"""Seconds."""

TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)

GATEWAY_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    TIME_TO_FIRST_TOKEN: ("Seconds from arrival to the first token.", LATENCY_BUCKETS),
    INTER_TOKEN_LATENCY: ("Seconds between a sequence's consecutive tokens.", LATENCY_BUCKETS),
    TIME_PER_OUTPUT_TOKEN: ("Mean seconds per token after the first.", LATENCY_BUCKETS),
    E2E_LATENCY: ("Seconds from arrival to the end.", LATENCY_BUCKETS),
    QUEUE_TIME: ("Seconds from arrival until a worker claimed the request.", LATENCY_BUCKETS),
    PREFILL_TIME: ("Seconds from the claim to the first token.", LATENCY_BUCKETS),
    DECODE_TIME: ("Seconds from the first token to the last.", LATENCY_BUCKETS),
    REQUEST_PROMPT_TOKENS: ("Prompt tokens per sequence.", TOKEN_BUCKETS),
    REQUEST_GENERATION_TOKENS: ("Output tokens per sequence.", TOKEN_BUCKETS),
}
"""Name -> (help, buckets)."""

GATEWAY_GAUGES: dict[str, str] = {
    NUM_REQUESTS_RUNNING: "Sequences of this gateway that have at least one token.",
    NUM_REQUESTS_WAITING: "Sequences of this gateway that wait for their first token.",
    REDIS_UP: "1 when Redis answered lately.",
}
"""Name -> help; computed when scraped."""

# --- published by workers ----------------------------------------------------------------------

KV_CACHE_USAGE = "kv_cache_usage_perc"
PAGES = "kv_pages"
"""Label `state`: free, reserved, live, cached, quarantined, total."""

LEDGER_STATES = ("total", "free", "reserved", "live", "cached", "quarantined")

KV_LIVE_TOKENS = "kv_live_tokens"
NUM_PREEMPTIONS = "num_preemptions_total"
SEQUENCES_HANDED_OVER = "sequences_handed_over_total"
HANDOFFS = "kv_handoffs_total"
HANDOFFS_DENIED = "kv_handoffs_denied_total"
HANDOFFS_FAILED = "kv_handoffs_failed_total"
TRANSFER_BYTES = "kv_transfer_bytes"
TRANSFER_SECONDS = "kv_transfer_seconds"
TRANSFER_EXPOSED_SECONDS = "kv_transfer_exposed_seconds"
TRANSFER_SEALED = "kv_transfer_sealed"
TRANSFER_DIGEST_SECONDS = "kv_transfer_digest_seconds"
OVERLAP_RATIO = "overlap_ratio"
GB_PER_S = "gb_per_s"
WORKER_PROMPT_TOKENS = "worker_prompt_tokens_total"
WORKER_GENERATION_TOKENS = "worker_generation_tokens_total"
WORKER_CACHED_TOKENS = "worker_prefix_cache_hits_total"
STEPS = "steps_total"
STEP_SECONDS = "step_seconds_total"
STEP_KERNEL_SECONDS = "step_kernel_seconds_total"
STEP_GAPS = "step_gaps_total"
STEP_GAP_SECONDS = "step_gap_seconds_total"
LONGEST_STEP_GAP = "longest_step_gap_seconds"
PREFILL_INFLIGHT = "num_prefill_inflight_queue_reqs"
DECODE_TRANSFER_QUEUE = "num_decode_transfer_queue_reqs"

TRANSFER_COUNTERS: dict[str, str] = {
    TRANSFER_BYTES: "KV bytes sent (prefill) or received (decode) over {}.",
    TRANSFER_SECONDS: "Seconds of handoffs over {}: sending pages until the prompt is computed, "
    "and from then to COMMIT (prefill), or receiving pages (decode).",
    TRANSFER_EXPOSED_SECONDS: "Seconds from SEAL, when a prompt is computed, to COMMIT over {}: "
    "what transfers add to the time of a prefill.",
    TRANSFER_SEALED: "Handoffs over {} that kv_transfer_exposed_seconds counts.",
    TRANSFER_DIGEST_SECONDS: "Seconds spent on digests of pages over {}.",
}
TRANSFER_GAUGES: dict[str, str] = {
    OVERLAP_RATIO: "Share of the transfer time over {} that was hidden behind compute: "
    "1 - exposed seconds / seconds.",
    GB_PER_S: "KV gigabytes (1e9 bytes) per second of transfer over {}.",
}
"""Name without transport -> help. Workers publish each under `of_transport`."""

TRANSPORTS = {"shm": "shared memory", "tcp": "TCP"}


def of_transport(name: str, transport: str) -> str:
    """The metric of one transport; counters keep the ending by which they are known."""
    return f"{name}_{transport}" + ("_total" if name in TRANSFER_COUNTERS else "")


WORKER_STATS: dict[str, str] = {
    KV_LIVE_TOKENS: "Tokens in live KV pages; 1 - this / (live pages x page size) holds nothing.",
    NUM_PREEMPTIONS: "Sequences preempted because pages ran out.",
    SEQUENCES_HANDED_OVER: "Running sequences that moved to another decode worker in a drain.",
    HANDOFFS: "Handoffs committed.",
    HANDOFFS_DENIED: "Handoffs denied by the receiver.",
    HANDOFFS_FAILED: "Handoffs that ended otherwise: NACK, cancel, deadline or lost connection.",
    WORKER_PROMPT_TOKENS: "Prompt tokens computed by this worker.",
    WORKER_GENERATION_TOKENS: "Tokens sampled by this worker.",
    WORKER_CACHED_TOKENS: "Prompt tokens that this worker took from its prefix cache.",
    STEPS: "Steps executed.",
    STEP_SECONDS: "Seconds spent in steps.",
    STEP_KERNEL_SECONDS: "Of those, seconds in the model and in sampling.",
    STEP_GAPS: "Steps that followed another without a pause for lack of work.",
    STEP_GAP_SECONDS: "Seconds between such steps: reporting, taking in, scheduling.",
    LONGEST_STEP_GAP: "Longest time between two such steps, seconds.",
    PREFILL_INFLIGHT: "Requests claimed and not yet handed over.",
    DECODE_TRANSFER_QUEUE: "Handoffs granted and not yet committed.",
    "late_messages": "Messages for handoffs that had ended; ignored.",
    "digest_failures": "Page messages whose bytes did not match their digest; refused.",
    "refused": "Connections refused in HELLO.",
    **{
        of_transport(name, transport): text.format(long_name)
        for transport, long_name in TRANSPORTS.items()
        for name, text in (TRANSFER_COUNTERS | TRANSFER_GAUGES).items()
    },
    **DEVICE_STATS,
}
"""Keys of `WorkerRecord.stats` -> help. Names that end in `_total` are shown as counters."""
