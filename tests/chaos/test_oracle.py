"""The judge of the chaos run sees what it must see: each verdict, right and wrong."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RETRY = {"status": 503, "retry_after": "2", "complete": False}
NO_WORKER = {"message": "No decode worker.", "type": "service_unavailable"}


@dataclasses.dataclass
class Judge:
    """The oracle with one case whose right answer is " 6, 7"."""

    client: ModuleType
    oracle: ModuleType
    case: Any

    def __call__(self, *faults: tuple[str, str, float], **changes: Any) -> tuple[str, str]:
        """Verdict on the right answer, changed so, after faults of (kind, target, time)."""
        right = {
            "status": 200,
            "texts": {0: " 6, 7"},
            "finishes": {0: "length"},
            "tokens": {0: [[" 6", -0.1]]},
            "usage": {"prompt_tokens": 14, "completion_tokens": 5},
            "complete": True,
        }
        expected = self.oracle.Expected(*(right[k] for k in self.oracle.Expected.__annotations__))
        answer = self.client.Answer(
            self.case, True, "gateway", 100.0, 110.0, **{**right, **changes}
        )
        injected = [self.oracle.Fault(kind, target, at, at) for kind, target, at in faults]
        outcome, problem = self.oracle.judge(answer, expected, injected)
        return outcome, problem


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Judge:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    client, oracle, catalogue = map(importlib.import_module, ("client", "oracle", "catalogue"))
    return Judge(client, oracle, catalogue.PROBE)


def test_the_right_answer_is_right(judge: Judge) -> None:
    assert judge() == ("right", "")


@pytest.mark.parametrize(
    "changes",
    [
        {"texts": {0: " 6, 7,"}},
        {"texts": {0: " 6,"}},
        {"texts": {0: " 6, 6"}},
        {"texts": {0: " 6, 7", 1: "x"}},
        {"finishes": {0: "stop"}},
        {"tokens": {0: [[" 6", -0.2]]}},
        {"usage": {"prompt_tokens": 14, "completion_tokens": 6}},
        {"texts": {0: " 7"}, "complete": False, "cut": True},
        {"texts": {0: " 7"}, "complete": False, "error": {**NO_WORKER, "code": "no_decode_worker"}},
    ],
)
def test_a_wrong_answer_is_wrong_even_when_it_ends_early(
    judge: Judge, changes: dict[str, Any]
) -> None:
    outcome, problem = judge(("decode_kill", "decode-0", 101), **changes)
    assert outcome == "wrong"
    assert problem


def test_an_early_end_needs_a_reason_that_a_fault_explains(judge: Judge) -> None:
    error = {**NO_WORKER, "code": "no_decode_worker"}
    part = {"texts": {0: " 6"}, "complete": False, "error": error}
    assert judge(("both_decode_kill", "decode-0,decode-1", 101), **part) == ("error event", "")
    assert "unexplained" in judge(("link_cut", "decode-1", 101), **part)[1]
    assert "unexplained" in judge(("both_decode_kill", "decode-0,decode-1", 50), **part)[1]


def test_a_refusal_needs_retry_after(judge: Judge) -> None:
    empty = {"texts": {}, "tokens": {}, "error": {**NO_WORKER, "code": "no_decode_worker"}}
    fault = ("decode_kill", "decode-0", 99)
    assert judge(fault, **{**RETRY, **empty}) == ("503", "")
    assert "Retry-After" in judge(fault, **{**RETRY, **empty, "retry_after": None})[1]


def test_a_silent_end_is_excused_by_its_own_gateways_death_alone(judge: Judge) -> None:
    part = {"texts": {0: " 6"}, "complete": False}
    assert judge(("gateway_kill", "gateway", 105), **part) == ("broken", "")
    assert judge(("gateway_kill", "gateway-1", 105), **part)[1]
    assert judge(("decode_kill", "decode-0", 105), **part)[1]


def test_a_request_is_given_up_after_three_deaths_only(judge: Judge) -> None:
    error = {"message": "3 workers died.", "type": "server_error", "code": "request_failed"}
    part = {"texts": {0: " 6"}, "complete": False, "error": error}
    deaths = [("decode_kill", "decode-0", at) for at in (101.0, 104.0, 107.0)]
    assert judge(*deaths, **part) == ("error event", "")
    assert judge(*deaths[:2], **part)[1]


def test_what_hangs_has_failed(judge: Judge) -> None:
    assert judge(hung=True, complete=False)[0] == "hung"


def test_the_schedule_depends_on_the_seed_alone(judge: Judge) -> None:
    faults = importlib.import_module("faults")
    plan = faults.schedule(7, 2.0, 24.0)
    assert plan == faults.schedule(7, 2.0, 24.0)
    assert plan != faults.schedule(8, 2.0, 24.0)
    assert {planned.kind for planned in faults.schedule(7, 2.5, 24.0)} == set(faults.BAG)
    assert all(hasattr(faults.Injector, f"_{kind}") for kind in faults.BAG)
