"""The products of a layer with its weights."""

from __future__ import annotations

from octavo._linear_plan import LinearPlan
from octavo._operators import native
from octavo._types import Array, Stream, SupportsDLPack


@native()
def linear(
    x: Array,
    w: SupportsDLPack,
    bias: SupportsDLPack | None = None,
    *,
    activation: str | None = None,
    residual: SupportsDLPack | None = None,
    out: Array | None = None,
    static_weight: bool = False,
    batch_invariant: bool = False,
    norm_weight: SupportsDLPack | None = None,
    norm_eps: float = 1e-6,
    plan: LinearPlan | None = None,
    stream: Stream | None = None,
) -> Array:
    """A linear layer, ``activation(norm(x) @ w.T + bias) + residual``, at the speed of reading its weights.

    Decoding multiplies each weight with a few rows only, so that reading the weights is what takes the time.
    On the CPU Octavo's own threads read them, each a run of rows of ``w``: for up to some six rows of ``x``
    at the memory's speed, with more at that of the arithmetic. They soon sleep while there is nothing to do,
    so that products, attention and other programs do not fight over cores. On a GPU Octavo's kernels compute
    float16 and bfloat16 with up to 128 rows of ``x`` on Hopper, 16 elsewhere (the flat GEMM and the
    heuristic dataflow of FlashDecoding++, https://arxiv.org/abs/2311.01282), or with as many as the tables
    of what was measured say (``linear_table``). Other products are handed over to the library of ``x``
    (PyTorch, CuPy or JAX), which is faster with more rows. ``explain`` and ``linear_plan`` say which it is.

    Sums are float32, and so is everything up to the result, which is rounded once; where PyTorch or CuPy
    computes, they round at each step. On the CPU ``x`` of float32 may have weights of 16 bits: half the
    bytes to be read.

    Args:
        x: float32, float16 or bfloat16 [..., K], with up to five leading axes. Here and below any strides,
            with a unit last one.
        w: like x, [N, K], the layout of ``torch.nn.Linear``; beside x of float32, on the CPU, also float16 or
            bfloat16. With activation "silu_gate": [2 F, K], the rows of the gate before the others.
        bias: like x, [N], or [2 F]: added to the sums. Default: none.
        activation: "silu", ``s / (1 + exp(-s))``; "gelu", ``s * (1 + erf(s / sqrt(2))) / 2``, the exact one
            and not the approximation by tanh; "silu_gate" (SwiGLU), ``silu(first F sums) * last F sums``.
            Default: none.
        residual: like out: added at the end. Default: none.
        out: an array like x [..., N], or [..., F], to write the result to; never read. It may be
            ``residual`` itself, with the same address and strides; otherwise its memory must be apart from
            that of all inputs. Default: a new array of the framework of ``x``.
        static_weight: a promise that no work still under way on the stream writes to ``w`` or to
            ``norm_weight``: not the kernel in front of this one, nor those before it that may still be
            running. The GPU then reads weights while that kernel ends, some 1 to 2 us earlier. No effect on
            the CPU. Default: False.
        batch_invariant: the bits of a row of the result must not depend on how many other rows there are, or
            on what they hold. On the CPU they never do, nor on the number of threads. On a GPU Octavo then
            computes for any number of rows, in one order for all, and refuses what it has no kernel for; x
            and w have to be contiguous there, or to have rows that start on 16 bytes. Default: False.
        norm_weight: like x, or float32, [K]: the rows of ``x`` are normalised first, as ``rms_norm`` does it,
            to ``x / sqrt(mean(x**2) + norm_eps) * norm_weight`` (https://arxiv.org/abs/1910.07467). Then
            ``x`` has at most three leading axes that do not lie behind one another. On Hopper one launch does
            both for up to 16 rows of bfloat16, with a weight of bfloat16, unless batch_invariant is set or
            ``plan`` names another kernel than "sm90_flat". It multiplies ``x * norm_weight``, rounded to
            bfloat16, with ``w``, and divides the sums. Otherwise ``rms_norm`` runs before, in a launch of its
            own on a GPU. Default: none.
        norm_eps: at least 0. Default: 1e-06.
        plan: which kernel computes on a GPU, in place of that of ``linear_plan``: one that was found faster
            here, or ``LinearPlan("library", dtype)``, which hands the product over. It must be for the dtype
            of ``x``; with batch_invariant it must add up in the same order. Default: that of ``linear_plan``.
        stream: as for ``attention``; of JAX arrays on a GPU it has to be none. Default: the current stream.

    Returns:
        out: [..., N] or [..., F], of the dtype of x; the very object given as ``out``, if any. With K = 0 the
            sums are 0.

    Raises:
        ValueError: a shape, value or plan that does not fit.
        TypeError: not an array, a wrong dtype, a JAX array as ``out``, a torch tensor that requires grad,
            batch_invariant on a GPU where Octavo has no kernel.
        RuntimeError: as for ``attention``.
    """
    raise NotImplementedError  # native() makes the function that runs
