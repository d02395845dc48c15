"""include/octavo/octavo.h: its errors, its exports, and that it is plain C; warnings of all headers."""

import re
from ctypes import POINTER, byref, c_int32, c_int64, c_uint64
from pathlib import Path

import numpy as np
import pytest

from support.c_library import AttentionArgs, Library, OctavoError, PageAllocator, Tensor, c_interface
from support.programs import find_program, run

HEADER = Path(__file__).resolve().parents[2] / "include" / "octavo" / "octavo.h"


@pytest.fixture(scope="module")
def library():
    return Library()


def test_errors(library):
    q, k = np.ones((1, 1, 3, 8), np.float32), np.ones((1, 4, 2, 8), np.float32)
    out = np.empty_like(q)
    message = r"attention: num_q_heads \(3\) must be a multiple of num_kv_heads \(2\)"
    with pytest.raises(OctavoError, match=message) as error:
        library.attention(q=q, k=k, v=k, out=out)
    assert error.value.status == 1
    with pytest.raises(OctavoError, match="attention: v must ") as error:
        library.attention(q=q, k=q, v=q.astype(np.float16), out=out)
    assert error.value.status == 2
    with pytest.raises(OctavoError, match="attention: out must have data"):
        library.attention(q=q, k=q, v=q, out=Tensor(shape=Tensor.of(q).shape, ndim=4))
    with pytest.raises(OctavoError, match="attention: k's dtype must be from 0 to 9; got 10"):
        library.attention(q=q, k=Tensor(data=1, shape=Tensor.of(q).shape, ndim=4, dtype=10), v=q, out=out)
    with pytest.raises(OctavoError, match=r"attention: dropout_p \(0.5\) needs a dropout_seed; got none"):
        library.attention(q=q, k=q, v=q, out=out, dropout_p=0.5)
    with pytest.raises(OctavoError, match=r"args->struct_size \(8\) must be \d+, as the struct's init"):
        library.call("attention", byref(AttentionArgs(struct_size=8)))
    with pytest.raises(
        OctavoError, match=r"attention: q's shape must have fewer than 2\^63 elements; got \[46"
    ):
        library.attention(
            q=Tensor(data=1, shape=(c_int64 * 4)(2**62, 2**62, 4, 64), ndim=4), k=k, v=k, out=out
        )
    with pytest.raises(OctavoError, match="copy_pages: k_pages must have data"):
        library.copy_pages(k_pages=Tensor(shape=Tensor.of(q).shape, ndim=4))


def test_null_pointers(library):
    """Every function gives an error that names the pointer, and does nothing."""
    allocator = PageAllocator(library, 4, 16)
    one = byref(c_uint64(allocator.create()))
    seq, n = c_uint64(one._obj.value), c_int64(1)
    i64, table = byref(c_int64()), (c_int32 * 4)()
    null = None
    calls = [
        ("attention", (null,), "attention: args"),
        ("paged_attention", (null,), "paged_attention: args"),
        ("append_kv", (null,), "append_kv: args"),
        ("attention_args_init", (null,), "attention: args"),
        ("paged_attention_args_init", (null,), "paged_attention: args"),
        ("append_kv_args_init", (null,), "append_kv: args"),
        ("merge_states", (null,) * 7, "merge_states: out_a"),
        ("copy_pages", (null,), "copy_pages: args"),
        ("copy_pages_args_init", (null,), "copy_pages: args"),
        ("attention_backward", (null,), "attention_backward: args"),
        ("attention_backward_args_init", (null,), "attention_backward: args"),
        ("linear", (null,), "linear: args"),
        ("linear_args_init", (null,), "linear: args"),
        ("rms_norm", (null,), "rms_norm: args"),
        ("latent_attention", (null,), "latent_attention: args"),
        ("latent_attention_args_init", (null,), "latent_attention: args"),
        ("rms_norm_args_init", (null,), "rms_norm: args"),
        ("page_allocator_new", (c_int64(4), c_int64(16), null), "PageAllocator: allocator"),
        ("page_allocator_create", (null, one), "create: allocator"),
        ("page_allocator_create", (allocator._self, null), "create: sequence"),
        ("page_allocator_extend", (null, seq, n), "extend: allocator"),
        ("page_allocator_fork", (null, seq, n, one), "fork: allocator"),
        ("page_allocator_fork", (allocator._self, seq, n, null), "fork: forks"),
        ("page_allocator_truncate", (null, seq, n), "truncate: allocator"),
        ("page_allocator_free", (null, seq), "free: allocator"),
        ("page_allocator_length", (null, seq, i64), "length: allocator"),
        ("page_allocator_length", (allocator._self, seq, null), "length: length"),
        ("page_allocator_max_pages", (null, one, n, i64), "max_pages: allocator"),
        ("page_allocator_max_pages", (allocator._self, null, n, i64), "max_pages: sequences"),
        ("page_allocator_max_pages", (allocator._self, one, n, null), "max_pages: max_pages"),
        ("page_allocator_page_table", (null, one, n, table, n, table), "page_table: allocator"),
        ("page_allocator_page_table", (allocator._self, null, n, table, n, table), "page_table: sequences"),
        ("page_allocator_page_table", (allocator._self, one, n, null, n, table), "page_table: page_table"),
        ("page_allocator_page_table", (allocator._self, one, n, table, n, null), "page_table: seq_lens"),
        ("page_allocator_shared_prefix_len", (null, one, n, n, i64), "shared_prefix_len: allocator"),
        (
            "page_allocator_shared_prefix_len",
            (allocator._self, null, n, n, i64),
            "shared_prefix_len: sequences",
        ),
        (
            "page_allocator_shared_prefix_len",
            (allocator._self, one, n, n, null),
            "shared_prefix_len: shared_prefix_len",
        ),
        ("page_allocator_take_copies", (null, byref(POINTER(c_int32)()), i64), "take_copies: allocator"),
        ("page_allocator_take_copies", (allocator._self, null, i64), "take_copies: copies"),
        (
            "page_allocator_take_copies",
            (allocator._self, byref(POINTER(c_int32)()), null),
            "take_copies: count",
        ),
    ]
    for name, arguments, what in calls:
        with pytest.raises(OctavoError, match=rf"{what} must not be null") as error:
            library.call(name, *arguments)
        assert error.value.status == 1
    with_pointers = {f"octavo_{name}" for name, *_ in calls}
    without_status = {"octavo_last_error", "octavo_version", "octavo_page_allocator_delete"}
    without_status.add("octavo_page_allocator_num_free_pages")
    assert with_pointers == functions_of_the_header() - without_status
    library._library.octavo_page_allocator_delete(null)
    assert library._library.octavo_page_allocator_num_free_pages(null) == -1
    assert library._library.octavo_last_error() == b"num_free_pages: allocator must not be null"
    assert allocator.length(seq.value) == 0 and allocator.num_free_pages() == 4
    # Without sequences there is nothing to read or to write.
    library.call("page_allocator_page_table", allocator._self, null, c_int64(0), null, c_int64(0), null)
    library.call("page_allocator_fork", allocator._self, seq, c_int64(0), null)
    allocator.delete()


def functions_of_the_header():
    return set(re.findall(r"\b(octavo_\w+)\(", HEADER.read_text()))


def test_every_function_of_the_header_is_exported(library):
    names = functions_of_the_header()
    assert len(names) > 15
    for name in names:
        assert getattr(library._library, name)


@pytest.mark.parametrize(("compiler", "language"), [("gcc", "c"), ("g++", "c++")])
def test_header_is_plain_c(tmp_path, compiler, language):
    if find_program(compiler) is None:
        pytest.skip(f"needs {compiler}")
    source = tmp_path / "use.c"
    source.write_text(
        "#include <octavo/octavo.h>\n"
        f'_Static_assert(sizeof(octavo_tensor) == {c_interface.ctypes.sizeof(Tensor)}, "layout");\n'.replace(
            "_Static_assert", "static_assert" if language == "c++" else "_Static_assert"
        )
        + "int main(void) { octavo_attention_args args; octavo_attention_args_init(&args); return 0; }\n"
    )
    standard = "c++17" if language == "c++" else "c11"
    flags = [f"-std={standard}", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    run(compiler, "-x", language, *flags, f"-I{HEADER.parents[1]}", source)


def test_headers_have_no_warnings(tmp_path):
    """As a project with more warnings than Octavo's own includes them."""
    if find_program("g++") is None:
        pytest.skip("needs g++")
    source = tmp_path / "use.cpp"
    headers = sorted(HEADER.parent.glob("*.h"))
    source.write_text("".join(f"#include <octavo/{header.name}>\n" for header in headers))
    flags = ["-std=c++17", "-pedantic", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror"]
    run("g++", *flags, "-fsyntax-only", f"-I{HEADER.parents[1]}", source)
