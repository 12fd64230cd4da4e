"""How much a JSON text would make a parser build, found out without building it.

A parser holds the interpreter's lock until it is done, and so does freeing what it made: 8 MB of
`[[],[],…]` become 2.7 million objects and stop every stream for 1 to 2 s. This walk over the text
goes in windows, between which other threads run, and ends at the limit.
"""

from __future__ import annotations

import re

SMALL_BYTES = 16 * 1024
"""Bodies up to this size cannot hold enough to matter."""
MAX_WEIGHT = 300_000
"""A value, such as a token id, weighs 1: 300,000 of them take 30 ms."""
HEAVY = 10
"""Weight of an array, an object, and an object's entry."""
WINDOW = 32 * 1024

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("|\\?\Z)', re.DOTALL)
"""A string and its end, which is not a quote if the window ends first."""
_INSIDE = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)


class TooManyValues(ValueError):
    """The text has more values than any request needs."""


def check_weight(body: bytes) -> None:
    """`TooManyValues` if parsing `body` would stop other threads for long.

    Text inside strings weighs nothing. What is not JSON is left to the parser.
    """
    if len(body) <= SMALL_BYTES:
        return
    at = weight = 0
    in_string = False
    while at < len(body):
        if in_string:
            inside = _INSIDE.match(body, at, at + WINDOW)
            end = at if inside is None else inside.end()
            in_string = body[end : end + 1] != b'"'
            if in_string and end == at:  # a backslash and nothing behind it
                return
            at = end if in_string else end + 1
            continue
        window = body[at : at + WINDOW]
        parts = _STRING.split(window)
        outside = b"".join(parts[::2])
        heavy = sum(map(outside.count, (b"[", b"{", b":")))
        weight += HEAVY * heavy + outside.count(b",")
        if weight > MAX_WEIGHT:
            raise TooManyValues(
                f"has too many values: their weight is above {MAX_WEIGHT} (1 for each, {HEAVY} for "
                "each array, object and entry of an object)"
            )
        at += len(window)
        if len(parts) > 1 and parts[-2] != b'"':
            in_string = True
            at -= len(parts[-2])  # a backslash belongs to what follows
