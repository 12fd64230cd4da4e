"""POST /v1/completions and /v1/chat/completions: one `Call` from body to last byte.

1. `read`: body within the limit, parsed, tokenised (off the event loop unless tiny).
2. `admit`: one generation per choice, or a refusal.
3. `run`: submitted; tokens are turned into pieces as they come.
4. Answer: SSE, or one JSON body. An error before the first byte is an HTTP error.
5. Whatever happens, also when the client leaves and this handler is cancelled: every generation is
   ended, which recalls it from its worker.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from aiohttp import web

from pageferry.gateway.access import tenant_of
from pageferry.gateway.admission import Admission
from pageferry.gateway.choices import Choice
from pageferry.gateway.detokenize import TextStream
from pageferry.gateway.dispatch import Dispatcher
from pageferry.gateway.errors import ApiError, bad_request
from pageferry.gateway.log_lines import log_text
from pageferry.gateway.metrics import GatewayMetrics
from pageferry.gateway.rate_limits import Visit
from pageferry.gateway.requests import Generation
from pageferry.gateway.responses import ChatShape, CompletionShape, Shape, usage_of
from pageferry.gateway.schema import ChatCall, CompletionCall, parse_chat, parse_completion
from pageferry.gateway.sse import ClientGone, EventStream, send_whole
from pageferry.gateway.text import Tokenizer
from pageferry.gateway.web_errors import QUEUED, as_api_error, request_id
from pageferry.kvtransfer import metric_names as names
from pageferry.kvtransfer.settings import GatewaySettings

log = logging.getLogger(__name__)

INLINE_BYTES = 2048
"""Bodies up to this size are parsed and tokenised on the event loop: a thread hop costs more."""
LONG_BODY_BYTES = 32 * 1024
PACKED_AT_ONCE = 64 * 1024
DEFAULT_MAX_TOKENS = 16
"""Completions only, as the OpenAI API has it; chats may fill the context."""
SEED_RANGE = 2**63


@dataclass(frozen=True)
class CallContext:
    """What every call works with."""

    settings: GatewaySettings
    model: str
    gateway_id: str
    tokenizer: Tokenizer
    admission: Admission
    dispatcher: Dispatcher
    metrics: GatewayMetrics
    threads: ThreadPoolExecutor
    """For parsing and tokenising bodies of ordinary size."""
    long_threads: ThreadPoolExecutor
    """For those above `LONG_BODY_BYTES`, which would make the others wait for seconds."""


@dataclass(frozen=True)
class Prepared:
    call: CompletionCall | ChatCall
    prompts: list[array[int]]
    texts: list[str]
    """For echo: the prompts as text."""
    param: str
    """The field that the prompts came from."""


def prepare_completion(context: CallContext, body: bytes) -> Prepared:
    """Parse and tokenise. Runs on any thread. `ApiError` for everything a client can get wrong."""
    call = parse_completion(body)
    check_model(context.model, call.model)
    context.admission.check_shape(call.n, len(call.prompts))
    tokenizer = context.tokenizer
    prompts, texts = [], []
    for prompt in call.prompts:
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise bad_request("The prompt is empty: there is nothing to continue.", "prompt")
        tokenizer.check_ids(ids)
        prompts.append(packed(ids))
        if call.echo:
            texts.append(prompt if isinstance(prompt, str) else text_of(tokenizer, ids))
    return Prepared(call, prompts, texts, "prompt")


def prepare_chat(context: CallContext, body: bytes) -> Prepared:
    """As `prepare_completion`."""
    call = parse_chat(body)
    check_model(context.model, call.model)
    context.admission.check_shape(call.n, 1)
    ids = context.tokenizer.encode_chat(call.messages, template_kwargs=call.template_kwargs)
    return Prepared(call, [packed(ids)], [], "messages")


def packed(ids: list[int]) -> array[int]:
    """In slices: converting all of 700,000 would keep other threads waiting for 20 ms."""
    prompt = array("i")
    for start in range(0, len(ids), PACKED_AT_ONCE):
        prompt.extend(ids[start : start + PACKED_AT_ONCE])
    return prompt


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")


def check_model(served: str, wanted: str) -> None:
    if wanted != served:
        shown = wanted if len(wanted) <= 128 else wanted[:128] + "…"
        text = f"The model {shown!r} does not exist here; this gateway serves {served!r}."
        raise ApiError(404, text, "invalid_request_error", "model_not_found", "model")


class Calls:
    """The two handlers."""

    def __init__(self, context: CallContext) -> None:
        self._context = context

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, prepare_completion, CompletionShape)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, prepare_chat, ChatShape)

    async def _serve(
        self,
        request: web.Request,
        prepare: Callable[[CallContext, bytes], Prepared],
        shape_class: type[Shape],
    ) -> web.StreamResponse:
        context = self._context
        with tenant_of(request).visit() as visit:
            origin = Origin(visit.salt, request_id(request), asyncio.get_running_loop().time())
            try:
                visit.start()
                prepared = await self._read(request, prepare)
                wake = asyncio.Event()
                choices = make_choices(context, prepared, origin, wake)
                visit.grow(len(choices))
                context.admission.check_room(len(choices), context.dispatcher.num_waiting)
            except ApiError as error:
                context.metrics.count(names.REQUESTS_REFUSED, 1, str(error.status))
                raise
            visit.spend(sum(map(len, prepared.prompts)))
            run = Run(context, choices, wake, visit)
            return await self._answer(request, prepared.call, run, shape_class)

    async def _answer(
        self,
        request: web.Request,
        call: ChatCall | CompletionCall,
        run: Run,
        shape_class: type[Shape],
    ) -> web.StreamResponse:
        context, choices = self._context, run.choices
        shape = shape_class(
            context.model,
            context.tokenizer,
            logprobs=call.logprobs,
            usage_chunk=call.stream and call.include_usage,
            continuous_usage=call.continuous_usage,
        )
        stream = EventStream(request, context.settings.slow_client_s)
        answer: web.StreamResponse = stream.response
        outcome, cause = "abort", None
        request[QUEUED] = True
        try:
            await context.dispatcher.submit([choice.generation for choice in choices])
            if call.stream:
                return await run.stream(stream, shape)
            await run.complete()
            answer = web.json_response(shape.body(choices, usage_of(choices)))
            await send_whole(request, answer, context.settings.slow_client_s)
            return answer
        except (ClientGone, ConnectionError) as error:
            log.info("answer %s cut off: %s", shape.id, error)
            return answer
        except Exception as error:
            outcome, cause = "error", as_api_error(error, context.metrics, request_id(request))
            raise cause  # noqa: B904 - it is `error`, or has it as its cause
        finally:
            for choice in choices:
                context.dispatcher.end(choice.generation, outcome, cause)
                if context.settings.log_prompts:
                    log_text(choice.generation, context.tokenizer)

    async def _read(
        self, request: web.Request, prepare: Callable[[CallContext, bytes], Prepared]
    ) -> Prepared:
        context = self._context
        context.admission.check_open(context.dispatcher.num_waiting)
        context.admission.preparing += 1
        try:
            async with context.admission.bodies.read(request) as body:
                if len(body) <= INLINE_BYTES:
                    return prepare(context, body)
                pool = context.threads if len(body) <= LONG_BODY_BYTES else context.long_threads
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(pool, prepare, context, body)
        finally:
            context.admission.preparing -= 1


@dataclass(frozen=True)
class Origin:
    """Where a call comes from, and when it came."""

    salt: str
    client_id: str
    arrived: float


def make_choices(
    context: CallContext, prepared: Prepared, origin: Origin, wake: asyncio.Event
) -> list[Choice]:
    """One choice per prompt and n, in that order; `ApiError` when a prompt cannot fit."""
    call = prepared.call
    call_id = uuid.uuid4().hex
    seed = secrets.randbelow(SEED_RANGE) if call.seed is None else call.seed
    max_tokens = call.max_tokens
    if max_tokens is None and isinstance(call, CompletionCall):
        max_tokens = DEFAULT_MAX_TOKENS
    tokenizer = context.tokenizer
    choices = []
    for prompt_index, prompt in enumerate(prepared.prompts):
        budget = context.admission.output_budget(len(prompt), max_tokens, prepared.param)
        for i in range(call.n):
            index = prompt_index * call.n + i
            sampling = call.sampling(
                tokenizer.eos_token_ids, budget, seed + index, tokenizer.vocab_size
            )
            generation = Generation(
                id=f"{call_id}-{index}",
                prompt=prompt,
                sampling=sampling,
                gateway=context.gateway_id,
                queue_class=call.priority_class,
                arrived=origin.arrived,
                deadline=origin.arrived + context.settings.request_timeout_s,
                wake=wake,
                salt=origin.salt,
                client_id=origin.client_id,
            )
            text_stream = TextStream(
                tokenizer,
                tuple(call.stop),
                include_stop=call.include_stop_str_in_output,
                skip_special_tokens=call.skip_special_tokens,
                min_tokens=call.min_tokens,
            )
            prefix = prepared.texts[prompt_index] if prepared.texts else ""
            include_stop = call.include_stop_str_in_output
            choices.append(
                Choice(index, prompt_index, generation, text_stream, include_stop, prefix)
            )
    return choices


class Run:
    """Follows the generations of one call until all have ended."""

    def __init__(
        self, context: CallContext, choices: list[Choice], wake: asyncio.Event, visit: Visit
    ) -> None:
        self._context = context
        self._visit = visit
        self.choices = choices
        self._open = list(choices)
        self._wake = wake

    async def complete(self) -> None:
        """Wait for all choices. `ApiError` when one of them fails."""
        while self._open:
            self._take()
            if self._open:
                await self._wake.wait()

    async def stream(self, stream: EventStream, shape: Shape) -> web.StreamResponse:
        """Send pieces as they come. Raises what failed only while an HTTP error is possible."""
        loop = asyncio.get_running_loop()
        silence_s = self._context.settings.keepalive_s
        stream.last_write = loop.time()
        timer = loop.call_later(silence_s, self._wake.set)
        try:
            while self._open:
                data = self._take(shape)
                if data and self._open:
                    await stream.send(data.encode())
                elif self._open and loop.time() - stream.last_write >= silence_s:
                    await stream.comment()
                if self._open:
                    if loop.time() >= timer.when():
                        due = stream.last_write + silence_s
                        timer = loop.call_at(due, self._wake.set)
                    await self._wake.wait()
            if shape.usage_chunk:
                data += shape.usage_event(usage_of(self.choices))
            return await stream.finish(data.encode())
        except (ClientGone, ConnectionError):
            raise
        except Exception as error:
            if not stream.started:
                raise
            return await self._fail(stream, error)
        finally:
            timer.cancel()

    def _take(self, shape: Shape | None = None) -> str:
        """Collect what is new in all open choices; as SSE events when streaming."""
        self._wake.clear()
        events = []
        ended = False
        used = 0
        for choice in self._open:
            generation = choice.generation
            before = generation.delivered
            piece = choice.take()
            used += generation.delivered - before
            if piece is not None:
                if shape is None:
                    choice.pieces.append(piece)
                else:
                    events.append(shape.chunk(piece, generation))
            if choice.finish is not None:
                self._context.dispatcher.end(generation, choice.finish)
            elif generation.error is not None:
                raise generation.error
            ended = ended or choice.finish is not None
        self._context.metrics.delivered_tokens += used
        self._visit.spend(used)
        if ended:
            self._open = [choice for choice in self._open if choice.finish is None]
        return "".join(events)

    async def _fail(self, stream: EventStream, error: Exception) -> web.StreamResponse:
        """End the stream with an error event."""
        client_id = self.choices[0].generation.client_id
        failure = as_api_error(error, self._context.metrics, client_id)
        failure.__traceback__ = None  # generations keep their error; its frames keep those
        for choice in self.choices:
            self._context.dispatcher.end(choice.generation, "error", failure)
        return await stream.fail(failure)
