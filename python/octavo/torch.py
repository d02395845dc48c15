"""Octavo's operators as PyTorch's own, for torch.compile, torch.export and CUDA graphs.

The functions of ``octavo`` take tensors as they are, at less cost a call, but a compiler cannot look past
them. The functions here have the same names, arguments and results, but take tensors alone, no lists or NumPy
arrays, and neither ``stream`` nor the ``plan`` of ``linear``. They go through PyTorch's dispatcher, as
``torch.ops.octavo``: torch.compile traces through them (``fullgraph=True`` too), knows the shapes of their
results without running them, and knows what they write to. Work runs on torch's current stream.

A compiled function may write to views of a tensor, as of ``k_pages, v_pages = cache.unbind()``. But keep that
tensor's sizes static (``torch._dynamo.mark_static(cache)``) under ``dynamic=True``, where Inductor of PyTorch
2.13 loses the offset of a view that any custom operator writes to.

``attention`` is differentiable with respect to q, k, v, alibi_slopes and sinks, through its log-sum-exp too,
and once: ``attention_backward``, which computes the gradients, has none. torch.use_deterministic_algorithms
makes them deterministic. All other operators, and ``attention`` with ``out``, refuse tensors that require
grad unless gradients are off (``torch.no_grad``). Nothing has forward-mode derivatives (``torch.func.jvp``).
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor

import octavo
from octavo import _torch_autograd
from octavo._misuse import MISSING, refuse_call
from octavo._operators import ARGUMENTS
from octavo._torch_autograd import refuse_derivatives
from octavo._torch_operators import ATTENTIONS, IN_PLACE_OF, operator_named, python_name

__all__ = [
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

# The functions, each with the signature and the documentation of its namesake in octavo.

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _like(original: _Function) -> Callable[[Callable[..., Any]], _Function]:
    def complete(declared: Any) -> _Function:
        own = declared.__defaults__ or ()
        declared.__defaults__ = (MISSING,) * (declared.__code__.co_argcount - len(own)) + own
        assigned = ("__name__", "__qualname__", "__doc__")
        return cast("_Function", functools.update_wrapper(declared, original, assigned=assigned, updated=()))

    return complete


_MISMATCH = re.compile(
    r"octavo::(?P<op>\w+)\(\) Expected a value of type '(?:Optional\[)?(?P<wanted>\w+)\]?' for argument "
    r"'(?P<argument>\w+)' but instead found type '(?P<given>\w+)'"
)
_KINDS = {"Tensor": "a torch.Tensor", "str": "a str", "bool": "a bool", "int": "an int", "float": "a float"}


def _raise_in_words_of_octavo(
    error: RuntimeError, function: Callable[..., Any], tensors: tuple[Tensor, ...], options: dict[str, Any]
) -> None:
    """Raise in octavo's words what the dispatcher says of a call that no schema takes."""
    signature = inspect.unwrap(function)
    refuse_call(signature, {**dict(zip(signature.__code__.co_varnames, tensors, strict=False)), **options})
    if found := _MISMATCH.match(str(error)):
        kind, given = _KINDS.get(found["wanted"], found["wanted"]), found["given"]
        op = python_name(found["op"])
        if found["wanted"] == given:  # of which the dispatcher does not take every value
            wanted = "have no lone surrogates" if given == "str" else "fit in 64 bits"
            raise ValueError(f"{op}: {found['argument']} must {wanted}") from None
        raise TypeError(f"{op}: {found['argument']} must be {kind}; got {given}") from None


_NUMBERS = frozenset(x["name"] for described in ARGUMENTS.values() for x in described if x["type"] == "float")


def _given(operator: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options, with tensors in place of numbers under the names that the operators have for them."""
    given = options
    for name, value in options.items():
        if name in _NUMBERS and isinstance(value, Tensor):
            if name in IN_PLACE_OF.values():
                given = {**given, name: None, f"{name}_array": value}
            else:
                refuse_derivatives(operator, name, value)
    return given


def _refuse_stream(name: str) -> None:
    raise ValueError(f"{name}: stream must be None in octavo.torch, which works on the current stream")


_ATTENTION, _ATTENTION_LSE = operator_named("attention"), operator_named("attention.lse")
_PAGED_ATTENTION, _PAGED_ATTENTION_LSE = (
    operator_named("paged_attention"),
    operator_named("paged_attention.lse"),
)
_LATENT_ATTENTION, _LATENT_ATTENTION_LSE = (
    operator_named("latent_attention"),
    operator_named("latent_attention.lse"),
)
_MERGE_STATES = operator_named("merge_states")
_APPEND_KV, _APPEND_KV_Q = operator_named("append_kv"), operator_named("append_kv.q")
_APPEND_KV_OUT_Q = operator_named("append_kv.out_q")
_LINEAR, _LINEAR_OUT = operator_named("linear"), operator_named("linear.out")
_RMS_NORM, _RMS_NORM_RESIDUAL = operator_named("rms_norm"), operator_named("rms_norm.residual")
_RMS_NORM_OUT, _RMS_NORM_OUT_RESIDUAL = (
    operator_named("rms_norm.out"),
    operator_named("rms_norm.out_residual"),
)
_COPY_PAGES, _COPY_PAGES_TO = operator_named("copy_pages"), operator_named("copy_pages_to")
_TO_OUT = {name: (operator_named(f"{name}.out"), operator_named(f"{name}.out_lse")) for name in ATTENTIONS}


def _write(name: str, arrays: tuple[Tensor, ...], out: Tensor, return_lse: bool, options: Any) -> Any:
    operator, with_lse = _TO_OUT[name]
    if return_lse:
        return out, with_lse(*arrays, out, **options)
    operator(*arrays, out, **options)
    return out


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
    if stream is not None:
        _refuse_stream("attention")
    try:
        given = _given("attention", options)
        if out is None:
            return (_ATTENTION_LSE if return_lse else _ATTENTION)(q, k, v, **given)
        return _write("attention", (q, k, v), out, return_lse, given)
    except RuntimeError as error:
        _raise_in_words_of_octavo(error, attention, (q, k, v), options)
        raise


@_like(octavo.attention_backward)
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    return_dalibi: bool = False,
    return_dsinks: bool = False,
    dq: None = None,
    dk: None = None,
    dv: None = None,
    stream: None = None,
    **options: Any,
) -> Any:
    if stream is not None:
        _refuse_stream("attention_backward")
    for name, gradient in (("dq", dq), ("dk", dk), ("dv", dv)):
        if gradient is not None:
            raise ValueError(
                f"attention_backward: {name} must be None in octavo.torch, which returns new tensors"
            )
    arrays = (dout, q, k, v, out, lse)
    try:
        asks = bool(return_dalibi), bool(return_dsinks)
        return _torch_autograd.attention_backward(*asks, *arrays, **_given("attention_backward", options))
    except RuntimeError as error:
        _raise_in_words_of_octavo(error, attention_backward, arrays, options)
        raise


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
    if stream is not None:
        _refuse_stream("paged_attention")
    arrays = (q, k_pages, v_pages, page_table, seq_lens)
    try:
        given = _given("paged_attention", options)
        if out is None:
            return (_PAGED_ATTENTION_LSE if return_lse else _PAGED_ATTENTION)(*arrays, **given)
        return _write("paged_attention", arrays, out, return_lse, given)
    except RuntimeError as error:
        _raise_in_words_of_octavo(error, paged_attention, arrays, options)
        raise


@_like(octavo.latent_attention)
def latent_attention(
    q: Tensor,
    kv_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    return_lse: bool = False,
    out: Tensor | None = None,
    stream: None = None,
    **options: Any,
) -> Any:
    if stream is not None:
        _refuse_stream("latent_attention")
    arrays = (q, kv_pages, page_table, seq_lens)
    try:
        given = _given("latent_attention", options)
        if out is None:
            return (_LATENT_ATTENTION_LSE if return_lse else _LATENT_ATTENTION)(*arrays, **given)
        return _write("latent_attention", arrays, out, return_lse, given)
    except RuntimeError as error:
        _raise_in_words_of_octavo(error, latent_attention, arrays, options)
        raise


@_like(octavo.merge_states)
def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, stream: None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    if stream is not None:
        _refuse_stream("merge_states")
    try:
        return cast("tuple[Tensor, Tensor]", _MERGE_STATES(out_a, lse_a, out_b, lse_b, **options))
    except RuntimeError as error:
        _raise_in_words_of_octavo(error, merge_states, (out_a, lse_a, out_b, lse_b), options)
        raise


@_like(octavo.append_kv)
def append_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor | None = None,
    seq_lens: Tensor | None = None,
    *,
    q: Tensor | None = None,
    q_out: Tensor | None = None,
    stream: None = None,
    **options: Any,
) -> Any:
    if stream is not None:
        _refuse_stream("append_kv")
    try:
        arrays, tables = (k, v, k_pages, v_pages), (page_table, seq_lens)
        given = _given("append_kv", options)
        if q is None and q_out is None:
            return _APPEND_KV(*arrays, *tables, **given)
        if q_out is None:
            return _APPEND_KV_Q(*arrays, *tables, q=q, **given)
        _APPEND_KV_OUT_Q(*arrays, q_out, *tables, q=q, **given)
        return q_out
    except RuntimeError as error:
        given = {"page_table": page_table, "seq_lens": seq_lens, **options}
        _raise_in_words_of_octavo(error, append_kv, (k, v, k_pages, v_pages), given)
        raise


@_like(octavo.copy_pages)
def copy_pages(
    k_pages: Tensor,
    v_pages: Tensor,
    copies: Tensor,
    *,
    to_k_pages: Tensor | None = None,
    to_v_pages: Tensor | None = None,
    stream: None = None,
    **options: Any,
) -> None:
    if stream is not None:
        _refuse_stream("copy_pages")
    try:
        if to_k_pages is None and to_v_pages is None:
            _COPY_PAGES(k_pages, v_pages, copies, **options)
        else:
            _COPY_PAGES_TO(k_pages, v_pages, copies, to_k_pages, to_v_pages, **options)
    except RuntimeError as error:
        _raise_in_words_of_octavo(error, copy_pages, (k_pages, v_pages, copies), options)
        raise


@_like(octavo.linear)
def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    plan: None = None,
    stream: None = None,
    **options: Any,
) -> Tensor:
    if stream is not None:
        _refuse_stream("linear")
    if plan is not None:
        raise ValueError(
            "linear: plan must be None in octavo.torch; octavo.linear takes one, outside programs"
        )
    try:
        given = _given("linear", options)
        if out is None:
            return cast("Tensor", _LINEAR(x, w, bias, **given))
        _LINEAR_OUT(x, w, out, bias, **given)
        return out
    except RuntimeError as error:
        _raise_in_words_of_octavo(error, linear, (x, w), {"bias": bias, **options})
        raise


def _new_like(x: Tensor) -> Tensor:
    """Or what is no tensor itself, which the operator refuses."""
    return x.new_empty(x.shape) if isinstance(x, Tensor) else x


@_like(octavo.rms_norm)
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    *,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    stream: None = None,
    **unknown: Any,
) -> Any:
    if stream is not None:
        _refuse_stream("rms_norm")
    if isinstance(eps, Tensor):
        refuse_derivatives("rms_norm", "eps", eps)
    try:
        if residual is None and residual_out is None:
            if out is None:
                return _RMS_NORM(x, weight, eps, **unknown)
            _RMS_NORM_OUT(x, weight, out, eps, **unknown)
            return out
        if out is None and residual_out is None:
            return _RMS_NORM_RESIDUAL(x, weight, eps, residual, **unknown)
        out = _new_like(x) if out is None else out
        residual_out = _new_like(x) if residual_out is None else residual_out
        _RMS_NORM_OUT_RESIDUAL(x, weight, out, residual_out, eps, residual, **unknown)
        return out, residual_out
    except RuntimeError as error:
        _raise_in_words_of_octavo(error, rms_norm, (x, weight), unknown)
        raise
