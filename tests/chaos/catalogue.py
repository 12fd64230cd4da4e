"""The fixed requests of a chaos run. What each must answer is recorded before the first fault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

C1 = "1, 2, 3, 4, 5,"
C2 = "日本語" * 5
C3 = "Привет " * 4 + "Привет"
C5 = "The quick brown fox jumps over the lazy dog. " * 6

STORY = (
    "The ferry Margarethe had crossed the sound every morning for thirty years. Her captain, a "
    "quiet woman named Ingrid, knew each of the islands by the smell of its shore: tar and nets on "
    "the first, apples on the second, and on the third the cold iron of the old mine. On the day "
    "when the fog came she had eleven passengers, four horses, a crate of lamps and the post. "
)
"""About 90 tokens that many prompts begin with."""

LEDGER_LINES = [
    f"Entry {i}: {7 * i % 43} boxes of lamps went from quay {i % 9} to island {(5 * i) % 13}.\n"
    for i in range(1, 161)
]


def ledger(lines: int, first: int = 0) -> str:
    """A long prompt, about 26 tokens per line; those with equal `first` share their beginning."""
    return "".join(LEDGER_LINES[first : first + lines]) + "In short, the boxes"


@dataclass(frozen=True)
class Case:
    """One request body without `model` and `stream`."""

    name: str
    body: dict[str, Any]
    chat: bool = False
    wide: bool = False
    """Greedy with a wide margin at every token: the same text without --deterministic too."""
    short: bool = False
    """Cheap enough for bursts."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"


def _completion(name: str, prompt: Any, max_tokens: int, **more: Any) -> Case:
    marks = {key: more.pop(key, False) for key in ("wide", "short")}
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
    return Case(name, body, **marks)


def _chat(name: str, turns: list[str], max_tokens: int, system: str = "", **more: Any) -> Case:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, **more}
    return Case(name, body, chat=True)


def _sampled(seed: int, temperature: float = 0.9, **more: Any) -> dict[str, Any]:
    return {"temperature": temperature, "seed": seed, **more}


GREEDY = [
    _completion("count", C1, 64, wide=True),
    _completion("count-1", C1, 1, wide=True, short=True),
    _completion("count-9", C1, 9, wide=True, short=True),
    _completion("count-200", C1, 200),
    _completion("japanese", C2, 34, wide=True),
    _completion("japanese-7", C2, 7, wide=True, short=True),
    _completion("russian", C3, 40, wide=True),
    _completion("russian-8", C3, 8, wide=True, short=True),
    _completion("fox-eos", C5, 80),
    _completion("fox-ignore-eos", C5, 90, ignore_eos=True),
    _completion("story", STORY, 80),
    _completion("ids", [504, 28, 198, 1141, 327, 253] * 9, 30),
]
ENDINGS = [
    _completion("stop", C1, 64, stop=["12,"], wide=True),
    _completion("stop-held-back", C1, 64, stop=["7, 9", "22, x"], wide=True),
    _completion("stop-shown", C1, 64, stop=["15"], include_stop_str_in_output=True, wide=True),
    _completion("stop-token", C1, 64, stop_token_ids=[28], wide=True, short=True),
    _completion("stop-in-story", STORY, 150, stop=["\n", "fog"]),
    _completion("min-tokens", C5, 100, min_tokens=60),
]
SHAPES = [
    _completion("logprobs", C1, 40, logprobs=3, wide=True),
    _completion("logprobs-story", STORY, 40, logprobs=5),
    _completion("n-greedy", C1, 24, n=3, wide=True),
    _completion("n-sampled", STORY, 30, n=3, **_sampled(11)),
    _completion("n-logprobs", C5, 20, n=2, logprobs=1, **_sampled(12)),
    _completion("prompts", [C1, C3, STORY], 20),
    _completion("echo", STORY + "Then", 24, echo=True),
    _completion("echo-only", STORY, 0, echo=True, wide=True, short=True),
]
SHARED = [
    _completion(f"echo-shared-{i}", STORY + tail, 8 + 4 * i, echo=True)
    for i, tail in enumerate(
        ["Ingrid saw", "The horses", "Nobody on board", "When the lamps", "A bell", "The post"]
    )
]
LONG = [
    _completion("long-1100", ledger(48), 24),
    _completion("long-shared", ledger(48) + " were", 30, **_sampled(21)),
    _completion("long-1500", ledger(58, 20), 12),
    _completion("long-2200", ledger(84, 3), 16, logprobs=0),
    _completion("long-1", ledger(48, 60), 1),
]
SAMPLED = [
    _completion("sampled", STORY, 50, **_sampled(1)),
    _completion("sampled-hot", STORY, 60, **_sampled(2, 1.5, top_k=50)),
    _completion("sampled-top-p", C5, 70, **_sampled(3, 1.0, top_p=0.8)),
    _completion("sampled-min-p", STORY + "She", 50, **_sampled(4, 1.2, min_p=0.05)),
    _completion("sampled-140", "Once upon a time", 140, **_sampled(5, 0.8, ignore_eos=True)),
    _completion("sampled-short", "The capital of France is", 8, short=True, **_sampled(6)),
    _completion("sampled-bias", STORY, 30, **_sampled(7, logit_bias={"28": -5, "504": 2})),
]
PENALTIES = [
    _completion("frequency", C1, 60, frequency_penalty=1.0),
    _completion("presence", C5, 60, presence_penalty=1.5),
    _completion("repetition", STORY, 50, repetition_penalty=1.3),
    _completion("penalties-sampled", STORY, 60, frequency_penalty=0.5, **_sampled(8)),
]
CHATS = [
    _chat("hi", ["Say hi."], 40),
    _chat("system", ["What is the ferry called?"], 60, system="Answer from this: " + STORY),
    _chat("turns", ["Name a fruit.", "Apple.", "Another one, please."], 30),
    _chat("chat-sampled", ["Tell me about lighthouses."], 80, **_sampled(31)),
    _chat("chat-logprobs", ["Count to five."], 30, logprobs=True, top_logprobs=3),
    _chat("chat-n", ["Give me a name for a boat."], 20, n=3, **_sampled(32)),
    _chat("chat-stop", ["List three colours."], 60, stop=["\n2", "."]),
    _chat("chat-penalties", ["Describe fog."], 80, presence_penalty=0.8, frequency_penalty=0.4),
]

CASES = [*GREEDY, *ENDINGS, *SHAPES, *SHARED, *LONG, *SAMPLED, *PENALTIES, *CHATS]

EIGHTY_HASHES = 45855
"""The token of 80 times `#`: few tokens, much text."""
HASHES = [504, 28, *([EIGHTY_HASHES] * 750)]
STALL_PROMPTS, STALL_N = 4, 16
STALL_ONE = _completion("stall-one", HASHES, 16, echo=True, ignore_eos=True)
STALL = _completion("stall", [HASHES] * STALL_PROMPTS, 16, echo=True, ignore_eos=True, n=STALL_N)
"""What the client that stops reading asks for: 3.8 MB, more than the kernel buffers on loopback
(3 MB). It is greedy, so each of its choices is that of STALL_ONE."""

PROBE = CASES[0]
