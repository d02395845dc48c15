"""How an operator becomes part of a JAX program: the call that XLA makes, and how JAX transforms it."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla
from jax.typing import ArrayLike

from octavo import _core, _jax_batching, _linear_on_cuda
from octavo._operators import ARGUMENTS, with_keywords
from octavo._tree_mask import words_of_bools

try:
    from jax import ffi  # since 0.5
except ImportError:
    from jax.extend import ffi  # type: ignore[attr-defined, no-redef]

if jax.__version_info__ < (0, 4, 38):
    raise ImportError(f"octavo.jax needs JAX 0.4.38 or newer; this is {jax.__version__}")

for _name, _handlers in _core.xla_handlers().items():
    for _platform, _handler in zip(("cpu", "CUDA"), _handlers, strict=True):
        ffi.register_ffi_target(f"octavo_{_name}", _handler, platform=_platform)

Integers: TypeAlias = ArrayLike | Sequence[int] | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]]
"""Page numbers, lengths or offsets. What is not an array is part of the program."""

Option: TypeAlias = bool | int | float | str
_Arrays: TypeAlias = dict[str, jax.Array]
_Results: TypeAlias = dict[str, jax.ShapeDtypeStruct]
_Options: TypeAlias = tuple[tuple[str, Option], ...]
_Asked: TypeAlias = frozenset[str]
_Function: TypeAlias = Callable[[_Arrays], tuple[jax.Array, ...]]
_Wrapped = TypeVar("_Wrapped", bound=Callable[..., Any])

_OPTION_TYPES: dict[str, type[Option]] = {"bool": bool, "int": int, "float": float, "str": str}
_ATTRIBUTE_TYPES: dict[type, Callable[[Any], Any]] = {
    bool: np.bool_,
    int: np.int64,
    float: np.float64,
    str: str,
}


def _refuse(*_: Any, message: str) -> NoReturn:
    raise TypeError(message)


# The identity, in programs that cannot be lowered for CUDA.
_refused_on_cuda = Primitive("octavo_refused_on_cuda")
_refused_on_cuda.def_impl(functools.partial(xla.apply_primitive, _refused_on_cuda))  # under jax.disable_jit
_refused_on_cuda.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_refused_on_cuda, lambda _, x, **__: [x])
mlir.register_lowering(_refused_on_cuda, _refuse, platform="cuda")


CACHE = ("k_pages", "v_pages", "k_scales", "v_scales")
"""What a cache is made of; scales only where it has some of each token and head."""
_OF_ALL_TOKENS = frozenset({"k_scale_array", "v_scale_array", "k_channel_offset", "k_channel_scale"})
_TABLES = frozenset({"rotary_cos", "rotary_sin"})
_OF_HEADS = frozenset({"softmax_phi_array", "sinks"})
_ONE_A_CALL = _OF_ALL_TOKENS | _TABLES | _OF_HEADS | {"w", "bias", "norm_weight", "weight"}
"""Arrays of which a call has one, however many things it works on."""


@dataclass(frozen=True)
class Operator:
    name: str
    # With those among the optional ones that are asked for.
    results: Callable[[_Arrays, Mapping[str, Option], _Asked], _Results]
    fold: Callable[[_jax_batching.Arrays, frozenset[str]], _jax_batching.Folded]
    shareable: frozenset[str] = frozenset()  # what one call can use for all of a mapped axis
    # What takes its place on a GPU where that is faster, or there is no kernel: a product.
    on_cuda: Callable[[_Arrays, Mapping[str, Option]], tuple[jax.Array, ...]] | None = None


def _queries_results(arrays: _Arrays, _: Mapping[str, Option], asked: _Asked) -> _Results:
    q = arrays["q"]
    results = {"out": jax.ShapeDtypeStruct(q.shape, q.dtype)}
    if "lse" in asked:
        results["lse"] = jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32)
    return results


def _attention_results(arrays: _Arrays, options: Mapping[str, Option], asked: _Asked) -> _Results:
    results = _queries_results(arrays, options, asked)
    out, v = results["out"], arrays["v"]
    return {**results, "out": jax.ShapeDtypeStruct((*out.shape[:-1], *v.shape[-1:]), out.dtype)}


def _paged_results(arrays: _Arrays, options: Mapping[str, Option], asked: _Asked) -> _Results:
    results = _queries_results(arrays, options, asked)
    out, v_pages = results["out"], arrays["v_pages"]
    is_int4 = v_pages.dtype == jnp.uint8 and options.get("kv_dtype") == "int4"
    width = (length * (2 if is_int4 else 1) for length in v_pages.shape[-1:])
    return {**results, "out": jax.ShapeDtypeStruct((*out.shape[:-1], *width), out.dtype)}


def _cache_results(arrays: _Arrays, _: Mapping[str, Option], __: _Asked) -> _Results:
    like = {**{name: name for name in CACHE}, "q_out": "q"}
    return {
        result: jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype)
        for result, name in like.items()
        if name in arrays
    }


def _copied_results(arrays: _Arrays, options: Mapping[str, Option], asked: _Asked) -> _Results:
    """The cache that is written: another one, where there is one."""
    to = [f"to_{name}" for name in CACHE if f"to_{name}" in arrays]
    if not to:
        return _cache_results(arrays, options, asked)
    return {name: jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype) for name in to}


def _merged_results(arrays: _Arrays, _: Mapping[str, Option], __: _Asked) -> _Results:
    out = arrays["out_a"]
    return {
        "out": jax.ShapeDtypeStruct(out.shape, out.dtype),
        "lse": jax.ShapeDtypeStruct(out.shape[:-1], jnp.float32),
    }


def _norm_results(arrays: _Arrays, _: Mapping[str, Option], __: _Asked) -> _Results:
    like_x = jax.ShapeDtypeStruct(arrays["x"].shape, arrays["x"].dtype)
    return {"out": like_x, "residual_out": like_x} if "residual" in arrays else {"out": like_x}


_ASKED_GRADIENTS = {"alibi_slopes": "return_dalibi", "sinks": "return_dsinks"}
"""What has a gradient besides q, k and v, and the keywords that ask for it, in the order of the results."""


def _latent_results(arrays: _Arrays, options: Mapping[str, Option], asked: _Asked) -> _Results:
    results = _queries_results(arrays, options, asked)
    out, v_dim = results["out"], cast("int", options["v_dim"])
    return {**results, "out": jax.ShapeDtypeStruct((*out.shape[:-1], max(v_dim, 0)), out.dtype)}


def _gradients(arrays: _Arrays, _: Mapping[str, Option], asked: _Asked) -> _Results:
    names = ["q", "k", "v"]
    for name, keyword in _ASKED_GRADIENTS.items():
        if f"d{name}" not in asked:
            continue
        if name not in arrays:
            raise ValueError(f"attention_backward: d{name} ({keyword}) needs {name}; got none")
        names.append(name)
    return {f"d{name}": jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype) for name in names}


def _linear_results(arrays: _Arrays, options: Mapping[str, Option], _: _Asked) -> _Results:
    x, w = arrays["x"], arrays["w"]
    width = w.shape[0] // (2 if options.get("activation") == "silu_gate" else 1) if w.ndim else 0
    return {"out": jax.ShapeDtypeStruct((*x.shape[:-1], width), x.dtype)}


def _linear_by_jax(arrays: _Arrays, options: Mapping[str, Option]) -> tuple[jax.Array]:
    given: dict[str, Any] = {"bias": None, "activation": None, "residual": None, **arrays, **options}
    names = ("x", "w", "bias", "activation", "residual", "norm_weight", "norm_eps")
    return (_linear_on_cuda.by_jax(**{name: given[name] for name in names if name in given}),)


ATTENTION = Operator(
    "attention",
    _attention_results,
    _jax_batching.fold_attention,
    frozenset({"alibi_slopes", "block_mask", *_OF_HEADS}),
)
PAGED_ATTENTION = Operator(
    "paged_attention",
    _paged_results,
    _jax_batching.fold_paged_attention,
    frozenset({*CACHE, "alibi_slopes", *_OF_ALL_TOKENS, *_OF_HEADS}),
)
APPEND_KV = Operator("append_kv", _cache_results, _jax_batching.fold_append_kv, _OF_ALL_TOKENS | _TABLES)
COPY_PAGES = Operator("copy_pages", _copied_results, _jax_batching.fold_copy_pages)
MERGE_STATES = Operator("merge_states", _merged_results, _jax_batching.fold_merge_states)
ATTENTION_BACKWARD = Operator(
    "attention_backward", _gradients, _jax_batching.fold_attention, frozenset({"block_mask", "sinks"})
)
LINEAR = Operator(
    "linear",
    _linear_results,
    _jax_batching.fold_linear,
    frozenset({"w", "bias", "norm_weight"}),
    _linear_by_jax,
)
LATENT_ATTENTION = Operator(
    "latent_attention", _latent_results, _jax_batching.fold_latent_attention, frozenset({"kv_pages"})
)
RMS_NORM = Operator("rms_norm", _norm_results, _jax_batching.fold_rms_norm, frozenset({"weight"}))


def _vary(result: jax.Array, arrays: _Arrays) -> jax.Array:
    """Inside shard_map: differs from device to device over the mesh axes over which an argument does."""
    if not hasattr(jax, "typeof"):  # before 0.6; shard_map without check_rep then asks for nothing
        return result

    def axes(x: jax.Array) -> frozenset[str]:
        kind: Any = jax.typeof(x)
        if hasattr(kind, "manual_axis_type"):
            kind = kind.manual_axis_type
            return frozenset(kind.varying)
        return frozenset(getattr(kind, "vma", ()))

    new = frozenset[str]().union(*map(axes, arrays.values())) - axes(result)
    if not new:
        return result
    lax: Any = jax.lax
    if hasattr(lax, "pcast"):
        return cast("jax.Array", lax.pcast(result, tuple(new), to="varying"))
    return cast("jax.Array", lax.pvary(result, tuple(new)))


def _call_xla(
    op: Operator, arrays: _Arrays, options: Mapping[str, Option], asked: _Asked
) -> tuple[jax.Array, ...]:
    results = op.results(arrays, options, asked)
    described: dict[str, jax.Array | jax.ShapeDtypeStruct] = {**arrays, **results}
    for name, x in described.items():
        if not all(isinstance(length, int) for length in x.shape):
            raise TypeError(f"{op.name}: {name} must have a known shape; got {x.shape}")
    arguments = [(name, str(x.dtype), tuple(x.shape)) for name, x in described.items()], dict(options)
    why_refused_on_cuda = _core.check_xla_call(op.name, *arguments)
    if why_refused_on_cuda:
        message = f"{op.name}: {why_refused_on_cuda}"
        first = next(iter(arrays))
        arrays = {**arrays, first: _refused_on_cuda.bind(arrays[first], message=message)}
    names = list(arrays)
    call = ffi.ffi_call(
        f"octavo_{op.name}",
        list(results.values()),
        input_output_aliases={names.index(name): i for i, name in enumerate(results) if name in arrays},
    )
    attributes = {name: _ATTRIBUTE_TYPES[type(value)](value) for name, value in options.items()}

    def by_octavo(arrays: _Arrays) -> tuple[jax.Array, ...]:
        outs = call(*arrays.values(), arrays=" ".join([*names, *results]), **attributes)
        return tuple(_vary(out, arrays) for out in outs)

    on_cuda = op.on_cuda
    if on_cuda is None or not _core.jax_multiplies(*arguments):
        return by_octavo(arrays)
    outs = jax.lax.platform_dependent(arrays, cpu=by_octavo, default=lambda x: on_cuda(x, options))
    return cast("tuple[jax.Array, ...]", outs)


@dataclass(frozen=True)
class Gradients:
    """How those of ``attention`` are computed."""

    deterministic: bool
    asked: _Asked

    @classmethod
    def of_call(cls, options: Mapping[str, Any], deterministic: Any) -> Gradients:
        """Slopes and sinks that are not traced are constants, of which nobody can ask the gradient."""

        def is_traced(array: Any) -> bool:
            return any(isinstance(x, jax.core.Tracer) for x in jax.tree_util.tree_leaves(array))

        asked = frozenset(f"d{name}" for name in _ASKED_GRADIENTS if is_traced(options.get(name)))
        return cls(bool(_option("attention", "deterministic_backward", bool, deterministic)), asked)


@functools.cache
def _function(
    op: Operator, options: _Options, asked: _Asked = frozenset(), gradients: Gradients | None = None
) -> _Function:
    """The operator with these options, as JAX transforms it."""

    @jax.custom_batching.custom_vmap
    def call(arrays: _Arrays) -> tuple[jax.Array, ...]:
        return _call_xla(op, arrays, dict(options), asked)

    @call.def_vmap
    def _vmap(
        axis_size: int, in_batched: list[dict[str, bool]], arrays: _Arrays
    ) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
        is_mapped = in_batched[0]
        # All have the dropout mask that one would have, and gradients of the sinks of their own.
        by_turns = bool(dict(options).get("dropout_p")) or "dsinks" in asked
        if by_turns or any(is_mapped.get(name) for name in _ONE_A_CALL):
            one_call = _function(op, options, asked)
            mapped = {name: x for name, x in arrays.items() if is_mapped[name]}
            results = jax.lax.map(lambda one: one_call({**arrays, **one}), mapped)
            return results, tuple(True for _ in results)
        # All parts of a cache are shared, or none.
        shared = op.shareable - {name for name, mapped in is_mapped.items() if mapped}
        if not {name for name in CACHE if name in arrays} <= shared:
            shared -= set(CACHE)
        mapped = {
            name: x if is_mapped[name] or name in shared else jnp.broadcast_to(x, (axis_size, *x.shape))
            for name, x in arrays.items()
        }
        bounds = {
            f"max_seqlen_{which}": mapped[which].shape[1] for which in "qk" if f"cu_seqlens_{which}" in mapped
        }
        folded, places = op.fold(mapped, shared)
        kept = dict(options)
        if is_mapped.get("page_table", False) or "k_pages" not in shared:
            kept.pop("shared_prefix_len", None)  # each element of the axis has a prefix of its own
        outs = _function(op, tuple({**bounds, **kept}.items()), asked)(folded)
        one = {name: jax.ShapeDtypeStruct(x.shape[is_mapped[name] :], x.dtype) for name, x in arrays.items()}
        wanted = op.results(cast("_Arrays", one), dict(options), asked)
        results = []
        for (result, kind), out in zip(wanted.items(), outs, strict=True):
            placed = out[places[result]] if result in places else out
            if placed.size == axis_size * math.prod(kind.shape):
                results.append(placed.reshape(axis_size, *kind.shape))
            else:  # gradients of slopes, which each element's sequences had in common
                results.append(placed.reshape(axis_size, -1, *kind.shape).sum(axis=1))
        return tuple(results), tuple(True for _ in results)

    if gradients is None:
        return jax.jit(_without_gradients(op, call), inline=True)
    differentiable = _with_gradients(op, call, options, asked, gradients)
    # A gradient varies from device to device as the results do. Of an array that does not, the sum is wanted,
    # which is what JAX makes of the gradient where it is made to vary.
    return jax.jit(
        lambda arrays: differentiable({name: _vary(x, arrays) for name, x in arrays.items()}), inline=True
    )


def _without_gradients(op: Operator, call: _Function) -> _Function:
    refused = jax.custom_jvp(call)

    @refused.defjvp
    def _jvp(_: Any, __: Any) -> Any:
        twice = "attention cannot be differentiated twice: " if op is ATTENTION_BACKWARD else ""
        raise TypeError(f"{twice}{op.name} has no derivatives; use jax.lax.stop_gradient on its arguments")

    return cast("_Function", refused)


_OF_BACKWARD = frozenset(argument["name"] for argument in ARGUMENTS["attention_backward"])


def _with_gradients(
    op: Operator, call: _Function, options: _Options, asked: _Asked, gradients: Gradients
) -> _Function:
    differentiable = jax.custom_vjp(call)

    def forward(arrays: _Arrays) -> tuple[tuple[jax.Array, ...], tuple[_Arrays, ...]]:
        out, lse = _function(op, options, frozenset({"lse"}), gradients)(arrays)
        return (out, lse) if "lse" in asked else (out,), (arrays, {"out": out, "lse": lse})

    def backward(
        kept: tuple[_Arrays, ...], of_results: tuple[jax.Array, ...]
    ) -> tuple[dict[str, jax.Array | None]]:
        arrays, results = kept
        given = {**dict(zip(("dout", "dlse"), of_results, strict=False)), **arrays, **results}
        given = {name: x for name, x in given.items() if name in _OF_BACKWARD}
        of_backward = tuple(option for option in options if option[0] in _OF_BACKWARD)
        with_deterministic = (*of_backward, ("deterministic", gradients.deterministic))
        computed = _function(ATTENTION_BACKWARD, with_deterministic, gradients.asked)(given)
        others = (name for name in _ASKED_GRADIENTS if f"d{name}" in gradients.asked)
        of_arrays = dict(zip(("q", "k", "v", *others), computed, strict=True))
        return ({name: of_arrays.get(name) for name in arrays},)  # None: no numbers, or zeros

    differentiable.defvjp(forward, backward)
    return cast("_Function", differentiable)


def _option(op: str, name: str, kind: type[Option], value: Any) -> Option:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{op}: {name} is part of the program and must be a Python {kind.__name__}, not traced"
        )
    if kind is bool and isinstance(value, (bool, np.bool_)):
        return bool(value)
    if kind is int and hasattr(value, "__index__"):
        return operator.index(value)
    if kind is float and hasattr(value, "__float__"):
        return float(value)
    if kind is str and isinstance(value, str):
        return value
    raise TypeError(f"{op}: {name} must be a {kind.__name__}; got {type(value).__name__}")


def _integers_of_64_bits(value: Any) -> np.ndarray | None:
    """Those of NumPy or of a list, which JAX would make 32 bits of, outside of its x64 mode."""
    is_on_host = isinstance(value, (np.ndarray, list, tuple))
    if not is_on_host or any(isinstance(x, jax.Array) for x in jax.tree_util.tree_leaves(value)):
        return None
    array = np.asarray(value)
    is_wide = array.dtype in (np.int64, np.uint64)
    return array if is_wide and jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype else None


def _as_array(op: str, name: str, value: Any) -> jax.Array:
    wide = _integers_of_64_bits(value)
    if wide is not None:
        bounds = np.iinfo(np.int32 if wide.dtype == np.int64 else np.uint32)
        beyond = wide[(wide < bounds.min) | (wide > bounds.max)]
        if beyond.size > 0:
            raise ValueError(
                f"{op}: {name} must fit in {bounds.dtype} outside of JAX's x64 mode; got {beyond[0]}"
            )
    return jnp.asarray(value)


def words_of(op: str, name: str, mask: Any) -> jax.Array:
    """The words of a mask: bools are packed, and words of 64 bits become pairs where JAX has no such."""
    wide = _integers_of_64_bits(mask)
    if wide is not None and wide.ndim == 1:
        return jnp.asarray(np.ascontiguousarray(wide).view(np.uint32).reshape(-1, 2))
    words = _as_array(op, name, mask)
    return cast("jax.Array", words_of_bools(op, name, words)) if words.dtype == bool else words


def run(
    op: Operator,
    arguments: Mapping[str, Any],
    asked: Iterable[str] = (),
    gradients: Gradients | None = None,
) -> tuple[jax.Array, ...]:
    """Call an operator; `arguments` has all of them that there are in JAX programs.

    `asked` names the optional results that are wanted. Without `gradients` it refuses to be differentiated.
    """
    arrays: _Arrays = {}
    options: dict[str, Option] = {}
    # What may be a number or an array, by both names.
    in_place = {y for x in ARGUMENTS[op.name] if "in_place_of" in x for y in (x["name"], x["in_place_of"])}
    for argument in ARGUMENTS[op.name]:
        name, default = argument["name"], argument["default"]
        is_array = argument["type"] == "array"
        value = arguments.get(argument.get("in_place_of", name))
        if name in in_place and isinstance(value, (jax.Array, np.ndarray)) != is_array:
            continue
        if value is None and default is None:
            if is_array and argument["required"]:
                raise TypeError(f"{op.name}: {name} must be an array; got None")
            continue
        if is_array:
            arrays[name] = _as_array(op.name, name, value)
        else:
            options[name] = _option(op.name, name, _OPTION_TYPES[argument["type"]], value)
    return _function(op, tuple(options.items()), frozenset(asked), gradients)(arrays)


_ARGS_SECTION = re.compile(r"^Args:\n(.*?)\n\n", re.MULTILINE | re.DOTALL)


def _documented_arguments(docstring: str) -> dict[str, str]:
    """The entries of the section Args by name, each with all of its lines."""
    section = _ARGS_SECTION.search(inspect.cleandoc(docstring))
    entries = re.split(r"\n(?=    \w)", section[1]) if section else []
    return {entry.partition(":")[0].strip(): entry for entry in entries}


def like(original: Callable[..., Any], options: type | None = None) -> Callable[[_Wrapped], _Wrapped]:
    """Give a function's ``**options`` names and defaults; what it does not document is as in the original."""

    def complete(declared: _Wrapped) -> _Wrapped:
        def write_arguments(parameters: list[str]) -> str:
            return ", ".join(f"{name}={name}" for name in parameters)

        function = with_keywords(declared, options, declared, write_arguments)
        if function.__doc__ and original.__doc__:  # not under python -OO
            own = inspect.cleandoc(function.__doc__)
            entries = {**_documented_arguments(original.__doc__), **_documented_arguments(own)}
            arguments = "\n".join(entries[name] for name in inspect.signature(function).parameters)
            function.__doc__ = _ARGS_SECTION.sub(lambda _: f"Args:\n{arguments}\n\n", own)
        return function

    return complete
