"""What attention_backward refuses, word for word. What attention refuses too: test_errors_attention.py."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import octavo
from support.refusals import (
    FLOATS,
    LENGTHS,
    NO_ARRAY,
    PACKED_BACKWARD,
    D,
    broadcast,
    case,
    dense_backward,
    f32,
    i32,
    memory,
    read_only,
    refused,
)

F16 = np.ones((2, 3, 4, 8), np.float16)

CASES = [
    # Arrays.
    case(*D, TypeError, f"dout {NO_ARRAY}; got NoneType", dout=None),
    case(*D, TypeError, f"lse {NO_ARRAY}; got NoneType", lse=None),
    case(*D, TypeError, f"dq {NO_ARRAY}; got str", dq="dq"),
    case(*D, TypeError, f"dout {FLOATS}; got float64", dout=np.ones((2, 3, 4, 8))),
    case(*D, TypeError, "lse must be float32; got float64", lse=np.ones((2, 3, 4))),
    case(*D, TypeError, "dlse must be float32; got float16", dlse=np.ones((2, 3, 4), np.float16)),
    case(*D, TypeError, "dout must be float32 like q; got float16", dout=F16),
    case(*D, TypeError, "out must be float32 like q; got float16", out=F16),
    case(*D, TypeError, "k must be float32 like q; got float16", k=np.ones((2, 5, 2, 8), np.float16)),
    case(
        *D,
        ValueError,
        "dout must have shape [batch, seqlen_q, num_q_heads, head_dim]; got [3, 4, 8]",
        dout=f32(3, 4, 8),
    ),
    case(
        *PACKED_BACKWARD,
        ValueError,
        "out must have shape [total_q, num_q_heads, head_dim]; got [2, 3, 4, 8]",
        out=f32(2, 3, 4, 8),
    ),
    case(
        *D, ValueError, "dout must have the shape of q [2, 3, 4, 8]; got [2, 3, 2, 8]", dout=f32(2, 3, 2, 8)
    ),
    case(*D, ValueError, "out must have the shape of q [2, 3, 4, 8]; got [2, 5, 4, 8]", out=f32(2, 5, 4, 8)),
    case(
        *D,
        ValueError,
        "out must have the shape of q with the head_dim of v [2, 3, 4, 16]; got [2, 3, 4, 8]",
        v=f32(2, 5, 2, 16),
    ),
    case(
        *D,
        ValueError,
        "dv must have the shape of v [2, 5, 2, 16]; got [2, 5, 2, 8]",
        v=f32(2, 5, 2, 16),
        out=f32(2, 3, 4, 16),
        dout=f32(2, 3, 4, 16),
        dv=f32(2, 5, 2, 8),
    ),
    *(
        case(
            *D,
            ValueError,
            f"{name} must have the shape of q without its last axis; q has [2, 3, 4, 8], {name} [2, 4, 3]",
            **{name: f32(2, 4, 3)},
        )
        for name in ("lse", "dlse")
    ),
    case(
        *D,
        ValueError,
        "dout must have a unit stride along its last axis; got stride 0",
        dout=broadcast((2, 3, 4, 8)),
    ),
    case(
        *PACKED_BACKWARD,
        ValueError,
        "cu_seqlens_q and cu_seqlens_k must be given together; only cu_seqlens_k was",
        cu_seqlens_q=None,
    ),
    case(*PACKED_BACKWARD, ValueError, f"max_seqlen_k {LENGTHS}; got -1", max_seqlen_k=-1),
    case(
        *PACKED_BACKWARD,
        ValueError,
        "max_seqlen_q (1) must be at least every length in cu_seqlens_q; sequence 1 has 2",
        max_seqlen_q=1,
    ),
    case(
        *D,
        ValueError,
        "num_q_heads (4) must be a multiple of num_kv_heads (3)",
        k=f32(2, 5, 3, 8),
        v=f32(2, 5, 3, 8),
    ),
    case(*D, ValueError, "prefix_lens[1] must be at least 0; got -1", prefix_lens=i32([1, -1])),
    case(
        *D,
        ValueError,
        "prefix_lens[1] must be below 2^31; got 4294967299",
        prefix_lens=np.array([1, 2**32 + 3], np.int64),
    ),
    case(*D, ValueError, "num_q_heads of alibi_slopes (2) must equal that of q (4)", alibi_slopes=f32(2)),
    # Numbers.
    case(*D, ValueError, "softcap must be 0 (none) or positive; got -1", softcap=-1.0),
    case(*D, ValueError, "alibi_symmetric needs alibi_slopes; got none", alibi_symmetric=True),
    case(*D, ValueError, "attention_chunk (64) needs causal", attention_chunk=64, causal=False),
    case(*D, ValueError, "window_right must be -1 (unbounded) or at least 0; got -7", window_right=-7),
    case(*D, ValueError, "softmax_scale must be finite in float32; got 1e+300", softmax_scale=1e300),
    case(*D, ValueError, "dropout_p must lie in [0, 1 - 2^-17); got 1", dropout_p=1.0, dropout_seed=1),
    case(*D, ValueError, "dropout_p (0.5) needs a dropout_seed; got none", dropout_p=0.5),
    case(*D, TypeError, "deterministic must be a bool; got int", deterministic=1),
    case(*D, TypeError, "return_dalibi must be a bool; got NoneType", return_dalibi=None),
    case(*D, ValueError, "dalibi_slopes (return_dalibi) needs alibi_slopes; got none", return_dalibi=True),
    case(*D, ValueError, "num_q_heads of sinks (2) must equal that of q (4)", sinks=f32(2)),
    case(*D, TypeError, "return_dsinks must be a bool; got NoneType", return_dsinks=None),
    case(*D, ValueError, "dsinks (return_dsinks) needs sinks; got none", return_dsinks=True),
    # Gradients.
    case(*D, ValueError, "dq must be writable; it is read-only", dq=read_only(f32(2, 3, 4, 8))),
    case(*D, TypeError, "dq must be float32 like q; got float16", dq=F16),
    case(*D, TypeError, "dv must be float32 like v; got float16", dv=np.ones((2, 5, 2, 8), np.float16)),
    case(*D, ValueError, "dq must have the shape of q [2, 3, 4, 8]; got [2, 5, 4, 8]", dq=f32(2, 5, 4, 8)),
    case(*D, ValueError, "dk must have the shape of k [2, 5, 2, 8]; got [2, 5, 4, 8]", dk=f32(2, 5, 4, 8)),
    case(*D, ValueError, "dv must have the shape of v [2, 5, 2, 8]; got [2, 6, 2, 8]", dv=f32(2, 6, 2, 8)),
    case(
        *PACKED_BACKWARD,
        ValueError,
        "dk must have shape [total_k, num_kv_heads, head_dim]; got [1, 5, 2, 8]",
        dk=f32(1, 5, 2, 8),
    ),
    case(
        *D,
        ValueError,
        "dk must not overlap itself: the stride of axis 1 (0) must be at least 1 in magnitude",
        dk=as_strided(f32(2, 1, 2, 8), (2, 5, 2, 8), (64, 0, 32, 4)),
    ),
    *(
        case(*D, ValueError, f"{gradient} must not overlap {name} in memory", **arrays)
        for gradient, name, arrays in (
            ("dq", "dout", {"dq": memory(0, 2, 3, 4, 8), "dout": memory(191, 2, 3, 4, 8)}),
            ("dq", "q", {"dq": memory(0, 2, 3, 4, 8), "q": memory(0, 2, 3, 4, 8)}),
            ("dq", "out", {"dq": memory(8, 2, 3, 4, 8), "out": memory(0, 2, 3, 4, 8)}),
            ("dq", "lse", {"dq": memory(23, 2, 3, 4, 8), "lse": memory(0, 2, 3, 4)}),
            ("dk", "k", {"dk": memory(0, 2, 5, 2, 8), "k": memory(0, 2, 5, 2, 8)}),
            ("dk", "v", {"dk": memory(0, 2, 5, 2, 8), "v": memory(159, 2, 5, 2, 8)}),
            ("dv", "dlse", {"dv": memory(0, 2, 5, 2, 8), "dlse": memory(100, 2, 3, 4)}),
            ("dv", "alibi_slopes", {"dv": memory(0, 2, 5, 2, 8), "alibi_slopes": memory(159, 4)}),
            ("dv", "sinks", {"dv": memory(0, 2, 5, 2, 8), "sinks": memory(159, 4)}),
        )
    ),
    *(
        case(
            *D,
            ValueError,
            f"{name} must not share elements with {other}; both may be views of one array, but not of the "
            "same part",
            **arrays,
        )
        for name, other, arrays in (
            ("dk", "dq", {"dq": memory(0, 2, 3, 4, 8), "dk": memory(191, 2, 5, 2, 8)}),
            ("dv", "dk", {"dk": memory(0, 2, 5, 2, 8), "dv": memory(0, 2, 5, 2, 8)}),
        )
    ),
]


test_refused = refused(CASES)


def test_octavo_torch_returns_new_tensors() -> None:
    torch = pytest.importorskip("torch")
    import octavo.torch

    arrays = {name: torch.from_numpy(x) for name, x in dense_backward().items()}
    with pytest.raises(
        ValueError, match=r"attention_backward: dk must be None in octavo\.torch, which returns"
    ):
        octavo.torch.attention_backward(**arrays, dk=arrays["k"].clone())
    with pytest.raises(ValueError, match=r"dalibi_slopes \(return_dalibi\) needs alibi_slopes; got none"):
        octavo.torch.attention_backward(**arrays, return_dalibi=True)
    with pytest.raises(ValueError, match=r"dsinks \(return_dsinks\) needs sinks; got none"):
        octavo.torch.attention_backward(**arrays, return_dsinks=True)


def test_gradients_of_jax_arrays_are_new() -> None:
    jax = pytest.importorskip("jax")
    arrays = {name: jax.numpy.asarray(x) for name, x in dense_backward().items()}
    with pytest.raises(TypeError, match="dq is written to and cannot be a JAX array, which is immutable"):
        octavo.attention_backward(**arrays, dq=arrays["q"])
