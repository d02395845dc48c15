"""Calls an operator on a case with a target's arrays; results come back as float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import octavo
from support import problems
from support.case import Case
from support.problems import Cache, Inputs, OutputGradients
from support.targets import Target

Result = tuple[NDArray[np.float64], NDArray[np.float64]]


def optional_arrays(target: Target, inputs: Inputs) -> dict[str, Any]:
    slopes, prefix_lens = inputs.alibi_slopes, inputs.prefix_lens
    ranges = inputs.bidirectional_ranges
    return {
        "alibi_slopes": None if slopes is None else target.library.float32(slopes),
        "prefix_lens": None if prefix_lens is None else target.int32(prefix_lens),
        "bidirectional_ranges": None if ranges is None else target.int32(ranges),
        "sinks": None if inputs.sinks is None else target.library.float32(inputs.sinks),
    }


def blocks(target: Target, case: Case, inputs: Inputs) -> dict[str, Any]:
    """The block mask of dense and packed calls, where the case has one."""
    if inputs.block_mask is None:
        return {}
    return {"block_mask": target.library.boolean(inputs.block_mask), "block_size": case.block_size}


def read(target: Target, result: tuple[Any, Any]) -> Result:
    out, lse = result
    assert isinstance(out, target.library.array_type)
    assert isinstance(lse, target.library.array_type)
    assert target.dtype in str(out.dtype)
    assert "float32" in str(lse.dtype)
    assert tuple(lse.shape) == tuple(out.shape[:-1])
    return target.library.to_float64(out), target.library.to_float64(lse)


def dense(case: Case, packed: NDArray) -> NDArray:
    """[total, heads, head_dim] -> [batch, seqlen, heads, head_dim]."""
    return packed.reshape(case.batch, len(packed) // case.batch, *packed.shape[1:])


def attention(target: Target, case: Case, inputs: Inputs, **overrides: Any) -> Result:
    """Over dense arrays, poisoned where no query looks."""
    k, v = problems.poisoned(case, inputs)
    arguments = {
        **case.masks,
        **optional_arrays(target, inputs),
        **blocks(target, case, inputs),
        **overrides,
    }
    result = octavo.attention(
        *(target.array(dense(case, x)) for x in (inputs.q, k, v)), return_lse=True, **arguments
    )
    assert tuple(result[0].shape) == (case.batch, case.seqlens_q[0], case.num_q_heads, case.head_dim_v)
    return read(target, result)


def packed_attention(target: Target, case: Case, inputs: Inputs, **overrides: Any) -> Result:
    k, v = problems.poisoned(case, inputs)
    arguments = {
        **case.masks,
        **optional_arrays(target, inputs),
        **blocks(target, case, inputs),
        **overrides,
    }
    result = octavo.attention(
        *(target.array(x) for x in (inputs.q, k, v)),
        cu_seqlens_q=target.int32(inputs.cu_seqlens_q),
        cu_seqlens_k=target.int32(inputs.cu_seqlens_k),
        return_lse=True,
        **arguments,
    )
    assert tuple(result[0].shape) == (*inputs.q.shape[:-1], case.head_dim_v)
    return read(target, result)


def attention_backward(
    target: Target,
    case: Case,
    inputs: Inputs,
    gradients: OutputGradients,
    *,
    packed: bool = False,
    **overrides: Any,
) -> tuple[NDArray[np.float64], ...]:
    """The forward, poisoned where no query looks, and its backward: dq, dk, dv, those of slopes and sinks."""
    k, v = problems.poisoned(case, inputs)
    optional = {**optional_arrays(target, inputs), **blocks(target, case, inputs)}
    arguments = {**case.masks, **optional, **overrides}
    options_of_backward = {
        name: arguments.pop(name) for name in ("dlse", "deterministic", "dq", "dk", "dv") if name in arguments
    }
    shape: Callable[[NDArray[Any]], NDArray[Any]] = (lambda x: x) if packed else partial(dense, case)
    if packed:
        arguments["cu_seqlens_q"] = target.int32(inputs.cu_seqlens_q)
        arguments["cu_seqlens_k"] = target.int32(inputs.cu_seqlens_k)
    arrays = [target.array(shape(x)) for x in (inputs.q, k, v)]
    forward = octavo.attention(*arrays, return_lse=True, **arguments)
    result = octavo.attention_backward(
        target.array(shape(gradients.dout)),
        *arrays,
        *forward,
        return_dalibi=arguments.get("alibi_slopes") is not None,
        return_dsinks=arguments.get("sinks") is not None,
        **{"dlse": target.library.float32(shape(gradients.dlse)), **options_of_backward},
        **arguments,
    )
    for gradient, array in zip(result, arrays, strict=False):
        assert isinstance(gradient, target.library.array_type)
        assert target.dtype in str(gradient.dtype)
        assert tuple(gradient.shape) == tuple(array.shape)
    return tuple(map(target.library.to_float64, result))


def paged_attention(
    target: Target, case: Case, inputs: Inputs, cache: Cache, *, packed: bool = True, **overrides: Any
) -> Result:
    """`packed` gives cu_seqlens_q; without it every sequence must have one query."""
    arguments = {
        **case.masks,
        "k_scale": case.k_scale,
        "v_scale": case.v_scale,
        **optional_arrays(target, inputs),
        **overrides,
    }
    result = octavo.paged_attention(
        target.array(inputs.q),
        target.array(cache.k_pages),
        target.array(cache.v_pages),
        target.int32(cache.page_table),
        target.int32(cache.seq_lens),
        cu_seqlens_q=target.int32(inputs.cu_seqlens_q) if packed else None,
        return_lse=True,
        **arguments,
    )
    assert tuple(result[0].shape) == (*inputs.q.shape[:-1], case.head_dim_v)
    return read(target, result)


def assert_same_bits(a: Result, b: Result) -> None:
    for x, y in zip(a, b, strict=True):
        assert x.tobytes() == y.tobytes(), f"{np.count_nonzero(x != y)} of {x.size} elements differ"


def rows_of(result: Result, which: NDArray[np.bool_]) -> Result:
    out, lse = result
    return out[which], lse[which]


GUARD = 64  # elements on either side
SENTINEL = -7.0


class GuardedArray:
    """An array of NaN inside a bigger buffer, to see that nothing around it is written."""

    def __init__(self, target: Target, *shape: int) -> None:
        size = int(np.prod(shape))
        values = np.full(size + 2 * GUARD, SENTINEL)
        values[GUARD : GUARD + size] = np.nan
        self._target = target
        self._buffer = target.array(values)
        self.array = self._buffer[GUARD : GUARD + size].reshape(shape)

    def check_margins(self) -> None:
        values = self._target.library.to_float64(self._buffer)
        assert (values[:GUARD] == SENTINEL).all(), "written before the array's begin"
        assert (values[-GUARD:] == SENTINEL).all(), "written past the array's end"
