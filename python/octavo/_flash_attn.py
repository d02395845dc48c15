"""What the functions of octavo.flash_attn have in common: their arguments and results in Octavo's terms."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

import octavo.torch
from octavo._torch_autograd import refuse_derivatives
from octavo._torch_dropout import draw_seed


def score_options(
    function: str,
    q: Tensor,
    num_queries: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
) -> dict[str, Any]:
    """The options of ``octavo.attention`` and ``octavo.paged_attention`` that say what becomes of the scores.

    Args:
        function: the caller's name, for errors.
        q: of any shape [..., head_dim].
        num_queries: the most of one sequence.
        softmax_scale: this and the following as the caller got them.
        causal: likewise.
        window_size: likewise.
        softcap: likewise.
        alibi_slopes: likewise.
    """
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"{function}: window_size must be (left, right); got {window_size!r}")
    try:
        window_left, window_right = (max(operator.index(bound), -1) for bound in window_size)
    except TypeError:
        raise TypeError(
            f"{function}: window_size must be two ints (left, right), -1 for all keys; got {window_size!r}"
        ) from None
    if causal or num_queries == 1:  # a query of its own sits at the last key
        window_right = 0
    return {
        "softmax_scale": q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        "causal": window_right == 0,
        "window_left": window_left,
        "window_right": window_right,
        "softcap": max(softcap, 0.0),
        "alibi_slopes": alibi_slopes,
        "alibi_symmetric": alibi_slopes is not None,
    }


def _padded(x: Tensor) -> Tensor:
    """With a head_dim that the operators take, a multiple of 8."""
    padding = -x.shape[-1] % 8
    return torch.nn.functional.pad(x, (0, padding)) if padding else x


def with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _like(v: Tensor, out: Tensor) -> Tensor:
    """Without the padding of v's head_dim."""
    return out if out.shape[-1] == v.shape[-1] else out[..., : v.shape[-1]]


def their_lse(lse: Tensor) -> Tensor:
    """[..., seqlen, heads] to [..., heads, seqlen], and -inf of queries that see no key to inf."""
    lse = lse.transpose(-1, -2).contiguous()
    return torch.nan_to_num(lse, nan=math.nan, posinf=math.inf, neginf=math.inf)


def their_results(q: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The last one holds attention weights under dropout, and is empty otherwise."""
    return out, their_lse(lse), q.new_empty(0)


def attend(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    deterministic: bool,
    return_attn_probs: bool,
    options: dict[str, Any],
) -> Any:
    """Attention over dense or packed arrays. `options` are those of ``octavo.attention``, but for dropout."""
    for name in ("softmax_scale", "softcap"):
        if isinstance(options[name], Tensor):
            refuse_derivatives(function, name, options[name])
    if dropout_p != 0.0:
        if return_attn_probs:
            raise ValueError(
                f"{function}: return_attn_probs must be False under dropout, since the attention weights are "
                f"never held; got dropout_p={dropout_p}"
            )
        options |= {"dropout_p": dropout_p, "dropout_seed": draw_seed(function, q.device)}
    arrays = [_padded(with_unit_stride(x)) for x in (q, k, v)]
    if not deterministic and not return_attn_probs:
        return _like(v, octavo.torch.attention(*arrays, **options))
    if deterministic:
        out, lse = torch.ops.octavo.attention.deterministic(True, *arrays, **options)
    else:
        out, lse = octavo.torch.attention(*arrays, return_lse=True, **options)
    out = _like(v, out)
    return their_results(q, out, lse) if return_attn_probs else out


def attend_to_pages(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, seq_lens: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The results of ``octavo.paged_attention`` with these options."""
    padded, keys, values = (_padded(x) for x in (with_unit_stride(q), k_pages, v_pages))
    out, lse = octavo.torch.paged_attention(
        padded, keys, values, page_table, seq_lens, return_lse=True, **options
    )
    return _like(v_pages, out), lse


def require_shape(function: str, name: str, x: Tensor, axes: str, *sizes: int | None) -> None:
    """Raise ValueError if an array has other sizes; None stands for any."""
    fits = x.ndim == len(sizes)
    for size, wanted in zip(x.shape, sizes, strict=False):  # all() of a generator would take twice as long
        if wanted is not None and size != wanted:
            fits = False
    if not fits:
        shape = ", ".join("any" if wanted is None else str(wanted) for wanted in sizes)
        raise ValueError(f"{function}: {name} must be {axes} = [{shape}]; got {list(x.shape)}")


def require_int32(function: str, name: str, x: Tensor, axes: str, *sizes: int | None) -> None:
    """Likewise, and TypeError if its numbers are others."""
    if x.dtype != torch.int32:
        raise TypeError(f"{function}: {name} must be int32; got {str(x.dtype).removeprefix('torch.')}")
    require_shape(function, name, x, axes, *sizes)
