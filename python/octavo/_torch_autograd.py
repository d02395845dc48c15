"""How PyTorch's autograd treats the operators of octavo.torch: it refuses them, or goes back through them.

It goes back through ``attention``, whose gradients ``attention_backward`` computes. Those have no gradients
in turn: differentiating twice raises an error when it happens, not when a first derivative is computed with
``create_graph=True``, as torch.func always does. All other operators refuse tensors that require grad.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

# torch.autograd.Function, but one that may be applied at one level of torch.func's transforms. Of the levels
# further out PyTorch's dispatcher takes care: it calls the operator again at each.
from torch.autograd.function import _SingleLevelFunction

from octavo._operators import ARGUMENTS

_FORWARD = [argument["name"] for argument in ARGUMENTS["attention"]]
_BACKWARD = [argument["name"] for argument in ARGUMENTS["attention_backward"]]
_DEFAULTS = [argument["default"] for argument in ARGUMENTS["attention"]]
# The places of what has a gradient, in the order of the results of attention_backward.
_DIFFERENTIABLE = [_FORWARD.index(name) for name in ("q", "k", "v", "alibi_slopes", "sinks")]


def attention_backward(of_slopes: bool, of_sinks: bool, *args: Any, **options: Any) -> tuple[Tensor, ...]:
    """The gradients of q, k and v, and then those of slopes and of sinks, as they are asked for."""
    overloads = torch.ops.octavo.attention_backward
    results: tuple[Tensor, ...]
    if not of_sinks:
        results = (overloads.dalibi if of_slopes else overloads.default)(*args, **options)
        return results
    *results, dslopes, dsinks = overloads.dsinks(of_slopes, *args, **options)
    return (*results, *([dslopes] if of_slopes else []), dsinks)


def wants_gradients(args: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)


def refuse_gradients(operator: str, names: list[str], args: tuple[Any, ...]) -> None:
    """Raise what the kernel itself would, for tensors that it never sees."""
    for argument, value in zip(names, args, strict=False):
        if wants_gradients((value,)):
            differentiable = "octavo.torch.attention without out, " if operator == "attention" else ""
            raise TypeError(
                f"{operator}: {argument} requires grad, and this call has no backward; use {differentiable}"
                f"{argument}.detach() or torch.no_grad()"
            )


def refuse_tangents(operator: str, names: list[str], args: tuple[Any, ...]) -> None:
    """Likewise."""
    if forward_ad._current_level < 0:
        return
    for argument, value in zip(names, args, strict=False):
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise TypeError(
                f"{operator}: {argument} has a tangent (forward-mode differentiation), and this call has no "
                f"jvp; use {argument}.detach()"
            )


def refuse_derivatives(operator: str, number: str, value: Tensor) -> None:
    """Raise TypeError for a tensor in place of a number that wants derivatives: its value alone is taken."""
    if wants_gradients((value,)):
        raise TypeError(
            f"{operator}: {number} requires grad, and this call has no backward for numbers; use "
            f"{number}.detach() or torch.no_grad()"
        )
    refuse_tangents(operator, [number], (value,))


@contextlib.contextmanager
def _below_autograd() -> Iterator[None]:
    """Hide calls from autograd, but not from that of a transform of torch.func further out."""
    is_inside = torch._C._are_functorch_transforms_active()
    with torch.set_grad_enabled(is_inside), torch._C._AutoDispatchBelowAutograd():
        yield


class _Function(_SingleLevelFunction):
    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int]:
        """As torch.autograd.Function has it, for PyTorch's compiled autograd."""
        return (ctx._autograd_function_id,)


class _Attention(_Function):
    @staticmethod
    def forward(ctx: Any, return_lse: bool, deterministic: bool, *args: Any) -> Any:
        with _below_autograd():
            out, lse = torch.ops.octavo.attention.lse(*args)
        ctx.save_for_backward(out, lse, *(x if isinstance(x, Tensor) else None for x in args))
        ctx.others = [None if isinstance(x, Tensor) else x for x in args]
        ctx.deterministic = deterministic
        ctx.set_materialize_grads(False)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        out, lse, *tensors = ctx.saved_tensors
        _, _, *needed = ctx.needs_input_grad
        gradients: list[Tensor | None] = [None] * len(tensors)
        if dout is None and dlse is None:
            return None, None, *gradients
        args = [other if x is None else x for x, other in zip(tensors, ctx.others, strict=True)]
        values = dict(zip(_FORWARD, args, strict=True)) | {
            "dout": torch.zeros_like(out) if dout is None else _readable(dout),
            "out": out,
            "lse": lse,
            "dlse": None if dlse is None else _readable(dlse),
            "deterministic": ctx.deterministic or torch.are_deterministic_algorithms_enabled(),
        }
        *qkv, slopes, sinks = _DIFFERENTIABLE
        results = attention_backward(needed[slopes], needed[sinks], *(values[name] for name in _BACKWARD))
        asked = (place for place in (slopes, sinks) if needed[place])
        for place, result in zip((*qkv, *asked), results, strict=True):
            gradients[place] = result if needed[place] else None
        return None, None, *gradients


def _readable(gradient: Tensor) -> Tensor:
    """As the operator takes it: autograd's may be expanded, or have its axes in another order."""
    strides = gradient.stride()
    return gradient.contiguous() if strides[-1] != 1 or 0 in strides else gradient


class _AttentionBackward(_Function):
    @staticmethod
    def forward(_: Any, overload: str, *args: Any) -> Any:
        with _below_autograd():
            return getattr(torch.ops.octavo.attention_backward, overload)(*args)

    @staticmethod
    def backward(_: Any, *__: Tensor) -> NoReturn:
        raise TypeError(
            "attention_backward: its results cannot be differentiated; attention has no second derivatives"
        )


def _apply(function: Any, *args: Any) -> Any:
    with enable_single_level_autograd_function():
        return function.apply(*args)


def _record_attention(return_lse: bool, deterministic: bool, *args: Any) -> Any:
    return _apply(_Attention, return_lse, deterministic, *args, *_DEFAULTS[len(args) :])


RECORD: dict[str, Callable[..., Any]] = {
    "attention": functools.partial(_record_attention, False, False),
    "attention.lse": functools.partial(_record_attention, True, False),
    "attention.deterministic": functools.partial(_record_attention, True),
    "attention_backward": functools.partial(_apply, _AttentionBackward, "default"),
    "attention_backward.dalibi": functools.partial(_apply, _AttentionBackward, "dalibi"),
    "attention_backward.dsinks": functools.partial(_apply, _AttentionBackward, "dsinks"),
}
"""How to call an operator so that autograd can go back through it: a function of the same arguments."""
