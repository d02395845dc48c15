"""Octavo's operators as PyTorch's own, for torch.compile, torch.export and CUDA graphs.

The functions of ``octavo`` take tensors as they are, at less cost a call, but a compiler cannot look past
them. The functions here have the same names, arguments and results, and go through PyTorch's dispatcher, as
``torch.ops.octavo``: torch.compile traces through them (``fullgraph=True`` too), knows the shapes of their
results without running them, and knows what they write to. Work runs on torch's current stream.

A compiled function may write to views of a tensor, as of ``k_pages, v_pages = cache.unbind()``. But keep that
tensor's sizes static (``torch._dynamo.mark_static(cache)``) under ``dynamic=True``, where Inductor of PyTorch
2.13 loses the offset of a view that any custom operator writes to.

There is no backward yet: a tensor that requires grad is refused unless gradients are off (``torch.no_grad``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

import octavo

__all__ = ["append_kv", "attention", "copy_pages", "merge_states", "paged_attention"]

if not hasattr(torch.library, "register_fake"):
    raise ImportError(f"octavo.torch needs PyTorch 2.4 or newer; this is {torch.__version__}")

# The operators. A schema's defaults are those of the function in octavo: the dispatcher does not pass on an
# argument that equals its default. An operator may not return what it was given: those with `out` return the
# log-sum-exp alone. A log-sum-exp that was not asked for is an empty tensor.

_library = torch.library.Library("octavo", "DEF")

_ATTENTION = (
    "Tensor q, Tensor k, Tensor v, *, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, float? softmax_scale=None, bool causal=False, "
    "SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, "
    "Tensor? prefix_lens=None, bool return_lse=False"
)
_PAGED_ATTENTION = (
    "Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_table, Tensor seq_lens, *, "
    "Tensor? cu_seqlens_q=None, SymInt? max_seqlen_q=None, float? softmax_scale=None, bool causal=True, "
    "SymInt window_left=-1, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? prefix_lens=None, "
    "float? k_scale=None, float? v_scale=None, SymInt? num_splits=None, bool batch_invariant=False, "
    "bool return_lse=False"
)


def _define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define torch.ops.octavo.<name>. `kernel` runs it, `fake` only makes results of the right kind."""
    # Compiled code must keep the strides that it was traced with: Octavo wants a last axis of unit stride.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    _library.define(name + schema, tags=tags)
    arguments = [argument.name for argument in getattr(torch.ops.octavo, name).default._schema.arguments]

    def trace(*args: Any, **kwargs: Any) -> Any:
        # What the kernel itself refuses, and a compiler would find out too late.
        for argument, value in [*zip(arguments, args, strict=False), *kwargs.items()]:
            if torch.is_grad_enabled() and isinstance(value, Tensor) and value.requires_grad:
                raise TypeError(
                    f"{name}: {argument} requires grad, and this call has no backward; use "
                    f"{argument}.detach() or torch.no_grad()"
                )
        return fake(*args, **kwargs)

    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{name}", trace, lib=_library)


def _will_write(*arrays: Tensor) -> None:
    """Let autograd know, so that it finds out who still needs the old values."""
    for array in arrays:
        torch.autograd.graph.increment_version(array)


def _lse_like(q: Tensor, return_lse: bool) -> Tensor:
    return q.new_empty(q.shape[:-1] if return_lse else (0,), dtype=torch.float32)


def _define_attention(name: str, schema: str, function: Callable[..., Any]) -> None:
    """Define the operator that returns new tensors, and the one that writes to `out`."""

    def kernel(q: Tensor, *args: Tensor, return_lse: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
        if return_lse:
            return cast("tuple[Tensor, Tensor]", function(q, *args, return_lse=True, **options))
        return function(q, *args, **options), _lse_like(q, False)

    def fake(q: Tensor, *_: Tensor, return_lse: bool = False, **__: Any) -> tuple[Tensor, Tensor]:
        return q.new_empty(q.shape), _lse_like(q, return_lse)

    def kernel_out(*args: Tensor, out: Tensor, **options: Any) -> Tensor:
        _will_write(out)
        return kernel(*args, out=out, **options)[1]

    def fake_out(q: Tensor, *_: Tensor, return_lse: bool = False, **__: Any) -> Tensor:
        return _lse_like(q, return_lse)

    _define(name, f"({schema}) -> (Tensor, Tensor)", kernel, fake)
    _define(f"{name}_out", f"({schema}, Tensor(a!) out) -> Tensor", kernel_out, fake_out)


def _append_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, *args: Tensor, **options: Any) -> None:
    _will_write(k_pages, v_pages)
    octavo.append_kv(k, v, k_pages, v_pages, *args, **options)


def _copy_pages(k_pages: Tensor, v_pages: Tensor, copies: Tensor) -> None:
    _will_write(k_pages, v_pages)
    octavo.copy_pages(k_pages, v_pages, copies)


def _fake_merge_states(out_a: Tensor, lse_a: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


def _fake_nothing(*_: Any, **__: Any) -> None:
    pass


_define_attention("attention", _ATTENTION, octavo.attention)
_define_attention("paged_attention", _PAGED_ATTENTION, octavo.paged_attention)
_define(
    "merge_states",
    "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    octavo.merge_states,
    _fake_merge_states,
)
_define(
    "append_kv",
    "(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor page_table, Tensor seq_lens, *, "
    "Tensor? cu_seqlens=None, float? k_scale=None, float? v_scale=None) -> ()",
    _append_kv,
    _fake_nothing,
)
_define(
    "copy_pages",
    "(Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor copies) -> ()",
    _copy_pages,
    _fake_nothing,
)

# The functions, each with the signature and the documentation of its namesake in octavo.

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _like(function: _Function) -> Callable[[Callable[..., Any]], _Function]:
    assigned = ("__name__", "__qualname__", "__doc__")
    return cast(
        "Callable[[Callable[..., Any]], _Function]", functools.wraps(function, assigned=assigned, updated=())
    )


def _refuse_stream(name: str, stream: object) -> None:
    if stream is not None:
        raise ValueError(f"{name}: stream must be None in octavo.torch, which works on the current stream")


@_like(octavo.attention)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    out: Tensor | None = None,
    stream: None = None,
    **options: Any,
) -> Any:
    _refuse_stream("attention", stream)
    if out is None:
        out, lse = torch.ops.octavo.attention(q, k, v, return_lse=return_lse, **options)
    else:
        lse = torch.ops.octavo.attention_out(q, k, v, return_lse=return_lse, out=out, **options)
    return (out, lse) if return_lse else out


@_like(octavo.paged_attention)
def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    return_lse: bool = False,
    out: Tensor | None = None,
    stream: None = None,
    **options: Any,
) -> Any:
    _refuse_stream("paged_attention", stream)
    arrays = (q, k_pages, v_pages, page_table, seq_lens)
    if out is None:
        out, lse = torch.ops.octavo.paged_attention(*arrays, return_lse=return_lse, **options)
    else:
        lse = torch.ops.octavo.paged_attention_out(*arrays, return_lse=return_lse, out=out, **options)
    return (out, lse) if return_lse else out


@_like(octavo.merge_states)
def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, stream: None = None
) -> tuple[Tensor, Tensor]:
    _refuse_stream("merge_states", stream)
    return cast("tuple[Tensor, Tensor]", torch.ops.octavo.merge_states(out_a, lse_a, out_b, lse_b))


@_like(octavo.append_kv)
def append_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    stream: None = None,
    **options: Any,
) -> None:
    _refuse_stream("append_kv", stream)
    torch.ops.octavo.append_kv(k, v, k_pages, v_pages, page_table, seq_lens, **options)


@_like(octavo.copy_pages)
def copy_pages(k_pages: Tensor, v_pages: Tensor, copies: Tensor, *, stream: None = None) -> None:
    _refuse_stream("copy_pages", stream)
    torch.ops.octavo.copy_pages(k_pages, v_pages, copies)
