"""What a sampled token means for its request: the event that the gateway gets."""

from __future__ import annotations

from typing import Protocol

from pageferry.kvtransfer.wire import Event, Kind, Request, TokenLogprob


class SampledToken(Protocol):
    """What the model runner returns for one row (see `kernels.runner.Sampled`)."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float | None: ...
    @property
    def top(self) -> tuple[tuple[int, float], ...]: ...
    @property
    def error(self) -> str: ...


def token_event(
    request: Request,
    sampled: SampledToken,
    index: int,
    max_model_len: int,
    worker: str,
    num_cached_tokens: int = 0,
) -> Event:
    """The event for output token number `index` of `request`.

    Its `finish` is set when the token ends the sequence: a stop token id ("stop"), or the output
    budget or `max_model_len` is used up ("length"). A row error becomes `Kind.ERROR`.
    """
    if sampled.error:
        return Event(
            request.request_id,
            request.epoch,
            Kind.ERROR,
            worker,
            index=index,
            code=sampled.error,
            message="The model produced non-finite values for this request.",
        )
    finish, stop_token_id = None, None
    if sampled.token_id in request.sampling.stop_token_ids:
        finish, stop_token_id = "stop", sampled.token_id
    elif (
        index + 1 >= request.sampling.max_tokens or request.prompt_len + index + 1 >= max_model_len
    ):
        finish = "length"
    logprobs: tuple[TokenLogprob, ...] = ()
    if request.sampling.logprobs >= 0 and sampled.logprob is not None:
        logprobs = (TokenLogprob(sampled.logprob, sampled.top),)
    return Event(
        request.request_id,
        request.epoch,
        Kind.TOKENS,
        worker,
        index=index,
        token_ids=(sampled.token_id,),
        logprobs=logprobs,
        finish=finish,
        stop_token_id=stop_token_id,
        num_cached_tokens=num_cached_tokens,
    )
