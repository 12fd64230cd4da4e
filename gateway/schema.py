"""The two calls that generate text: what a client may send, checked once, at the door.

`parse_completion` and `parse_chat` turn a body into a call object or raise
`ApiError` 400 with the name of the field that is wrong. Afterwards nothing is doubted again, except
what depends on the model: `sampling()` checks token ids against its vocabulary.

Rules: null is the same as absent; true is not 1; 10.0 is 10; unknown fields are tolerated; known
fields that are not implemented are refused (see `schema_fields.UNSUPPORTED`). `max_tokens` and
`max_completion_tokens` are both accepted on both endpoints; the latter wins. `service_tier: "flex"`
asks for the `batch` class. Limits: stop 16 strings of 256 characters, logit_bias 300 keys,
logprobs 20, n 128, messages 4096, prompts 1024.
"""

from __future__ import annotations

from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pageferry.gateway.errors import ApiError, bad_request
from pageferry.gateway.schema_fields import (
    Choices,
    Count,
    Flag,
    LogitBias,
    Messages,
    MinP,
    Penalty,
    Prompts,
    RepetitionPenalty,
    Seed,
    Stop,
    StopTokenIds,
    StreamOptions,
    Temperature,
    TemplateKwargs,
    Text,
    TopCount,
    TopK,
    TopP,
    load_object,
    refuse_unsupported,
)
from pageferry.kvtransfer.wire import SamplingParams

_SEED_MASK = 2**63 - 1


class Call(BaseModel):
    """What both endpoints share."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: Text
    stream: Flag = False
    stream_options: StreamOptions | None = None
    n: Choices = 1
    best_of: Choices | None = None
    max_tokens: Count | None = None
    """Output budget that the client asked for; `max_completion_tokens` has been folded in."""
    max_completion_tokens: Count | None = None
    min_tokens: Count = 0
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: LogitBias = Field(default_factory=dict)
    seed: Seed | None = None
    stop: Stop = ()
    stop_token_ids: StopTokenIds = ()
    ignore_eos: Flag = False
    include_stop_str_in_output: Flag = False
    skip_special_tokens: Flag = True
    service_tier: Text = "auto"

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise bad_request(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream: true", param="stream_options")
        if self.best_of is not None and self.best_of != self.n:
            raise bad_request(
                f"best_of ({self.best_of}) other than n ({self.n}) is not supported",
                param="best_of",
            )
        if self.max_tokens == 0 and not self.echo:
            raise bad_request(
                "max_tokens must be at least 1, except with echo",
                param="max_tokens"
                if self.max_completion_tokens is None
                else "max_completion_tokens",
            )
        return self

    @property
    def echo(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    @property
    def logprobs(self) -> int:
        """-1: none; k >= 0: those of the chosen token and of the k most likely ones."""
        return -1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has usage and no choices."""
        return bool((self.stream_options or {}).get("include_usage", False))

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk has the usage so far; as in vLLM, not without `include_usage`."""
        options = self.stream_options or {}
        return self.include_usage and bool(options.get("continuous_usage_stats", False))

    @property
    def priority_class(self) -> str:
        """Queue class: "interactive" or "batch"."""
        return "batch" if self.service_tier == "flex" else "interactive"

    def sampling(
        self, eos_token_ids: tuple[int, ...], max_tokens: int, seed: int, vocab_size: int
    ) -> SamplingParams:
        """How the workers should sample one of this call's sequences.

        `max_tokens` is the budget after defaults and clamping to the context; `seed` is any int.
        Raises `ApiError` 400 for token ids outside 0..vocab_size-1.
        """
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise bad_request(
                        f"{name} has token id {token_id}; this model's ids go from 0 to "
                        f"{vocab_size - 1}",
                        param=name,
                    )
        if self.min_tokens > max_tokens:
            raise bad_request(
                f"min_tokens ({self.min_tokens}) must not exceed the {max_tokens} tokens that "
                "max_tokens and the context allow",
                param="min_tokens",
            )
        ends = self.stop_token_ids if self.ignore_eos else (*eos_token_ids, *self.stop_token_ids)
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k if 0 < self.top_k < vocab_size else 0,
            min_p=self.min_p,
            seed=seed & _SEED_MASK,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=dict(self.logit_bias),
            logprobs=self.logprobs,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(dict.fromkeys(ends)),
        )


class CompletionCall(Call):
    """POST /v1/completions."""

    prompts: Prompts = Field(alias="prompt")
    """At least one; each a non-empty string or a non-empty list of token ids, not yet checked
    against the vocabulary."""
    echo_wanted: Flag = Field(False, alias="echo")
    top_logprobs: TopCount | None = Field(None, alias="logprobs")

    @property
    def echo(self) -> bool:
        return self.echo_wanted

    @property
    def logprobs(self) -> int:
        return -1 if self.top_logprobs is None else self.top_logprobs

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        if self.echo and self.logprobs >= 0:
            raise bad_request("echo together with logprobs is not supported", param="logprobs")
        return self


class ChatCall(Call):
    """POST /v1/chat/completions."""

    messages: Messages
    """`role` and `content` as strings, and where given `name`, `reasoning_content`, `reasoning`."""
    logprobs_wanted: Flag = Field(False, alias="logprobs")
    top_logprobs: TopCount = 0
    template_kwargs: TemplateKwargs = Field(default_factory=dict, alias="chat_template_kwargs")

    @property
    def logprobs(self) -> int:
        return self.top_logprobs if self.logprobs_wanted else -1

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs_wanted:
            raise bad_request("top_logprobs needs logprobs: true", param="top_logprobs")
        return self


C = TypeVar("C", bound=Call)


def _explain(error: ValidationError) -> ApiError:
    """The first thing that is wrong, without a copy of the value."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "missing":
        clause = "is required"
    elif "error" in first.get("ctx", {}):
        clause = str(first["ctx"]["error"])
    else:
        clause = f"is not valid: {first['msg']}"
    if clause.startswith("["):  # a place inside the field: messages[0].content ...
        return bad_request(f"{param}{clause}", param=param)
    return bad_request(f"{param} {clause}", param=param)


def _parse(cls: type[C], body: bytes, unsupported: dict[str, tuple[Any, ...]]) -> C:
    fields = load_object(body)
    refuse_unsupported(fields, unsupported)
    try:
        return cls.model_validate(fields)
    except ValidationError as error:
        raise _explain(error) from None


def parse_completion(body: bytes) -> CompletionCall:
    """A checked completion call; `ApiError` 400 otherwise."""
    return _parse(CompletionCall, body, {"add_special_tokens": (True,)})


def parse_chat(body: bytes) -> ChatCall:
    """A checked chat call; `ApiError` 400 otherwise."""
    return _parse(ChatCall, body, {"add_special_tokens": (False,), "echo": (False,)})
