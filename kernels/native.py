"""The CPU kernels' library: found, checked, and called through its C interface (`native/abi.h`).

The library is an optional part of the installation: without a C++ compiler there is none, and the
torch reference computes. `PAGEFERRY_CPU_KERNELS` chooses: `auto` (the best level that the processor
offers), one of `LEVELS` to go no further than that, or `torch` for the reference.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_float, c_int64, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

log = logging.getLogger(__name__)

VARIABLE = "PAGEFERRY_CPU_KERNELS"
LEVELS = ("base", "avx2", "avx512", "avx512_bf16", "amx")
"""Instruction sets, each a superset of those before it. `base` is what the compiler assumes."""

ABI_VERSION = 2
"""Of `abi.h`; a library left over from another version of the sources is not used."""

FLOAT32, BFLOAT16 = 0, 1
WIDTH = 16
"""Outputs of a packed block."""


class BadKernelChoice(ValueError):
    """`PAGEFERRY_CPU_KERNELS` names nothing that there is."""


class Matrix(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
    )


class LayerWeights(ctypes.Structure):
    _fields_ = (
        ("qkv", Matrix),
        ("o", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("window", c_int64),
    )


class ModelWeights(ctypes.Structure):
    _fields_ = (
        ("dtype", c_int64),
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("intermediate", c_int64),
        ("page_size", c_int64),
        ("deterministic", c_int64),
        ("eps", c_float),
        ("embedding_multiplier", c_float),
        ("residual_multiplier", c_float),
        ("attention_scale", c_float),
        ("layers", POINTER(LayerWeights)),
        ("final_norm", c_void_p),
        ("rope_table", c_void_p),
        ("embedding", c_void_p),
        ("head", Matrix),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        ("num_tokens", c_int64),
        ("num_seqs", c_int64),
        ("table_stride", c_int64),
        ("input_ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("cu_seqlens_q", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
    )


ON_LAYER = ctypes.CFUNCTYPE(None, c_int64)

_SIGNATURES: dict[str, tuple[object, ...]] = {
    "pf_abi_version": (c_int64,),
    "pf_best_level": (c_int64,),
    "pf_use_level": (c_int64, c_int64),
    "pf_current_level": (c_int64,),
    "pf_set_threads": (None, c_int64),
    "pf_borrow": (None, c_void_p, c_void_p, c_int64),
    "pf_packed_bytes": (c_int64, c_int64, c_int64, c_int64, c_int64),
    "pf_blocks": (c_int64, c_int64, c_int64),
    "pf_pack": (None, c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "pf_forward": (
        *(None, POINTER(ModelWeights), POINTER(Batch), c_void_p, c_int64, c_void_p),
        ON_LAYER,
    ),
    "pf_logits": (None, POINTER(ModelWeights), c_void_p, c_int64, c_void_p),
    "pf_linear": (None, c_int64, POINTER(Matrix), c_void_p, c_int64, c_void_p),
    "pf_linear_silu": (None, c_int64, POINTER(Matrix), c_void_p, c_int64, c_void_p),
    "pf_rms_norm": (None, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p),
    "pf_rope_store": (
        *(None, POINTER(ModelWeights), POINTER(Batch), POINTER(LayerWeights)),
        *(c_void_p, c_void_p),
    ),
    "pf_attention": (
        *(None, POINTER(ModelWeights), POINTER(Batch), POINTER(LayerWeights)),
        *(c_void_p, c_void_p, c_void_p),
    ),
    "pf_read_bandwidth": (c_double, c_int64, c_int64),
}


def find_library() -> Path | None:
    """The library beside this file, as setuptools leaves it; None where it was not built."""
    here = Path(__file__)
    for suffix in EXTENSION_SUFFIXES:
        path = here.with_name("_native" + suffix)
        if path.is_file():
            return path
    return None


@cache
def library() -> ctypes.CDLL | None:
    """The library at the level that is wanted, or None: compute with torch.

    Raises `BadKernelChoice` for a value of `PAGEFERRY_CPU_KERNELS` that is none of those above.
    """
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in ("auto", "torch", *LEVELS):
        raise BadKernelChoice(
            f"{VARIABLE}={wanted!r} is not one of auto, torch, {', '.join(LEVELS)}"
        )
    path = find_library()
    if wanted == "torch":
        return None
    if path is None:
        log.warning("the CPU kernels were not built (no C++ compiler at install); torch computes")
        return None
    return _open(path, wanted)


def _open(path: Path, wanted: str) -> ctypes.CDLL | None:
    try:
        lib = ctypes.CDLL(str(path))
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(lib, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        log.warning("the CPU kernels in %s cannot be used (%s); torch computes", path.name, error)
        return None
    if lib.pf_abi_version() != ABI_VERSION:
        log.warning("the CPU kernels in %s are of another version; install again", path.name)
        return None
    best = lib.pf_best_level()
    level = lib.pf_use_level(best if wanted == "auto" else LEVELS.index(wanted))
    if wanted not in ("auto", LEVELS[level]):
        log.warning("%s=%s: this processor offers %s", VARIABLE, wanted, LEVELS[level])
    log.info("CPU kernels: %s", LEVELS[level])
    return lib


def borrow_cores(busy_address: int, cores: Sequence[int]) -> bool:
    """Have passes use `cores` too, whenever the int64 at `busy_address` is 0.

    False when there is no library. The address must stay valid for the rest of the process.
    """
    lib = library()
    if lib is None:
        return False
    lib.pf_borrow(busy_address, (c_int64 * len(cores))(*cores), len(cores))
    return True
