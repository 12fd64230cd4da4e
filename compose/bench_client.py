"""The client of a load test: streamed completions from any OpenAI-compatible server.

1. `discover` finds the model, its context length and what the server takes: prompts as token ids or
   as text, forced output lengths (`ignore_eos`, `min_tokens`) or not.
2. `run` sends a `Load`: closed loops (each stream sends its next request when the last one has
   ended) and open arrivals (each request is sent when it is due, whatever the others do) at the
   same time, until all have ended or the load's time is over.
3. Each request leaves an `Outcome`: when it was due, when its tokens came, how it ended.

A request of an open loop is timed from when it was *due*: a client or server that falls behind
cannot hide waiting time (no coordinated omission). Times are seconds since the load's start.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pageferry.compose.bench_workload import Request, prompt_ids, prompt_text

PROBE_WORDS = 64
CONNECT_S = 10.0
ERROR_CHARS = 200


class Unusable(Exception):
    """The server cannot be measured; the text says what it answered."""


@dataclass(frozen=True)
class Server:
    """How to talk to one server."""

    url: str
    """Base URL without `/v1`."""
    model: str = ""
    """Empty: the first of `/v1/models`."""
    chat: bool = False
    api_key: str = ""
    timeout_s: float = 600.0
    """Seconds without a byte after which a request has failed."""
    max_model_len: int = 0
    """0: unknown."""
    ids: bool = True
    """Prompts go as token ids, so their length is exact."""
    exact: bool = True
    """The server takes `ignore_eos` and `min_tokens`."""
    counted: bool = True
    """The server takes `continuous_usage_stats`: chunks say how many tokens they carry."""
    tokens_per_word: float = 1.0
    """Only for text prompts."""

    @property
    def path(self) -> str:
        return f"{self.url}/v1/{'chat/' if self.chat else ''}completions"

    def body(self, request: Request, key: str) -> dict[str, Any]:
        """The JSON to send; `key` seeds the prompt's contents."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.counted:
            body["stream_options"]["continuous_usage_stats"] = True
        if self.exact:
            body |= {"ignore_eos": True, "min_tokens": request.output}
        if self.ids and not self.chat:
            return body | {"prompt": prompt_ids(request.prompt, key)}
        text = prompt_text(round(request.prompt / self.tokens_per_word), key)
        if self.chat:
            return body | {"messages": [{"role": "user", "content": text}]}
        return body | {"prompt": text}


@dataclass
class Outcome:
    """What the client saw of one request."""

    request: Request
    due_s: float
    sent_s: float = 0.0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    """(arrival, tokens in it) of every chunk that carried tokens."""
    end_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    cut: bool = False
    """Still running when the load's time was over."""
    storm: bool = False
    """Sent by `Load.open`, not by a closed loop."""


@dataclass(frozen=True)
class Load:
    """What to send at the same time."""

    closed: tuple[Request, ...] = ()
    """Shared by `concurrency` streams; with `seconds`, repeated (with new prompts) until then."""
    concurrency: int = 0
    open: tuple[Request, ...] = ()
    seconds: float | None = None
    """End after this long; None: when every request has ended."""
    key: str = ""
    """Seeds the prompts' contents. Two loads with different keys share no prefix."""

    def closed_requests(self) -> Iterator[tuple[str, Request]]:
        """(prompt key, request) in the order in which the streams take them."""
        requests = itertools.cycle(self.closed) if self.seconds else self.closed
        return ((f"{self.key}-c{i}", r) for i, r in enumerate(requests))

    def open_requests(self) -> Iterator[tuple[str, Request]]:
        return ((f"{self.key}-o{i}", r) for i, r in enumerate(self.open))


@dataclass
class Watch:
    """Shows a load while it runs, and ends it early."""

    sent: list[Outcome] = field(default_factory=list)
    """Running or ended, in the order of their starts."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set it: nothing more is sent, and what is running is cut."""
    ended: Callable[[Outcome], None] = lambda _: None
    """Called after each request."""


@dataclass(frozen=True)
class Result:
    outcomes: list[Outcome]
    wall_s: float


def session(server: Server) -> aiohttp.ClientSession:
    """A client session with no limit on connections, one for each request.

    Some servers close a connection between two requests without saying so (llama.cpp): a second
    request on it would fail, which says nothing about the server's load.
    """
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=server.timeout_s)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)


async def stream(client: aiohttp.ClientSession, server: Server, key: str, seen: Outcome) -> None:
    """Send one request and fill `seen`, whose times are on `time.perf_counter`'s clock."""
    seen.sent_s = time.perf_counter()
    try:
        async with client.post(server.path, json=server.body(seen.request, key)) as reply:
            if reply.status != 200:
                text = (await reply.text())[:ERROR_CHARS]
                seen.error = f"HTTP {reply.status}: {text}"
                return
            await _read(reply, seen)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        seen.error = f"{type(error).__name__}: {error}"[:ERROR_CHARS]
    except asyncio.CancelledError:
        seen.cut = True
        raise
    finally:
        seen.end_s = time.perf_counter()
        counted = sum(tokens for _, tokens in seen.chunks)
        seen.output_tokens = max(seen.output_tokens, counted)


async def _read(reply: aiohttp.ClientResponse, seen: Outcome) -> None:
    done, counted = False, 0
    async for line in reply.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            continue
        now = time.perf_counter()
        chunk = json.loads(data)
        if "error" in chunk:
            seen.error = f"error event: {chunk['error']}"[:ERROR_CHARS]
            return
        usage = chunk.get("usage") or {}
        if usage:
            seen.output_tokens = int(usage["completion_tokens"])
            seen.prompt_tokens = int(usage["prompt_tokens"])
        if chunk.get("choices"):
            # Without a count a chunk is one token, unless it has no text and only says "finished".
            tokens = seen.output_tokens - counted if usage else _has_text(chunk["choices"][0])
            if tokens > 0:
                seen.chunks.append((now, tokens))
                counted += tokens
            done = done or bool(chunk["choices"][0].get("finish_reason"))
    if not done:
        seen.error = "the stream ended without finish_reason and [DONE]"
    elif not seen.chunks:
        seen.error = "the stream ended without a token"


def _has_text(choice: dict[str, Any]) -> int:
    delta = choice.get("delta")
    if delta is None:
        return 1 if choice.get("text") or not choice.get("finish_reason") else 0
    return 1 if delta.get("content") or delta.get("reasoning_content") else 0


async def discover(server: Server) -> Server:
    """`server` with everything filled in that its answers tell; `Unusable` if nothing works."""
    async with session(server) as client:
        server = await _model(client, server)
        refusals: list[str] = []
        for exact, ids in ((True, True), (True, False), (False, True), (False, False)):
            if ids and server.chat:
                continue
            for counted in (True, False):
                trial = _with(server, exact=exact, ids=ids, counted=counted)
                seen = Outcome(Request(PROBE_WORDS, 2), 0.0)
                await stream(client, trial, "probe", seen)
                if not seen.error:
                    per_word = (seen.prompt_tokens or PROBE_WORDS) / PROBE_WORDS
                    return _with(trial, tokens_per_word=1.0 if ids else per_word)
                refusals.append(seen.error)
    raise Unusable(f"{server.path} takes no completion: {refusals[-1]}")


async def _model(client: aiohttp.ClientSession, server: Server) -> Server:
    try:
        async with client.get(f"{server.url}/v1/models") as reply:
            if reply.status != 200:
                raise Unusable(f"{server.url}/v1/models: HTTP {reply.status}")
            models = (await reply.json(content_type=None))["data"]
    except (aiohttp.ClientError, TimeoutError, OSError, KeyError, TypeError, ValueError) as error:
        raise Unusable(f"{server.url}/v1/models: {type(error).__name__}: {error}") from error
    names = [m["id"] for m in models]
    if not names or (server.model and server.model not in names):
        raise Unusable(f"{server.url} does not serve {server.model or 'any model'}, but {names}")
    model = models[names.index(server.model or names[0])]
    meta = model.get("meta") or {}
    limit = model.get("max_model_len") or meta.get("n_ctx") or meta.get("n_ctx_train") or 0
    return _with(server, model=model["id"], max_model_len=server.max_model_len or int(limit))


def _with(server: Server, **changes: Any) -> Server:
    return Server(**{**server.__dict__, **changes})


async def run(server: Server, load: Load, watch: Watch | None = None) -> Result:
    """Send `load`. Outcomes in the order of their starts."""
    watch = watch or Watch()
    outcomes = watch.sent
    closed = load.closed_requests()
    async with session(server) as client:
        started = time.perf_counter()

        async def one(key: str, request: Request, due: float, storm: bool) -> None:
            seen = Outcome(request, due, storm=storm)
            outcomes.append(seen)
            await stream(client, server, key, seen)
            watch.ended(seen)

        async def loop() -> None:
            for key, request in closed:
                await one(key, request, time.perf_counter(), storm=False)

        async def arrival(key: str, request: Request) -> None:
            due = started + request.arrival_s
            await asyncio.sleep(due - time.perf_counter())
            await one(key, request, due, storm=True)

        tasks = [asyncio.create_task(loop()) for _ in range(load.concurrency)]
        tasks += [asyncio.create_task(arrival(k, r)) for k, r in load.open_requests()]
        await _finish(tasks, load.seconds, watch.stop)
        wall_s = time.perf_counter() - started
    for seen in outcomes:
        seen.due_s, seen.sent_s = seen.due_s - started, max(0.0, seen.sent_s - started)
        seen.end_s = max(seen.sent_s, seen.end_s - started)
        seen.chunks = [(at - started, tokens) for at, tokens in seen.chunks]
    return Result(outcomes, wall_s)


async def _finish(
    tasks: list[asyncio.Task[None]], seconds: float | None, stop: asyncio.Event
) -> None:
    """Until all have ended, the time is over or `stop`; the rest is cut. A task's bug is raised."""
    whole = asyncio.ensure_future(asyncio.wait(tasks))
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({whole, stopped}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    whole.cancel()
    stopped.cancel()
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in tasks:
        if task not in pending:
            task.result()
