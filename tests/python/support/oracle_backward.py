"""What the gradients of attention mean: float64 NumPy from the formulas, and the yardstick for errors.

Arrays are packed, as in `oracle`. tests/python/test_oracle_backward.py holds the formulas against central
differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.oracle import (
    EPSILON_OUT,
    HALF_SPACING,
    NUMPY_DTYPES,
    PackedSequence,
    round_to,
    score_errors,
    sequences,
    sum_errors,
)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Gradients:
    """Something of each gradient; of one sequence or of all."""

    dq: Array  # [total_q, num_q_heads, head_dim]
    dk: Array  # [total_k, num_kv_heads, head_dim]
    dv: Array
    dslopes: Array  # [num_q_heads] or [batch, num_q_heads]
    dsinks: Array  # [num_q_heads]

    def __iter__(self) -> Iterator[Array]:
        return iter((self.dq, self.dk, self.dv, self.dslopes, self.dsinks))


class Backward:
    """The gradients of one sequence.

    With a dtype other than float64 as a plain implementation computes them, whose error is the yardstick for
    the operator's: products of the dtype are summed in float32, and what a framework would keep between two
    operations is rounded to the dtype.

    Args:
        q: [n, num_q_heads, head_dim].
        k: [m, num_kv_heads, head_dim].
        v: Like k, with a head_dim of its own.
        dout: Like q, with that of v.
        dlse: [n, num_q_heads].
        sequence: The sequence.
        scale: Multiplies the products of queries and keys.
        softcap: 0 for none.
        dtype: That of the arrays, or float64.
    """

    def __init__(
        self,
        q: NDArray[Any],
        k: NDArray[Any],
        v: NDArray[Any],
        dout: NDArray[Any],
        dlse: NDArray[Any],
        sequence: PackedSequence,
        scale: float,
        softcap: float,
        dtype: str = "float64",
    ) -> None:
        work = np.float64 if dtype == "float64" else np.float32

        def rounded(x: NDArray[Any]) -> NDArray[Any]:
            return x if dtype == "float64" else x.astype(NUMPY_DTYPES[dtype]).astype(work)

        self.groups = k.shape[1], q.shape[1] // k.shape[1]
        k, v = (np.repeat(x, self.groups[1], axis=1) for x in (k, v))
        self.q, self.k, self.v, self.dout = (x.transpose(1, 0, 2).astype(work) for x in (q, k, v, dout))
        self.distance = sequence.distance.astype(work)

        # Everything from here on is [num_q_heads, n, m], or a factor for it.
        scores = rounded(work(scale) * rounded(self.q @ self.k.transpose(0, 2, 1)))
        self.slope_of_cap: Any = work(1.0)
        self.softcap, self.tanh, self.bias = softcap, work(0.0), sequence.bias
        if softcap > 0.0:
            self.tanh = rounded(np.tanh(scores / work(softcap)))
            scores, self.slope_of_cap = rounded(work(softcap) * self.tanh), 1 - self.tanh**2
        if sequence.bias is not None:
            scores = rounded(scores + sequence.bias.astype(work))
        scores = np.where(sequence.see, scores, work(-np.inf))
        sink = work(-np.inf) if sequence.sinks is None else sequence.sinks[:, None, None].astype(work)
        highest = np.maximum(scores.max(axis=2, keepdims=True, initial=-np.inf), sink)
        finite = np.where(np.isneginf(highest), work(0), highest)
        weights, of_sink = np.exp(scores - finite), np.exp(sink - finite)
        total = weights.sum(axis=2, keepdims=True) + of_sink
        self.weights = rounded(weights / np.where(total == 0.0, work(1), total))
        self.sink_weights = rounded(of_sink / np.where(total == 0.0, work(1), total))  # [num_q_heads, n, 1]

        self.kept = work(1.0) if sequence.kept is None else sequence.kept.astype(work)
        self.dropped = rounded(self.weights * self.kept)
        self.dweights = rounded(rounded(self.dout @ self.v.transpose(0, 2, 1)) * self.kept)
        self.delta = (self.weights * self.dweights).sum(axis=2, keepdims=True) - dlse.T[:, :, None].astype(
            work
        )
        self.dscores = rounded(self.weights * (self.dweights - self.delta))
        self.scale = work(scale)
        self.dproducts = rounded(self.scale * rounded(self.dscores * self.slope_of_cap))

    def _of_keys(self, by_head: NDArray[Any]) -> Array:
        """[num_q_heads, m, head_dim] to [m, num_kv_heads, head_dim]: the sums over groups."""
        groups = by_head.reshape(*self.groups, *by_head.shape[1:])
        return groups.sum(axis=1).transpose(1, 0, 2).astype(np.float64)

    def gradients(self) -> Gradients:
        return Gradients(
            (self.dproducts @ self.k).transpose(1, 0, 2).astype(np.float64),
            self._of_keys(self.dproducts.transpose(0, 2, 1) @ self.q),
            self._of_keys(self.dropped.transpose(0, 2, 1) @ self.dout),
            -(self.dscores * self.distance).sum(axis=(1, 2)).astype(np.float64),
            -(self.sink_weights * self.delta).sum(axis=(1, 2)).astype(np.float64),
        )

    def spreads(self) -> Gradients:
        """How large each gradient would be if the parts of what it sums up had random signs.

        The gradient itself may be far smaller, and 0 where a query sees one key. To that adds what the
        forward's output has a part in, as its rounding is the same for all keys of a query: its product with
        dout is subtracted from each of them.
        """
        slopes = self.scale * self.weights * self.slope_of_cap
        parts = (slopes * (np.abs(self.dweights) + np.abs(self.delta))) ** 2
        of_out = 4.0 * ((self.dout * (self.dropped @ self.v)) ** 2).sum(axis=2, keepdims=True)
        distances = (self.weights * self.distance).sum(axis=2)
        return Gradients(
            np.sqrt(parts @ self.k**2 + of_out * (slopes @ self.k) ** 2).transpose(1, 0, 2),
            np.sqrt(self._of_keys((parts + of_out * slopes**2).transpose(0, 2, 1) @ self.q**2)),
            np.sqrt(self._of_keys(self.dropped.transpose(0, 2, 1) ** 2 @ self.dout**2)),
            np.sqrt((of_out[:, :, 0] * distances**2).sum(axis=1)),
            np.sqrt((self.sink_weights**2 * (self.delta**2 + of_out)).sum(axis=(1, 2))),
        )

    def float_errors(self) -> Gradients:
        """How far float32 sums may take each gradient, however close to 0 they are.

        Those are the scores, on which a weight depends twice, as the forward's LSE does, and the products of
        dout with values and with the output. The slope of the cap, 1 - tanh^2, has four roundings of tanh.
        """
        head_dim, head_dim_v = self.q.shape[2], self.v.shape[2]
        squares = self.q**2 @ self.k.transpose(0, 2, 1) ** 2
        of_products = np.abs(self.scale) * sum_errors(squares, head_dim)
        of_scores = 2.0**0.5 * score_errors(
            of_products, self.slope_of_cap, self.softcap * self.tanh, self.bias
        )
        of_dweights = sum_errors(self.dout**2 @ self.v.transpose(0, 2, 1) ** 2, head_dim_v) * self.kept
        spread = self.weights * (self.dweights - self.delta)
        of_delta = np.hypot(
            sum_errors(((self.dout * (self.dropped @ self.v)) ** 2).sum(axis=2), head_dim_v),
            np.sqrt(((of_scores * spread) ** 2).sum(axis=2)),
        )[:, :, None]

        of_dscores = np.hypot(of_scores * spread, self.weights * of_dweights)
        of_slope = 2.0 * self.tanh**2 * 4.0 * HALF_SPACING
        of_own = self.scale * np.hypot(of_dscores * self.slope_of_cap, self.dscores * of_slope)
        slopes = self.scale * self.weights * self.slope_of_cap
        distances = (self.weights * self.distance).sum(axis=2, keepdims=True)
        of_sinks = self.sink_weights * np.hypot(
            of_delta, self.delta * (self.weights * of_scores).sum(axis=2, keepdims=True)
        )
        return Gradients(
            np.sqrt(of_own**2 @ self.k**2 + (of_delta * (slopes @ self.k)) ** 2).transpose(1, 0, 2),
            np.sqrt(self._of_keys((of_own**2 + (of_delta * slopes) ** 2).transpose(0, 2, 1) @ self.q**2)),
            np.sqrt(self._of_keys((of_scores * self.dropped).transpose(0, 2, 1) ** 2 @ self.dout**2)),
            np.sqrt(
                ((of_dscores * self.distance) ** 2).sum(axis=(1, 2))
                + ((of_delta * distances) ** 2).sum(axis=(1, 2))
            ),
            np.sqrt((of_sinks**2).sum(axis=(1, 2))),
        )


@dataclass(frozen=True)
class Reference:
    """The true gradients, the plain ones, and the tolerance that they give."""

    dtype: str
    names: tuple[str, ...]  # of the gradients that there are
    true: Gradients
    plain: Gradients
    spreads: Gradients
    float_errors: Gradients
    largest_lse: float  # in magnitude, and at least 1
    largest_operand: float  # in magnitude, of q, k and dout

    def tolerances(self) -> list[Array]:
        """At most twice the plain error plus an epsilon, relative to the largest element and to the spread.

        Row by row for the 16-bit dtypes. A float32 row's error is a few roundings of one sum and owes much to
        luck: there the plain error is that of all rows. So it is for the gradients of slopes, which are few.
        The epsilon is at least float32's times the largest LSE, with which the weights are found again, or
        what float32 sums may be off by, such as of large products that happen to add up to nearly 0. Where
        float16 has subnormal numbers only, the result and the weights that the operands are multiplied by are
        off by half of the least one, however small they are; of other dtypes they may be zero, as a GPU
        flushes what is subnormal in float32.
        """
        tolerances = []
        least = 2.0**-24 if self.dtype == "float16" else 2.0**-126
        relative = max(EPSILON_OUT[self.dtype], EPSILON_OUT["float32"] * self.largest_lse)
        for true, plain, spread, of_floats in zip(
            self.true, self.plain, self.spreads, self.float_errors, strict=True
        ):
            is_rows = true.ndim == 3
            axes = (1, 2) if is_rows else None
            plain_error = np.abs(plain - true).max(axis=axes, initial=0.0)
            epsilon = np.abs(true).max(axis=axes, initial=0.0) + spread.max(axis=axes, initial=0.0)
            epsilon = np.maximum(relative * epsilon, of_floats.max(axis=axes, initial=0.0))
            if self.dtype == "float32" or not is_rows:
                plain_error = plain_error.max(initial=0.0)
            of_subnormals = least * (1.0 + self.largest_operand)
            tolerances.append(np.asarray(2.0 * plain_error + epsilon + of_subnormals))
        return tolerances

    def check(self, *gradients: NDArray[Any]) -> None:
        tolerances = Gradients(*self.tolerances())
        for name, gradient in zip(self.names, gradients, strict=True):
            true, tolerance = getattr(self.true, name), getattr(tolerances, name)
            gradient = np.asarray(gradient, np.float64).reshape(true.shape)
            assert np.isfinite(gradient).all(), f"{name} has {np.count_nonzero(~np.isfinite(gradient))} NaNs"
            if gradient.size == 0:
                continue
            error = np.abs(gradient - true)
            if true.ndim == 3:
                error = error.max(axis=(1, 2))
            excess = error - tolerance
            worst = np.unravel_index(np.argmax(excess), error.shape)
            assert excess[worst] <= 0.0, (
                f"{name}: error {error[worst]:.3g} in {tuple(map(int, worst))} of {error.shape}, tolerance "
                f"{error[worst] - excess[worst]:.3g}; {np.count_nonzero(excess > 0)} are off"
            )


def attention_backward(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    dout: NDArray[Any],
    dlse: NDArray[Any],
    seqlens_q: Sequence[int],
    seqlens_k: Sequence[int],
    *,
    dtype: str,
    lse: NDArray[Any],
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    **masks: Any,
) -> Reference:
    """All gradients for packed arrays, sequence by sequence. q, k, v and dout hold numbers of `dtype`.

    `masks` are those of `oracle.sequences`; `lse` [total_q, num_q_heads] is for the tolerance.
    """
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    slopes = masks.get("alibi_slopes")
    slopes_shape = (q.shape[1],) if slopes is None else slopes.shape
    true, plain, spreads, float_errors = (
        Gradients(
            np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), np.zeros(slopes_shape), np.zeros(q.shape[1])
        )
        for _ in range(4)
    )
    for each in sequences(q.shape[1], seqlens_q, seqlens_k, **masks):
        rows, keys = each.rows, each.keys
        arguments = (q[rows], k[keys], v[keys], dout[rows], dlse[rows], each, scale, softcap)
        exact = Backward(*arguments)
        for total, one in (
            (true, exact.gradients()),
            (spreads, exact.spreads()),
            (float_errors, exact.float_errors()),
            (plain, Backward(*arguments, dtype).gradients()),
        ):
            total.dq[rows], total.dk[keys], total.dv[keys] = one.dq, one.dk, one.dv
            mine = total.dslopes[each.index] if total.dslopes.ndim == 2 else total.dslopes
            mine += one.dslopes
            total.dsinks[:] += one.dsinks
    rounded = (round_to(x, dtype) for x in (plain.dq, plain.dk, plain.dv))
    plain = Gradients(*rounded, plain.dslopes, plain.dsinks)
    largest_lse = float(np.abs(lse).max(initial=1.0, where=np.isfinite(lse)))
    largest_operand = max(float(np.abs(x).max(initial=0.0)) for x in (q, k, dout))
    given = {"dslopes": slopes, "dsinks": masks.get("sinks")}
    names = ("dq", "dk", "dv", *(name for name, array in given.items() if array is not None))
    return Reference(dtype, names, true, plain, spreads, float_errors, largest_lse, largest_operand)
