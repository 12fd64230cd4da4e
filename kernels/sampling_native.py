"""Sampling by the C++ library: `kernels/native/sampling.cpp` behind `kernels/native/sampling.h`.

The structs here mirror those of the header. One call per step, without the interpreter lock; what
does not change from step to step is prepared once per sequence.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pageferry.kernels.sample_spec import BAD_BIAS, NON_FINITE, Sampled, SampleSpec

ERRORS = ("", NON_FINITE, BAD_BIAS)
"""By `pf_sample_status`."""

_MASK64 = (1 << 64) - 1
_INT32_MAX = (1 << 31) - 1
_TOP_K_MAX = 1 << 62


class _Params(ctypes.Structure):
    """`pf_sample_params`."""

    _fields_ = (
        ("temperature", ctypes.c_double),
        ("span", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        ("top_k", ctypes.c_int64),
        ("seen_ids", ctypes.c_void_p),
        ("output_counts", ctypes.c_void_p),
        ("num_seen", ctypes.c_int64),
        ("bias_ids", ctypes.c_void_p),
        ("bias_values", ctypes.c_void_p),
        ("num_biased", ctypes.c_int64),
        ("masked_ids", ctypes.c_void_p),
        ("num_masked", ctypes.c_int64),
        ("repetition_penalty", ctypes.c_float),
        ("presence_penalty", ctypes.c_float),
        ("frequency_penalty", ctypes.c_float),
        ("num_logprobs", ctypes.c_int32),
    )


class _Sampled(ctypes.Structure):
    """`pf_sampled`."""

    _fields_ = (
        ("token", ctypes.c_int32),
        ("status", ctypes.c_int32),
        ("num_top", ctypes.c_int32),
        ("logprob", ctypes.c_float),
    )


class NativeSampler:
    """`sample` for float32 logits on a CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._call = library.pf_sample
        self._call.restype = None
        self._call.argtypes = (
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
        )

    def sample(self, logits: Tensor, specs: Sequence[SampleSpec]) -> list[Sampled]:
        """As `kernels.sampling.sample`; `ValueError` for logits that the library cannot read."""
        rows, vocab = logits.shape
        if logits.dtype != torch.float32 or logits.device.type != "cpu" or logits.stride(1) != 1:
            raise ValueError(
                f"logits must be float32 rows on a CPU, got {logits.dtype} on {logits.device} "
                f"with strides {logits.stride()}"
            )
        if rows != len(specs):
            raise ValueError(f"{rows} rows of logits but {len(specs)} specs")
        params = (_Params * rows)(*map(_row_params, specs))
        out = (_Sampled * rows)()
        most = max((s.params.logprobs for s in specs), default=0)
        max_top = min(vocab, max(0, most))
        top_ids = np.empty((rows, max_top), dtype=np.int32)
        top_logprobs = np.empty((rows, max_top), dtype=np.float32)
        self._call(
            logits.data_ptr(),
            rows,
            vocab,
            logits.stride(0),
            params,
            out,
            top_ids.ctypes.data,
            top_logprobs.ctypes.data,
            max_top,
        )
        return [
            _result(row, spec, top_ids[i], top_logprobs[i])
            for i, (row, spec) in enumerate(zip(out, specs, strict=True))
        ]


class _Prepared:
    """A sequence's `_Params`, and the arrays that it points to."""

    def __init__(self, spec: SampleSpec) -> None:
        p = spec.params
        self.bias_ids = _int32(p.logit_bias)
        self.bias_values = array("f", p.logit_bias.values())
        self.stop_ids = _int32(p.stop_token_ids)
        self.params = _Params(
            temperature=p.temperature,
            span=spec.span,
            top_p=p.top_p,
            seed=p.seed & _MASK64,
            top_k=min(p.top_k, _TOP_K_MAX),
            bias_ids=_address(self.bias_ids),
            bias_values=_address(self.bias_values),
            num_biased=len(self.bias_ids),
            masked_ids=_address(self.stop_ids),
            repetition_penalty=p.repetition_penalty,
            presence_penalty=p.presence_penalty,
            frequency_penalty=p.frequency_penalty,
            num_logprobs=p.logprobs,
        )
        self.counts_tokens = (
            p.repetition_penalty != 1.0 or p.presence_penalty != 0 or p.frequency_penalty != 0
        )


def _row_params(spec: SampleSpec) -> _Params:
    prepared: _Prepared | None = spec.derived.get(_Prepared)
    if prepared is None:
        prepared = spec.derived[_Prepared] = _Prepared(spec)
    params = prepared.params
    params.position = spec.position
    params.num_masked = len(spec.masked_ids)
    if prepared.counts_tokens:
        counts = spec.counts
        params.seen_ids = _address(counts.ids)
        params.output_counts = _address(counts.output_counts)
        params.num_seen = len(counts.ids)
    return params


def _result(
    row: _Sampled, spec: SampleSpec, top_ids: NDArray[np.int32], top: NDArray[np.float32]
) -> Sampled:
    token = row.token
    if row.status:
        return Sampled(token, error=ERRORS[row.status])
    if spec.params.logprobs < 0:
        return Sampled(token)
    count = row.num_top
    pairs = zip(top_ids[:count].tolist(), top[:count].tolist(), strict=True)
    return Sampled(token, row.logprob, tuple(pairs))


def _int32(ids: Iterable[int]) -> array[int]:
    """Ids that fit no int32 become -1, which is in no vocabulary either."""
    return array("i", (i if 0 <= i <= _INT32_MAX else -1 for i in ids))


def _address(values: array[int] | array[float]) -> int:
    """Of the first element; good until the array grows."""
    return values.buffer_info()[0]
