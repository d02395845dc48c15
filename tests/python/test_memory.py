"""On the CPU nothing is read or written outside the arrays, nor a key or value that no query sees.

Arrays lie against memory that may not be touched, on either side; unseen keys are such memory. A process of
its own runs this file, since a wrong access ends it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import octavo
from support import calls, libraries, problems
from support.case import Case
from support.oracle import NUMPY_DTYPES
from support.targets import Target

PAGE = mmap.PAGESIZE
PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


def forbid(address: int, num_bytes: int) -> None:
    """Reading or writing the memory pages that lie wholly inside becomes a fault."""
    begin, end = -(-address // PAGE) * PAGE, (address + num_bytes) // PAGE * PAGE
    if begin < end and _libc.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")


def fenced(values: NDArray, side: str) -> NDArray:
    """A copy that ends, or begins, where memory may not be touched."""
    num_bytes = -(-max(values.nbytes, 1) // PAGE) * PAGE
    memory = mmap.mmap(-1, num_bytes + 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    offset = PAGE if side == "before" else PAGE + num_bytes - values.nbytes
    array = np.frombuffer(memory, values.dtype, values.size, offset).reshape(values.shape)
    array[...] = values
    forbid(address, PAGE)
    forbid(address + PAGE + num_bytes, PAGE)
    return array


class FencedNumPy(libraries.NumPy):
    def __init__(self, side: str) -> None:
        self.side = side

    def from_numpy(self, values: NDArray) -> Any:
        return fenced(np.ascontiguousarray(values), self.side)


@dataclasses.dataclass(frozen=True)
class FencedTarget(Target):
    side: str = "after"

    @property
    def library(self) -> libraries.ArrayLibrary:
        return FencedNumPy(self.side)


CASES = (
    Case("fenced_head_dim_8", (5,), (37,), num_q_heads=3, num_kv_heads=1, head_dim=8),
    Case("fenced_head_dim_24", (1, 1), (1, 33), num_q_heads=6, num_kv_heads=2, head_dim=24, page_size=7),
    Case("fenced_head_dim_80", (33, 1), (70, 129), num_q_heads=10, num_kv_heads=2, head_dim=80, page_size=17),
    Case("fenced_head_dim_128", (65,), (65,), num_q_heads=4, num_kv_heads=1, head_dim=128, alibi="batch"),
    Case("fenced_page_size_1", (1, 3), (5, 70), num_kv_heads=4, head_dim=40, page_size=1, prefix_lens=(2, 3)),
)

# Most keys are unseen; the memory pages that hold nothing else fault.
UNSEEN = (
    Case("unseen_before_window", (3,), (3000,), num_q_heads=2, num_kv_heads=1, window_left=20),
    Case("unseen_after_window", (3000,), (3,), num_q_heads=2, num_kv_heads=1, causal=False),
    Case("unseen_between", (3,), (3000,), num_q_heads=2, num_kv_heads=1, window_left=20, prefix_lens=(9,)),
)


def forbid_unseen(array: NDArray, unseen: NDArray[np.bool_]) -> None:
    """The first axis of `array` counts tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], unseen, [False]]).astype(int)))
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        row_bytes = array.strides[0]
        forbid(array.ctypes.data + int(begin) * row_bytes, int(end - begin) * row_bytes)


def check_fences(target: FencedTarget) -> None:
    for case in CASES:
        inputs = problems.make_inputs(case, target.dtype)
        cache = problems.make_cache(case, inputs)
        reference = problems.make_reference(case, inputs, target.dtype, paged=True)
        out = target.nan(*inputs.q.shape)
        reference.check(*calls.packed_attention(target, case, inputs, out=out))
        for num_splits in (None, 3):
            reference.check(
                *calls.paged_attention(target, case, inputs, cache, out=out, num_splits=num_splits)
            )
        if case.batch == 1:
            reference.check(*calls.attention(target, case, inputs, out=calls.dense(case, out)))
        pages = [target.array(cache.k_pages), target.array(cache.v_pages)]
        table, seq_lens = target.int32(cache.page_table), target.int32(cache.seq_lens)
        k, v = target.array(inputs.k), target.array(inputs.v)
        octavo.append_kv(k, v, *pages, table, seq_lens, cu_seqlens=target.int32(inputs.cu_seqlens_k))
        octavo.copy_pages(*pages, target.int32([[0, len(cache.k_pages) - 1]]))
        lse = target.library.float32(reference.lse)
        octavo.merge_states(out, lse, out, lse)
        gradients = problems.make_output_gradients(case, target.dtype)
        results = {
            name: target.nan(*x.shape) for name, x in (("dq", inputs.q), ("dk", inputs.k), ("dv", inputs.v))
        }
        reference_backward = problems.make_backward_reference(case, inputs, gradients, target.dtype)
        for num_threads in (1, 16):  # whole KV heads, or parts of them
            octavo.set_num_threads(num_threads)
            reference_backward.check(
                *calls.attention_backward(target, case, inputs, gradients, packed=True, **results)
            )


def check_unseen(target: FencedTarget) -> None:
    for case in UNSEEN:
        inputs = problems.make_inputs(case, target.dtype)
        reference = problems.make_reference(case, inputs, target.dtype)
        k, v = target.array(inputs.k), target.array(inputs.v)
        unseen = problems.unseen_keys(case)
        for array in (k, v):
            forbid_unseen(array, unseen)
        arguments = {**case.masks, **calls.optional_arrays(target, inputs), "return_lse": True}
        result = octavo.attention(target.array(inputs.q)[None], k[None], v[None], **arguments)
        reference.check(*calls.read(target, result))
        check_unseen_backward(target, case, inputs, [target.array(inputs.q)[None], k[None], v[None]])
        if not case.is_cacheable:
            continue
        # The same keys as one sequence's pages, in order, and one page that no sequence holds.
        page_size = 16
        num_pages = -(-len(k) // page_size)
        pages = []
        for packed in (inputs.k, inputs.v):
            slots = np.zeros(((num_pages + 1) * page_size, *packed.shape[1:]))
            slots[: len(packed)] = packed
            pages.append(target.array(slots))
            unused = np.ones(len(slots), bool)
            unused[: len(packed)] = unseen
            forbid_unseen(pages[-1], unused)
        arguments["cu_seqlens_q"] = target.int32(inputs.cu_seqlens_q)
        result = octavo.paged_attention(
            target.array(inputs.q),
            *(x.reshape(num_pages + 1, page_size, *x.shape[1:]) for x in pages),
            target.int32(np.arange(num_pages)[None]),
            target.int32([len(k)]),
            **arguments,
        )
        reference.check(*calls.read(target, result))


def check_unseen_backward(
    target: FencedTarget, case: Case, inputs: problems.Inputs, arrays: list[NDArray]
) -> None:
    gradients = problems.make_output_gradients(case, target.dtype)
    reference = problems.make_backward_reference(case, inputs, gradients, target.dtype)
    arguments = {**case.masks, **calls.optional_arrays(target, inputs)}
    forward = octavo.attention(*arrays, return_lse=True, **arguments)
    dlse = target.library.float32(gradients.dlse)[None]
    for num_threads in (1, 16):
        octavo.set_num_threads(num_threads)
        dout = target.array(gradients.dout)[None]
        reference.check(*octavo.attention_backward(dout, *arrays, *forward, dlse=dlse, **arguments))


def run(isa: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", __file__, *arguments],
        env={**os.environ, "OCTAVO_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
@pytest.mark.parametrize("isa", ["baseline", ""], ids=["baseline", "widest"])
def test_nothing_outside_is_touched(isa: str) -> None:
    result = run(isa, "check")
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect")
def test_a_wrong_access_is_seen() -> None:
    result = run("", "fault")
    assert result.returncode != 0
    assert "Segmentation fault" in result.stderr


if __name__ == "__main__":
    if sys.argv[1] == "fault":
        row = fenced(np.zeros(5, np.float32), "after")
        ctypes.string_at(row.ctypes.data, 21)
    for dtype in NUMPY_DTYPES:
        for side in ("before", "after"):
            check_fences(FencedTarget("numpy", "cpu", dtype, side))
        check_unseen(FencedTarget("numpy", "cpu", dtype))
