"""Which kernel multiplies with weights on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo import _core


@dataclass(frozen=True)
class LinearPlan:
    """How a GPU multiplies ``x`` [M, K] with ``w`` [N, K]: ``linear_plan`` returns it, ``linear`` takes it.

    Two plans are equal if they do the same, wherever they come from. A plan serves any number of rows of
    ``x``, though it was chosen for one. ``LinearPlan("library", "bfloat16")`` hands a product over.
    """

    kernel: str
    """"sm90_flat", "sm90_wide" or "sm80_linear"; "library": a product of PyTorch, CuPy or JAX."""
    dtype: str
    """The dtype of the arrays: "float16" or "bfloat16"; with "library" also "float32"."""
    w_rows: int = 0
    """Rows of ``w`` in a tile, which one thread block computes; this and the rest: 0 for the library."""
    x_rows: int = 0
    """Rows of ``x`` in a tile."""
    splits: int = 0
    """Thread blocks that share a tile, each with a part of K, and add up their sums."""
    ctas_per_sm: int = 0
    """Thread blocks for which an SM has room at once."""
    source: str = field(default="estimated", compare=False)
    """"measured": from the table that Octavo ships for this GPU, or for the one most like it; "tuned": from
    that of ``tune_linear`` on this machine; "estimated": in neither, the least estimated time decides."""

    def __str__(self) -> str:
        tile = f", {self.w_rows}x{self.x_rows}, splits {self.splits}, CTAs per SM {self.ctas_per_sm}"
        return f"{self.kernel}<{self.dtype}{tile if self.w_rows else ''}> ({self.source})"


def dtype_name(dtype: object) -> object:
    """Get the name of a dtype of NumPy, JAX or PyTorch; a str is one."""
    if isinstance(dtype, str):
        return dtype
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    return name or str(dtype).removeprefix("torch.")


def device_name(operator: str, device: object) -> str:
    """The device that was named, or the first GPU."""
    if not isinstance(device, (str, type(None))):
        raise TypeError(f"{operator}: device must be a str or None; got {type(device).__name__}")
    return "cuda:0" if device is None else device


def linear_plan(
    M: int,  # noqa: N803
    N: int,  # noqa: N803
    K: int,  # noqa: N803
    dtype: object,
    device: str | None = None,
    *,
    activation: str | None = None,
    batch_invariant: bool = False,
) -> LinearPlan:
    """Which kernel ``linear`` runs for contiguous ``x`` [M, K] and ``w`` [N, K] on a GPU, with which tiles.

    This is the heuristic dataflow of FlashDecoding++ (https://arxiv.org/abs/2311.01282, section 5): which
    kernel is the fastest depends on M, N, K and the GPU. A product in a table (``linear_table``) gets the
    kernel that was measured to be the fastest, any other one that with the least estimated time.

    Args:
        M: rows of ``x``, over all leading axes.
        N: rows of ``w``; with activation "silu_gate" both halves.
        K: columns of both.
        dtype: "float32", "float16" or "bfloat16", or such a dtype of NumPy, JAX or PyTorch.
        device: a GPU by its product or its architecture, such as "h200" or "sm_90", which need not be there;
            or "cuda:1", a GPU of this machine. Default: the first GPU of this machine.
        activation: as for ``linear``. Default: none.
        batch_invariant: the plan for ``linear(..., batch_invariant=True)``. Default: False.

    Returns:
        The plan.

    Raises:
        ValueError: a length below 0 or above 2^30, an unknown device, dtype or activation, or the CPU as
            device, where one kernel computes all.
        TypeError: an argument of another type; batch_invariant for float32, of which there is no kernel.
        RuntimeError: there is no GPU here, and none was named.
    """
    where = device_name("linear_plan", device)
    fields = _core.linear_plan(M, N, K, dtype_name(dtype), where, activation, batch_invariant)
    return LinearPlan(**fields)
