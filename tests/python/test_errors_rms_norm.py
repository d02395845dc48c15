"""What rms_norm refuses, word for word."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

from support.refusals import (
    FLOATS,
    LENGTHS,
    NO_ARRAY,
    N,
    S,
    case,
    f32,
    long,
    memory,
    read_only,
    refused,
)

ROWS = "[..., dim] with at most three leading axes"


def f16(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float16)


CASES = [
    case(*N, TypeError, f"x {NO_ARRAY}; got list", x=[1.0]),
    case(*N, TypeError, f"x {FLOATS}; got int32", x=np.ones((2, 8), np.int32)),
    case(*N, ValueError, f"x must have shape {ROWS}; got []", x=f32()),
    case(*N, ValueError, f"x must have shape {ROWS}; got [1, 1, 1, 1, 8]", x=f32(1, 1, 1, 1, 8)),
    case(
        *N,
        ValueError,
        "x must have a unit stride along its last axis; got stride 2",
        x=f32(2, 3, 16)[..., ::2],
    ),
    case(*N, ValueError, f"dim {LENGTHS}; got {2**31}", x=as_strided(f32(1), (1, 2**31), (4, 4))),
    case(
        *N, ValueError, f"every axis of x {LENGTHS}; got {2**31}", x=long(2**31, 1, 8), out=long(2**31, 1, 8)
    ),
    case(
        *N,
        ValueError,
        f"the number of rows of x {LENGTHS}; got {2**31}",
        x=long(2**16, 2**15, 8),
        out=long(2**16, 2**15, 8),
    ),
    case(*N, TypeError, "weight must be float32 like x; got float16", weight=f16(8)),
    case(
        *N,
        TypeError,
        "weight must be float16 like x, or float32; got int32",
        x=f16(3, 8),
        weight=np.arange(8, dtype=np.int32),
    ),
    case(*N, ValueError, "weight must have shape [dim]; got [1, 8]", weight=f32(1, 8)),
    case(
        *N,
        ValueError,
        "weight must have a unit stride along its last axis; got stride 2",
        weight=f32(16)[::2],
    ),
    case(*N, ValueError, "dim of weight (7) must equal that of x (8)", weight=f32(7)),
    *(
        case(*N, ValueError, f"eps must be finite and at least 0; got {shown}", eps=eps)
        for eps, shown in ((-1e-6, "-1e-06"), (float("nan"), "nan"), (float("inf"), "inf"), (1e39, "1e+39"))
    ),
    case(*N, TypeError, "eps must be a float; got str", eps="1e-6"),
    case(
        *N,
        ValueError,
        "residual and residual_out must be given together; got only residual_out",
        residual_out=f32(2, 3, 8),
    ),
    case(*S, TypeError, "residual must be float32 like x; got float16", residual=f16(2, 3, 8)),
    case(*S, ValueError, "residual must have the shape of x [2, 3, 8]; got [2, 1, 8]", residual=f32(2, 1, 8)),
    case(*S, ValueError, f"residual must have shape {ROWS}; got [3, 8]", residual=f32(3, 8)),
    *(
        bad
        for name in ("out", "residual_out")
        for bad in (
            case(*S, TypeError, f"{name} must be float32 like x; got float16", **{name: f16(2, 3, 8)}),
            case(
                *S,
                ValueError,
                f"{name} must have the shape of x [2, 3, 8]; got [3, 2, 8]",
                **{name: f32(3, 2, 8)},
            ),
            case(
                *S, ValueError, f"{name} must be writable; it is read-only", **{name: read_only(f32(2, 3, 8))}
            ),
            case(
                *S,
                ValueError,
                f"{name} must not overlap itself: the stride of axis 1 (0) must be at least 1 in magnitude",
                **{name: as_strided(f32(16), (2, 3, 8), (32, 0, 4))},
            ),
            case(
                *S,
                ValueError,
                f"{name} must not overlap x in memory",
                **{name: memory(0, 2, 3, 8), "x": memory(8, 2, 3, 8)},
            ),
            case(
                *S,
                ValueError,
                f"{name} must not overlap residual in memory",
                **{name: memory(0, 2, 3, 8), "residual": memory(0, 3, 2, 8).swapaxes(0, 1)},
            ),
            case(
                *S,
                ValueError,
                f"{name} must not overlap weight in memory",
                **{name: memory(0, 2, 3, 8), "weight": memory(40, 8)},
            ),
        )
    ),
    case(
        *S,
        ValueError,
        "residual_out must not share elements with out; both may be views of one array, but not of the same "
        "part",
        out=memory(0, 2, 3, 8),
        residual_out=memory(40, 2, 3, 8),
    ),
]


test_refused = refused(CASES)
