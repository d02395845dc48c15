"""The unified maximum of a model's attention, from what calls without it have returned."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from octavo import _core
from octavo._linear_plan import dtype_name

if TYPE_CHECKING:  # NumPy itself is imported by the first call
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

_OPERATOR = "calibrate_softmax_phi"
_LEAST_WIDTH = 1e-3  # of a row's interval, so that that of a single key has one
_ROUNDING = 1e-9  # of shares of rows
_LARGEST = 2.0**32  # of log-sum-exps: those beyond lie further apart in float64 than some intervals are wide


def _share_below(
    x: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The mean share of the intervals [low, high] that lies below each of x, which ascend."""
    import numpy as np

    slopes = 1.0 / (high - low)
    ends = np.concatenate([low, high])
    order = np.argsort(ends, kind="stable")
    ends, changes = ends[order], np.concatenate([slopes, -slopes])[order]
    rising = np.cumsum(changes)
    at_ends = np.concatenate([[0.0], np.cumsum(rising[:-1] * np.diff(ends))])
    return np.interp(x, ends, at_ends / len(low))


def _best_shift(low: NDArray[np.float64], high: NDArray[np.float64], below: float, above: float) -> float:
    """The phi for which [phi - below, phi + above] holds most of the intervals; the middle of several."""
    import numpy as np

    ends = np.concatenate([low, high])
    shifts = np.sort(np.concatenate([ends - above, ends + below]))
    held = _share_below(shifts + above, low, high) - _share_below(shifts - below, low, high)
    is_best = held >= held.max() - _ROUNDING
    # Between two breakpoints `held` is linear: a run of best ones holds what lies between them.
    starts = np.flatnonzero(is_best & ~np.concatenate([[False], is_best[:-1]]))
    stops = np.flatnonzero(is_best & ~np.concatenate([is_best[1:], [False]]))
    longest = int(np.argmax(shifts[stops] - shifts[starts]))
    return float(shifts[starts[longest]] + shifts[stops[longest]]) / 2.0


def _array(name: str, given: ArrayLike, wanted: str, kinds: str) -> NDArray[Any]:
    """What NumPy reads, of a dtype of one of these kinds; an empty list is of any."""
    import numpy as np

    try:
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:  # PyTorch's, where a tensor requires gradients
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"{_OPERATOR}: {name} must be an array of {wanted}: {error}") from None
    if array.dtype.kind not in kinds and array.size > 0:
        raise TypeError(f"{_OPERATOR}: {name} must be of {wanted}; got {array.dtype}")
    return array


def calibrate_softmax_phi(
    lse: ArrayLike, seq_lens: ArrayLike, dtype: object
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Find ``softmax_phi`` for each query head, from ordinary calls of ``attention`` or ``paged_attention``.

    The unified maximum of FlashDecoding++ (Hong et al. 2024, arXiv:2311.01282) stands for a row's own where
    that lies in a window around it: in units of log2(e), from 2 below in float16, or 60 below in bfloat16 and
    float32, to 8 above. A row's maximum is not known, but lies between ``lse - log(n)`` and ``lse``, where n
    is the number of its keys; it is taken to lie anywhere there alike.

    Args:
        lse: float [..., num_q_heads]: the log-sum-exps of rows, as ``return_lse=True`` gives them; those of
            several calls stacked or concatenated, made without ``sinks``, which a log-sum-exp includes.
            Anything that NumPy reads. Rows of -inf, which saw no key, are left out.
        seq_lens: int [...]: the number of keys that each row saw, in the shape of lse without its last axis,
            or in one that broadcasts to it.
        dtype: that of the queries: "float16", "bfloat16", "float32", or the dtype itself; "float16" for
            caches of codes, whose weights are of that type whatever the queries are. On the CPU the window of
            float16 is as wide as that of the others.

    Returns:
        phi: float32 [num_q_heads]: what to pass as ``softmax_phi``; 0 for a head without rows.
        share: float64 [num_q_heads]: the share of rows that are expected to lie outside of the window and to
            keep their own maximum. Where it is large, as it is for OPT-6.7B in that paper, phi gains nothing.

    Raises:
        ValueError: shapes that do not fit, an unknown dtype, a log-sum-exp that is NaN, inf, or finite
            and beyond 2^32 in magnitude, a row with a log-sum-exp but no key.
        TypeError: lse is not of numbers, or seq_lens not of integers.
    """
    import numpy as np

    name = dtype_name(dtype)
    if name not in ("float16", "bfloat16", "float32"):
        raise ValueError(f"{_OPERATOR}: dtype must be float16, bfloat16 or float32; got {name}")
    values = _array("lse", lse, "numbers", "iufV").astype(np.float64)  # V: what ml_dtypes adds
    if values.ndim < 1 or values.shape[-1] == 0:
        raise ValueError(f"{_OPERATOR}: lse must have shape [..., num_q_heads]; got {list(values.shape)}")
    lengths = _array("seq_lens", seq_lens, "integers", "iu")
    try:
        lengths = np.broadcast_to(lengths, values.shape[:-1])
    except ValueError:
        raise ValueError(
            f"{_OPERATOR}: seq_lens must have the shape of lse without its last axis, "
            f"{list(values.shape[:-1])}, or one that broadcasts to it; got {list(lengths.shape)}"
        ) from None
    values, lengths = values.reshape(-1, values.shape[-1]), lengths.reshape(-1)
    if np.isnan(values).any() or np.isposinf(values).any():
        raise ValueError(f"{_OPERATOR}: lse must be finite or -inf; got {values[~(values < np.inf)][0]}")
    too_large = np.isfinite(values) & (np.abs(values) > _LARGEST)
    if too_large.any():
        raise ValueError(
            f"{_OPERATOR}: lse must be at most 2^32 in magnitude, or -inf; got {values[too_large][0]}"
        )
    too_short = lengths[np.isfinite(values).any(axis=1) & (lengths < 1)]
    if too_short.size:
        raise ValueError(f"{_OPERATOR}: seq_lens must be at least 1 where lse is finite; got {too_short[0]}")

    below, above = (math.log(2.0) * x for x in _core.softmax_phi_window(name == "float16"))
    phi = np.zeros(values.shape[1], np.float32)
    share = np.zeros(values.shape[1])
    for head, column in enumerate(values.T):
        seen = np.isfinite(column)
        if not seen.any():
            continue
        high = column[seen]
        low = high - np.maximum(np.log(lengths[seen]), _LEAST_WIDTH)
        phi[head] = _best_shift(low, high, below, above)
        window = float(phi[head]) + np.array([-below, above])
        below_it, not_above_it = _share_below(window, low, high)
        outside = 1.0 - (not_above_it - below_it)
        share[head] = outside if outside > _ROUNDING else 0.0
    return phi, share
