"""Settings: frozen dataclasses, read once from flags and `PAGEFERRY_*` variables.

Precedence: flag, then environment, then default. A flag or a `PAGEFERRY_*` variable that no service
knows is an error (exit code 2), because a misspelt setting is otherwise silently a default.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, NoReturn, TypeVar

from pageferry.kvtransfer import redis_url

ENV_PREFIX = "PAGEFERRY_"

S = TypeVar("S")


def setting(default: Any, help: str, *, choices: tuple[str, ...] | None = None) -> Any:
    """A dataclass field with its help text; units belong into the text and the name."""
    return field(default=default, metadata={"help": help, "choices": choices})


class SettingsError(ValueError):
    """A setting has an unknown name or an impossible value."""


@dataclass(frozen=True)
class CommonSettings:
    redis_url: str = setting(
        "redis://127.0.0.1:6379/0",
        "Redis or Valkey that carries requests, tokens and the registry: redis://, rediss://, "
        "unix://, or redis+cluster://, redis+sentinel:// and their rediss+ forms with several "
        "hosts. Plain REDIS_URL is read too; a password is safer there than in a flag.",
    )
    model: str = setting(
        "",
        "Model: a directory with config.json and safetensors, a .gguf file, a hub id, or empty for "
        "the demo model. Gateways read only the tokenizer and configuration from it.",
    )
    served_model_name: str = setting(
        "", "Model id that clients use. Default: the last part of the model's name."
    )
    lease_s: float = setting(
        3.0, "Seconds without a heartbeat after which a process counts as dead (0.5 to 60)."
    )
    log_level: str = setting(
        "info", "Least severe log level shown.", choices=("debug", "info", "warning", "error")
    )


@dataclass(frozen=True)
class GatewaySettings(CommonSettings):
    host: str = setting("127.0.0.1", "Address that the HTTP server binds to.")
    port: int = setting(8000, "TCP port of the HTTP server (0 picks a free one).")
    api_key: str = setting(
        "",
        "API key that clients must send (Authorization: Bearer). Better given as "
        "PAGEFERRY_API_KEY: every user of the host may read command lines.",
    )
    api_keys_file: str = setting(
        "",
        "TOML file of named API keys with limits (see docs/api.md); read again on SIGHUP. Without "
        "it and --api-key, everybody who reaches the port may call.",
    )
    cors_origins: str = setting(
        "",
        'Origins of web pages that may call, separated by commas, or "*". Default: no page may.',
    )
    tls_cert: str = setting(
        "", "PEM file with the certificate chain: serve HTTPS. Read again on SIGHUP."
    )
    tls_key: str = setting("", "PEM file with the private key of --tls-cert, not encrypted.")
    log_prompts: bool = setting(
        False, "Log prompts and answers as text. Without it no line holds what clients write."
    )
    max_body_mib: float = setting(8.0, "Largest accepted HTTP body, MiB; larger ones get 413.")
    max_queued_requests: int = setting(
        512, "Sequences waiting for their first token above which new calls get 429."
    )
    request_timeout_s: float = setting(
        600.0, "Seconds after which an unfinished request ends with an error and is cancelled."
    )
    worker_wait_s: float = setting(
        15.0,
        "Seconds that accepted requests wait when no decode worker that could take them is left; "
        "after that they end with 503 (or an error event once streaming).",
    )
    keepalive_s: float = setting(
        10.0, "Seconds of silence after which a streaming client gets an SSE comment."
    )
    slow_client_s: float = setting(
        30.0, "Seconds for which a streaming client may refuse data before it is cut off."
    )
    local_prefill_tokens: int = setting(
        0,
        "Prompts of at most this many tokens skip the prefill workers and are prefilled by the "
        "decode worker itself. With no live prefill worker every prompt takes that way.",
    )
    max_n: int = setting(16, "Largest accepted n (choices per prompt).")
    max_prompts: int = setting(64, "Largest accepted number of prompts in one call.")
    drain_s: float = setting(25.0, "Seconds that SIGTERM gives running streams to finish.")


@dataclass(frozen=True)
class WorkerSettings(CommonSettings):
    name: str = setting("", "Worker name; the id is this plus a suffix unique per start.")
    device: str = setting("auto", 'Compute device: "auto", "cpu", "cuda" or "cuda:N".')
    dtype: str = setting(
        "auto",
        "Weights and KV data type; auto is bfloat16 where the hardware has it, else float32.",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    cores: str = setting(
        "",
        'CPU cores to pin this worker to, e.g. "0", "0-3" or "0,2"; default: all allowed cores. '
        "The number of compute threads is the number of cores.",
    )
    cpu_kernels: str = setting(
        "auto",
        "Kernels of a CPU worker: auto is the best that the processor and the installation offer.",
        choices=("auto", "torch", "base", "avx2", "avx512", "avx512_bf16", "amx"),
    )
    core_flag: str = setting(
        "",
        "File that tells the decode worker which borrows a prefill worker's cores when that one "
        "computes; `pageferry up` sets it on both.",
    )
    deterministic: bool = setting(
        False,
        "Compute each row's bits from its sequence alone: the same text in any batch, cut into any "
        "chunks, on any worker of this setting. Needs the C++ kernels (CPU); set it everywhere.",
    )
    page_size: int = setting(16, "Token slots per KV page; equal on all workers (8 to 128).")
    kv_memory_mib: int = setting(
        0,
        "KV pool size, MiB. 0 chooses: on a GPU what is left of --gpu-memory-fraction after the "
        "weights, on a CPU a tenth of the available memory, at most 4096.",
    )
    num_pages: int = setting(0, "KV pool size in pages; overrides --kv-memory-mib when not 0.")
    gpu_memory_fraction: float = setting(
        0.9, "Share of a GPU's memory that this worker may use (0 to 1)."
    )
    max_model_len: int = setting(
        0, "Longest sequence, prompt and output, tokens. 0: the model's own limit."
    )
    max_num_batched_tokens: int = setting(
        512, "Tokens computed in one step at the most; long prompts are cut into such chunks."
    )
    max_num_seqs: int = setting(64, "Sequences in one step at the most.")
    engine_timeout_s: float = setting(
        120.0,
        "Seconds that the engine may take for one step (1 to 86400). One that takes longer counts "
        "as hung: the worker exits with 1 and its requests go to others.",
    )
    alive_file: str = setting(
        "",
        "File to write whenever the worker's lease has been renewed, for health checks on its host "
        "(python -m pageferry.kvtransfer.alive_file FILE); one for each worker.",
    )
    prefix_cache: bool = setting(True, "Keep pages of finished prompts for reuse.")
    transport: str = setting(
        "auto",
        "How pages travel: shm (one host, CPU), tcp; auto takes shm where both ends share a host. "
        "A transport named here that cannot be had is an error, not a fallback.",
        choices=("auto", "shm", "tcp"),
    )
    cluster_key: str = setting(
        "",
        "Secret that workers prove to each other on connecting; empty is accepted only if all "
        "workers have none.",
    )
    handoff_tls_cert: str = setting(
        "",
        "PEM file with this worker's certificate: page transfers over tcp are then ciphered, and "
        "both ends must show a certificate of --handoff-tls-ca. All workers or none.",
    )
    handoff_tls_key: str = setting("", "PEM file with the key of --handoff-tls-cert.")
    handoff_tls_ca: str = setting(
        "", "PEM file with the CA that signs all workers' certificates, and nobody else's."
    )
    handoff_timeout_s: float = setting(
        30.0,
        "Seconds after which a handoff is given up: by the worker that sends it without an answer, "
        "by the one that receives it without progress.",
    )
    drain_s: float = setting(25.0, "Seconds that SIGTERM gives running work to finish.")


@dataclass(frozen=True)
class PrefillSettings(WorkerSettings):
    max_inflight_handoffs: int = setting(16, "Requests claimed and not yet handed over, at most.")


@dataclass(frozen=True)
class DecodeSettings(WorkerSettings):
    bind: str = setting(
        "127.0.0.1", "Address on which page transfers are accepted; 0.0.0.0 in containers."
    )
    advertise: str = setting(
        "",
        "Host name or address that prefill workers should dial. Default: --bind, or this "
        "host's name when bound to 0.0.0.0.",
    )
    handoff_port: int = setting(0, "TCP port for page transfers (0 picks a free one).")
    watermark_pages: int = setting(
        2, "Pages kept free when admitting, so that running sequences can grow."
    )
    borrow_cores: str = setting(
        "",
        "Cores of a prefill worker on this host to compute on while that one idles; "
        "needs --core-flag.",
    )


def _parse_value(name: str, annotation: Any, text: str, choices: tuple[str, ...] | None) -> Any:
    try:
        if annotation is bool:
            lowered = text.strip().lower()
            if lowered in ("1", "true", "yes", "on"):
                return True
            if lowered in ("0", "false", "no", "off"):
                return False
            raise ValueError("expected true or false")
        value = annotation(text)
    except ValueError as error:
        raise SettingsError(f"{name}={text!r}: expected {annotation.__name__}") from error
    if choices and value not in choices:
        raise SettingsError(f"{name}={text!r}: expected one of {', '.join(choices)}")
    return value


def _redis_url(name: str, text: str) -> str:
    """The text itself; the error does not show it, because it may hold a password."""
    try:
        redis_url.parse(text)
    except ValueError as error:
        raise SettingsError(f"{name} {error}") from None
    return text


def _flag(setting_name: str) -> str:
    return "--" + setting_name.replace("_", "-")


def env_name(setting_name: str) -> str:
    return ENV_PREFIX + setting_name.upper()


def known_env_names(extra: Sequence[type] = ()) -> set[str]:
    """Every `PAGEFERRY_*` variable that some service reads."""
    classes = (GatewaySettings, PrefillSettings, DecodeSettings, *extra)
    return {env_name(f.name) for c in classes for f in fields(c)}


def _default(f: Field[Any]) -> Any:
    assert f.default is not MISSING, f"setting {f.name} needs a default"
    return f.default


def from_args(
    cls: type[S],
    prog: str,
    description: str,
    argv: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> S:
    """Build `cls` from flags and environment; on a mistake print one sentence and exit with 2."""
    env = os.environ if env is None else env
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser(cls, prog, description)
    flags = vars(parser.parse_args(list(argv)))
    hints = typing.get_type_hints(cls)
    try:
        check_env(env, (cls,))
        values = {
            f.name: _value(f, hints[f.name], flags[f.name], env)
            for f in fields(cls)  # type: ignore[arg-type]
        }
        return cls(**values)
    except SettingsError as error:
        parser.error(str(error))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser(cls: type, prog: str, description: str) -> _Parser:
    """A flag for each setting of `cls`; their values stay text."""
    parser = _Parser(
        prog=prog,
        description=description,
        epilog=f"Each setting is also an environment variable: --max-num-seqs is "
        f"{ENV_PREFIX}MAX_NUM_SEQS. Flags win.",
        allow_abbrev=False,
    )
    hints = typing.get_type_hints(cls)
    for f in fields(cls):
        shown = _default(f)
        shown = "none" if shown == "" else shown
        is_switch = hints[f.name] is bool  # "--verbose" alone means "--verbose true"
        parser.add_argument(
            _flag(f.name),
            nargs="?" if is_switch else None,
            const="true" if is_switch else None,
            metavar=hints[f.name].__name__.upper(),
            help=f"{f.metadata['help']} [default: {shown}]".replace("%", "%%"),
        )
    return parser


def _value(f: Field[Any], hint: Any, flag: str | None, env: Mapping[str, str]) -> Any:
    """A setting's value: from its flag, else from the environment, else its default."""
    text, shown_name = flag, _flag(f.name)
    if text is None and (text := env.get(env_name(f.name))) is not None:
        shown_name = env_name(f.name)
    if text is None and f.name == "redis_url" and env.get("REDIS_URL"):
        text, shown_name = env["REDIS_URL"], "REDIS_URL"
    if text is None:
        return _default(f)
    if f.name == "redis_url" and text:
        return _redis_url(shown_name, text)
    return _parse_value(shown_name, hint, text, f.metadata["choices"])


def check_env(env: Mapping[str, str], extra: Sequence[type] = ()) -> None:
    """`SettingsError` when a `PAGEFERRY_*` variable is one that no service knows."""
    known = known_env_names(extra)
    for name in env:
        if name.startswith(ENV_PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise SettingsError(f"unknown environment variable {name}{hint}")
