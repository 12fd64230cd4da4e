"""The byte layout of KV pages: what both ends of a handoff must agree on, to the byte."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

LAYOUT_VERSION = 1
"""Raised whenever the meaning of the bytes changes."""


@dataclass(frozen=True)
class KVLayout:
    """Pool memory is one C-contiguous array `[layers, pages, 2, kv_heads, page_size, head_dim]`.

    Index 2 is K (0) or V (1). One page of one layer is therefore one contiguous run of
    `page_bytes`, and adjacent pages of one layer are adjacent in memory.
    """

    dtype: str
    page_size: int
    """Token slots per page."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tp_rank: int = 0
    tp_size: int = 1
    version: int = LAYOUT_VERSION

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer, K and V."""
        values = 2 * self.num_kv_heads * self.page_size * self.head_dim
        return values * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers."""
        return self.page_bytes * self.num_layers

    def pool_bytes(self, num_pages: int) -> int:
        return self.bytes_per_page * num_pages

    def offset(self, num_pages: int, layer: int, page: int) -> int:
        """Byte offset of a page within a pool of `num_pages`."""
        return (layer * num_pages + page) * self.page_bytes

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def differences(self, other: dict[str, Any]) -> list[str]:
        """One `field: mine M, theirs T` per field in which `other` differs; empty when equal."""
        return [
            f"{name}: mine {mine!r}, theirs {other.get(name)!r}"
            for name, mine in self.to_dict().items()
            if mine != other.get(name)
        ]
