"""The page pool: who may use which KV page, and which pages hold a known prefix.

A page is in exactly one state at any instant:

1. `FREE`        nobody's. `reserve` takes the lowest ids first, so that grants have long runs.
2. `RESERVED`    promised to one writer. `commit` makes it live, `cancel` gives it back,
                 `quarantine` sets it aside.
3. `LIVE`        in use by one or more holders; `retain` and `match` add a reference, `release`
                 drops one.
4. `CACHED`      no holder, but its contents are findable under a prefix hash. `match` revives
                 it; `reserve` evicts the least recently used one when no free page is left.
5. `QUARANTINED` a writer that we cannot stop may still write to it. Only `absolve` frees it.

Invariants, checked by `check_integrity`: the five counts add up to the total; a page has references
exactly when it is live; a hash maps to one page, that page to that hash, and only live and cached
pages have one. A registered page is full and immutable.

A transition that the state does not allow is a bug in the caller and raises `PoolCorrupted` before
anything has changed. One lock; torch-free.
"""

from __future__ import annotations

import enum
import hashlib
import heapq
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from pageferry.kvtransfer.wire import Ledger, pack_ids

_HASH_DOMAIN = b"pageferry.prefix.1"


class OutOfPages(Exception):
    """Fewer pages can be had than were asked for; nothing was taken."""


class PoolCorrupted(RuntimeError):
    """The page bookkeeping contradicts itself or its caller: a bug, never a load condition."""


class PageState(enum.Enum):
    FREE = "free"
    RESERVED = "reserved"
    LIVE = "live"
    CACHED = "cached"
    QUARANTINED = "quarantined"


def _framed(part: bytes) -> bytes:
    """Length first, so that ("ab", "c") and ("a", "bc") stay apart."""
    return len(part).to_bytes(8, "little") + part


class PagePool:
    """Page bookkeeping of one worker. Holds no KV bytes; see `kvtransfer.memory`.

    `namespace` separates pools whose bytes must not be mixed (model fingerprint, KV layout); both
    ends of a handoff need the same one. With `prefix_cache` off nothing is ever registered.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        namespace: bytes = b"",
        *,
        prefix_cache: bool = True,
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages {num_pages} and page_size {page_size} must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self.namespace = namespace
        self.prefix_cache = prefix_cache
        self.evictions = 0
        self._lock = threading.Lock()
        self._state = [PageState.FREE] * num_pages
        self._counts = Counter({PageState.FREE: num_pages})
        self._refs = [0] * num_pages
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._free = list(range(num_pages))  # a heap
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def ledger(self) -> Ledger:
        with self._lock:
            return Ledger(
                total=self.num_pages,
                free=self._counts[PageState.FREE],
                reserved=self._counts[PageState.RESERVED],
                live=self._counts[PageState.LIVE],
                cached=self._counts[PageState.CACHED],
                quarantined=self._counts[PageState.QUARANTINED],
                page_size=self.page_size,
            )

    def state(self, page: int) -> PageState:
        with self._lock:
            return self._state[page]

    # --- prefix hashes

    def hash_prefix(self, token_ids: Sequence[int], salt: str = "") -> list[bytes]:
        """One 32-byte hash per full page of `token_ids`, each covering everything before it.

        SHA-256 over (parent hash, the page's ids as little-endian int32); the root covers page
        size, namespace and `salt`, each with its length in front.
        """
        root = hashlib.sha256(_framed(_HASH_DOMAIN))
        root.update(_framed(self.page_size.to_bytes(8, "little")))
        root.update(_framed(self.namespace) + _framed(salt.encode()))
        parent = root.digest()
        packed = pack_ids(list(token_ids))
        stride = 4 * self.page_size
        hashes = []
        for start in range(0, len(packed) - stride + 1, stride):
            parent = hashlib.sha256(parent + packed[start : start + stride]).digest()
            hashes.append(parent)
        return hashes

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Pages of the longest leading run of `hashes`; each gains one reference."""
        with self._lock:
            pages = self._leading_run(hashes)
            for page in pages:
                if self._state[page] is PageState.CACHED:
                    del self._cached[page]
                    self._move(page, PageState.LIVE)
                self._refs[page] += 1
            return pages

    def peek(self, hashes: Sequence[bytes]) -> int:
        """Length of the run that `match` would return; takes nothing."""
        with self._lock:
            return len(self._leading_run(hashes))

    def register(self, pages: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Make live, full, immutable pages findable. An existing page for a hash stays the one."""
        if len(pages) != len(hashes):
            raise ValueError(f"{len(pages)} pages but {len(hashes)} hashes")
        if not self.prefix_cache:
            return
        with self._lock:
            self._require(pages, PageState.LIVE, "register")
            for page, digest in zip(pages, hashes, strict=True):
                known = self._hash_of.get(page)
                if known is not None and known != digest:
                    raise PoolCorrupted(
                        f"register: page {page} already holds {known.hex()[:12]}, "
                        f"not {digest.hex()[:12]}"
                    )
            for page, digest in zip(pages, hashes, strict=True):
                if digest not in self._page_of and page not in self._hash_of:
                    self._page_of[digest] = page
                    self._hash_of[page] = digest

    # --- transitions

    def reserve(self, count: int) -> list[int]:
        """`count` pages for a writer: free ones, then evicted cached ones. All or nothing."""
        with self._lock:
            return self._take(count, PageState.RESERVED)

    def allocate(self, count: int) -> list[int]:
        """`count` live pages, each with one reference."""
        with self._lock:
            pages = self._take(count, PageState.LIVE)
            for page in pages:
                self._refs[page] = 1
            return pages

    def commit(self, pages: Sequence[int]) -> None:
        """Reserved -> live, with one reference each."""
        with self._lock:
            self._require_distinct(pages, PageState.RESERVED, "commit")
            for page in pages:
                self._move(page, PageState.LIVE)
                self._refs[page] = 1

    def cancel(self, pages: Sequence[int]) -> None:
        """Reserved -> free."""
        with self._lock:
            self._require_distinct(pages, PageState.RESERVED, "cancel")
            self._give_back(pages)

    def quarantine(self, pages: Sequence[int]) -> None:
        """Reserved -> quarantined: a writer that we cannot stop may still write here."""
        with self._lock:
            self._require_distinct(pages, PageState.RESERVED, "quarantine")
            for page in pages:
                self._move(page, PageState.QUARANTINED)

    def absolve(self, pages: Sequence[int]) -> None:
        """Quarantined -> free: the writer confirmed that it stopped, or is gone."""
        with self._lock:
            self._require_distinct(pages, PageState.QUARANTINED, "absolve")
            self._give_back(pages)

    def retain(self, pages: Sequence[int]) -> None:
        """One more reference on each live page."""
        with self._lock:
            self._require(pages, PageState.LIVE, "retain")
            for page in pages:
                self._refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reference less. The last one out leaves the page cached if registered, else free.

        Of one call, the last page becomes the first to be evicted: a prefix is of no use without
        the pages before it.
        """
        with self._lock:
            self._require(pages, PageState.LIVE, "release")
            for page, times in Counter(pages).items():
                if times > self._refs[page]:
                    raise PoolCorrupted(
                        f"release: page {page} has {self._refs[page]} references, not {times}"
                    )
            for page in reversed(pages):
                self._refs[page] -= 1
                if self._refs[page]:
                    continue
                if page in self._hash_of:
                    self._move(page, PageState.CACHED)
                    self._cached[page] = None
                else:
                    self._give_back((page,))

    # --- checks

    def check_integrity(self, holders: Mapping[int, int] | None = None) -> None:
        """Raise `PoolCorrupted` if any invariant is broken.

        `holders`: expected references by page, for every page that somebody holds.
        """
        with self._lock:
            by_state: dict[PageState, set[int]] = {state: set() for state in PageState}
            for page, state in enumerate(self._state):
                by_state[state].add(page)
                self._check_page(page, state, holders)
            for state, pages in by_state.items():
                if self._counts[state] != len(pages):
                    raise PoolCorrupted(
                        f"{len(pages)} pages are {state.value}, counted {self._counts[state]}"
                    )
            self._check_list("free list", self._free, by_state[PageState.FREE])
            self._check_list("eviction list", self._cached, by_state[PageState.CACHED])
            for digest, page in self._page_of.items():
                if self._hash_of.get(page) != digest:
                    raise PoolCorrupted(f"hash {digest.hex()[:12]} names page {page}, not back")
            if len(self._page_of) != len(self._hash_of):
                raise PoolCorrupted(
                    f"{len(self._page_of)} hashes for {len(self._hash_of)} registered pages"
                )

    def _check_page(self, page: int, state: PageState, holders: Mapping[int, int] | None) -> None:
        refs = self._refs[page]
        if (refs > 0) != (state is PageState.LIVE) or refs < 0:
            raise PoolCorrupted(f"page {page} is {state.value} with {refs} references")
        registered = page in self._hash_of
        if state is PageState.CACHED and not registered:
            raise PoolCorrupted(f"page {page} is cached without a hash")
        if registered and state not in (PageState.LIVE, PageState.CACHED):
            raise PoolCorrupted(f"page {page} is {state.value} but registered")
        if holders is not None and refs != holders.get(page, 0):
            raise PoolCorrupted(
                f"page {page} is {state.value} with {refs} references, "
                f"its holders count {holders.get(page, 0)}"
            )

    @staticmethod
    def _check_list(name: str, listed: Iterable[int], expected: set[int]) -> None:
        pages = list(listed)
        if len(pages) != len(set(pages)) or set(pages) != expected:
            wrong = sorted(set(pages) ^ expected) or sorted(
                page for page, times in Counter(pages).items() if times > 1
            )
            raise PoolCorrupted(f"{name} disagrees with the states of pages {wrong[:8]}")

    # --- under the lock

    def _leading_run(self, hashes: Sequence[bytes]) -> list[int]:
        pages = []
        for digest in hashes:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def _take(self, count: int, state: PageState) -> list[int]:
        if count < 0:
            raise ValueError(f"cannot take {count} pages")
        available = len(self._free) + len(self._cached)
        if count > available:
            raise OutOfPages(f"{count} pages wanted, {available} of {self.num_pages} available")
        pages = []
        for _ in range(count):
            if self._free:
                page = heapq.heappop(self._free)
            else:
                page, _ = self._cached.popitem(last=False)
                del self._page_of[self._hash_of.pop(page)]
                self.evictions += 1
            self._move(page, state)
            pages.append(page)
        return pages

    def _give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._move(page, PageState.FREE)
            heapq.heappush(self._free, page)

    def _move(self, page: int, state: PageState) -> None:
        self._counts[self._state[page]] -= 1
        self._counts[state] += 1
        self._state[page] = state

    def _require(self, pages: Sequence[int], state: PageState, verb: str) -> None:
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise PoolCorrupted(f"{verb}: page {page} is not one of {self.num_pages}")
            if self._state[page] is not state:
                raise PoolCorrupted(
                    f"{verb}: page {page} is {self._state[page].value}, not {state.value}"
                )

    def _require_distinct(self, pages: Sequence[int], state: PageState, verb: str) -> None:
        self._require(pages, state, verb)
        if len(set(pages)) != len(pages):
            twice = [page for page, times in Counter(pages).items() if times > 1]
            raise PoolCorrupted(f"{verb}: page {twice[0]} ({state.value}) is named twice")
