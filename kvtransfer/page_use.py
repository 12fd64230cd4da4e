"""How many token slots of live pages hold something: what a ledger of whole pages cannot tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def live_tokens(tables: Iterable[tuple[Sequence[int], int]], page_size: int) -> int:
    """Tokens in the pages of live sequences; those of a page that several share count once.

    `tables` holds (page ids in order, tokens that are computed) of each sequence. KV memory that
    holds nothing is 1 - live tokens / (live pages * page_size).
    """
    full: set[int] = set()
    begun: dict[int, int] = {}
    for page_ids, num_tokens in tables:
        whole, rest = divmod(num_tokens, page_size)
        full.update(page_ids[:whole])
        if rest and whole < len(page_ids):
            page = page_ids[whole]
            begun[page] = max(rest, begun.get(page, 0))
    return len(full) * page_size + sum(n for page, n in begun.items() if page not in full)
