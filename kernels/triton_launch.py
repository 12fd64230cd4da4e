"""Tile sizes, warps and pipeline depths of the Triton kernels: plain functions of the problem.

No autotuning: a choice depends on shape, dtype and compute capability alone, so every process
compiles the same kernels, a restart times nothing, and both ends of a handoff compute alike. The
tables come from ahead-of-time compilation for 8.0, 8.6, 8.9, 9.0, 10.0 and 12.0 (`ptxas -v`: no
spills in 16 bits at head_dim 16 to 256, with and without a window), which
`tests/kernels/test_triton_aot.py` repeats in part. They are sound, not measured: no timings exist.

Torch and Triton are not imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

Phase = Literal["prefill", "decode"]

MAX_HEAD_DIM = 256

SHARED_BYTES = {
    (7, 5): 64 * 1024,
    (8, 0): 163 * 1024,
    (8, 7): 163 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (10, 3): 227 * 1024,
}
"""Shared memory one block may use, by compute capability (CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability")."""

SMALLEST_SHARED_BYTES = 99 * 1024
"""For the consumer parts (8.6, 8.9, 12.0) and for capabilities that the table does not know."""

SCRATCH_BYTES = 2048
"""What ahead-of-time compilation adds to the tiles: at most 1 KiB seen."""


@dataclass(frozen=True)
class AttentionShape:
    head_dim: int
    group: int
    """Query heads per KV head."""
    itemsize: int
    """Bytes per element of q and of the pool."""


@dataclass(frozen=True)
class AttentionConfig:
    block_m: int
    """Rows of a tile; a row is one (token, query head of the group) pair."""
    block_n: int
    """Keys of a tile."""
    block_d: int
    """head_dim padded to a power of two."""
    num_warps: int
    num_stages: int
    """Tiles of K and V in flight."""

    def shared_bytes(self, itemsize: int) -> int:
        """An upper bound: the query tile, `num_stages` tiles of K and V, scratch of reductions."""
        keys = 2 * self.num_stages * self.block_n
        return (self.block_m + keys) * self.block_d * itemsize + SCRATCH_BYTES


def next_power_of_2(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


@lru_cache(maxsize=256)
def launch_config(
    phase: Phase, shape: AttentionShape, capability: tuple[int, int]
) -> AttentionConfig:
    """The tile for one attention kernel.

    Prefill takes the largest tile whose fp32 accumulator stays in registers; decode has one row
    per query head of a group, padded to the 16 that a tensor-core instruction takes, and needs
    loads in flight rather than rows. The tile shrinks until shared memory suffices.

    Raises ValueError for a head_dim above MAX_HEAD_DIM and where even the smallest tile is too big.
    """
    if not 1 <= shape.head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim {shape.head_dim} is outside 1..{MAX_HEAD_DIM}, which the Triton attention "
            "kernels cover; run this model on the CPU"
        )
    block_d = max(16, next_power_of_2(shape.head_dim))
    if phase == "prefill":
        rows, keys, warps, stages = _prefill_tile(block_d, shape.itemsize, capability)
    else:
        rows, keys, warps, stages = _decode_tile(block_d, shape.itemsize, capability)
    least_rows = max(16, next_power_of_2(shape.group))
    config = AttentionConfig(max(rows, least_rows), keys, block_d, warps, stages)
    limit = SHARED_BYTES.get(capability, SMALLEST_SHARED_BYTES)
    while config.shared_bytes(shape.itemsize) > limit:
        config = _smaller(config, least_rows, shape)
    return config


def _smaller(config: AttentionConfig, least_rows: int, shape: AttentionShape) -> AttentionConfig:
    """Less depth (down to 2 tiles in flight), then fewer keys, then fewer rows, then no overlap."""
    if config.num_stages > 2:
        return replace(config, num_stages=config.num_stages - 1)
    if config.block_n > 16:
        return replace(config, block_n=config.block_n // 2)
    if config.block_m > least_rows:
        return replace(config, block_m=config.block_m // 2)
    if config.num_stages > 1:
        return replace(config, num_stages=1)
    raise ValueError(
        f"no attention tile for {shape} fits this card's shared memory; serve the model in 16 bits "
        "or run it on the CPU"
    )


def _prefill_tile(
    block_d: int, itemsize: int, capability: tuple[int, int]
) -> tuple[int, int, int, int]:
    """(rows, keys, warps, stages)."""
    if itemsize == 4:  # tf32x3 holds operands thrice; what is served in fp32 is under test
        if block_d <= 64:
            return 64, 32, 8, 2
        return (16, 32, 4, 2) if block_d == 128 else (16, 16, 8, 2)
    if block_d > 128:
        return 64, 32, 8, 2
    # wgmma (9.x) reads q from shared memory, tcgen05 (10.x) accumulates in tensor memory; mma.sync
    # (all others) keeps both in registers, where 64 keys at 128 dimensions and a window spill.
    in_registers = capability[0] not in (9, 10)
    return 128, 32 if in_registers and block_d == 128 else 64, 8, 3


def _decode_tile(
    block_d: int, itemsize: int, capability: tuple[int, int]
) -> tuple[int, int, int, int]:
    """(rows, keys, warps, stages)."""
    if itemsize == 4:
        return (16, 32, 4, 2) if block_d <= 128 else (16, 16, 8, 2)
    return 16, 64 if block_d <= 128 else 32, 4, 4 if capability[0] in (9, 10) else 3


PROCESSORS = {
    (8, 0): 108,
    (8, 6): 84,
    (8, 9): 128,
    (9, 0): 132,
    (10, 0): 148,
    (12, 0): 170,
}
"""Streaming multiprocessors of the largest common card of a capability (its data sheet). A table,
not a query: cards of one kind that differ in a few processors must split, and round, alike."""

FEWEST_PROCESSORS = 84

PROGRAMS_PER_PROCESSOR = 4
"""Programs of one long context per processor: the last, partly filled wave is a quarter or less."""


@dataclass(frozen=True)
class SplitConfig:
    """How decode attention shares one context among programs."""

    keys: int
    """A program takes at least so many keys."""
    most: int
    """Programs per KV head at most; longer contexts give each more keys."""


@lru_cache(maxsize=256)
def split_config(kv_heads: int, group: int, capability: tuple[int, int]) -> SplitConfig:
    """The split for `kv_heads` KV heads (of this card's shard) with `group` query heads each.

    Few heads need short splits to occupy the card. A split's partial result is group * head_dim
    fp32 values for keys * 2 * head_dim values read: at 8 * group keys an eighth of the bytes.
    """
    keys = max(min(256, max(64, 32 * next_power_of_2(kv_heads))), next_power_of_2(8 * group))
    processors = PROCESSORS.get(capability, FEWEST_PROCESSORS)
    most = -(-PROGRAMS_PER_PROCESSOR * processors // kv_heads)
    return SplitConfig(keys, min(256, max(8, most)))


@dataclass(frozen=True)
class RowsConfig:
    """Tile of a kernel that treats rows alone: `rows` rows of `columns` (a power of two)."""

    rows: int
    columns: int
    num_warps: int


TILE_ELEMENTS = 4096
"""Elements a row-wise program handles: 16 per thread at 8 warps, two 16-byte loads of bf16."""


@lru_cache(maxsize=256)
def rows_config(num_columns: int) -> RowsConfig:
    """The tile of `rms_norm`, `fused_add_rms_norm`: whole rows, several if they are short."""
    columns = next_power_of_2(num_columns)
    rows = max(1, TILE_ELEMENTS // 2 // columns)
    return RowsConfig(rows, columns, warps_for(rows * columns))


def warps_for(elements: int) -> int:
    """One warp per 512 elements, 1 to 16 of them."""
    return min(16, max(1, next_power_of_2(elements // 512)))
