"""Octavo's operators as they are registered with PyTorch, ``torch.ops.octavo``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from octavo import _core
from octavo._operators import ARGUMENTS
from octavo._torch_autograd import RECORD, refuse_gradients, refuse_tangents, wants_gradients

if not hasattr(torch.library, "register_fake"):
    raise ImportError(f"octavo.torch needs PyTorch 2.4 or newer; this is {torch.__version__}")

# Their arguments stand in the order of those in octavo, without return_lse and stream; none is for
# keywords only, which costs time at every call; `out` follows the arguments without a default. An operator
# may not return what it was given: with `out` it returns the log-sum-exp alone, or nothing.

_library = torch.library.Library("octavo", "DEF")
_DISPATCHER = _core.torch_dispatcher  # as `stream`: what the kernels want that PyTorch's dispatcher calls

ATTENTIONS = ("attention", "paged_attention", "latent_attention")
IN_PLACE_OF = {
    argument["name"]: argument["in_place_of"]
    for described in ARGUMENTS.values()
    for argument in described
    if "in_place_of" in argument
}
"""The arrays that stand for numbers, and the names of these."""
_TYPES = {"array": "Tensor", "bool": "bool", "int": "SymInt", "float": "float", "str": "str"}
# The dispatcher drops arguments at the end that equal their defaults.
_DEFAULTS = {name: tuple(argument["default"] for argument in ARGUMENTS[name]) for name in ARGUMENTS}


def _arguments(name: str) -> tuple[str, str]:
    """What a schema says of an operator's arguments: of those that must be given, and of the others."""
    required, others = [], []
    aliases = iter("abcdef")
    for argument in ARGUMENTS[name]:
        kind, default = _TYPES[argument["type"]], argument["default"]
        if argument["access"] == "write":
            kind += f"({next(aliases)}!)"
        if argument["required"]:
            required.append(f"{kind} {argument['name']}")
        else:
            others.append(f"{kind}{'?' if default is None else ''} {argument['name']}={default}")
    return ", ".join(required), ", ".join(others)


def operator_named(name: str) -> Any:
    operator, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.octavo, operator), overload or "default")


def python_name(name: str) -> str:
    """The function that calls torch.ops.octavo.<name>."""
    return name.partition(".")[0].removesuffix("_to")


def _refuse_missing_memory(operator: str, names: list[str], args: tuple[Any, ...]) -> None:
    """Raise TypeError where some tensors are on meta and others are not.

    PyTorch's dispatcher then takes the call for one about shapes alone, and results for those of the others.
    """
    given = [(name, x.device) for name, x in zip(names, args, strict=False) if isinstance(x, Tensor)]
    on_meta = [name for name, device in given if device.type == "meta"]
    others = [(name, device) for name, device in given if device.type != "meta"]
    if on_meta and others:
        name, device = others[0]
        raise TypeError(
            f"{operator}: {on_meta[0]} must have memory, or all tensors be on meta; it is on meta, {name} on "
            f"{device}"
        )


def _define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define torch.ops.octavo.<name>, which may have an overload's name after a dot.

    `kernel` runs it, `fake` only makes results of the right kind.
    """
    operator, record = python_name(name), RECORD.get(name)

    def trace(*args: Any) -> Any:
        _refuse_missing_memory(operator, names, args)
        refuse_tangents(operator, names, args)
        if record is None:
            refuse_gradients(operator, names, args)  # a compiler would find out too late
        return fake(*args)

    # Autograd is the dispatch key under which tensors still have the wrappers that want gradients: those of
    # torch.func's transforms, or a subclass around other tensors.
    def differentiate(*args: Any) -> Any:
        wanted = record if record is not None and wants_gradients(args) else None
        if wanted is None and num_dispatch_modes() == 0:
            # The remaining keys would hand ordinary tensors straight to the kernel, which takes no others. To
            # call it at once saves what this function costs.
            try:
                return kernel(*args)
            except (TypeError, RuntimeError):  # of PyTorch 2.4 the latter, by its DLPack
                pass  # if it was not about the kind of the tensors, the kernel will raise it once more
        refuse_tangents(operator, names, args)
        if wanted is not None:
            return wanted(*args)
        refuse_gradients(operator, names, args)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    # Compiled code must keep the strides that it was traced with: Octavo wants a last axis of unit stride.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    _library.define(name + schema, tags=tags)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _library.impl(name, differentiate, "Autograd")
    torch.library.register_fake(f"octavo::{name}", trace, lib=_library)
    overload = operator_named(name)
    # As octavo.torch has them: a number, and an array in its place, share one there.
    names = [IN_PLACE_OF.get(argument.name, argument.name) for argument in overload._schema.arguments]
    num_dispatch_modes = torch._C._len_torch_dispatch_stack


def _will_write(*arrays: Tensor | None) -> None:
    """Let autograd know, so that it finds out who still needs the old values."""
    for array in arrays:
        if array is not None:  # which the kernel will refuse
            torch.autograd.graph.increment_version(array)


def _out_like(name: str) -> Callable[..., Tensor]:
    """What makes an array like the result of an attention, from its arguments."""
    if name == "attention":
        return lambda q, _, v, *__: q.new_empty((*q.shape[:-1], v.shape[-1]))
    described = ARGUMENTS[name]
    place = [argument["name"] for argument in described].index(
        "kv_dtype" if name == "paged_attention" else "v_dim"
    )

    def given(others: tuple[Any, ...]) -> Any:
        return others[place - 1] if len(others) >= place else described[place]["default"]

    def like_pages(q: Tensor, k_pages: Tensor, v_pages: Tensor, *others: Any) -> Tensor:
        is_int4 = v_pages.dtype == torch.uint8 and given((k_pages, v_pages, *others)) == "int4"
        return q.new_empty((*q.shape[:-1], v_pages.shape[-1] * (2 if is_int4 else 1)))

    def of_width(q: Tensor, *others: Any) -> Tensor:
        return q.new_empty((*q.shape[:-1], given(others)))

    return like_pages if name == "paged_attention" else of_width


def _lse_like(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:-1], dtype=torch.float32)


def _define_attention(name: str) -> None:
    """Define the operator that returns a tensor, the one that writes to `out`, and both with log-sum-exp.

    Of attention there is one more, whose first argument says whether the backward pass is deterministic.
    """
    core, defaults = getattr(_core, name), _DEFAULTS[name]
    num_arrays = sum(argument["required"] for argument in ARGUMENTS[name])
    dropped = [defaults[given:] for given in range(len(defaults) + 1)]

    def kernel(*args: Any, return_lse: bool = False, out: Tensor | None = None) -> Any:
        return core(*args, *dropped[len(args)], return_lse, out, _DISPATCHER)

    def kernel_out(*args: Any) -> None:
        out = args[num_arrays]
        _will_write(out)
        kernel(*args[:num_arrays], *args[num_arrays + 1 :], out=out)

    def kernel_out_lse(*args: Any) -> Tensor:
        out = args[num_arrays]
        _will_write(out)
        result = kernel(*args[:num_arrays], *args[num_arrays + 1 :], out=out, return_lse=True)
        return cast("Tensor", result[1])

    def fake_lse(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        return fake(q, *others), _lse_like(q)

    arrays, options = _arguments(name)
    out, fake = "Tensor(a!) out", _out_like(name)
    _define(name, f"({arrays}, {options}) -> Tensor", kernel, fake)
    with_lse = functools.partial(kernel, return_lse=True)
    _define(f"{name}.lse", f"({arrays}, {options}) -> (Tensor, Tensor)", with_lse, fake_lse)
    if name == "attention":  # PyTorch 2.13 would abort at exit if overloads had the same arguments
        _define(
            f"{name}.deterministic",
            f"(bool deterministic, {arrays}, {options}) -> (Tensor, Tensor)",
            lambda _, *args: with_lse(*args),
            lambda _, *args: fake_lse(*args),
        )
    _define(f"{name}.out", f"({arrays}, {out}, {options}) -> ()", kernel_out, _fake_nothing)
    _define(
        f"{name}.out_lse",
        f"({arrays}, {out}, {options}) -> Tensor",
        kernel_out_lse,
        lambda q, *_: _lse_like(q),
    )


def _checks_of(name: str, argument: str, result: str) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Two checks, for the overloads of an operator that has this result where that argument is given.

    The first returns the argument and raises ValueError if it is not given; the second raises it if it is.
    """
    place = next(i for i, described in enumerate(ARGUMENTS[name]) if described["name"] == argument)

    def require(*args: Any) -> Any:
        if len(args) <= place or args[place] is None:
            raise ValueError(f"{name}: {result} needs {argument}; got none")
        return args[place]

    def refuse(*args: Any) -> None:
        if len(args) > place and args[place] is not None:
            raise ValueError(f"{name}: {argument} needs an operator with {result}, such as {name}.{argument}")

    return require, refuse


def _define_append_kv() -> None:
    """Define the operator without queries, the one that returns them rotated, and the one to q_out."""
    name = "append_kv"
    core, described, defaults = _core.append_kv, ARGUMENTS[name], _DEFAULTS[name]
    written = tuple(i for i, argument in enumerate(described) if argument["access"] == "write")
    num_arrays = sum(argument["required"] for argument in described)
    require_q, refuse_q = _checks_of(name, "q", "q_out")

    def kernel(*args: Any, q_out: Tensor | None = None) -> Any:
        args += defaults[len(args) :]
        _will_write(*(args[i] for i in written), q_out)
        return core(*args, q_out, _DISPATCHER)

    def kernel_alone(*args: Any) -> None:
        refuse_q(*args)
        kernel(*args)

    def kernel_q(*args: Any) -> Any:
        require_q(*args)
        return kernel(*args)

    def fake_q(*args: Any) -> Tensor:
        q = require_q(*args)
        return cast("Tensor", q.new_empty(q.shape))

    def kernel_out_q(*args: Any) -> None:
        kernel(*args[:num_arrays], *args[num_arrays + 1 :], q_out=args[num_arrays])

    arrays, options = _arguments(name)
    _define(name, f"({arrays}, {options}) -> ()", kernel_alone, refuse_q)
    _define(f"{name}.q", f"({arrays}, {options}) -> Tensor", kernel_q, fake_q)
    _define(f"{name}.out_q", f"({arrays}, Tensor(e!) q_out, {options}) -> ()", kernel_out_q, _fake_nothing)


def _copy_pages(
    k_pages: Tensor,
    v_pages: Tensor,
    copies: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    _will_write(k_pages, v_pages, k_scales, v_scales)
    _core.copy_pages(k_pages, v_pages, copies, None, None, k_scales, v_scales, None, None, _DISPATCHER)


def _copy_pages_to(
    k_pages: Tensor,
    v_pages: Tensor,
    copies: Tensor,
    to_k_pages: Tensor,
    to_v_pages: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    to_k_scales: Tensor | None = None,
    to_v_scales: Tensor | None = None,
) -> None:
    _will_write(to_k_pages, to_v_pages, to_k_scales, to_v_scales)
    _core.copy_pages(
        k_pages,
        v_pages,
        copies,
        to_k_pages,
        to_v_pages,
        k_scales,
        v_scales,
        to_k_scales,
        to_v_scales,
        _DISPATCHER,
    )


def _define_attention_backward() -> None:
    """Define the operator that returns the gradients of q, k and v, and those with that of slopes or sinks.

    The one with that of sinks is told whether that of slopes is wanted, too; otherwise it is empty. PyTorch
    2.13 would abort at exit if overloads had the same arguments and as many results.
    """
    name = "attention_backward"
    core, defaults = _core.attention_backward, _DEFAULTS[name]
    dropped = [defaults[given:] for given in range(len(defaults) + 1)]
    place_of = {argument["name"]: place for place, argument in enumerate(ARGUMENTS[name])}

    def kernel(*args: Any, return_dalibi: bool = False, return_dsinks: bool = False) -> Any:
        asks = return_dalibi, return_dsinks
        return core(*args, *dropped[len(args)], *asks, None, None, None, _DISPATCHER)

    def kernel_dsinks(of_slopes: bool, *args: Any) -> Any:
        *results, dsinks = kernel(*args, return_dalibi=of_slopes, return_dsinks=True)
        return (*results, *([] if of_slopes else [dsinks.new_empty(0)]), dsinks)

    def fake(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in (q, k, v))

    def fake_of(of: str, keyword: str, args: tuple[Any, ...]) -> Tensor:
        array = args[place_of[of]] if len(args) > place_of[of] else None
        if array is None:
            raise ValueError(f"{name}: d{of} ({keyword}) needs {of}; got none")
        return cast("Tensor", array.new_empty(array.shape))

    def fake_dalibi(*args: Any) -> tuple[Tensor, ...]:
        return (*fake(*args), fake_of("alibi_slopes", "return_dalibi", args))

    def fake_dsinks(of_slopes: bool, *args: Any) -> tuple[Tensor, ...]:
        dsinks = fake_of("sinks", "return_dsinks", args)
        return (*(fake_dalibi(*args) if of_slopes else (*fake(*args), dsinks.new_empty(0))), dsinks)

    arguments = ", ".join(_arguments(name))
    _define(name, f"({arguments}) -> (Tensor, Tensor, Tensor)", kernel, fake)
    _define(
        f"{name}.dalibi",
        f"({arguments}) -> (Tensor, Tensor, Tensor, Tensor)",
        functools.partial(kernel, return_dalibi=True),
        fake_dalibi,
    )
    _define(
        f"{name}.dsinks",
        f"(bool of_slopes, {arguments}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        kernel_dsinks,
        fake_dsinks,
    )


def _define_linear() -> None:
    """Define the operator that returns a tensor, and the one that writes to `out`."""
    core, defaults = _core.linear, _DEFAULTS["linear"]
    dropped = [defaults[given:] for given in range(len(defaults) + 1)]

    def kernel(*args: Any, out: Tensor | None = None) -> Any:
        return core(*args, *dropped[len(args)], out, None, _DISPATCHER)  # no plan

    def kernel_out(x: Tensor, w: Tensor, out: Tensor, *options: Any) -> None:
        _will_write(out)
        kernel(x, w, *options, out=out)

    def fake(
        x: Tensor, w: Tensor, _: Tensor | None = None, activation: str | None = None, *__: Any
    ) -> Tensor:
        return x.new_empty((*x.shape[:-1], w.shape[0] // (2 if activation == "silu_gate" else 1)))

    arrays, options = _arguments("linear")
    _define("linear", f"({arrays}, {options}) -> Tensor", kernel, fake)
    _define("linear.out", f"({arrays}, Tensor(a!) out, {options}) -> ()", kernel_out, _fake_nothing)


def _define_rms_norm() -> None:
    """Define the operator without a residual and the one with it; and those that write to `out`, likewise."""
    name = "rms_norm"
    core, defaults = _core.rms_norm, _DEFAULTS[name]
    require_residual, refuse_residual = _checks_of(name, "residual", "residual_out")

    def kernel(*args: Any, out: Tensor | None = None, residual_out: Tensor | None = None) -> Any:
        return core(*args, *defaults[len(args) :], out, residual_out, _DISPATCHER)

    def kernel_norm(*args: Any) -> Any:
        refuse_residual(*args)
        return kernel(*args)

    def fake_norm(x: Tensor, *others: Any) -> Tensor:
        refuse_residual(x, *others)
        return x.new_empty(x.shape)

    def kernel_residual(*args: Any) -> Any:
        require_residual(*args)
        return kernel(*args)

    def fake_residual(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        require_residual(x, *others)
        return x.new_empty(x.shape), x.new_empty(x.shape)

    def fake_out(x: Tensor, weight: Tensor, _: Tensor, *options: Any) -> None:
        refuse_residual(x, weight, *options)

    def kernel_out(x: Tensor, weight: Tensor, out: Tensor, *options: Any) -> None:
        refuse_residual(x, weight, *options)
        _will_write(out)
        kernel(x, weight, *options, out=out)

    def kernel_out_residual(
        x: Tensor, weight: Tensor, out: Tensor, residual_out: Tensor, *options: Any
    ) -> None:
        _will_write(out, residual_out)
        kernel(x, weight, *options, out=out, residual_out=residual_out)

    arrays, options = _arguments(name)
    out, outs = "Tensor(a!) out", "Tensor(a!) out, Tensor(b!) residual_out"
    _define(name, f"({arrays}, {options}) -> Tensor", kernel_norm, fake_norm)
    _define(f"{name}.residual", f"({arrays}, {options}) -> (Tensor, Tensor)", kernel_residual, fake_residual)
    _define(f"{name}.out", f"({arrays}, {out}, {options}) -> ()", kernel_out, fake_out)
    _define(
        f"{name}.out_residual", f"({arrays}, {outs}, {options}) -> ()", kernel_out_residual, _fake_nothing
    )


def _fake_merge_states(out_a: Tensor, lse_a: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


def _fake_nothing(*_: Any) -> None:
    pass


for _name in ATTENTIONS:
    _define_attention(_name)
_define_attention_backward()
_define_linear()
_define_rms_norm()
_define_append_kv()
_define(
    "merge_states",
    f"({_arguments('merge_states')[0]}) -> (Tensor, Tensor)",
    lambda *args: _core.merge_states(*args, _DISPATCHER),
    _fake_merge_states,
)
_define(
    "copy_pages",
    "(Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor copies, Tensor(c!)? k_scales=None, "
    "Tensor(d!)? v_scales=None) -> ()",
    _copy_pages,
    _fake_nothing,
)
_define(
    "copy_pages_to",
    "(Tensor k_pages, Tensor v_pages, Tensor copies, Tensor(a!) to_k_pages, Tensor(b!) to_v_pages, "
    "Tensor? k_scales=None, Tensor? v_scales=None, Tensor(c!)? to_k_scales=None, "
    "Tensor(d!)? to_v_scales=None) -> ()",
    _copy_pages_to,
    _fake_nothing,
)
