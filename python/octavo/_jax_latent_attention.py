"""``octavo.jax.latent_attention``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import jax
from jax.typing import ArrayLike

import octavo
from octavo import _jax_call
from octavo._jax_call import Integers, like
from octavo._types import LatentAttentionScalars

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _LatentAttentionOptions(LatentAttentionScalars, total=False):
    cu_seqlens_q: Integers | None


@overload
def latent_attention(
    q: ArrayLike,
    kv_pages: ArrayLike,
    page_table: Integers,
    seq_lens: Integers,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_LatentAttentionOptions],
) -> jax.Array: ...
@overload
def latent_attention(
    q: ArrayLike,
    kv_pages: ArrayLike,
    page_table: Integers,
    seq_lens: Integers,
    *,
    return_lse: Literal[True],
    **options: Unpack[_LatentAttentionOptions],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def latent_attention(
    q: ArrayLike,
    kv_pages: ArrayLike,
    page_table: Integers,
    seq_lens: Integers,
    *,
    return_lse: bool,
    **options: Unpack[_LatentAttentionOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@like(octavo.latent_attention, _LatentAttentionOptions)
def latent_attention(
    q: ArrayLike,
    kv_pages: ArrayLike,
    page_table: Integers,
    seq_lens: Integers,
    *,
    return_lse: bool = False,
    **options: Unpack[_LatentAttentionOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention over a paged cache of latents: ``octavo.latent_attention`` in a JAX program.

    Its options are those of ``octavo.latent_attention``.

    Args:
        q: float32, float16 or bfloat16 [batch, num_q_heads, qk_dim], one token a sequence; packed:
            [total_q, num_q_heads, qk_dim].
        kv_pages: like q, or float8_e4m3fn, [num_pages, page_size, qk_dim], or with an axis of one head before
            the last.
        page_table: int32, or int64 in JAX's x64 mode, [batch, max_pages]; entries past a sequence's last page
            are never used.
        seq_lens: of the same dtypes, [batch]: the length of each sequence in tokens, new ones included.
        return_lse: return the log-sum-exp too. Default: False.

    Returns:
        out: like q with v_dim in place of qk_dim.
        lse: only with return_lse: float32, the shape of q without its last axis.

    Raises:
        ValueError: a shape or number that does not fit.
        TypeError: a wrong dtype, a traced number, no softmax_scale, differentiation.
        JaxRuntimeError, ValueError: when the program runs: on the CPU lengths and pages that do not fit, on
            a GPU a dtype or qk_dim without a kernel.
    """
    arrays = {"q": q, "kv_pages": kv_pages, "page_table": page_table, "seq_lens": seq_lens}
    asked = ["lse"] if return_lse else []
    results = _jax_call.run(_jax_call.LATENT_ATTENTION, {**arrays, **options}, asked)
    return (results[0], results[1]) if return_lse else results[0]
