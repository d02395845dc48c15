"""How the benchmark of gradients calls FlashAttention-3 and -4: everything but their kernels."""

from __future__ import annotations

import ctypes
import json
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.case import Case

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from _backward_inputs import make_inputs  # noqa: E402
from _backward_peers import FlashAttention3, FlashAttention4, _Fa3Parameters  # noqa: E402
from _backward_rows import GROUPS, Task, fa4_kernels  # noqa: E402
from _contestants import UnsupportedError  # noqa: E402

SMALL = Case("small", (40, 40), (40, 40), num_q_heads=4, num_kv_heads=2, head_dim=32, page_size=0)
EQUAL_HEADS = replace(SMALL, num_kv_heads=4)

pytestmark = pytest.mark.usefixtures("one_torch_thread", "seeded_torch", "cuda_of_the_cpu")


class Fa3Library:
    """In place of the library: what its two functions are called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def function(self, name: str) -> Callable[[int, int], None]:
        def run(address: int, stream: int) -> None:
            assert stream == 7
            parameters = _Fa3Parameters.from_address(address)
            values = {field: getattr(parameters, field) for field, _ in _Fa3Parameters._fields_}
            for accumulator in ("dk_accum", "dv_accum"):
                if values[accumulator]:
                    values[f"first of {accumulator}"] = ctypes.c_float.from_address(values[accumulator]).value
                    ctypes.c_float.from_address(values[accumulator]).value = 1.0
            self.calls.append((name, values))

        return run


def fa3_with(library: Fa3Library) -> FlashAttention3:
    contestant = object.__new__(FlashAttention3)
    contestant.run_forward, contestant.run_backward = map(library.function, ("forward", "backward"))
    return contestant


def test_parameters_of_flash_attention_3() -> None:
    library = Fa3Library()
    task = Task(replace(SMALL, head_dim=128), deterministic=True)
    inputs = make_inputs(task, "cpu")
    call = fa3_with(library).prepare(task, inputs)
    for _ in range(2):
        dq, dk, dv = call()
    assert [x.shape for x in (dq, dk, dv)] == [x.shape for x in (inputs.q, inputs.k, inputs.v)]
    for name, found in library.calls:
        tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "o": inputs.out, "do": inputs.dout}
        for which, x in (tensors | {"dq": dq, "dk": dk, "dv": dv}).items():
            strides = tuple(found[f"{which}_{axis}"] for axis in ("batch", "row", "head"))
            assert (found[which], strides) == (x.data_ptr(), x.stride()[:3]), which
        lse = (ctypes.c_float * 40).from_address(found["lse"])  # heads first
        np.testing.assert_array_equal(np.array(lse), inputs.lse[0, :, 0].numpy())
        assert name == "backward"
        assert (found["seqlen_q"], found["seqlen_q_rounded"], found["seqlen_k_rounded"]) == (40, 64, 128)
        assert (found["h"], found["h_k"], found["b"], found["d"], found["d_rounded"]) == (4, 2, 2, 128, 128)
        assert (found["is_causal"], found["is_local"], found["window_size_right"]) == (True, False, 0)
        assert found["deterministic"] and found["is_bf16"] and found["dq_semaphore"] and found["dk_semaphore"]
        assert found["first of dk_accum"] == found["first of dv_accum"] == 0.0  # at every call
        assert found["tile_count_semaphore"]
        assert found["scale_softmax"] == pytest.approx(128**-0.5)
    assert ctypes.sizeof(_Fa3Parameters) == 896 and _Fa3Parameters.is_bf16.offset == 0x260
    assert _Fa3Parameters.d_rounded.offset == 0x10C and _Fa3Parameters.do.offset == 0x2B0


def test_flash_attention_3_with_its_forward() -> None:
    library = Fa3Library()
    task = Task(replace(EQUAL_HEADS, head_dim=64, causal=False), forward=True)
    fa3_with(library).prepare(task, make_inputs(task, "cpu"))()
    (first, forward), (second, backward) = library.calls
    assert (first, second) == ("forward", "backward")
    assert forward["o"] == backward["o"] and forward["lse"] == backward["lse"]
    assert forward["num_splits"] == 1 and not forward["is_causal"] and forward["window_size_right"] == 39
    assert not backward["dk_accum"] and backward["dq_accum"]


def test_what_flash_attention_3_does_not_take() -> None:
    contestant = fa3_with(Fa3Library())
    for task, why in (
        (Task(replace(SMALL, head_dim=96)), r"head dims \(64, 128, 192, 256\)"),
        (Task(replace(SMALL, head_dim=256), deterministic=True), "no deterministic mode"),
        (Task(SMALL, dropout_p=0.1), "no dropout"),
        (Task(replace(SMALL, alibi="head")), "no ALiBi"),
        (Task(replace(SMALL, softcap=1.0)), "no softcap"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            contestant.prepare(task, make_inputs(task, "cpu"))


class Fa4Module:
    def __init__(self, path: str) -> None:
        self.name = Path(path).stem

    def __getitem__(self, function: str) -> Callable[..., None]:
        assert function == "func"

        def run(*arguments: Any) -> None:
            fa4_calls.append((self.name, arguments))

        return run


fa4_calls: list[tuple[str, tuple[Any, ...]]] = []


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", [SMALL, EQUAL_HEADS], ids=["groups", "equal heads"])
def test_steps_of_flash_attention_4(
    case: Case, deterministic: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every kernel gets as many arguments as it was compiled for, and finds zeros where it adds."""
    task = Task(case, forward=True, deterministic=deterministic)
    (tmp_path / "fa4").mkdir()
    entry = {
        "forward": "forward.so",
        "backward": ["prepare.so", "backward.so", "convert.so", "convert_keys.so"],
        "tile": [32, 16],
        "head_dim_multiple": 64,
    }
    (tmp_path / "fa4" / "index.json").write_text(json.dumps({fa4_kernels(task): entry}))
    monkeypatch.setitem(sys.modules, "tvm_ffi", types.SimpleNamespace(load_module=Fa4Module))
    contestant = FlashAttention4(tmp_path)
    call = contestant.prepare(task, make_inputs(task, "cpu"))
    fa4_calls.clear()
    gradients = call()
    shapes = [tuple(x.shape) for x in gradients]
    assert shapes == [(2, 40, 4, 32), *[(2, 40, case.num_kv_heads, 32)] * 2]
    names = ["forward", "prepare", "backward", "convert", *["convert_keys"] * 2 * (case.group_size > 1)]
    assert [name for name, _ in fa4_calls] == names
    count = {"forward": 18, "prepare": 14, "backward": 22, "convert": 7, "convert_keys": 7}
    assert all(len(arguments) == count[name] for name, arguments in fa4_calls)
    arguments = dict(fa4_calls)["backward"]
    dq_accum, *to_keys = arguments[6:9]
    assert dq_accum.shape == (2, 4, 64 * 64)
    if case.group_size > 1:
        assert all(x.shape == (2, 2, 48 * 64) and not x.any() for x in to_keys)
    else:
        assert [x.data_ptr() for x in to_keys] == [x.data_ptr() for x in gradients[1:]]
    semaphores = [None if x is None else tuple(x.shape) for x in arguments[16:19]]
    of_keys = (2, 2, 3, 2) if deterministic and case.group_size > 1 else None
    assert semaphores == [(2, 4, 2, 1) if deterministic else None, of_keys, of_keys]
    with pytest.raises(UnsupportedError, match="no kernels d32_group1_full"):
        contestant.prepare(Task(replace(EQUAL_HEADS, causal=False)), make_inputs(task, "cpu"))


def test_every_row_has_a_name_for_its_kernels() -> None:
    names = {task.name: fa4_kernels(task) for group in GROUPS.values() for task in group}
    assert names["d128_causal_4x4096_gqa4_deterministic"] == "d128_group4_causal_deterministic"
    assert names["d64_causal_8x2048_softcap"] == "d64_group1_causal_softcap30"
    assert names["d256_full_32x512"] == "d256_group1_full"
