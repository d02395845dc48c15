"""What is refused of caches of codes: each message names operator, argument, requirement and value."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import octavo

NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM = 6, 16, 8, 32
LEADING = (NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS)


def pages(dtype: Any = np.int8, head_dim: int = HEAD_DIM) -> Any:
    return np.zeros((*LEADING, head_dim), dtype)


def scales(dtype: Any = np.float32, *last: int) -> Any:
    return np.ones((*LEADING, *last), dtype)


def int8() -> dict[str, Any]:
    """Arguments of both operators, for caches with a scale of each token and head."""
    return {"k_pages": pages(), "v_pages": pages(), "k_scales": scales(), "v_scales": scales()}


def int4() -> dict[str, Any]:
    return {
        "k_pages": pages(np.uint8, HEAD_DIM // 2),
        "v_pages": pages(np.uint8, HEAD_DIM // 2),
        "k_scales": scales(np.float16, 2),
        "v_scales": scales(np.float16, 2),
        "kv_dtype": "int4",
    }


def call(operator: str, arguments: dict[str, Any], head_dim: int = HEAD_DIM) -> None:
    new = np.ones((1, NUM_KV_HEADS, head_dim), np.float32)
    tables = {"page_table": np.zeros((1, 1), np.int32), "seq_lens": np.ones(1, np.int32)}
    given = {"q": new} if operator == "paged_attention" else {"k": new, "v": new}
    getattr(octavo, operator)(**given, **arguments, **tables)


E4M3 = ml_dtypes.float8_e4m3fn
HEAD_MAJOR = (NUM_PAGES, NUM_KV_HEADS, PAGE_SIZE)
BOTH = (
    # pairs
    (int8, {"v_pages": pages(E4M3)}, TypeError, "v_pages must be int8 like k_pages; got float8_e4m3fn"),
    (int8, {"v_pages": pages(np.float32)}, TypeError, "v_pages must be int8 like k_pages; got float32"),
    (int4, {"v_pages": pages()}, TypeError, "k_pages (int4) need v_pages of int4; got int8"),
    (
        int4,
        {"k_pages": pages(E4M3)},
        TypeError,
        "v_pages (int4) need k_pages of int4 or int8; got float8_e4m3fn",
    ),
    (
        int4,
        {"k_pages": pages(np.float32)},
        TypeError,
        "v_pages (int4) need k_pages of int4 or int8; got float32",
    ),
    (
        int4,
        {"k_pages": pages()},
        TypeError,
        "k_scales must be float32; got float16",
    ),
    (
        int4,
        {"k_pages": pages(), "v_pages": pages(np.uint8)[:, 1:], "k_scales": scales()},
        ValueError,
        "v_pages must have the shape of k_pages [6, 16, 8, 32], but for head_dim; got [6, 15, 8, 32]",
    ),
    # kv_dtype
    (
        int4,
        {"kv_dtype": None},
        ValueError,
        "k_pages (uint8) need kv_dtype, which says what they hold: float8_e4m3fn, float8_e5m2 or int4",
    ),
    (
        int8,
        {"kv_dtype": "int4"},
        ValueError,
        "kv_dtype (int4) says what pages of uint8 hold; k_pages is of int8, v_pages of int8",
    ),
    (int4, {"kv_dtype": "int8"}, ValueError, "kv_dtype must be float8_e4m3fn, float8_e5m2 or int4; got int8"),
    (int4, {"kv_dtype": "nf4"}, ValueError, "kv_dtype must be float8_e4m3fn, float8_e5m2 or int4; got nf4"),
    (int4, {"kv_dtype": 4}, TypeError, "kv_dtype must be a str; got int"),
    (
        int4,
        {"kv_dtype": "\udcff"},  # what sys.argv has of a byte that is not UTF-8
        ValueError,
        r"kv_dtype must be text without null characters and lone surrogates; got '\udcff'",
    ),
    (
        int4,
        {"k_pages": pages(ml_dtypes.int4)},
        TypeError,
        "k_pages must be float32, float16, bfloat16, int8, float8_e4m3fn, float8_e5m2 or uint8; got int4; a "
        "cache of int4 is of uint8, its last axis head_dim / 2, the even dim in the lower half of its byte, "
        "with "
        'kv_dtype="int4"',
    ),
    # shapes
    (
        int8,
        {"k_scales": np.ones(HEAD_MAJOR, np.float32)},
        ValueError,
        "k_scales must have shape [num_pages, page_size, num_kv_heads] = [6, 16, 8]; got [6, 8, 16]",
    ),
    (
        int8,
        {"v_scales": np.ones((*LEADING, 1), np.float32)},
        ValueError,
        "v_scales must have shape [num_pages, page_size, num_kv_heads] = [6, 16, 8]; got [6, 16, 8, 1]",
    ),
    (
        int4,
        {"k_scales": np.ones(LEADING, np.float16)},
        ValueError,
        "k_scales must have shape [num_pages, page_size, num_kv_heads, 2] = [6, 16, 8, 2]; got [6, 16, 8]",
    ),
    (
        int4,
        {"v_scales": np.ones((*HEAD_MAJOR, 2), np.float16)},
        ValueError,
        "v_scales must have shape [num_pages, page_size, num_kv_heads, 2] = [6, 16, 8, 2]; got [6, 8, 16, 2]",
    ),
    (
        int4,
        {"k_scales": np.ones((2, *LEADING), np.float16).transpose(1, 2, 3, 0)},
        ValueError,
        "k_scales must have a unit last stride and pairs aligned to 4 bytes; got strides [128, 8, 1, 768]",
    ),
    (
        int4,
        {"v_scales": np.ones((*LEADING, 3), np.float16)[..., :2]},
        ValueError,
        "v_scales must have a unit last stride and pairs aligned to 4 bytes; got strides [384, 24, 3, 1]",
    ),
    (
        int4,
        {"v_scales": np.ones(np.prod(LEADING) * 2 + 1, np.float16)[1:].reshape(*LEADING, 2)},
        ValueError,
        "v_scales must have a unit last stride and pairs aligned to 4 bytes; got strides [256, 16, 2, 1] at "
        "an address that is 2 modulo 4",
    ),
    # dtypes
    (int8, {"k_scales": scales(np.float16)}, TypeError, "k_scales must be float32; got float16"),
    (int8, {"v_scales": scales(np.int32)}, TypeError, "v_scales must be float32; got int32"),
    (
        int4,
        {"k_scales": scales(np.float32, 2)},
        TypeError,
        "k_scales must be float16 (a scale and a minimum) for int4; got float32",
    ),
    # which scales
    (
        int8,
        {"k_scales": None},
        ValueError,
        "k_pages (int8) need k_scales or k_scale: what is stored is the value divided by its scale",
    ),
    (int8, {"v_scales": None, "k_scales": None, "k_scale": 0.1}, ValueError, "v_pages (int8) need v_scales"),
    (
        int4,
        {"v_scales": None},
        ValueError,
        "v_pages (int4) need v_scales: a scale and a minimum of each token and head",
    ),
    (int8, {"k_scale": 0.1}, ValueError, "k_scale and k_scales must not both be given"),
    (int8, {"v_scale": np.ones(1, np.float32)}, ValueError, "v_scale and v_scales must not both be given"),
    (
        int4,
        {"k_scale": 0.1},
        ValueError,
        "k_scale must not be given for k_pages (int4), which need k_scales, a scale and a minimum of "
        "each token and head",
    ),
    # static ones
    *(
        (
            int8,
            {"k_scales": None, "k_scale": value},
            ValueError,
            f"k_scale must be finite and greater than 0; got {text}",
        )
        for value, text in ((0.0, "0"), (-0.5, "-0.5"), (np.inf, "inf"), (np.nan, "nan"))
    ),
    (
        int8,
        {"k_scales": None, "k_scale": 1e-39},
        ValueError,
        "k_scale must be at least 2^-126, as the inverse of a smaller number may be beyond float32; "
        "got 1e-39",
    ),
    (
        int8,
        {"v_scales": None, "v_scale": np.array([1, 1, 2**-127, 1, 1, 1, 1, 1], np.float32)},
        ValueError,
        "v_scale[2] must be at least 2^-126, as the inverse of a smaller number may be beyond float32; "
        "got 5.87747e-39",
    ),
    (
        int8,
        {"v_scales": None, "v_scale": np.array([1, 1, 1, 0, 1, 1, 1, 1], np.float32)},
        ValueError,
        "v_scale[3] must be finite and greater than 0; got 0",
    ),
    (
        int8,
        {"k_scales": None, "k_scale": np.ones(3, np.float32)},
        ValueError,
        "k_scale must be a number, or have shape [1] or [num_kv_heads] = [8]; got [3]",
    ),
    (
        int8,
        {"k_scales": None, "k_scale": np.ones((1, 8), np.float32)},
        ValueError,
        "k_scale must be a number, or have shape [1] or [num_kv_heads] = [8]; got [1, 8]",
    ),
    (
        int8,
        {"k_scales": None, "k_scale": np.ones(8, np.float16)},
        TypeError,
        "k_scale must be float32; got float16",
    ),
    (
        int8,
        {"k_scales": None, "k_scale": np.ones(16, np.float32)[::2]},
        ValueError,
        "k_scale must have a unit stride along its last axis; got stride 2",
    ),
    (
        int8,
        {"k_scales": None, "k_scale": "0.1"},
        TypeError,
        "k_scale must be a float, or an array of float32; got str",
    ),
    # 16 bits, or 32
    (
        int8,
        {"k_pages": pages(np.float32), "v_pages": pages(np.float32)},
        ValueError,
        "k_scales belong to codes of 8 or 4 bits; k_pages hold float32",
    ),
    (
        dict,
        {"k_pages": pages(np.float32), "v_pages": pages(np.float32), "v_scale": np.ones(1, np.float32)},
        ValueError,
        "v_scale must be a number for v_pages (float32); arrays of scales belong to codes of 8 bits",
    ),
)


@pytest.mark.parametrize("operator", ["paged_attention", "append_kv"])
@pytest.mark.parametrize(("base", "change", "error", "message"), BOTH)
def test_what_both_refuse(
    operator: str, base: Any, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(f"{operator}: {message}")):
        call(operator, {**base(), **change})


def test_head_dims() -> None:
    with pytest.raises(ValueError, match=r"append_kv: head_dim of k \(31\) must be even for int4"):
        call("append_kv", int4(), head_dim=31)
    with pytest.raises(ValueError, match=r"head_dim of k \(64\) must equal that of k_pages \(32\)"):
        call("append_kv", int4(), head_dim=64)
    wide = {**int4(), "v_pages": pages(np.uint8)}
    with pytest.raises(ValueError, match=r"head_dim of v \(32\) must equal that of v_pages \(64\)"):
        call("append_kv", wide)
    mixed = {**wide, "k_pages": pages(), "k_scales": scales()}
    with pytest.raises(ValueError, match=r"append_kv: head_dim of v \(31\) must be even for int4"):
        call("append_kv", {**mixed, "k_pages": pages(head_dim=31)}, head_dim=31)
    with pytest.raises(ValueError, match=r"head_dim of k_pages \(32\) must equal that of q \(16\)"):
        call("paged_attention", int4(), head_dim=16)


@pytest.mark.parametrize("base", [int8, int4])
def test_scales_that_are_written(base: Any) -> None:
    arguments = base()
    arguments["k_scales"].flags.writeable = False
    call("paged_attention", arguments)
    with pytest.raises(ValueError, match="append_kv: k_scales must be writable; it is read-only"):
        call("append_kv", arguments)
    arguments = base()
    arguments["v_scales"] = arguments["k_scales"]
    with pytest.raises(ValueError, match="append_kv: v_scales must not share elements with k_scales"):
        call("append_kv", arguments)
    arguments = base()
    arguments["k_scales"] = np.broadcast_to(arguments["k_scales"][:1], arguments["k_scales"].shape)
    call("paged_attention", arguments)
    with pytest.raises(ValueError, match="k_scales must be writable"):
        call("append_kv", arguments)


def test_scales_in_the_memory_of_codes() -> None:
    row = np.zeros((*LEADING, HEAD_DIM + 4), np.uint8)
    arguments = {
        "k_pages": row[..., :HEAD_DIM].view(np.int8),
        "v_pages": pages(),
        "k_scales": row[..., HEAD_DIM:].view(np.float32)[..., 0],
        "v_scales": scales(),
    }
    call("append_kv", arguments)
    arguments["k_scales"] = row[..., HEAD_DIM - 4 : HEAD_DIM].view(np.float32)[..., 0]
    with pytest.raises(ValueError, match="append_kv: k_scales must not share elements with k_pages"):
        call("append_kv", arguments)
    new = np.ones((1, NUM_KV_HEADS, HEAD_DIM), np.float32)
    out = np.zeros(NUM_PAGES * PAGE_SIZE * NUM_KV_HEADS, np.float32)
    arguments = {**int8(), "v_scales": out.reshape(LEADING)}
    tables = {"page_table": np.zeros((1, 1), np.int32), "seq_lens": np.ones(1, np.int32)}
    with pytest.raises(ValueError, match="paged_attention: out must not overlap v_scales in memory"):
        octavo.paged_attention(new, **arguments, **tables, out=out[: new.size].reshape(new.shape))
    with pytest.raises(ValueError, match="append_kv: k must not overlap v_scales in memory"):
        octavo.append_kv(out[: new.size].reshape(new.shape), new, **arguments, **tables)
    with pytest.raises(ValueError, match="append_kv: v must not overlap v_scales in memory"):
        octavo.append_kv(new, out[: new.size].reshape(new.shape), **arguments, **tables)
    static = np.ones(NUM_KV_HEADS, np.float32)
    arguments = {**int8(), "k_scales": None, "k_scale": out[:NUM_KV_HEADS], "v_scales": out.reshape(LEADING)}
    out[:NUM_KV_HEADS] = static
    with pytest.raises(ValueError, match="append_kv: k_scale must not overlap v_scales in memory"):
        octavo.append_kv(new, new, **arguments, **tables)


def copy(**change: Any) -> None:
    arguments = {**int8(), "copies": np.array([[0, 1]], np.int32), **change}
    octavo.copy_pages(**arguments)


def other() -> dict[str, Any]:
    return {f"to_{name}": x for name, x in int8().items()}


def test_copies() -> None:
    copy()
    copy(**other())
    copy(k_scales=None)
    with pytest.raises(
        ValueError, match="copy_pages: k_scales and to_k_scales must be given together; got only k_scales"
    ):
        copy(**{**other(), "to_k_scales": None})
    with pytest.raises(ValueError, match="v_scales and to_v_scales must be given together; got only to_v"):
        copy(**other(), v_scales=None)
    with pytest.raises(ValueError, match="copy_pages: to_k_scales belong to another cache"):
        copy(to_k_scales=scales())
    with pytest.raises(
        ValueError, match=r"copy_pages: k_scales must have shape .* = \[6, 16, 8\]; got \[8\]"
    ):
        copy(k_scales=np.ones(8, np.float32))
    with pytest.raises(ValueError, match=r"copy_pages: to_v_scales must have shape"):
        copy(**{**other(), "to_v_scales": np.ones(8, np.float32)})
    with pytest.raises(TypeError, match="copy_pages: k_scales must be float32; got float16"):
        copy(k_scales=scales(np.float16))
    with pytest.raises(ValueError, match="k_scales belong to codes of 8 or 4 bits; k_pages hold float32"):
        copy(k_pages=pages(np.float32), v_pages=pages(np.float32))
    with pytest.raises(ValueError, match="copy_pages: v_scales must not share elements with k_scales"):
        copy(k_scales=(both := scales()), v_scales=both)
    half = {"to_v_pages": pages(np.uint8, HEAD_DIM // 2), "to_v_scales": scales(np.float16, 2)}
    with pytest.raises(TypeError, match="copy_pages: to_v_pages must be int8 like v_pages; got uint8"):
        copy(**{**other(), **half})
    read_only = scales()
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="copy_pages: k_scales must be writable"):
        copy(k_scales=read_only)
    copy(k_scales=read_only, **other())
    source = int8()
    with pytest.raises(ValueError, match="copy_pages: k_scales must not overlap to_k_scales in memory"):
        copy(**source, **{**other(), "to_k_scales": source["k_scales"]})


def test_arrays_on_another_device() -> None:
    torch = pytest.importorskip("torch")
    k = torch.ones(1, NUM_KV_HEADS, HEAD_DIM)
    cache = {name: torch.from_numpy(x) for name, x in int8().items()}
    cache["k_scales"] = cache["k_scales"].to("meta")
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises((TypeError, RuntimeError), match="append_kv: k_scales"):
        octavo.append_kv(k, k, page_table=table, seq_lens=lengths, **cache)
