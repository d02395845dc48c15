"""The benchmark of gradients: its rows, how it measures and what it reports, without a GPU."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.case import Case

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import _backward_measure  # noqa: E402
import _timing  # noqa: E402
import bench_backward  # noqa: E402
from _backward_contestants import Contestant, Eager, Octavo, PlainOctavo  # noqa: E402
from _backward_inputs import Inputs, make_inputs  # noqa: E402
from _backward_rows import GROUPS, Task  # noqa: E402
from _contestants import UnsupportedError  # noqa: E402

SMALL = Case("small", (40, 40), (40, 40), num_q_heads=4, num_kv_heads=2, head_dim=32, page_size=0)
EQUAL_HEADS = replace(SMALL, num_kv_heads=4)

pytestmark = pytest.mark.usefixtures("one_torch_thread", "seeded_torch")


# The rows


def test_list_needs_no_gpu() -> None:
    command = [sys.executable, bench_backward.__file__, "--list"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names = [line.split(" | ")[0].removeprefix("| ") for line in shown.splitlines()[2:]]
    assert names == [task.name for tasks in GROUPS.values() for task in tasks]
    assert len(set(names)) == len(names)
    one = subprocess.run(
        [*command, "--cases", "d64,other", "--rows", "causal"], check=True, capture_output=True, text=True
    )
    shown = [line.split()[1] for line in one.stdout.splitlines()[2:]]
    assert shown == names[:4] + names[24:27]


def test_an_unknown_group_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_backward.parse_args(["--cases", "d64,d65"])
    assert "--cases: there is no 'd65'; there are d64, d128, d256, other," in capsys.readouterr().err


def test_rows() -> None:
    for head_dim in (64, 128, 256):
        tasks = GROUPS[f"d{head_dim}"]
        shapes = {(task.case.batch, task.case.seqlens_q[0], task.case.causal) for task in tasks}
        lengths = ((32, 512), (8, 2048), (2, 8192), (1, 16384))
        assert shapes == {(*length, causal) for length in lengths for causal in (True, False)}
        for task in tasks:
            assert (task.case.num_q_heads, task.case.group_size) == (2048 // head_dim, 1)
            assert task.plain == task and not task.forward
    tasks = [task for group in GROUPS.values() for task in group]
    assert all(task.case.dtype == "bfloat16" and task.case.seqlens_q == task.case.seqlens_k for task in tasks)
    assert {task.case.head_dim for task in GROUPS["other"]} == {96, 128, 192}
    options = GROUPS["options"]
    assert all(task.plain != task for task in options)
    assert any(task.dropout_p for task in options) and any(task.deterministic for task in options)
    assert any(task.case.alibi for task in options) and any(task.case.softcap for task in options)
    assert all(task.forward for task in GROUPS["forward"] + GROUPS["standard"])
    assert max(task.case.seqlens_q[0] for task in GROUPS["standard"]) == 65536
    assert [group for group, tasks in GROUPS.items() if any(task.standard for task in tasks)] == ["standard"]


def test_operations() -> None:
    """By hand: two products in the forward, five in the backward, half of them under a causal mask."""
    tasks = {task.name: task for group in GROUPS.values() for task in group}
    product = 2 * 16384**2 * 2048
    assert tasks["d128_full_1x16384"].flops == 5 * product
    assert tasks["d128_causal_1x16384"].flops == 5 * product // 2
    assert tasks["d128_causal_1x16384_forward"].flops == 7 * product // 2
    assert tasks["d64_full_32x512"].flops == 5 * 2 * 32 * 32 * 512**2 * 64
    assert tasks["d128_causal_8x2048_dropout"].flops == tasks["d128_causal_8x2048"].flops


def test_says_who_is_absent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def found(folder: Path | None) -> tuple[list[str], str]:
        names = [contestant.name for contestant in bench_backward.contestants(folder)]
        return names, capsys.readouterr().err

    without = ["octavo", "octavo_plain", "cudnn", "fa2", "eager"]
    names, said = found(None)
    assert names == without
    for label in ("FlashAttention-3", "FlashAttention-4"):
        assert f"without {label}: --peers names no folder" in said
    names, said = found(tmp_path)
    assert names == without
    assert f"without FlashAttention-3: {tmp_path / 'libdew_flash_attn3.so'} is not there" in said
    assert "without FlashAttention-4: " in said


# Measuring


class Calls:
    """In place of a CUDA graph."""

    def __init__(self, calls: Sequence[Callable[[], object]], repeats: int) -> None:
        assert repeats > 0
        self.calls = calls
        for call in calls:
            call()
        # Replays write to where the captured call did.
        self.results = [call.results for call in calls]

    def replay(self) -> None:
        for call, results in zip(self.calls, self.results, strict=True):
            for to, x in zip(results, call.call(), strict=True):
                to.copy_(x)


class Peer(Contestant):
    def __init__(self, name: str, spoil: Callable[[list[Any]], Any]) -> None:
        self.name, self.spoil = name, spoil

    def prepare(self, task: Task, inputs: Inputs) -> Callable[[], list[Any]]:
        if self.name == "unsupported":
            raise UnsupportedError("not for it")
        gradients = Octavo().prepare(task, inputs)()

        def call() -> list[Any]:
            results = [x.clone() for x in gradients]
            self.spoil(results)
            return results

        return call


def fail(_: list[Any]) -> None:
    raise ValueError("first line\nsecond line")


@pytest.fixture
def _measures_on_the_cpu(cuda_of_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backward_measure, "capture", Calls)
    monkeypatch.setattr(_backward_measure, "make_inputs", lambda task: make_inputs(task, "cpu"))
    monkeypatch.setattr(
        _backward_measure, "replay_times", lambda graphs, rounds, warm_up, lead_in: dict.fromkeys(graphs, 6e4)
    )


@pytest.mark.usefixtures("_measures_on_the_cpu")
def test_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is right has a time; what is wrong, or cannot run a task, has a reason instead."""
    contestants = [
        Octavo(),
        Peer("right", lambda results: None),
        Peer("unsupported", fail),
        Peer("failing", fail),
        Peer("doubles dk", lambda results: results[1].mul_(2.0)),
        Peer("writes no dv", lambda results: results[2].fill_(torch.nan)),
    ]
    task = Task(SMALL)
    num_bytes = sum(x.nbytes for x in vars(make_inputs(task, "cpu")).values() if x is not None)
    found = _backward_measure.measure(task, contestants, 2 * num_bytes, call_us=1000.0, rounds=3)
    # Graphs of 25 ms: five times five copies of the inputs.
    assert found.us == {"octavo": 6e4 / 25, "right": 6e4 / 25}
    assert 0.0 < found.error["octavo"] == found.error["right"] <= 2.0 * found.plain_error["octavo"]
    assert found.skipped["unsupported"] == "not for it"
    assert found.skipped["failing"] == "ValueError: first line"
    assert found.skipped["doubles dk"].startswith("WRONG: error 1, tolerance 0.0")
    assert found.skipped["writes no dv"].startswith("WRONG: error nan")
    monkeypatch.setattr(Octavo, "prepare", lambda *_: fail([]))
    with pytest.raises(ValueError, match="first line"):
        _backward_measure.measure(task, [Octavo()], 0, call_us=1000.0, rounds=3)


@pytest.mark.usefixtures("_measures_on_the_cpu")
def test_measure_options() -> None:
    calls = itertools.count()

    def last_bit(results: list[Any]) -> None:
        results[0][0, -1, 0, 0] *= 1.0 + next(calls) % 3 / 128

    differing = Peer("differing", last_bit)
    task = Task(SMALL, deterministic=True)
    found = _backward_measure.measure(
        task, [Octavo(), PlainOctavo(), Peer("same", lambda _: None), differing], 0, 1e3, 3
    )
    assert set(found.us) == {"octavo", "octavo_plain", "same"}
    assert found.skipped == {"differing": "WRONG: deterministic calls differ"}
    assert "octavo_plain" not in found.error
    dropout = Task(SMALL, dropout_p=0.5)
    found = _backward_measure.measure(dropout, [Octavo(), PlainOctavo()], 0, 1e3, 3)
    assert set(found.us) == {"octavo", "octavo_plain"} and not found.skipped


@pytest.mark.usefixtures("_measures_on_the_cpu")
def test_measures_memory_of_standard_rows_first(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Memory:
        def __init__(self, small_calls: Sequence[Callable[[], object]]) -> None:
            assert len([call() for call in small_calls]) == 2

        def of(self, call: Callable[[], object]) -> int:
            call()
            order.append("memory")
            return len(order)

    monkeypatch.setattr(_backward_measure, "DeviceMemory", Memory)
    long = Task(replace(EQUAL_HEADS, name="long", seqlens_q=(80,), seqlens_k=(80,)), True, standard=True)
    short = Task(replace(EQUAL_HEADS, name="short", seqlens_q=(20,), seqlens_k=(20,)), True, standard=True)
    found = []
    for task, measured in _backward_measure.measure_all(
        [Task(SMALL), long, short], [Octavo(), Peer("peer", lambda _: None), Eager()], lambda _: 1e3, 3
    ):
        order.append(task.name)
        found.append(measured)
    assert order == [*["memory"] * 4, "small", long.name, short.name]
    assert [set(measured.us) for measured in found] == [{"octavo", "peer"}, *[{"octavo", "eager"}] * 2]
    assert [measured.peak_bytes for measured in found] == [
        {},
        {"octavo": 3, "eager": 4},
        {"octavo": 1, "eager": 2},
    ]


@pytest.mark.usefixtures("cuda_of_the_cpu")
def test_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes beyond those of inputs: what PyTorch reserves, and what a library keeps for itself."""
    reserved, of_libraries = 100, 10

    def call(of_pytorch: int, of_library: int) -> Callable[[], None]:
        def run() -> None:
            nonlocal reserved, of_libraries
            reserved += of_pytorch
            of_libraries = max(of_libraries, of_library)

        return run

    def empty_cache() -> None:
        nonlocal reserved
        reserved = 100

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000 - reserved - of_libraries, 1000))
    memory = _backward_measure.DeviceMemory([call(1, 20)])
    assert memory.of(call(30, 25)) == 30 + 5
    assert memory.of(call(7, 60)) == 7 + 40
    assert memory.of(call(7, 60)) == 7 + 40  # though the library has it already


def test_rounds_that_warm_up_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time = next(clock)

        def elapsed_time(self, end: Event) -> float:
            return float(end.time)

    def graph(name: str) -> Any:
        return types.SimpleNamespace(replay=lambda: order.append(name))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    times = _timing.replay_times({"a": graph("a"), "b": graph("b")}, rounds=3, warm_up=2, lead_in=1)
    assert order == [x for first in ("ab", "ba", "ab", "ba", "ab") for name in first for x in name * 2]
    assert times == {"a": 1e3 * (4 * 3 + 3), "b": 1e3 * (4 * 3 + 1)}  # the middle one of rounds 2, 3 and 4


@pytest.mark.parametrize("count", range(1, 8))
def test_contestants_follow_each_other_equally_often(count: int) -> None:
    orders = _timing.turns(count, 2 * count if count % 2 else count)
    assert all(sorted(order) == list(range(count)) for order in orders)
    followed = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert set(followed) == {(a, b) for a in range(count) for b in range(count) if a != b}
    assert len(set(followed.values())) <= 1


# The report


def row(**found: Any) -> dict[str, Any]:
    task = Task(SMALL)
    return {
        "case": task.name,
        "shape": bench_backward.describe(task),
        "us": {},
        "tflops": {},
        "max_error": {},
        "plain_error": {},
        "peak_bytes": {},
        "skipped": {},
    } | found


@pytest.mark.usefixtures("_measures_on_the_cpu")
def test_rows_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Probe:
        def __init__(self, rounds: int) -> None:
            assert rounds == 3

        def read_bandwidth(self) -> float:
            return 4e12

    device = types.SimpleNamespace(
        Probe=Probe,
        driver_version=lambda: "580",
        matmul_flops=lambda rounds: 700e12,
        versions=lambda names: dict.fromkeys(names, "1.0"),
    )
    monkeypatch.setitem(sys.modules, "_device", device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    task = Task(SMALL, deterministic=True)
    monkeypatch.setitem(GROUPS, "options", [task])
    peers = [Octavo(), PlainOctavo(), Peer("fa4", lambda results: results[0].zero_())]
    monkeypatch.setattr(bench_backward, "contestants", lambda folder: peers)
    path = tmp_path / "rows.jsonl"
    assert bench_backward.main(["--cases", "options", "--quick", "--json", str(path)]) == 0
    (found,) = map(json.loads, path.read_text().splitlines())
    assert (found["case"], found["group"]) == ("small_deterministic", "options")
    assert set(found["us"]) == {"octavo", "octavo_plain"} and found["skipped"]["fa4"].startswith("WRONG: ")
    assert found["tflops"]["octavo"] == pytest.approx(task.flops / found["us"]["octavo"] / 1e6)
    assert 0.0 < found["max_error"]["octavo"] < 0.01
    machine = found["machine"]
    assert (machine["device"], machine["matmul_flops"], machine["read_bandwidth"]) == (
        "Some GPU",
        700e12,
        4e12,
    )
    shown = capsys.readouterr().out
    assert "8192^3 bfloat16 product afterwards: 700 TFLOP/s" in shown
    assert f"small_deterministic: fa4: {found['skipped']['fa4']}" in shown


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row(
            us={"octavo": 100.0, "octavo_plain": 90.0, "cudnn": 130.0, "fa3": 120.0},
            tflops={"octavo": 500.4, "octavo_plain": 556.0, "cudnn": 384.9, "fa3": 417.0},
            max_error={"octavo": 0.00241},
            plain_error={"octavo": 0.0048},
            skipped={"fa4": "no kernels"},
        ),
        row(us={"octavo": 5.0, "eager": 50.0}, peak_bytes={"octavo": 1 << 30, "eager": 5 << 30}),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert bench_backward.main(["--from-json", str(path)]) == 0
    header, _, first, second, why = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in first.strip("|").split("|")]
    assert cells[:3] == ["small", "2 x 40", "4/2"]
    assert cells[3:10] == ["500", "556", "385", "", "417", "", ""]
    assert cells[10:] == ["100.0", "1.20", "0.0024", "0.0048", "", ""]
    assert second.endswith("| 5.0 | 10.00 |  |  | 1.07 | 5.37 |")
    assert why == "small: fa4: no kernels"
    assert len(header.split("|")) == len(first.split("|"))


def test_a_wrong_octavo_fails_the_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for name, status in (("octavo", 1), ("fa4", 0)):
        path.write_text(json.dumps(row(skipped={name: "WRONG: error 1, tolerance 0.01"})) + "\n")
        assert bench_backward.main(["--from-json", str(path)]) == status
