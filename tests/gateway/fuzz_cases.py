"""Requests for `fuzz_http.py`: good ones, and ways to get one wrong, drawn by seed and number."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

PATHS = ("/v1/completions", "/v1/chat/completions")

Rng = random.Random


@dataclasses.dataclass
class Case:
    data: bytes
    """What is sent; after it nothing more comes."""
    complete: bool = True
    """It is an HTTP request, or so malformed that it must be answered."""
    slow: bool = False
    """Sent in pieces with pauses."""
    leave: bool = False
    """Closes the connection without waiting for an answer."""


# --- bodies -----------------------------------------------------------------------------------

ODD_NUMBERS = (
    "-1", "0", "1e999", "-1e999", "1e-999", "1.0000000000000001", "9" * 40, "9" * 5000, "-0.0",
    "18446744073709551616", "9223372036854775808", "NaN", "Infinity", "-Infinity", "0x10", "01",
    "1.", ".5", "+1", "1e", "1_000",
)  # fmt: skip
ODD_TEXTS = (
    r"\ud800", r"\udfff\ud800", r"\u0000", r"\uffff", r"\ud83d\ude00", "\u2028", "\U0010ffff",
    "<|im_end|>", "\x7f", "é" * 100, "\\", '"',
)  # fmt: skip
FIELDS = (
    "model", "prompt", "messages", "stream", "n", "best_of", "max_tokens", "max_completion_tokens",
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "echo",
    "logprobs", "top_logprobs", "stream_options", "service_tier", "user", "tools",
    "response_format",
    "kv_transfer_params", "priority", "cache_salt", "chat_template_kwargs", "suffix", "guided_json",
)  # fmt: skip


def random_text(rng: Rng, longest: int = 60) -> str:
    signs = "abc ,.{}[]:\"\\/\n\t'<>|é日\u0301\u200b🙂\x00\x1f"
    return "".join(rng.choice(signs) for _ in range(rng.randint(0, longest)))


def random_value(rng: Rng, depth: int = 0) -> Any:
    choices: list[Callable[[], Any]] = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.randint(-10, 10),
        lambda: rng.randint(-(2**70), 2**70),
        lambda: rng.uniform(-3, 3),
        lambda: random_text(rng),
    ]
    if depth < 4:
        choices += [
            lambda: [random_value(rng, depth + 1) for _ in range(rng.randint(0, 4))],
            lambda: {random_text(rng, 8): random_value(rng, depth + 1) for _ in range(3)},
        ]
    return rng.choice(choices)()


def good_body(rng: Rng, model: str, path: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "max_tokens": rng.randint(1, 4)}
    if path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": random_text(rng) or "x"}]
    else:
        body["prompt"] = rng.choice((random_text(rng) or "x", [1, 2, 3], ["a", "b"], [[5], [6, 7]]))
    if rng.random() < 0.5:
        body["stream"] = True
    if rng.random() < 0.3:
        body |= {"n": 2, "temperature": 0.5, "stop": ["zz"], "seed": rng.randint(0, 9)}
    return body


def mutate(rng: Rng, body: dict[str, Any]) -> dict[str, Any]:
    """One to three fields get values of any type, at any level."""
    for _ in range(rng.randint(1, 3)):
        target: Any = body
        messages = body.get("messages")
        if isinstance(messages, list) and messages and rng.random() < 0.4:
            target = messages[rng.randrange(len(messages))]
            if not isinstance(target, dict):
                target = body
        name = rng.choice(("role", "content", "name", "tool_calls", *FIELDS))
        target[name] = random_value(rng)
    return body


def duplicate_keys(rng: Rng, text: str) -> str:
    name = rng.choice(FIELDS)
    return text[:-1] + f',"{name}":{json.dumps(random_value(rng))},"{name}":1' + "}"


def odd_number(rng: Rng, text: str) -> str:
    return text[:-1] + f',"{rng.choice(FIELDS)}":{rng.choice(ODD_NUMBERS)}' + "}"


def odd_text(rng: Rng, text: str) -> str:
    name, odd = rng.choice(("prompt", "stop", "model", "user")), rng.choice(ODD_TEXTS)
    return text[:-1] + f',"{name}":"{odd * rng.randint(1, 3)}"' + "}"


def nested(rng: Rng, text: str) -> str:
    depth = rng.choice((10, 500, 1100, 50_000))
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}")))
    inside = opening * depth + "1" + closing * rng.choice((depth, depth - 1, 0))
    return text[:-1] + f',"{rng.choice(FIELDS)}":{inside}' + "}"


def wide(rng: Rng, text: str) -> str:
    item = rng.choice(("1", '"a"', "[]", "{}", "null", '{"role":"user","content":"a"}'))
    many = ",".join([item] * rng.choice((100, 5000, 120_000)))
    return text[:-1] + f',"{rng.choice(FIELDS)}":[{many}]' + "}"


BODY_MUTATIONS: tuple[Callable[[Rng, str], str], ...] = (
    duplicate_keys, odd_number, odd_text, nested, wide,
)  # fmt: skip


# --- requests ---------------------------------------------------------------------------------


def http(path: str, body: bytes, headers: str = "", method: str = "POST") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: fuzz\r\nConnection: close\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode("latin-1", "replace") + body


def kind_good(rng: Rng, model: str, path: str) -> Case:
    return Case(http(path, json.dumps(good_body(rng, model, path)).encode()))


def kind_types(rng: Rng, model: str, path: str) -> Case:
    return Case(http(path, json.dumps(mutate(rng, good_body(rng, model, path))).encode()))


def kind_grammar(rng: Rng, model: str, path: str) -> Case:
    text = json.dumps(good_body(rng, model, path))
    for _ in range(rng.randint(1, 2)):
        text = rng.choice(BODY_MUTATIONS)(rng, text)
    return Case(http(path, text.encode("utf-8", "surrogatepass")))


def kind_truncated(rng: Rng, model: str, path: str) -> Case:
    body = json.dumps(good_body(rng, model, path)).encode()
    return Case(http(path, body[: rng.randrange(len(body))]))


def kind_bytes(rng: Rng, model: str, path: str) -> Case:
    return Case(http(path, rng.randbytes(rng.choice((0, 1, 30, 3000, 40_000)))))


def kind_flips(rng: Rng, model: str, path: str) -> Case:
    body = bytearray(json.dumps(good_body(rng, model, path)).encode())
    for _ in range(rng.randint(1, 4)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    return Case(http(path, bytes(body)))


def kind_content_type(rng: Rng, model: str, path: str) -> Case:
    body = json.dumps(good_body(rng, model, path)).encode()
    header = rng.choice(
        (
            "Content-Type: text/plain",
            "Content-Type: application/json; charset=utf-16",
            "Content-Type: multipart/form-data; boundary=x",
            "Content-Type: application/x-www-form-urlencoded",
            "Content-Type: \xff\xfe",
            "Content-Encoding: gzip",
            "Content-Encoding: br, gzip",
            "Transfer-Encoding: gzip",
            "Expect: 100-continue",
            "Expect: 999",
            "Accept: image/png",
            "Upgrade: websocket\r\nConnection: Upgrade",
        )
    )
    return Case(http(path, body, header + "\r\n"))


def kind_headers(rng: Rng, model: str, path: str) -> Case:
    name = rng.choice(
        ("X-Request-Id", "Authorization", "Cookie", "X-A", "Host", "Origin", "User-Agent")
    )
    value = rng.choice(
        ("a" * 100, "a" * 9000, "a" * 100_000, "\x00", "\x01\x7f", "é", " ", "a\r\n b", "a\nb: c")
    )
    lines = f"{name}: {value}\r\n" * rng.choice((1, 1, 2, 200))
    data = http(path, json.dumps(good_body(rng, model, path)).encode(), lines)
    # An answer to what is still being sent may be lost with the connection.
    return Case(data, complete=len(lines) < 50_000)


def kind_request_line(rng: Rng, model: str, path: str) -> Case:
    body = json.dumps(good_body(rng, model, path)).encode()
    line = rng.choice(
        (
            b"POST " + path.encode() + b" HTTP/9.9",
            b"POST " + path.encode(),
            b"POST " + path.encode() + b"?" + b"q" * 10_000 + b" HTTP/1.1",
            b"BREW /v1/completions HTTP/1.1",
            b"GET /v1/models/" + b"%ff%00" * 20 + b" HTTP/1.1",
            b"GET /v1/../../etc/passwd HTTP/1.1",
            b"GET http://other/v1/models HTTP/1.1",
            b"CONNECT other:80 HTTP/1.1",
            b"OPTIONS * HTTP/1.1",
            b"TRACE /v1/models HTTP/1.1",
            b"DELETE /v1/models HTTP/1.1",
            b"POST /v1/workers/x/drain HTTP/1.1",
            b"HEAD /ready HTTP/1.1",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            rng.randbytes(50),
            b"PRI * HTTP/2.0",
        )
    )
    head = b"\r\nHost: fuzz\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    return Case(line + head + body, complete=False)


def kind_chunks(rng: Rng, model: str, path: str) -> Case:
    body = json.dumps(good_body(rng, model, path)).encode()
    size = b"%x" % len(body)
    chunks, complete = rng.choice(
        (
            (size + b"\r\n" + body + b"\r\n0\r\n\r\n", True),
            (
                b"".join(b"1\r\n" + body[i : i + 1] + b"\r\n" for i in range(len(body)))
                + b"0\r\n\r\n",
                True,
            ),
            (size + b";ext=" + b"x" * 5000 + b"\r\n" + body + b"\r\n0\r\n\r\n", True),
            (size + b"\r\n" + body + b"\r\n0\r\nTrailer: x\r\n\r\n", True),
            (b"-5\r\n" + body + b"\r\n0\r\n\r\n", False),
            (b"zz\r\n" + body + b"\r\n0\r\n\r\n", False),
            (b"ffffffffffffffff\r\n" + body, False),
            (size + b"\r\n" + body + b"junk\r\n0\r\n\r\n", False),
            (size + b"\n" + body + b"\n0\n\n", False),
            (b"0" * 5000 + size + b"\r\n" + body + b"\r\n0\r\n\r\n", False),
            (size + b"\r\n" + body[: len(body) // 2], False),
        )
    )
    extra = rng.choice(
        ("", "", f"Content-Length: {len(body)}\r\n", "Transfer-Encoding: identity\r\n")
    )
    head = f"POST {path} HTTP/1.1\r\nHost: fuzz\r\nConnection: close\r\n{extra}"
    whole = head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunks
    return Case(whole, complete=complete and not extra)


def kind_lengths(rng: Rng, model: str, path: str) -> Case:
    body = json.dumps(good_body(rng, model, path)).encode()
    length = rng.choice(
        (b"-1", b"abc", b"9" * 30, b"+5", b"5, 5", b"1e3", b"%d" % (2 * len(body)), b"")
    )
    head = f"POST {path} HTTP/1.1\r\nHost: fuzz\r\nConnection: close\r\nContent-Length: "
    return Case(head.encode() + length + b"\r\n\r\n" + body, complete=False)


def kind_slow(rng: Rng, model: str, path: str) -> Case:
    data = http(path, json.dumps(good_body(rng, model, path)).encode())
    return Case(data[: rng.randrange(1, len(data) + 1)], complete=False, slow=True)


def kind_leaves(rng: Rng, model: str, path: str) -> Case:
    body = good_body(rng, model, path) | {"max_tokens": 500, "stream": rng.random() < 0.5}
    return Case(http(path, json.dumps(body).encode()), leave=True)


def kind_pipelined(rng: Rng, model: str, path: str) -> Case:
    first = http(path, json.dumps(good_body(rng, model, path)).encode())
    data = first.replace(b"Connection: close\r\n", b"") * rng.randint(2, 5)
    return Case(data + rng.choice((first, rng.randbytes(20) + b"\r\n\r\n")), complete=False)


def kind_large(rng: Rng, model: str, path: str) -> Case:
    text = rng.choice(("a", " ", "<", "日", "\\\\", '\\"', "\\u0041")) * rng.choice(
        (20_000, 300_000)
    )
    name = rng.choice(("prompt", "user", "model", "stop"))
    body = json.dumps(good_body(rng, model, path))[:-1] + f',"{name}":"{text}"' + "}"
    return Case(http(path, body.encode()))


KINDS: dict[Callable[[Rng, str, str], Case], int] = {
    kind_good: 6,
    kind_types: 30,
    kind_grammar: 24,
    kind_truncated: 8,
    kind_bytes: 6,
    kind_flips: 10,
    kind_content_type: 4,
    kind_headers: 6,
    kind_request_line: 6,
    kind_chunks: 8,
    kind_lengths: 4,
    kind_slow: 4,
    kind_leaves: 4,
    kind_pipelined: 3,
    kind_large: 2,
}
"""Kind -> its weight."""


def draw(seed: int, number: int, model: str) -> tuple[str, Case]:
    rng = Rng(f"{seed}-{number}")
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    return kind.__name__, kind(rng, model, rng.choice(PATHS))


def draw_good(model: str) -> Case:
    body = {"model": model, "prompt": "hello", "max_tokens": 1}
    return Case(http(PATHS[0], json.dumps(body).encode()))
