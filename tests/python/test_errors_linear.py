"""What linear refuses, word for word."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import octavo
from support.refusals import (
    FLOATS,
    LENGTHS,
    NO_ARRAY,
    L,
    broadcast,
    case,
    f32,
    layer,
    long,
    memory,
    read_only,
    refused,
)


def f16(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float16)


AXES_OF_X = "must have shape [..., N], as many axes as x"
LIKE_OUT = "must have the leading axes of x and the width of w: [2, 3, 5]; got"

CASES = [
    # Kinds and dtypes.
    case(*L, TypeError, f"x {NO_ARRAY}; got NoneType", x=None),
    case(*L, TypeError, f"w {NO_ARRAY}; got list", w=[[1.0]]),
    case(*L, TypeError, f"bias {NO_ARRAY}; got float", bias=1.0),
    case(*L, TypeError, f"out {NO_ARRAY}; got str", out="out"),
    case(*L, TypeError, f"x {FLOATS}; got float64", x=np.ones((2, 3, 8))),
    case(*L, TypeError, f"w {FLOATS}; got int8", w=np.ones((5, 8), np.int8)),
    case(*L, TypeError, f"x {FLOATS}; got int32", x=np.ones((2, 3, 8), np.int32)),
    case(*L, TypeError, f"w {FLOATS}; got int32", w=np.ones((5, 8), np.int32)),
    case(*L, TypeError, "w must be float16 like x; got float32", x=f16(2, 3, 8)),
    case(*L, TypeError, "bias must be float32 like x; got float16", bias=f16(5)),
    case(*L, TypeError, "residual must be float32 like x; got float16", residual=f16(2, 3, 5)),
    case(*L, TypeError, "out must be float32 like x; got float16", out=f16(2, 3, 5)),
    case(*L, TypeError, "norm_weight must be float32 like x; got float16", norm_weight=f16(8)),
    case(*L, TypeError, f"norm_weight {NO_ARRAY}; got float", norm_weight=1.0),
    case(*L, TypeError, "out must be float32 like x; got float16", w=f16(5, 8), out=f16(2, 3, 5)),
    # Shapes.
    case(*L, ValueError, "x must have shape [..., K] with up to 5 leading axes; got []", x=f32()),
    case(*L, ValueError, "x must have at most 6 axes; got 7", x=f32(1, 1, 1, 1, 1, 2, 8)),
    case(*L, ValueError, "w must have shape [N, K]; got [8]", w=f32(8)),
    case(*L, ValueError, "w must have shape [N, K]; got [1, 5, 8]", w=f32(1, 5, 8)),
    case(*L, ValueError, "w must have shape [2 F, K]; got [8]", w=f32(8), activation="silu_gate"),
    case(*L, ValueError, "K of w (7) must equal that of x (8)", w=f32(5, 7)),
    case(*L, ValueError, "N of bias (6) must equal that of w (5)", bias=f32(6)),
    case(*L, ValueError, "K of norm_weight (7) must equal that of x (8)", norm_weight=f32(7)),
    case(*L, ValueError, "norm_weight must have shape [K]; got [1, 8]", norm_weight=f32(1, 8)),
    case(
        *L,
        ValueError,
        "x must have at most 3 leading axes that do not lie behind one another where norm_weight is given; "
        "got 4 of them in [2, 2, 2, 2, 8]",
        x=f32(3, 3, 3, 3, 8)[:2, :2, :2, :2],
        norm_weight=f32(8),
    ),
    case(*L, ValueError, "bias must have shape [N]; got [1, 5]", bias=f32(1, 5)),
    case(
        *L,
        ValueError,
        "bias must have shape [2 F]; got [2, 3]",
        w=f32(6, 8),
        bias=f32(2, 3),
        activation="silu_gate",
    ),
    case(
        *L,
        ValueError,
        "N of bias (3) must equal that of w (6)",
        w=f32(6, 8),
        bias=f32(3),
        activation="silu_gate",
    ),
    case(
        *L,
        ValueError,
        "w must have an even number of rows with activation silu_gate; got 5",
        activation="silu_gate",
    ),
    *(
        case(
            *L,
            ValueError,
            f"{name} {AXES_OF_X}; got [6, 5]",
            **{name: f32(6, 5)},
        )
        for name in ("residual", "out")
    ),
    *(
        case(*L, ValueError, f"{name} {LIKE_OUT} [3, 2, 5]", **{name: f32(3, 2, 5)})
        for name in ("residual", "out")
    ),
    case(*L, ValueError, f"out {LIKE_OUT} [2, 3, 8]", out=f32(2, 3, 8)),
    case(
        *L,
        ValueError,
        f"K {LENGTHS}; got {2**30 + 1}",
        x=as_strided(f32(1), (2, 3, 2**30 + 1), (0, 0, 4)),
        w=as_strided(f32(1), (5, 2**30 + 1), (0, 4)),
    ),
    case(*L, ValueError, f"N {LENGTHS}; got {2**30 + 1}", w=long(2**30 + 1, 8), out=long(2, 3, 8)),
    # Strides.
    case(
        *L, ValueError, "x must have a unit stride along its last axis; got stride 0", x=broadcast((2, 3, 8))
    ),
    case(*L, ValueError, "w must have a unit stride along its last axis; got stride 5", w=f32(8, 5).T),
    case(*L, ValueError, "bias must have a unit stride along its last axis; got stride 2", bias=f32(10)[::2]),
    case(
        *L,
        ValueError,
        "residual must have a unit stride along its last axis; got stride 2",
        residual=f32(2, 3, 10)[..., ::2],
    ),
    case(
        *L,
        ValueError,
        "out must have a unit stride along its last axis; got stride -1",
        out=f32(2, 3, 5)[..., ::-1],
    ),
    case(
        *L,
        ValueError,
        "out must not overlap itself: the stride of axis 1 (0) must be at least 1 in magnitude",
        out=as_strided(f32(2, 1, 5), (2, 3, 5), (20, 0, 4)),
    ),
    # Memory.
    case(*L, ValueError, "out must be writable; it is read-only", out=read_only(f32(2, 3, 5))),
    *(
        case(*L, ValueError, f"out must not overlap {name} in memory", **arrays)
        for name, arrays in (
            ("x", {"out": memory(0, 2, 3, 5), "x": memory(29, 2, 3, 8)}),
            ("w", {"out": memory(39, 2, 3, 5), "w": memory(0, 5, 8)}),
            ("bias", {"out": memory(0, 2, 3, 5), "bias": memory(10, 5)}),
            ("residual", {"out": memory(0, 2, 3, 5), "residual": memory(5, 2, 3, 5)}),
            ("norm_weight", {"out": memory(0, 2, 3, 5), "norm_weight": memory(5, 8)}),
        )
    ),
    # Options.
    case(*L, ValueError, "activation must be silu, gelu, silu_gate or None; got relu", activation="relu"),
    case(*L, TypeError, "activation must be a str; got bool", activation=True),
    case(
        *L,
        ValueError,
        r"activation must be text without null characters and lone surrogates; got '\ud800'",
        activation="\ud800",
    ),
    case(
        *L,
        ValueError,
        r"activation must be text without null characters and lone surrogates; got 'silu\x00'",
        activation="silu\0",
    ),
    case(*L, TypeError, "static_weight must be a bool; got int", static_weight=1),
    case(
        *L,
        ValueError,
        "norm_eps must be finite and at least 0; got -1",
        norm_eps=-1.0,
        norm_weight=f32(8),
    ),
    case(*L, TypeError, "batch_invariant must be a bool; got NoneType", batch_invariant=None),
]


test_refused = refused(CASES)


def test_the_number_of_rows_is_bounded() -> None:
    with pytest.raises(ValueError, match=rf"linear: the number of rows of x must lie in \[0, {2**30}\]; got"):
        octavo.explain("linear", long(2**16, 2**16, 8), f32(1, 8), device="cpu")


def test_jax_arrays_are_not_written_to() -> None:
    jax = pytest.importorskip("jax")
    arrays = {name: jax.numpy.asarray(x) for name, x in layer().items()}
    with pytest.raises(TypeError, match="out is written to and cannot be a JAX array, which is immutable"):
        octavo.linear(**arrays, out=jax.numpy.zeros((2, 3, 5)))


def test_gradients_are_refused() -> None:
    torch = pytest.importorskip("torch")
    arrays = {name: torch.from_numpy(x) for name, x in layer().items()}
    arrays["w"].requires_grad_()
    message = r"linear: w requires grad, and this call has no backward; use w\.detach\(\)"
    with pytest.raises(TypeError, match=message):
        octavo.linear(**arrays)
    with torch.no_grad():
        assert octavo.linear(**arrays).shape == (2, 3, 5)
