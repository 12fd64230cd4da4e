"""When a run of failed steps is the worker's fault, and when one request's."""

from __future__ import annotations

import pytest

from pageferry.kvtransfer.engine_thread import MAX_FAILED_STEPS, StepWatch
from pageferry.kvtransfer.pool import PagePool


def watch() -> StepWatch:
    return StepWatch(PagePool(4, 4))


def test_failures_of_different_requests_in_a_row_end_the_worker() -> None:
    steps = watch()
    for i in range(MAX_FAILED_STEPS - 1):
        steps.failed([f"r{i}"])
    with pytest.raises(RuntimeError, match="in a row"):
        steps.failed(["another"])


def test_one_request_that_always_fails_does_not_end_it() -> None:
    steps = watch()
    for i in range(10):
        steps.failed(["poison", f"bystander-{i}"])
    with pytest.raises(RuntimeError, match="in a row"):
        steps.failed(["another"])


def test_a_good_step_ends_the_row() -> None:
    steps = watch()
    for i in range(10):
        steps.failed([f"r{i}"])
        steps.succeeded()
