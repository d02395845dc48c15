"""RMSNorm, with the sum of a residual stream before it."""

from __future__ import annotations

from typing import overload

from octavo._operators import native
from octavo._types import Array, Stream, SupportsDLPack


@overload
def rms_norm(
    x: Array,
    weight: SupportsDLPack,
    eps: float = 1e-6,
    residual: None = None,
    *,
    out: Array | None = None,
    residual_out: None = None,
    stream: Stream | None = None,
) -> Array: ...
@overload
def rms_norm(
    x: Array,
    weight: SupportsDLPack,
    eps: float = 1e-6,
    *,
    residual: SupportsDLPack,
    out: Array | None = None,
    residual_out: Array | None = None,
    stream: Stream | None = None,
) -> tuple[Array, Array]: ...
@overload
def rms_norm(
    x: Array,
    weight: SupportsDLPack,
    eps: float,
    residual: SupportsDLPack,
    *,
    out: Array | None = None,
    residual_out: Array | None = None,
    stream: Stream | None = None,
) -> tuple[Array, Array]: ...
@native()
def rms_norm(
    x: Array,
    weight: SupportsDLPack,
    eps: float = 1e-6,
    residual: SupportsDLPack | None = None,
    *,
    out: Array | None = None,
    residual_out: Array | None = None,
    stream: Stream | None = None,
) -> Array | tuple[Array, Array]:
    """Divide each row by its root mean square, and multiply it by the weight; add a residual before, if any.

    ``x / sqrt(mean(x**2) + eps) * weight`` over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467).
    Everything in between is float32, and the result is rounded once.

    With ``residual``, ``x + residual`` takes the place of x: what a layer of a transformer has added, and the
    stream of values that it added it to. The sum is rounded to the dtype of x, normalised as rounded, and
    returned as well, since it is the residual of the next call. FlashInfer's ``fused_add_rmsnorm`` and vLLM's
    ``fused_add_rms_norm`` write both results over their inputs; here that is
    ``rms_norm(x, weight, eps, residual, out=x, residual_out=residual)``, and nothing is overwritten
    otherwise.

    Args:
        x: float32, float16 or bfloat16 [..., dim], with at most three leading axes; any strides, with a unit
            last one.
        weight: [dim], of the dtype of x or float32.
        eps: added to the mean of the squares; at least 0. Default: 1e-06.
        residual: like x: added to it. Default: none.
        out: an array like x to write the normalised rows to: exactly x or residual (same address and
            strides), or one whose memory is apart from theirs and that of the weight. Default: a new array
            of the framework of x.
        residual_out: such an array for the sum, given only with residual. It shares no element with ``out``.
        stream: as for ``attention``. Default: the current stream.

    Returns:
        out: like x; the very object given as ``out``, if any.
        residual_out: only with residual: like x, ``x + residual``; the very object given, if any.

    Raises:
        ValueError: a shape or value that does not fit.
        TypeError: not an array, a wrong dtype, a torch tensor that requires grad, a JAX array as ``out`` or
            ``residual_out``.
        RuntimeError: as for ``attention``.
    """
    raise NotImplementedError  # native() makes the function that runs
