"""Every face of an operator equals its description, src/operators/schema.h; seven places make an argument."""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import math
import re
import sys
import typing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import octavo
from octavo import _core, _operators
from support.c_library import c_interface
from support.programs import run

ROOT = Path(__file__).resolve().parents[2]

OPERATORS = _core.operator_arguments()
INPUTS = _operators.ARGUMENTS
CHOICES = (  # of Python alone, if no inputs
    *("return_lse", "return_dalibi", "return_dsinks", "out", "residual_out", "q_out", "dq", "dk", "dv"),
    *("plan", "stream"),
)
POSITIONAL_OPTIONS = (
    *(("linear", "bias"), ("rms_norm", "eps"), ("rms_norm", "residual")),
    *(("append_kv", "page_table"), ("append_kv", "seq_lens")),
)
CPP_STRUCTS = {
    "attention": ("attention.h", "AttentionArgs"),
    "paged_attention": ("paged_attention.h", "PagedAttentionArgs"),
    "append_kv": ("paged_attention.h", "AppendKvArgs"),
    "copy_pages": ("paged_attention.h", "CopyPagesArgs"),
    "merge_states": ("attention.h", "MergeStatesArgs"),
    "attention_backward": ("attention.h", "AttentionBackwardArgs"),
    "linear": ("linear.h", "LinearArgs"),
    "rms_norm": ("rms_norm.h", "RmsNormArgs"),
    "latent_attention": ("latent_attention.h", "LatentAttentionArgs"),
}
C_STRUCTS = {
    "attention": c_interface.AttentionArgs,
    "paged_attention": c_interface.PagedAttentionArgs,
    "append_kv": c_interface.AppendKvArgs,
    "copy_pages": c_interface.CopyPagesArgs,
    "attention_backward": c_interface.AttentionBackwardArgs,
    "linear": c_interface.LinearArgs,
    "rms_norm": c_interface.RmsNormArgs,
    "latent_attention": c_interface.LatentAttentionArgs,
}
SCALARS = [
    pytest.param(operator, argument, id=f"{operator}-{argument['name']}")
    for operator, arguments in INPUTS.items()
    for argument in arguments
    if argument["type"] != "array"
]


def can_import(module):
    """Whether a face of Octavo can be imported: its library is there."""
    return importlib.util.find_spec(module.rpartition(".")[2]) is not None


def names(arguments):
    return [argument["name"] for argument in arguments]


def parameters_of(operator):
    """What Python has parameters for: one for a number and the array in its place."""
    return [argument for argument in INPUTS[operator] if "in_place_of" not in argument]


def test_the_description_itself():
    """Some of it by hand: what all other tests rely on."""
    assert list(OPERATORS) == [
        *("attention", "paged_attention", "append_kv", "copy_pages", "merge_states", "attention_backward"),
        *("linear", "rms_norm", "latent_attention"),
    ]
    described = {argument["name"]: argument for argument in OPERATORS["paged_attention"]}
    assert described["q"] == {
        "name": "q",
        "type": "array",
        "access": "read",
        "required": True,
        "default": None,
    }
    assert not described["alibi_slopes"]["required"]
    assert [described[name]["access"] for name in ("out", "lse")] == ["result", "result"]
    assert (described["causal"]["type"], described["causal"]["default"]) == ("bool", True)
    assert (described["window_left"]["type"], described["window_left"]["default"]) == ("int", -1)
    assert (described["softcap"]["type"], described["softcap"]["default"]) == ("float", 0.0)
    assert (described["k_scale"]["type"], described["k_scale"]["default"]) == ("float", None)
    assert [x["name"] for x in OPERATORS["append_kv"] if x["access"] == "write"] == [
        "k_pages",
        "v_pages",
        "k_scales",
        "v_scales",
    ]
    in_place = {x["name"]: x["in_place_of"] for x in OPERATORS["append_kv"] if "in_place_of" in x}
    assert in_place == {"k_scale_array": "k_scale", "v_scale_array": "v_scale"}
    assert (described["kv_dtype"]["type"], described["kv_dtype"]["default"]) == ("str", None)


@pytest.mark.parametrize("operator", OPERATORS)
def test_cpp_structs(operator):
    """Their fields are the arguments and the stream. The defaults in the description are theirs."""
    header, struct = CPP_STRUCTS[operator]
    text = re.sub(r"//.*", "", (ROOT / "include" / "octavo" / header).read_text())
    body = re.search(rf"struct {struct} {{(.*?)\n}};", text, re.DOTALL)[1]
    fields = re.findall(r"(\w+)(?: = [^,;]+)?[,;]", body)
    own = ["plan", "stream"] if operator == "linear" else ["stream"]
    assert sorted(fields) == sorted([*names(OPERATORS[operator]), *own])


@pytest.mark.parametrize("operator", C_STRUCTS)
def test_c_structs(operator):
    library, struct = c_interface.Library(), C_STRUCTS[operator]
    fields = dict(struct._fields_)
    assert sorted(fields) == sorted([*names(OPERATORS[operator]), "struct_size", "stream"])
    args = struct()
    ctypes.memset(ctypes.byref(args), 0x55, ctypes.sizeof(args))
    getattr(library._library, f"octavo_{operator}_args_init")(ctypes.byref(args))
    assert args.struct_size == ctypes.sizeof(args) and args.stream is None
    c_types = {
        "array": (c_interface.Tensor,),
        "bool": (ctypes.c_int32,),
        "int": (ctypes.c_int64,),
        "float": (ctypes.c_double, ctypes.c_float),
        "str": (ctypes.c_int32,),
    }
    for argument in OPERATORS[operator]:
        value = getattr(args, argument["name"])
        assert fields[argument["name"]] in c_types[argument["type"]]
        if argument["type"] == "array":
            assert bytes(value) == bytes(ctypes.sizeof(value))
        elif argument["default"] is not None:
            assert value == argument["default"]
        else:  # what a user's own value cannot be, or does no more than none
            assert value == {"int": -1, "str": -1, "float": 1.0}[argument["type"]] or math.isnan(value)


@pytest.mark.parametrize("operator", OPERATORS)
def test_python_signatures(operator):
    function, described = getattr(octavo, operator), parameters_of(operator)
    in_place = {argument.get("in_place_of") for argument in INPUTS[operator]}
    signature = inspect.signature(function)
    inputs = names(described)
    parameters = [p for p in signature.parameters.values() if p.name in inputs or p.name not in CHOICES]
    assert [p.name for p in parameters] == names(described)
    for parameter, argument in zip(parameters, described, strict=True):
        required = argument["required"]
        is_positional = required or (operator, parameter.name) in POSITIONAL_OPTIONS
        assert parameter.kind is (
            parameter.POSITIONAL_OR_KEYWORD if is_positional else parameter.KEYWORD_ONLY
        )
        default = parameter.empty if required else argument["default"]
        assert parameter.default == default and type(parameter.default) is type(default)
        kind = argument["type"] + (" | array" if argument["name"] in in_place else "")
        kind += " | None" if default is None else ""
        assert parameter.annotation in (
            kind,
            kind.replace("array", "SupportsDLPack"),
            kind.replace("array", "Array"),
            kind.replace("array", "Integers"),
        )
    choices = [p.name for p in signature.parameters.values() if p not in parameters]
    assert choices == [name for name in CHOICES if name in choices] and choices[-1] == "stream"
    assert list(typing.get_type_hints(function)) == [*signature.parameters, "return"]


@pytest.mark.parametrize("operator", OPERATORS)
def test_docstrings(operator):
    """Each argument has an entry, in order, which names its default."""
    function = getattr(octavo, operator)
    section = inspect.getdoc(function).partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = {x.partition(":")[0].strip(): x for x in re.split(r"\n(?=    \w)", section)}
    assert list(entries) == list(inspect.signature(function).parameters)
    for argument in parameters_of(operator):
        if argument["default"] is not None:
            assert f"Default: {argument['default']}" in " ".join(entries[argument["name"]].split())


def test_typed_dicts():
    """Type checkers see the keywords that the operators have."""
    modules = {"octavo._types": "{}Options"}
    if can_import("octavo.jax"):
        modules["octavo.jax"] = "_{}Options"
    for module, name in modules.items():
        for operator in ("attention", "paged_attention", "attention_backward"):
            title = operator.title().replace("_", "")
            options = getattr(importlib.import_module(module), name.format(title))
            expected = [argument["name"] for argument in parameters_of(operator) if not argument["required"]]
            assert sorted(options.__annotations__) == sorted(expected)


USES = """
from typing import Any

from typing_extensions import assert_type

import numpy as np
from numpy.typing import NDArray

import octavo

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Half = np.ndarray[tuple[int, ...], np.dtype[np.float16]]
Lse = NDArray[np.float32]


class Other:  # an array of a library without dtypes in its types
    def __dlpack__(self) -> object: ...


def use(x: Array, i: np.ndarray[tuple[int, ...], np.dtype[np.int32]], o: Other, b: bool) -> None:
    paged = (x, x, x, i, i)
    assert_type(octavo.attention(x, x, x, causal=True, alibi_slopes=x, out=x, stream=0), Array)
    assert_type(octavo.attention(x, x, x, softmax_scale=0.5, return_lse=True), tuple[Array, Lse])
    assert_type(octavo.paged_attention(*paged, cu_seqlens_q=i, num_splits=None, window_left=2), Array)
    assert_type(octavo.paged_attention(*paged, return_lse=True, k_scale=0.5), tuple[Array, Lse])
    assert_type(octavo.paged_attention(*paged, k_scale=x, k_scales=x, kv_dtype="int4"), Array)
    octavo.paged_attention(x, x, x, [[0, 1]], (3,), chosen_pages=[[[0, 1], [1, -1]]])
    octavo.paged_attention(x, x, x, ((0, 1),), [3], cu_seqlens_q=[0, 1], bidirectional_ranges=[[(0, 2)]])
    octavo.copy_pages(x, x, [(0, 1)])
    octavo.copy_pages(x, x, octavo.PageAllocator(4, 2).take_copies())
    octavo.paged_attention(x, x, x, [["0"]], [3])  # type: ignore[arg-type]
    results = (x, x, x, x, x, x)
    assert_type(octavo.attention_backward(*results, dlse=x, dq=x), tuple[Array, Array, Array])
    assert_type(
        octavo.attention_backward(*results, alibi_slopes=x, return_dalibi=True, deterministic=True),
        tuple[Array, Array, Array, Array],
    )
    assert_type(
        octavo.attention_backward(*results, sinks=x, return_dsinks=True), tuple[Array, Array, Array, Array]
    )
    assert_type(
        octavo.attention_backward(*results, alibi_slopes=x, return_dalibi=True, sinks=x, return_dsinks=True),
        tuple[Array, Array, Array, Array, Array],
    )
    octavo.append_kv(x, x, x, x, i, i, rotary_cos=x, rotary_sin=x, rotary_interleaved=True)
    assert_type(octavo.append_kv(x, x, x, x, i, i, rotary_cos=x, rotary_sin=x, q=x, q_out=x), Array)
    octavo.append_kv(x, x, x, x, i, i, q_out=x)  # type: ignore[call-overload]
    assert_type(octavo.rms_norm(x, x, 1e-5, out=x), Array)
    assert_type(octavo.rms_norm(x, x, residual=x, out=x, residual_out=x), tuple[Array, Array])
    assert_type(octavo.rms_norm(x, x, 1e-5, x), tuple[Array, Array])
    octavo.rms_norm(x, x, residual_out=x)  # type: ignore[call-overload]
    assert_type(octavo.latent_attention(x, x, i, i, softmax_scale=0.1, out=x), Array)
    assert_type(octavo.latent_attention(x, x, i, i, softmax_scale=0.1, return_lse=True), tuple[Array, Lse])
    octavo.latent_attention(x, x, i, i, softcap=0.1)  # type: ignore[call-overload]
    h = x.astype(np.float16)
    assert_type(octavo.attention(h, h, h, return_lse=True), tuple[Half, Lse])
    assert_type(octavo.merge_states(h, x, h, x), tuple[Half, Lse])
    assert_type(octavo.attention(o, o, o, return_lse=True), tuple[Other, Other])
    assert_type(octavo.merge_states(o, o, o, o), tuple[Other, Other])
    assert_type(octavo.attention(h, h, h, return_lse=b), Half | tuple[Half, Any])
    assert_type(octavo.paged_attention(*paged, return_lse=b), Array | tuple[Array, Any])
    latent = octavo.latent_attention(x, x, i, i, softmax_scale=0.1, return_lse=b)
    assert_type(latent, Array | tuple[Array, Any])
    assert_type(octavo.attention_backward(*results, return_dalibi=b), tuple[Array, ...])
    assert_type(octavo.attention_backward(*results, return_dalibi=True, return_dsinks=b), tuple[Array, ...])
    octavo.attention_backward(*results, return_lse=True)  # type: ignore[call-overload]
    octavo.attention(x, x, x, window=3)  # type: ignore[call-overload]
    octavo.attention(x, x, x, window_left=0.5)  # type: ignore[call-overload]
    octavo.paged_attention(*paged, causal=None)  # type: ignore[call-overload]
    octavo.paged_attention(*paged, return_lse=True, v_scale="1")  # type: ignore[call-overload]
"""


JAX_USES = """
from typing_extensions import assert_type

import jax
import numpy as np

import octavo.jax


def use(x: jax.Array, b: bool) -> None:
    octavo.jax.paged_attention(x, x, x, [[0], [1]], (1, 1), cu_seqlens_q=np.ones(3, np.int32))
    octavo.jax.paged_attention(x, x, x, x, x, chosen_pages=[[0]], bidirectional_ranges=[[(0, 2)]])
    octavo.jax.append_kv(x, x, x, x, [[0], [1]], [1, 1])
    octavo.jax.append_kv(x, x, x, x, slot_mapping=[3])
    octavo.jax.copy_pages(x, x, [(0, 1)])
    octavo.jax.attention(x, x, x, cu_seqlens_q=[0, 2], cu_seqlens_k=[0, 2], prefix_lens=[1])
    octavo.jax.paged_attention(x, x, x, [["0"]], [1])  # type: ignore[arg-type]
    assert_type(octavo.jax.attention(x, x, x, return_lse=b), jax.Array | tuple[jax.Array, jax.Array])
    backward = octavo.jax.attention_backward(x, x, x, x, x, x, return_dalibi=b, return_dsinks=True)
    assert_type(backward, tuple[jax.Array, ...])
"""


@pytest.mark.parametrize("uses", [pytest.param(USES, id="octavo"), pytest.param(JAX_USES, id="jax")])
def test_type_checkers(tmp_path, uses):
    """They know the results by what is asked for, and refuse unknown keywords and values of other types."""
    pytest.importorskip("mypy")
    if uses is JAX_USES:
        pytest.importorskip("octavo.jax")
    (tmp_path / "uses.py").write_text(uses)
    run(sys.executable, "-m", "mypy", "--strict", "--config-file=", "uses.py", cwd=tmp_path)


@pytest.mark.parametrize("operator", OPERATORS)
def test_torch_schemas(operator):
    torch = pytest.importorskip("torch")
    import octavo.torch  # noqa: F401

    overloads = getattr(torch.ops.octavo, operator)
    results = [x["name"] for x in OPERATORS[operator] if x["access"] == "result"]
    for overload in overloads.overloads():
        # copy_pages_to has those that begin with "to_", and two overloads have one of their own.
        described = [x for x in INPUTS[operator] if not x["name"].startswith("to_")]
        others = [*results, "deterministic", "of_slopes"]
        arguments = getattr(overloads, overload)._schema.arguments
        arguments = [x for x in arguments if x.name in names(described) or x.name not in others]
        for ours, argument in zip(arguments, described, strict=True):
            optional = not argument["required"] and argument["default"] is None
            kind = argument["type"].replace("array", "Tensor")
            assert ours.name == argument["name"] and not ours.kwarg_only
            assert str(ours.type) == (f"Optional[{kind}]" if optional else kind)
            assert ours.has_default_value() == (not argument["required"])
            assert ours.default_value == argument["default"]
            assert bool(ours.alias_info) == (argument["access"] == "write")


def xla_arrays(operator):
    """(name, dtype, shape) of small arrays that fit together."""
    shapes = {
        "attention": {"q": (1, 2, 2, 8), "k": (1, 3, 1, 8), "v": (1, 3, 1, 8), "out": (1, 2, 2, 8)},
        "paged_attention": {
            "q": (1, 2, 8),
            "k_pages": (4, 2, 1, 8),
            "v_pages": (4, 2, 1, 8),
            "page_table": (1, 3),
            "seq_lens": (1,),
            "out": (1, 2, 8),
        },
        "append_kv": {
            "k": (1, 1, 8),
            "v": (1, 1, 8),
            "k_pages": (4, 2, 1, 8),
            "v_pages": (4, 2, 1, 8),
            "page_table": (1, 3),
            "seq_lens": (1,),
        },
        "attention_backward": {
            **dict.fromkeys(("dout", "q", "out", "dq"), (1, 2, 2, 8)),
            **dict.fromkeys(("k", "v", "dk", "dv"), (1, 3, 1, 8)),
            "lse": (1, 2, 2),
        },
        "linear": {"x": (3, 8), "w": (4, 8), "out": (3, 4)},
        "rms_norm": {"x": (2, 8), "weight": (8,), "out": (2, 8)},
        "latent_attention": {
            "q": (1, 2, 16),
            "kv_pages": (4, 2, 16),
            "page_table": (1, 3),
            "seq_lens": (1,),
            "out": (1, 2, 8),
        },
    }[operator]
    dtypes = {"page_table": "int32", "seq_lens": "int32"}
    return [(name, dtypes.get(name, "float32"), shape) for name, shape in shapes.items()]


@pytest.mark.parametrize(("operator", "argument"), SCALARS)
def test_xla_attributes(operator, argument):
    """A call from a JAX program reads each scalar, as the type that it is described by."""
    arrays, name = xla_arrays(operator), argument["name"]
    fitting = {"bool": False, "int": 0, "float": 0.5, "str": "int4"}
    for kind, value in fitting.items():
        if kind != argument["type"]:
            with pytest.raises(RuntimeError, match="variant"):
                _core.check_xla_call(operator, arrays, {name: value})
    if name == "activation":
        with pytest.raises(ValueError, match="activation must be silu, gelu, silu_gate or None; got int4"):
            _core.check_xla_call(operator, arrays, {name: "int4"})
        _core.check_xla_call(operator, arrays, {name: "silu"})
    elif name == "kv_dtype":
        with pytest.raises(ValueError, match=r"kv_dtype \(int4\) says what pages of uint8 hold"):
            _core.check_xla_call(operator, arrays, {name: "int4"})
    elif not name.startswith("max_seqlen"):  # those are for packed arrays
        others = {"dropout_seed": 1} if name == "dropout_p" else {}
        if operator == "latent_attention":
            others = {"softmax_scale": 0.5, "v_dim": 8}
        value = {"num_splits": 1, "v_dim": 8, "block_size": 64}.get(name, fitting[argument["type"]])
        _core.check_xla_call(operator, arrays, {**others, name: value})


@pytest.mark.parametrize(("operator", "argument"), SCALARS)
def test_jax_options(operator, argument):
    pytest.importorskip("jax")
    import octavo.jax

    inputs = names(INPUTS[operator])
    arrays = {name: np.zeros(shape, dtype) for name, dtype, shape in xla_arrays(operator) if name in inputs}
    name, kind = argument["name"], argument["type"]
    with pytest.raises(TypeError, match=f"{operator}: {name} must be a {kind}; got object"):
        getattr(octavo.jax, operator)(**arrays, **{name: object()})


def test_arguments_are_passed_in_the_order_of_the_description(monkeypatch):
    """Whatever the order in which Python declares or gives them."""

    def merge_states(out_b: int, lse_a: int, out_a: int, *, stream: int = 0, lse_b: int = 0) -> None:
        """Merge."""

    monkeypatch.setattr(_operators, "_core", SimpleNamespace(merge_states=lambda *args: args))
    declared = _operators.native()(merge_states)
    assert declared(3, 2, lse_b=4, stream=6, out_a=1) == (1, 2, 3, 4, 6)
    assert inspect.signature(declared) == inspect.signature(merge_states)
    assert declared.__doc__ == "Merge." and declared.__qualname__ == merge_states.__qualname__
    assert inspect.getsource(declared) == inspect.getsource(merge_states)


def test_functions_are_made_without_docstrings_too():
    modules = [name for name in ("octavo", "octavo.jax", "octavo.torch") if can_import(name)]
    run(sys.executable, "-OO", "-c", f"import {', '.join(modules)}; assert not octavo.attention.__doc__")


# How soon a new argument is added


def places_of(word):
    """The files before any kernel that have the word, each as often as it has groups of lines with it."""
    folders = [ROOT / "examples", ROOT / "include", ROOT / "python"]
    folders += [folder for folder in (ROOT / "src").iterdir() if folder.name not in ("cpu", "cuda")]
    files = [file for folder in folders for file in folder.rglob("*.*")]
    places = []
    for file in files:
        if file.suffix not in (".h", ".cpp", ".py") or file.name == "flash_attn.py":
            continue  # the latter has the arguments of another library
        last = -math.inf
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines()):
            if re.search(rf"\b{word}\b", line):
                if number > last + 3:
                    places.append(str(file.relative_to(ROOT)))
                last = number
    return places


def test_a_scalar_of_paged_attention_is_written_in_seven_places():
    """Those that docs/developing.md lists."""
    page = (ROOT / "docs" / "developing.md").read_text(encoding="utf-8")
    section = page.partition("\n## Add an argument\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\d\. `([\w/.]+)`", section, re.MULTILINE)
    assert len(listed) == 7
    # latent_attention has an argument of this name too, in files of its own and beside paged_attention's.
    places = {place for place in places_of("num_splits") if "latent_attention" not in place}
    assert sorted(places) == sorted(listed)
