"""A short run of the fuzzer. The long one: `python -m tests.kvtransfer.fuzz_frames 100000 1`."""

from __future__ import annotations

import pytest

from pageferry.kvtransfer.frames import Pages
from pageferry.kvtransfer.incoming import Incoming
from tests.kvtransfer import fuzz_frames


def test_malformed_frames_disturb_nobody(monkeypatch):
    monkeypatch.setattr("pageferry.kvtransfer.handshake.MIN_PATIENCE_S", 1.0)
    figures = fuzz_frames.run(2_000, seed=7)
    assert figures["receiver"]["protocol_errors"] > 50
    assert figures["receiver"]["digest_failures"] > 5
    assert figures["frames"]["writer"] > 100
    assert figures["rss_mib"]["last"] - figures["rss_mib"]["after_a_tenth"] < 40


def test_the_fuzzer_notices_a_page_outside_the_grant(monkeypatch):
    """A receiver that believes any page number writes where others live."""

    def careless(incoming: Incoming, message: Pages) -> str:
        return ""

    def everywhere(incoming: Incoming, first: int, count: int) -> list[int]:
        return [(incoming.reserved[0] - 1 + i) % fuzz_frames.NUM_PAGES for i in range(count)]

    monkeypatch.setattr(Incoming, "fault", careless)
    monkeypatch.setattr(Incoming, "pages", everywhere)
    with pytest.raises(AssertionError):
        fuzz_frames.run(300, seed=3)
