"""Linear layers: what they mean, in float64, and the yardstick for errors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.oracle import EPSILON_OUT, HALF_SPACING, NUMPY_DTYPES, round_to, sum_errors

ACTIVATIONS = (None, "silu", "gelu", "silu_gate")


def erfc(x: NDArray[Any]) -> NDArray[np.float64]:
    import math

    return np.vectorize(math.erfc, otypes=[np.float64])(np.asarray(x, np.float64))


def silu(x: NDArray[Any]) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def activate(sums: NDArray[Any], activation: str | None) -> NDArray[Any]:
    """In the precision of the sums."""
    if activation == "silu":
        return silu(sums)
    if activation == "gelu":
        return sums * (erfc(sums * -(0.5**0.5)) / 2).astype(sums.dtype)
    if activation == "silu_gate":
        gate, up = np.split(sums, 2, axis=-1)
        return silu(gate) * up
    return sums


@dataclass(frozen=True)
class Problem:
    """A call, with numbers that its dtypes can hold, as float64."""

    dtype: str
    w_dtype: str
    x: NDArray[np.float64]
    w: NDArray[np.float64]
    bias: NDArray[np.float64] | None
    residual: NDArray[np.float64] | None
    activation: str | None
    norm_weight: NDArray[np.float64] | None = None
    norm_eps: float = 1e-3

    @classmethod
    def drawn(
        cls,
        dtype: str,
        rows: tuple[int, ...],
        width: int,
        depth: int,
        activation: str | None = None,
        *,
        has_bias: bool = True,
        has_residual: bool = True,
        has_norm: bool = False,
        w_dtype: str | None = None,
        seed: int = 0,
    ) -> Problem:
        random = np.random.default_rng([seed, width, depth])
        w_rows = 2 * width if activation == "silu_gate" else width

        def normal(dtype: str, *shape: int, scale: float = 1.0) -> NDArray[np.float64]:
            return round_to(scale * random.standard_normal(shape), dtype)

        w_dtype = w_dtype or dtype
        return cls(
            dtype,
            w_dtype,
            normal(dtype, *rows, depth),
            normal(w_dtype, w_rows, depth, scale=2.0 / max(1, depth) ** 0.5),
            normal(dtype, w_rows) if has_bias else None,
            normal(dtype, *rows, width) if has_residual else None,
            activation,
            normal(dtype, depth) if has_norm else None,
        )

    def with_row(self, *index: int) -> Problem:
        """One row of x alone."""
        residual = None if self.residual is None else self.residual[index]
        return replace(self, x=self.x[index], residual=residual)

    def exact(self) -> NDArray[np.float64]:
        return self._compute(np.dtype(np.float64), None)

    def _compute(
        self,
        precision: np.dtype[Any],
        rounded_to: str | None,
        *,
        divides_sums: bool = False,
    ) -> NDArray[np.float64]:
        """In this precision throughout, with every step rounded to `rounded_to` if that is given.

        `divides_sums`: a norm's root divides the sums of products, in place of x.
        """

        def step(values: NDArray[Any]) -> NDArray[Any]:
            return values if rounded_to is None else round_to(values, rounded_to).astype(precision)

        x, root = self.x.astype(precision), np.ones((1,), precision)
        if self.norm_weight is not None:
            mean = np.mean(x * x, axis=-1, keepdims=True) if x.shape[-1] else np.zeros((1,), precision)
            root = np.sqrt(mean + precision.type(self.norm_eps))
            x = (x if divides_sums else x / root) * self.norm_weight.astype(precision)
            if precision == np.float32:  # as rms_norm returns it, or as a kernel multiplies it
                x = round_to(x, self.dtype).astype(precision)
        w = self.w.astype(precision)
        result = step(x @ w.T / root if divides_sums else x @ w.T)
        if self.bias is not None:
            result = step(result + self.bias.astype(precision))
        result = step(activate(result, self.activation))
        if self.residual is not None:
            result = step(result + self.residual.astype(precision))
        return result.astype(np.float64)

    def _float_errors(self) -> NDArray[np.float64]:
        """How far float32 may take each result, also where few of them have a plain error near 0 by chance.

        Besides the sums of products that is by the norm's root, by the sum with the bias, which the residual
        may cancel, and by the activation, here of sums that are off in either direction, a gate's on its own.
        """
        x = self.x
        if self.norm_weight is not None:
            mean = np.square(x).sum(axis=-1, keepdims=True) / max(1, x.shape[-1])
            x = x / np.sqrt(mean + self.norm_eps) * self.norm_weight
        sums = x @ self.w.T
        errors = sum_errors(np.square(x) @ np.square(self.w).T, x.shape[-1])
        if self.norm_weight is not None:
            errors += EPSILON_OUT["float32"] * np.abs(sums)
        if self.bias is not None:
            sums = sums + self.bias
            errors += HALF_SPACING * np.abs(sums)
        if self.activation is None:
            return errors
        signs = np.where(np.arange(len(self.w)) < len(self.w) / 2, 1.0, -1.0)
        activated = activate(sums, self.activation)
        moved = [activate(sums + sign * errors, self.activation) for sign in (1.0, -1.0, signs, -signs)]
        of_sums = np.max([np.abs(values - activated) for values in moved], axis=0)
        return of_sums + EPSILON_OUT["float32"] * np.abs(activated)

    def check(self, result: NDArray[np.float64], *, every_step_rounds: bool = False) -> None:
        """At most twice the largest error of a plain product in float32, plus half a spacing of the result.

        `every_step_rounds`: the plain one also rounds each step, as libraries on a GPU do. With a norm there
        are two plain ones, since a kernel may divide the sums in place of x, and the larger error counts. The
        plain error of few results owes much to luck, and that of a long K to the many sums side by side that
        BLAS has: in its place counts what float32 may be off by, where that is more.
        """
        exact = self.exact()
        assert result.shape == exact.shape
        if exact.size == 0:
            return
        orders = (False,) if self.norm_weight is None else (False, True)
        rounded_to = self.dtype if every_step_rounds else None
        plain = [self._compute(np.dtype(np.float32), rounded_to, divides_sums=order) for order in orders]
        error_of_plain = max(np.abs(round_to(values, self.dtype) - exact).max() for values in plain)
        tolerance = max(2.0 * error_of_plain, self._float_errors().max())
        tolerance += EPSILON_OUT[self.dtype] * np.abs(exact).max()
        assert np.abs(result - exact).max() <= tolerance

    def numpy(self, values: NDArray[np.float64], dtype: str | None = None) -> NDArray[Any]:
        return values.astype(np.float32).astype(NUMPY_DTYPES[dtype or self.dtype])
