"""Octavo's operators inside JAX programs: jax.jit, shard_map, vmap, scan; on CPU and GPU.

The functions of ``octavo`` take JAX arrays as they are, but only outside of ``jax.jit``, and wait for their
results. The functions here have the same names and arguments, become part of the program, and run on its
stream, through XLA's foreign function interface.

Arrays are values here: ``append_kv`` and ``copy_pages`` return the cache that they have written to. XLA
writes in place where nothing needs the old cache any more. So give it up:
``jax.jit(step, donate_argnames=("k_pages", "v_pages"))``, and where it has scales of each token these too.
Otherwise, and outside of ``jax.jit``, XLA copies all of it at every call. An ``octavo.PagedCache`` may be
passed, returned and given up as a whole. The cache lies in memory as its shape says; a transposed one is
copied.

Whatever is not an array (a scale, masks, bounds) is part of the program: an ordinary Python number, not a
traced value. Wrong shapes, dtypes and numbers are found when the program is traced, with the errors of
``octavo``; what only the values tell, such as a page that does not exist, is found on the CPU when it runs,
as JAX's own error with Octavo's message. Nothing is written then, but what was donated is gone with the call.

Over several devices, use ``jax.shard_map`` (before JAX 0.6 with ``check_rep=False``): left to itself, XLA
gathers whole arrays around a function that it does not know. ``jax.vmap`` maps the arrays into the axes that
the operators have; with dropout it calls them one by one, since the results are those of single calls, and
so it does for mapped sinks and for gradients of sinks.
``attention`` is differentiable in reverse mode (``jax.grad``), and once; ``attention_backward`` computes its
gradients. All other derivatives raise TypeError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import jax
from jax.typing import ArrayLike

import octavo
from octavo import _jax_call
from octavo._jax_cache import append_kv, copy_pages
from octavo._jax_call import Integers, like
from octavo._jax_kv_cache import KVCache, KVCacheStep
from octavo._jax_latent_attention import latent_attention
from octavo._types import AttentionBackwardScalars, AttentionScalars, PagedAttentionScalars

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "KVCache",
    "KVCacheStep",
    "append_kv",
    "attention",
    "attention_backward",
    "copy_pages",
    "latent_attention",
    "linear",
    "merge_states",
    "paged_attention",
    "rms_norm",
]


class _AttentionOptions(AttentionScalars, total=False):
    cu_seqlens_q: Integers | None
    cu_seqlens_k: Integers | None
    alibi_slopes: ArrayLike | None
    prefix_lens: Integers | None
    bidirectional_ranges: Integers | None
    block_mask: ArrayLike | None
    sinks: ArrayLike | None
    softmax_phi: float | ArrayLike | None


class _AttentionBackwardOptions(AttentionBackwardScalars, total=False):
    dlse: ArrayLike | None
    cu_seqlens_q: Integers | None
    cu_seqlens_k: Integers | None
    alibi_slopes: ArrayLike | None
    prefix_lens: Integers | None
    bidirectional_ranges: Integers | None
    block_mask: ArrayLike | None
    sinks: ArrayLike | None


class _PagedAttentionOptions(PagedAttentionScalars, total=False):
    cu_seqlens_q: Integers | None
    alibi_slopes: ArrayLike | None
    prefix_lens: Integers | None
    bidirectional_ranges: Integers | None
    k_scale: float | ArrayLike | None
    v_scale: float | ArrayLike | None
    k_scales: ArrayLike | None
    v_scales: ArrayLike | None
    k_channel_offset: ArrayLike | None
    k_channel_scale: ArrayLike | None
    sinks: ArrayLike | None
    softmax_phi: float | ArrayLike | None
    tree_mask: ArrayLike | None
    chosen_pages: Integers | None


@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: Literal[False] = False,
    deterministic_backward: bool = False,
    **options: Unpack[_AttentionOptions],
) -> jax.Array: ...
@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: Literal[True],
    deterministic_backward: bool = False,
    **options: Unpack[_AttentionOptions],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: bool,
    deterministic_backward: bool = False,
    **options: Unpack[_AttentionOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@like(octavo.attention, _AttentionOptions)
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    return_lse: bool = False,
    deterministic_backward: bool = False,
    **options: Unpack[_AttentionOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention over dense or packed arrays: ``octavo.attention`` in a JAX program.

    Its options are those of ``octavo.attention``. It is differentiable with respect to q, k, v,
    alibi_slopes and sinks, in reverse mode and once.

    Args:
        q: float32, float16 or bfloat16 [batch, seqlen_q, num_q_heads, head_dim]; packed:
            [total_q, num_q_heads, head_dim]. On a GPU no float32.
        k: like q, [batch, seqlen_k, num_kv_heads, head_dim]; packed: [total_k, num_kv_heads, head_dim].
        v: like k, with a head_dim of its own.
        return_lse: return the log-sum-exp too. Default: False.
        deterministic_backward: gradients are the same bits at every call. Default: False.

    Returns:
        out: like q, with the head_dim of v.
        lse: only with return_lse: float32, the shape of q without its last axis.

    Raises:
        ValueError: a shape or number that does not fit.
        TypeError: a wrong dtype, a traced number, differentiation in forward mode or twice.
        JaxRuntimeError, ValueError: when the program runs: on the CPU lengths that do not fit, on a GPU a
            dtype or head_dim without a kernel.
    """
    arrays = {"q": q, "k": k, "v": v}
    gradients = _jax_call.Gradients.of_call(options, deterministic_backward)
    asked = ["lse"] if return_lse else []
    results = _jax_call.run(_jax_call.ATTENTION, {**arrays, **options}, asked, gradients)
    return (results[0], results[1]) if return_lse else results[0]


@overload
def attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    return_dalibi: Literal[False] = False,
    return_dsinks: Literal[False] = False,
    **options: Unpack[_AttentionBackwardOptions],
) -> tuple[jax.Array, jax.Array, jax.Array]: ...
@overload
def attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    return_dalibi: Literal[True],
    return_dsinks: Literal[False] = False,
    **options: Unpack[_AttentionBackwardOptions],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]: ...
@overload
def attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    return_dalibi: Literal[False] = False,
    return_dsinks: Literal[True],
    **options: Unpack[_AttentionBackwardOptions],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]: ...
@overload
def attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    return_dalibi: Literal[True],
    return_dsinks: Literal[True],
    **options: Unpack[_AttentionBackwardOptions],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]: ...
@overload
def attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    return_dalibi: bool = False,
    return_dsinks: bool = False,
    **options: Unpack[_AttentionBackwardOptions],
) -> tuple[jax.Array, ...]: ...
@like(octavo.attention_backward, _AttentionBackwardOptions)
def attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    return_dalibi: bool = False,
    return_dsinks: bool = False,
    **options: Unpack[_AttentionBackwardOptions],
) -> tuple[jax.Array, ...]:
    """The gradients of ``attention``: ``octavo.attention_backward`` in a JAX program.

    Its options are those of ``octavo.attention_backward``.

    Args:
        dout: like out: the gradient of the loss with respect to it.
        q: as for ``attention``; so are k and v.
        k: [batch, seqlen_k, num_kv_heads, head_dim]; packed: [total_k, num_kv_heads, head_dim].
        v: like k, with a head_dim of its own.
        out: like q, with the head_dim of v: the output of ``attention``.
        lse: float32, the shape of q without its last axis: its log-sum-exp.
        return_dalibi: return the gradient of alibi_slopes, which have to be given, too. Default: False.
        return_dsinks: return the gradient of sinks, which have to be given, too. Default: False.

    Returns:
        dq: like q.
        dk: like k.
        dv: like v.
        dalibi_slopes: only with return_dalibi: float32, like alibi_slopes.
        dsinks: only with return_dsinks: float32, like sinks.

    Raises:
        ValueError: a shape or number that does not fit.
        TypeError: a wrong dtype, a traced number, differentiation; float32 on a GPU.
        JaxRuntimeError, ValueError: when the program runs: on the CPU lengths that do not fit.
    """
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    asks = {"dalibi_slopes": return_dalibi, "dsinks": return_dsinks}
    asked = [name for name, is_asked in asks.items() if is_asked]
    return _jax_call.run(_jax_call.ATTENTION_BACKWARD, {**arrays, **options}, asked)


@overload
def paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    page_table: Integers,
    seq_lens: Integers,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_PagedAttentionOptions],
) -> jax.Array: ...
@overload
def paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    page_table: Integers,
    seq_lens: Integers,
    *,
    return_lse: Literal[True],
    **options: Unpack[_PagedAttentionOptions],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    page_table: Integers,
    seq_lens: Integers,
    *,
    return_lse: bool,
    **options: Unpack[_PagedAttentionOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@like(octavo.paged_attention, _PagedAttentionOptions)
def paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    page_table: Integers,
    seq_lens: Integers,
    *,
    return_lse: bool = False,
    **options: Unpack[_PagedAttentionOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention of new tokens over a paged KV cache: ``octavo.paged_attention`` in a JAX program.

    Its options are those of ``octavo.paged_attention``.

    Args:
        q: float32, float16 or bfloat16 [batch, num_q_heads, head_dim], one token a sequence; packed:
            [total_q, num_q_heads, head_dim]. On a GPU no float32.
        k_pages: like q, [num_pages, page_size, num_kv_heads, head_dim]: the cache of keys.
        v_pages: like k_pages: the cache of values; its head_dim, and so that of the result, may be another.
        page_table: int32, or int64 in JAX's x64 mode, [batch, max_pages]; entries past a sequence's last page
            are never used.
        seq_lens: of the same dtypes, [batch]: the length of each sequence in tokens, new ones included.
        return_lse: return the log-sum-exp too. Default: False.

    Returns:
        out: like q, with the head_dim of v_pages.
        lse: only with return_lse: float32, the shape of q without its last axis.

    Raises:
        ValueError: a shape or number that does not fit.
        TypeError: a wrong dtype, a traced number, differentiation.
        JaxRuntimeError, ValueError: when the program runs: on the CPU lengths and pages that do not fit, on
            a GPU a dtype or head_dim without a kernel.
    """
    arrays = {"q": q, "k_pages": k_pages, "v_pages": v_pages, "page_table": page_table, "seq_lens": seq_lens}
    asked = ["lse"] if return_lse else []
    mask = options.get("tree_mask")
    if mask is not None:
        options["tree_mask"] = _jax_call.words_of("paged_attention", "tree_mask", mask)
    results = _jax_call.run(_jax_call.PAGED_ATTENTION, {**arrays, **options}, asked)
    return (results[0], results[1]) if return_lse else results[0]


@like(octavo.merge_states)
def merge_states(
    out_a: ArrayLike, lse_a: ArrayLike, out_b: ArrayLike, lse_b: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Merge the attention of the same queries over two disjoint sets of keys: ``octavo.merge_states``.

    Args:
        out_a: float32, float16 or bfloat16 [..., head_dim], with one to three leading axes: attention over
            the first set.
        lse_a: float32 [...]: its log-sum-exp, natural logarithm.
        out_b: like out_a: attention over the second set.
        lse_b: like lse_a.

    Returns:
        out: like out_a.
        lse: like lse_a.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: a wrong dtype, differentiation.
    """
    arrays = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    out, lse = _jax_call.run(_jax_call.MERGE_STATES, arrays)
    return out, lse


@like(octavo.linear)
def linear(
    x: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: str | None = None,
    residual: ArrayLike | None = None,
    static_weight: bool = False,
    batch_invariant: bool = False,
    norm_weight: ArrayLike | None = None,
    norm_eps: float = 1e-6,
) -> jax.Array:
    """A linear layer, ``activation(norm(x) @ w.T + bias) + residual``: ``octavo.linear`` in a JAX program.

    On a GPU, where Octavo has no kernel or the tables name the library, it is what ``jax.numpy.matmul``
    computes.

    Args:
        x: float32, float16 or bfloat16 [..., K], with up to five leading axes.
        w: like x, [N, K]; beside x of float32, on the CPU, also float16 or bfloat16. With activation
            "silu_gate": [2 F, K], the rows of the gate before the others.
        bias: like x, [N], or [2 F]: added to the sums. Default: none.
        activation: "silu", "gelu" or "silu_gate", as for ``octavo.linear``. Default: none.
        residual: like the result: added at the end. Default: none.
        static_weight: as for ``octavo.linear``. Default: False.
        batch_invariant: as for ``octavo.linear``. Default: False.
        norm_weight: like x, or float32, [K]: RMSNorm of the rows of ``x`` before the product, as for
            ``octavo.linear``. Default: none.
        norm_eps: at least 0. Default: 1e-06.

    Returns:
        out: [..., N] or [..., F], of the dtype of x.

    Raises:
        ValueError: a shape or number that does not fit.
        TypeError: a wrong dtype, a traced number, differentiation; batch_invariant on a GPU where Octavo has
            no kernel.
    """
    arguments = {
        "x": x,
        "w": w,
        "bias": bias,
        "activation": activation,
        "residual": residual,
        "static_weight": static_weight,
        "batch_invariant": batch_invariant,
        "norm_weight": norm_weight,
        "norm_eps": norm_eps,
    }
    return _jax_call.run(_jax_call.LINEAR, arguments)[0]


@overload
def rms_norm(x: ArrayLike, weight: ArrayLike, eps: float = 1e-6, residual: None = None) -> jax.Array: ...
@overload
def rms_norm(
    x: ArrayLike, weight: ArrayLike, eps: float = 1e-6, *, residual: ArrayLike
) -> tuple[jax.Array, jax.Array]: ...
@overload
def rms_norm(
    x: ArrayLike, weight: ArrayLike, eps: float, residual: ArrayLike
) -> tuple[jax.Array, jax.Array]: ...
@like(octavo.rms_norm)
def rms_norm(
    x: ArrayLike, weight: ArrayLike, eps: float = 1e-6, residual: ArrayLike | None = None
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Divide each row by its root mean square, and multiply it by the weight: ``octavo.rms_norm``.

    Args:
        x: float32, float16 or bfloat16 [..., dim], with at most three leading axes.
        weight: [dim], of the dtype of x or float32.
        eps: added to the mean of the squares; at least 0. Default: 1e-06.
        residual: like x: added to it, and the sum normalised. Default: none.

    Returns:
        out: like x.
        residual_out: only with residual: like x, ``x + residual``.

    Raises:
        ValueError: a shape or number that does not fit.
        TypeError: a wrong dtype, a traced number, differentiation.
    """
    arguments = {"x": x, "weight": weight, "eps": eps, "residual": residual}
    results = _jax_call.run(_jax_call.RMS_NORM, arguments)
    return results[0] if residual is None else (results[0], results[1])
