"""octavo.tune_linear, its file, and what is in force after it. The times are made up, but on a GPU."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

import octavo
from conftest import gpu_count
from octavo import LinearPlan, _core, _linear_cache, _tune_linear
from octavo._tune_linear import Problem, Times

DEVICE = "h100"  # a GPU that need not be there
WANTED = LinearPlan("sm90_flat", "bfloat16", 32, 8, 2, 2)
PROBLEM = Problem(4096, 4096, 8, "bfloat16")


@pytest.fixture(autouse=True)
def untuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """A folder of this test's own; what it tunes is forgotten."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    forget()


class Measure:
    """Every plan takes 20 us, but for some."""

    def __init__(self, *, library: float = 30.0, wanted: LinearPlan = WANTED, us: float = 10.0) -> None:
        self.us = {wanted: us, "library": library}
        self.calls: list[tuple[Problem, int, int]] = []

    def __call__(self, problem: Problem, plans: Sequence[LinearPlan], rounds: int, /) -> list[Times]:
        self.calls.append((problem, len(plans), rounds))
        us = [self.us.get(plan if plan.w_rows else "library", 20.0) for plan in plans]
        return [Times(x, x) for x in us]


def tune(problem: Problem = PROBLEM, *, save: bool = True, **times: Any) -> octavo.LinearTable:
    return _tune_linear.tune([problem], DEVICE, Measure(**times), save=save)


def plan(m: int, n: int = 4096, k: int = 4096, dtype: str = "bfloat16") -> LinearPlan:
    return octavo.linear_plan(m, n, k, dtype, DEVICE)


def test_what_was_the_fastest_is_in_force() -> None:
    before = plan(8)
    table = tune()
    assert plan(8) == WANTED != before and plan(8).source == "tuned"
    assert plan(1) == WANTED  # up to eight rows
    assert plan(9).source == "measured" and plan(8, 6144).source == "measured"
    assert plan(8, dtype="float16") == dataclasses.replace(before, dtype="float16")
    assert octavo.explain("linear", *arrays(8), device=DEVICE).plan["source"] == "tuned"
    assert list(table.sources) == ["measured", "tuned"]
    assert table.sources["tuned"].read_gb_per_s == round(4096 * 4096 * 2 / 10e3)
    tuned = [row for row in table.rows if row.plan.source == "tuned" and row.M == 8]
    assert [(row.N, row.K, row.plan) for row in tuned] == [(4096, 4096, WANTED)]
    assert "[4096, 4096] x 8: sm90_flat<bfloat16, 32x8, splits 2, CTAs per SM 2> (tuned)" in str(table)


def arrays(rows: int) -> list[Any]:
    @dataclasses.dataclass
    class Shape:
        shape: tuple[int, ...]
        dtype: str = "bfloat16"

    return [Shape((rows, 4096)), Shape((4096, 4096))]


def test_the_library_has_to_lead() -> None:
    tune(library=9.9)
    assert plan(8) == WANTED
    tune(library=9.7)
    assert plan(8) == LinearPlan("library", "bfloat16") and plan(8).source == "tuned"
    assert (
        "it was the faster one where they were tuned"
        in octavo.explain("linear", *arrays(8), device=DEVICE).summary
    )


@pytest.mark.parametrize(
    ("us", "rows", "leads"),
    [
        (Times(10.3, 10.1), 64, True),
        (Times(10.3, 9.9), 64, False),  # static weights are faster
        (Times(10.3, 9.9), 128, True),
        (Times(10.1, 10.1), 64, False),  # two runs differ by that
        (Times(10.1, 10.1), 128, False),
    ],
)
def test_when_the_library_computes(us: Times, rows: int, leads: bool) -> None:
    assert _tune_linear.library_is_faster(us, 10.0, rows) == leads


def test_the_best_of_both_modes_wins() -> None:
    times = {"a": Times(10.0, 10.0), "b": Times(9.9, 12.0), "c": Times(12.0, 9.0)}
    assert _tune_linear.fastest(times) == "a"


def test_the_measuring_is_bounded() -> None:
    """Many tiles a few times, then the best ones and the library longer."""
    measure = Measure()
    _tune_linear.tune([PROBLEM], DEVICE, measure, save=False)
    (first, tiles, few), (second, finalists, many) = measure.calls
    assert first == second == PROBLEM and few < many
    assert 10 < tiles <= 32 and 2 <= finalists <= 6


def test_a_later_process_reads_the_file(untuned: Path) -> None:
    tune()
    tune(Problem(64, 64, 1, "float16"), wanted=LinearPlan("sm90_flat", "float16", 32, 8, 1, 1))
    tune(Problem(128, 64, 1, "float16"), wanted=LinearPlan("sm90_flat", "float16", 16, 8, 1, 1))
    assert [path.name for path in untuned.iterdir()] == ["linear-h100.json"]  # and nothing unfinished
    expected = octavo.linear_table(DEVICE)
    forget()
    assert plan(8).source == "measured"
    _linear_cache.load(DEVICE)
    assert octavo.linear_table(DEVICE) == expected
    assert plan(8) == WANTED and plan(1, 64, 64, "float16").w_rows == 32


def test_tuning_again_replaces_a_shape() -> None:
    tune()
    wanted = dataclasses.replace(WANTED, x_rows=16)
    tune(Problem(4096, 4096, 16, "bfloat16"), wanted=wanted)
    assert plan(16) == wanted and plan(8) == WANTED  # up to sixteen rows
    rows = json.loads(_linear_cache.path_of(DEVICE).read_text())["rows"]["bfloat16"]
    assert [row["M"] for row in rows] == [16]


def test_without_saving(untuned: Path) -> None:
    tune(save=False)
    assert plan(8) == WANTED and not untuned.exists()


def test_a_failed_write_leaves_the_file(untuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune()
    before = _linear_cache.path_of(DEVICE).read_text()

    def refuse(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="no space"):
        tune(Problem(64, 64, 8, "bfloat16"))
    assert [path.read_text() for path in untuned.iterdir()] == [before]


def forget() -> None:
    """Be as a new process is."""
    for dtype in ("float16", "bfloat16"):
        _core.set_tuned_linear(DEVICE, dtype, [])
    _linear_cache._in_force.clear()


def load_file(content: str) -> None:
    path = _linear_cache.path_of(DEVICE)
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    _linear_cache.load(DEVICE)


def test_a_file_of_other_kernels_is_ignored() -> None:
    tune()
    content = json.loads(_linear_cache.path_of(DEVICE).read_text())
    _core.set_tuned_linear(DEVICE, "bfloat16", [])
    with pytest.warns(
        RuntimeWarning, match=r"linear-h100.json was measured with kernels of version 99.*tune_linear"
    ):
        load_file(json.dumps({**content, "kernels": 99}))
    assert plan(8).source == "measured"


def broken(**row: object) -> str:
    problem, tile = {"N": 64, "K": 64, "M": 8}, {"kernel": "sm90_flat", "w_rows": 16, "splits": 1}
    full = {**problem, **tile, "ctas_per_sm": 1, "library_is_faster": False, **row}
    head = {"kernels": _core.LINEAR_KERNELS, "gpu": "x", "driver": "1", "date": "2026-01-01"}
    return json.dumps({**head, "read_gb_per_s": 1, "rows": {"bfloat16": [full]}})


every_broken_file = pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "7",
        "{}",
        "\x00",
        broken().replace('"gpu"', '"cpu"'),
        broken(w_rows="16"),
        broken(w_rows=17),
        broken(splits=3),
        broken(kernel="sm99"),
        broken(M=0),
        broken(N=2**36),
        broken(N=2**70),
        broken(N="64"),
        "[" * 100000,
        broken().replace('"1"', "1"),
        broken(library_is_faster=3),
        broken().replace("bfloat16", "int32"),
        broken().replace("[{", "[7, {"),
    ],
)
CANNOT_BE_USED = r"linear-h100.json cannot be used \(.*octavo.tune_linear"


@every_broken_file
def test_a_broken_file_warns(content: str) -> None:
    with pytest.warns(RuntimeWarning, match=CANNOT_BE_USED):
        load_file(content)
    assert plan(8, 64, 64).source == "estimated"


@every_broken_file
def test_a_broken_file_is_replaced(content: str, recwarn: pytest.WarningsRecorder) -> None:
    with pytest.warns(RuntimeWarning, match=CANNOT_BE_USED):
        load_file(content)
    with pytest.warns(RuntimeWarning, match=CANNOT_BE_USED):
        tune()
    forget()
    recwarn.clear()
    _linear_cache.load(DEVICE)
    assert plan(8) == WANTED and not recwarn.list


def test_nothing_of_a_broken_file_is_in_force() -> None:
    """Neither what lies before the row that is wrong nor what lies behind it."""
    content = json.loads(broken())
    (right,) = content["rows"]["bfloat16"]
    wrong = {**right, "splits": 3}
    for rows in ({"bfloat16": [right], "float16": [wrong]}, {"float16": [wrong], "bfloat16": [right]}):
        with pytest.warns(RuntimeWarning, match=CANNOT_BE_USED):
            load_file(json.dumps({**content, "rows": rows}))
        assert plan(8, 64, 64).source == "estimated" and "tuned" not in octavo.linear_table(DEVICE).sources


def test_a_file_that_is_right(recwarn: pytest.WarningsRecorder) -> None:
    """What the broken ones are made of."""
    load_file(broken())
    assert plan(8, 64, 64).source == "tuned" and not recwarn.list


def test_what_others_have_saved_since_is_kept() -> None:
    tune()
    path = _linear_cache.path_of(DEVICE)
    saved = _linear_cache.read(path, DEVICE)
    assert saved is not None
    _linear_cache.write(path, saved.with_rows("float16", saved.rows["bfloat16"]))
    tune(PROBLEM._replace(N=6144))
    both = _linear_cache.read(path, DEVICE)
    assert both is not None and set(both.rows) == {"float16", "bfloat16"}
    assert {row[0] for row in both.rows["bfloat16"]} == {PROBLEM.N, 6144}


def test_there_may_be_no_file(recwarn: pytest.WarningsRecorder) -> None:
    _linear_cache.load(DEVICE)
    assert not recwarn.list and plan(8).source == "measured"


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    assert _linear_cache.path_of("NVIDIA H100 80GB HBM3") == tmp_path / "linear-nvidia-h100-80gb-hbm3.json"
    monkeypatch.delenv("OCTAVO_CACHE")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert _linear_cache.path_of("h100") == tmp_path / ".cache" / "octavo" / "linear-h100.json"


def test_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("OCTAVO_CACHE")
    monkeypatch.setattr(Path, "home", refuse)
    _linear_cache.load(DEVICE)  # has nothing to load
    measure = Measure()
    with pytest.raises(OSError, match=r"^tune_linear: save=True needs a home folder, .*: set OCTAVO"):
        _tune_linear.tune([PROBLEM], DEVICE, measure, save=True)
    assert not measure.calls
    tune(save=False)
    assert plan(8) == WANTED


def test_all_threads_notice() -> None:
    """Each remembers what it chose until a table changes."""
    results: list[list[LinearPlan]] = []
    begin, changed = threading.Barrier(3), threading.Event()

    def look() -> None:
        plans = [plan(8)]
        begin.wait()
        changed.wait()
        results.append([*plans, plan(8)])

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    begin.wait()
    tune()
    changed.set()
    for thread in threads:
        thread.join()
    assert [[found.source for found in plans] for plans in results] == [["measured", "tuned"]] * 2


def test_progress_without_tqdm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_tune_linear.importlib.util, "find_spec", lambda _: None)
    tune()
    assert capsys.readouterr().err == "tune_linear: 1 of 1: [4096, 4096] x 8\n"


@pytest.mark.parametrize(
    ("shapes", "options", "error", "message"),
    [
        ([(8, 8)], {"dtype": "float32"}, ValueError, "dtype must be float16 or bfloat16; got float32"),
        ([8], {}, TypeError, r"shapes must be pairs \(N, K\); got 8"),
        ([(8, 8, 8)], {}, TypeError, r"shapes must be pairs \(N, K\); got \(8, 8, 8\)"),
        (None, {}, TypeError, r"shapes must be an iterable of pairs \(N, K\), such as .*; got None"),
        (4096, {}, TypeError, r"shapes must be an iterable of pairs \(N, K\), such as .*; got 4096"),
        ([(8, 8)], {"rows": 5}, TypeError, "rows must be an iterable of ints; got 5"),
        ([(8, 8)], {"rows": None}, TypeError, "rows must be an iterable of ints; got None"),
        ([(8, 8)], {"rows": "8"}, TypeError, "rows must be an int; got str"),
        ([(0, 8)], {}, ValueError, r"N must lie in \[1, 1073741824\]; got 0"),
        ([(8, 8.0)], {}, TypeError, "K must be an int; got float"),
        ([(8, 12)], {}, ValueError, r"K \(12\) must be a multiple of 8"),
        ([(8, 8)], {"rows": (0,)}, ValueError, r"rows must lie in \[1, 1073741824\]; got 0"),
        ([], {}, ValueError, "shapes and rows must not be empty"),
        ([(8, 8)], {"rows": ()}, ValueError, "shapes and rows must not be empty"),
        (
            [(8, 8)],
            {"device": "h100"},
            ValueError,
            "device must be a GPU of this machine, such as cuda:0; got h100",
        ),
        ([(8, 8)], {"device": 1}, TypeError, "device must be a str or None; got int"),
    ],
)
def test_refusals(shapes: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^tune_linear: {message}"):
        octavo.tune_linear(shapes, **{"dtype": "float16", **options})


def test_rows_may_come_from_a_generator() -> None:
    """Which only one of several shapes could read."""
    problems = _tune_linear._problems(
        (shape for shape in ((8, 8), (16, 8))), "float16", (rows for rows in (2, 1))
    )
    assert [(problem.N, problem.M) for problem in problems] == [(8, 1), (8, 2), (16, 1), (16, 2)]


@pytest.mark.skipif(gpu_count() > 0, reason="there is a GPU")
def test_there_must_be_a_gpu() -> None:
    with pytest.raises(RuntimeError, match=r"^tune_linear: there is no cuda:0 here: "):
        octavo.tune_linear([(8, 8)], dtype="float16")


def test_the_version_of_the_kernels() -> None:
    """A change of the tiles moves times: kLinearKernels in sm90_linear/tiles.h has to go up with it."""
    tiles = {
        (fields["kernel"], fields["w_rows"], fields["x_rows"])
        for m in (8, 16, 32, 64, 128)
        for fields, _ in _core.linear_candidates(m, 4096, 4096, "bfloat16", DEVICE)
    }
    assert (_core.LINEAR_KERNELS, len(tiles), sum(w * x for _, w, x in tiles)) == (2, 60, 373248)


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_on_a_gpu(library: str, untuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures for real; a new call runs what was found."""
    pytest.importorskip(library)
    module = {"torch": "_tune_by_torch", "cupy": "_tune_by_cupy"}[library]
    measure = __import__(f"octavo.{module}", fromlist=["Measure"])
    assert measure.why_unusable() == ""
    monkeypatch.setattr(_tune_linear, "_find_measure", lambda device: measure.Measure(0))
    table = octavo.tune_linear([(1032, 520)], dtype="float16", rows=(8, 256))
    try:
        tuned = [row for row in table.rows if (row.N, row.K) == (1032, 520)]
        assert [row.M for row in tuned] == [8, 256] and {row.plan.source for row in tuned} == {"tuned"}
        assert 1 < table.sources["tuned"].read_gb_per_s < 20000
        assert [path.suffix for path in untuned.iterdir()] == [".json"]
        assert octavo.linear_plan(8, 1032, 520, "float16") == tuned[0].plan
    finally:
        for dtype in ("float16", "bfloat16"):
            _core.set_tuned_linear("cuda:0", dtype, [])
