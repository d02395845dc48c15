"""The benchmark of products with weights: its rows, its engines and how it measures, without a GPU."""

from __future__ import annotations

import ctypes
import json
import math
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _cublaslt  # noqa: E402
import _linear_engines  # noqa: E402
import _linear_measure  # noqa: E402
import bench_linear  # noqa: E402
import results_table  # noqa: E402
from _linear_cases import GROUPS, ROWS, TINY, Case, Product  # noqa: E402
from _linear_engines import Cublas, CublasLtBest, Engine, Octavo, StaticWeightOctavo, Triton  # noqa: E402
from _linear_inputs import Exact, Inputs, draw_weights  # noqa: E402
from _linear_measure import copies_of, measure, measure_all  # noqa: E402
from _linear_report import ENGINES, Row, format_row, format_summary, make_row  # noqa: E402

CPU = torch.device("cpu")
LAYER = TINY[-1]
BANDWIDTH = 2e12

pytestmark = pytest.mark.usefixtures("one_torch_thread", "seeded_torch")


def drawn(case: Case, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    return Inputs.drawn(case, draw_weights(case, dtype, CPU))


# The rows


def test_list_needs_neither_a_gpu_nor_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; sys.path.insert(0, sys.argv[1]); import bench_linear; "
        "bench_linear.main(['--list', *sys.argv[2:]])"
    )
    command = [sys.executable, "-c", program, str(BENCHMARKS)]

    def names(*options: str) -> list[str]:
        shown = subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout
        return [line.split()[1] for line in shown.splitlines()[2:]]

    every = names()
    assert every == [case.name for cases in GROUPS.values() for case in cases]
    assert len(set(every)) == len(every)
    assert {"12288x4096_m1", "128256x4096_m256", "7b_products_m16", "8b_layer_m64"} <= set(every)
    assert names("--cases", "layers", "--rows", "^7b_layer_m(1|8)$") == ["7b_layer_m1", "7b_layer_m8"]
    assert names("--tiny") == [case.name for case in TINY]


def test_rows() -> None:
    """Each matrix alone has all numbers of rows; layers are those of the models, by hand."""
    for group in ("shapes", "others"):
        shapes = {case.products for case in GROUPS[group]}
        assert {(case.products, case.num_rows) for case in GROUPS[group]} == {
            (products, num_rows) for products in shapes for num_rows in ROWS
        }
    layers = {case.name: case for case in GROUPS["layers"]}
    assert layers["7b_layer_m8"].products == (
        Product(12288, 4096),
        Product(4096, 4096),
        Product(22016, 4096, gated=True),
        Product(4096, 11008, residual=True),
    )
    assert layers["8b_products_m1"].products == (
        Product(6144, 4096),
        Product(4096, 4096),
        Product(28672, 4096),
        Product(4096, 14336),
    )


def test_floor() -> None:
    """3 us and the bytes of the weights alone, for each product."""
    one = Case("a", 64, (Product(1000, 2000),))
    assert one.num_bytes == 4_000_000 and one.floor_us(2e12) == pytest.approx(5.0)
    two = Case("b", 1, (Product(1000, 2000), Product(512, 1000, gated=True)))
    assert two.num_bytes == 5_024_000 and two.floor_us(2e12) == pytest.approx(6.0 + 2.512)
    assert two.products[1].outputs == 256


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cases", "shapes,all"], "--cases: there is no 'all'; there are shapes, others, layers"),
        (
            ["--engines", "octavo,mkl"],
            "--engines: there is no 'mkl'; there are octavo, octavo_static_weight,",
        ),
        (["--replays", "0"], "--replays (0) must be at least 1"),
        (["--dtype", "float32"], "argument --dtype: invalid choice: 'float32'"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_linear.parse_args(arguments)
    assert said in capsys.readouterr().err


def test_triton_only_where_it_is_named() -> None:
    default = bench_linear.parse_args([])
    assert default.engines == tuple(name for name in ENGINES if name != "triton")
    every = [case.name for cases in GROUPS.values() for case in cases]
    assert len([name for name in every if default.triton_rows.search(name)]) == 6


# Inputs and errors


def test_each_product_takes_the_result_before() -> None:
    inputs = drawn(LAYER)
    qkv, attended, gate_and_up, down = inputs.steps()
    assert qkv.x.data_ptr() == inputs.x.data_ptr() and qkv.residual is None
    assert attended.x.data_ptr() == qkv.out.data_ptr() and attended.x.shape == (3, 256)
    assert attended.x.stride(0) == qkv.product.w_rows  # the queries, among keys and values
    assert gate_and_up.x is not attended.x and gate_and_up.out.shape == (3, 384)
    assert down.x.data_ptr() == gate_and_up.out.data_ptr()
    assert down.residual is not None and down.residual.data_ptr() == attended.out.data_ptr()


def test_exact_results() -> None:
    inputs = drawn(LAYER)
    exact = Exact(inputs)
    x = inputs.x.double()
    qkv, o, gate_and_up, down = (w.double() for w in inputs.weights)
    h = (x @ qkv.t())[:, :256] @ o.t()
    gate, up = (h @ gate_and_up.t()).chunk(2, dim=-1)
    hidden = gate / (1 + torch.exp(-gate)) * up
    results = [x @ qkv.t(), h, hidden, hidden @ down.t() + h]
    assert exact.error(results) < 1e-14
    assert 2**-10 < exact.plain_error < 2**-6  # some roundings to bfloat16
    assert Exact(drawn(LAYER, torch.float16)).plain_error < exact.plain_error / 4


def test_one_wrong_element_is_an_error() -> None:
    inputs = drawn(Case("a", 64, (Product(1024, 512),)))
    exact = Exact(inputs)
    (right,) = _linear_engines.one_after_another([Octavo().call(step) for step in inputs.steps()])()
    assert exact.error([right]) <= exact.plain_error * 1.01
    for wrong in (right[63, 1000] + 0.2, 0.0, math.nan):
        result = right.clone()
        result[63, 1000] = wrong
        assert not exact.error([result]) <= 2 * exact.plain_error


# The engines


def multiply_on_the_cpu(x: Any, w: Any, out: Any) -> Any:
    return out.copy_((x.float() @ w.float().t()).to(out.dtype))


class FakeCublasLt:
    """Three algorithms; what it ran is in `ran`."""

    def __init__(self) -> None:
        self.ran: list[tuple[tuple[int, ...], str]] = []

    def algorithms(self, x: Any, w: Any, out: Any) -> list[str]:
        assert out.shape == (len(x), len(w))
        return ["first", "second", "third"]

    def product(self, x: Any, w: Any, out: Any, algorithm: str) -> Callable[[], Any]:
        def call() -> Any:
            self.ran.append((tuple(w.shape), algorithm))
            return multiply_on_the_cpu(x, w, out)

        return call


class Calls:
    """In place of a CUDA graph."""

    def __init__(self, calls: Sequence[Callable[[], object]], repeats: int) -> None:
        assert repeats > 0
        self.calls, self.repeats = calls, repeats
        for call in calls:
            call()

    def replay(self) -> None:
        for call in self.calls:
            call()


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The library that each torch.mm was to use; cublasLt is replaced by a fake."""
    preferred, used = ["default"], []

    def prefer(name: str | None = None) -> str:
        if name is not None:
            preferred[0] = name
        return preferred[0]

    def mm(x: Any, w: Any, *, out: Any) -> Any:
        used.append(preferred[0])
        return multiply_on_the_cpu(x, w.t(), out)

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(_linear_engines, "CublasLt", FakeCublasLt)
    monkeypatch.setattr(_linear_engines, "capture", Calls)
    monkeypatch.setattr(_linear_engines, "replay_times", lambda graphs, rounds: dict.fromkeys(graphs, 1.0))
    return used


def engines(*names: str) -> dict[str, Engine]:
    args = bench_linear.parse_args(["--engines", ",".join(names)])
    return {engine.name: engine for engine in bench_linear.usable_engines(args)}


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_results_of_every_engine(case: Case, libraries: list[str]) -> None:
    names = [name for name in ENGINES if name != "triton"]
    found = engines(*names)
    assert list(found) == names
    inputs = drawn(case)
    exact = Exact(inputs)
    for name, engine in found.items():
        for out in inputs.outs:
            out.fill_(math.nan)
        (calls,) = engine.prepare([inputs], 10.0)
        results = calls()
        assert exact.error(results) <= 2 * exact.plain_error, name
        assert [result.data_ptr() for result in results] == [out.data_ptr() for out in inputs.outs]
    assert libraries == ["cublas"] * len(case.products) + ["cublaslt"] * len(case.products)
    assert torch.backends.cuda.preferred_blas_library() == "default"


def test_weights_are_static_where_the_name_says_so() -> None:
    (step,) = drawn(TINY[0]).steps()
    for engine, static in ((Octavo(), False), (StaticWeightOctavo(), True)):
        assert engine.call(step).keywords["static_weight"] is static  # type: ignore[attr-defined]


@pytest.mark.usefixtures("libraries")
def test_the_best_algorithm_of_each_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen for one product after the other, each among the calls of all."""
    engine = CublasLtBest()
    fake = engine._library
    assert isinstance(fake, FakeCublasLt)
    inputs = drawn(LAYER)
    best = {tuple(w.shape): ("third", "first", "second", "third")[i] for i, w in enumerate(inputs.weights)}

    def replay_times(graphs: dict[str, Calls], rounds: int) -> dict[str, float]:
        times = {}
        for name, graph in graphs.items():
            fake.ran.clear()
            graph.replay()
            assert len(fake.ran) == len(inputs.weights) == len(best)
            times[name] = float(sum(best[shape] != algorithm for shape, algorithm in fake.ran))
        assert rounds > 0 and len(times) == 3
        return times

    monkeypatch.setattr(_linear_engines, "replay_times", replay_times)
    (calls,) = engine.prepare([inputs], 10.0)
    fake.ran.clear()
    calls()
    assert fake.ran == list(best.items())


def test_structures_of_cublaslt() -> None:
    """By cublasLt.h: 64 bytes of an algorithm, then its workspace, its state and six numbers of 4 bytes."""
    result = _cublaslt._HeuristicResult
    assert ctypes.sizeof(_cublaslt.Algorithm) == 64 and ctypes.sizeof(result) == 96
    assert (result.workspace_size.offset, result.state.offset, result.waves_count.offset) == (64, 72, 76)


def test_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles each row anew, by its own kernels alone, and takes part in single products only."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    engine = Triton(bench_linear.parse_args(["--triton-rows", "m5$"]).triton_rows)
    assert [case.name for case in (*TINY, *GROUPS["layers"]) if engine.takes_part(case)] == ["256x512_m5"]
    compiled, really = [], torch.compile

    def compile_it(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        really(function, **options)  # which refuses options that it does not know
        compiled.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compile_it)
    inputs = drawn(TINY[1])
    (calls,) = engine.prepare([inputs], 10.0)
    exact = Exact(inputs)
    assert exact.error(calls()) <= 2 * exact.plain_error
    (options,) = compiled
    assert options["fullgraph"] and not options["dynamic"]
    assert options["options"]["max_autotune"]
    assert options["options"]["max_autotune_gemm_backends"] == "TRITON"


def test_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    def load(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert list(engines(*ENGINES)) == ["octavo", "octavo_static_weight", "cublas", "cublaslt"]
    assert capsys.readouterr().err.splitlines() == [
        "without cublaslt_best: libcublasLt.so.13: cannot open shared object file",
        "without triton: the package triton is not installed",
    ]


# Measuring


@pytest.fixture
def _measures_on_the_cpu(
    cuda_of_the_cpu: None, libraries: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(_linear_measure, "capture", Calls)

    def replay_times(graphs: dict[str, Calls], rounds: int) -> dict[str, float]:
        """4 us a call of Octavo, and 1 us more of each engine after it."""
        return {
            name: (4.0 + i) * graph.repeats * len(graph.calls)
            for i, (name, graph) in enumerate(graphs.items())
        }

    monkeypatch.setattr(_linear_measure, "replay_times", replay_times)


class Spoiled(Cublas):
    def __init__(self, name: str, spoil: Callable[[Any], object]) -> None:
        self.name, self.spoil = name, spoil

    def call(self, step: Any) -> Callable[[], Any]:
        def call() -> Any:
            multiply_on_the_cpu(step.x, step.w, step.out)
            self.spoil(step.out)
            return step.out

        return call


def fail(_: object) -> None:
    raise ValueError("first line\nsecond line")


@pytest.mark.usefixtures("_measures_on_the_cpu")
def test_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is right has a time; what is wrong, or fails, has a reason instead."""
    peers = [
        Octavo(),
        Spoiled("right", lambda out: None),
        Spoiled("failing", fail),
        Spoiled("one element", lambda out: out[0, -1].add_(1.0)),
        Spoiled("unwritten", lambda out: out.fill_(math.nan)),
    ]
    copies = [drawn(TINY[1]) for _ in range(3)]
    found = measure(copies, peers, call_us=10.0, rounds=3)
    assert found.us == {"octavo": pytest.approx(4.0), "right": pytest.approx(5.0)}
    assert 0.0 < found.max_error["octavo"] <= 2 * found.plain_error
    assert len(found.kernels) == 1 and found.kernels[0]
    assert found.skipped["failing"] == "ValueError: first line"
    assert found.skipped["one element"].startswith("WRONG: error 0.")
    assert found.skipped["unwritten"].startswith("WRONG: error nan, tolerance 0.0")
    monkeypatch.setattr(Octavo, "call", lambda *_: fail(None))
    with pytest.raises(ValueError, match="first line"):
        measure(copies, [Octavo()], call_us=10.0, rounds=3)


def test_weights_rotate_over_twice_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    one, five, products, _ = TINY
    found = list(copies_of([one, five, products], 2 * one.num_bytes, torch.float16))
    assert [len(copies) for copies in found] == [5, 5, 2]
    for copies in found:
        pointers = [w.data_ptr() for inputs in copies for w in inputs.weights]
        assert len(set(pointers)) == len(pointers)
        assert len({inputs.x.data_ptr() for inputs in copies}) == len(copies)
        assert sum(w.nbytes for inputs in copies for w in inputs.weights) > 4 * one.num_bytes
    first, second, _ = found
    assert [inputs.weights for inputs in first] == [inputs.weights for inputs in second]
    assert (first[0].x.shape, second[0].x.shape) == ((1, 512), (5, 512))
    assert first[0].x.dtype == torch.float16


@pytest.mark.usefixtures("_measures_on_the_cpu")
def test_engines_measure_what_they_take_part_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    args = bench_linear.parse_args(["--engines", "octavo,triton", "--triton-rows", "_m1$"])
    found = measure_all(TINY, bench_linear.usable_engines(args), torch.bfloat16, BANDWIDTH, 3)
    both, one = {"octavo", "triton"}, {"octavo"}
    assert [set(measured.us) for _, measured in found] == [both, one, one, one]


@pytest.fixture
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = types.SimpleNamespace(read_bandwidth=lambda: BANDWIDTH)
    device = types.SimpleNamespace(
        Probe=lambda rounds: probe,
        driver_version=lambda: "580",
        matmul_flops=lambda rounds: 700e12,
        versions=lambda names: dict.fromkeys(names, "1.0"),
    )
    monkeypatch.setitem(sys.modules, "_device", device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")


@pytest.mark.usefixtures("_measures_on_the_cpu", "_device")
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    assert bench_linear.main(["--tiny", "--json", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["case"] for row in rows] == [case.name for case in TINY]
    shown = capsys.readouterr().out
    for case, row in zip(TINY, rows, strict=True):
        assert row["shape"]["num_rows"] == case.num_rows and row["dtype"] == "bfloat16"
        assert len(row["shape"]["products"]) == len(row["kernels"]) == len(case.products)
        assert (row["num_bytes"], row["floor_us"]) == (case.num_bytes, case.floor_us(BANDWIDTH))
        assert list(row["us"]) == [name for name in ENGINES if name != "triton"] and row["skipped"] == {}
        for name, us in row["us"].items():
            assert row["over_floor"][name] == pytest.approx(us / row["floor_us"])
            assert 0.0 < row["max_error"][name] <= 2 * row["plain_error"]
        assert row["over_cublas"] == {
            "octavo": pytest.approx(4.0 / 6.0),
            "octavo_static_weight": pytest.approx(5.0 / 6.0),
        }
        machine = row["machine"]
        assert (machine["device"], machine["driver"]) == ("Some GPU", "580")
        assert (machine["read_bandwidth"], machine["matmul_flops"]) == (BANDWIDTH, 700e12)
        assert format_row(row) in shown.splitlines()
    assert bench_linear.main(["--from-json", str(path)]) == 0
    assert set(capsys.readouterr().out.splitlines()) - {""} <= {*shown.splitlines()} | set(
        format_summary(rows).splitlines()
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", bench_linear.DTYPES)
def test_a_run_on_a_gpu(dtype: str, tmp_path: Path) -> None:
    """With all engines but Triton, which would tune for long."""
    path = tmp_path / "rows.jsonl"
    assert bench_linear.main(["--tiny", "--dtype", dtype, "--replays", "2", "--json", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["case"] for row in rows] == [case.name for case in TINY]
    for row in rows:
        assert set(row["us"]) == set(ENGINES) - {"triton"}, row["skipped"]
        assert row["dtype"] == dtype
        assert row["machine"]["driver"] and row["machine"]["read_bandwidth"] > 1e11


# The report, from rows that nobody measured


def made_up(case: Case, us: dict[str, float], **found: Any) -> Row:
    measured = types.SimpleNamespace(
        us=us,
        max_error=dict.fromkeys(us, 0.002),
        plain_error=0.0021,
        kernels=["made_up"] * len(case.products),
        skipped={},
    )
    for name, value in found.items():
        setattr(measured, name, value)
    machine = {"device": "Made-up GPU", "driver": "1", "read_bandwidth": BANDWIDTH}
    return make_row(case, "bfloat16", measured, machine)  # type: ignore[arg-type]


SQUARE = [case for case in GROUPS["shapes"] if case.label == "4096x4096"]
SQUARE_FLOOR = 3.0 + 2 * 4096**2 / BANDWIDTH * 1e6
ONE, MANY = SQUARE[0], SQUARE[-1]


def made_up_rows() -> list[Row]:
    other = next(case for case in GROUPS["shapes"] if case.name == "12288x4096_m1")
    layer = next(case for case in GROUPS["layers"] if case.name == "7b_layer_m16")
    return [
        made_up(
            ONE,
            {
                "octavo": SQUARE_FLOOR,
                "octavo_static_weight": 0.8 * SQUARE_FLOOR,
                "cublas": 1.25 * SQUARE_FLOOR,
                "cublaslt": 1.5 * SQUARE_FLOOR,
                "cublaslt_best": 1.1 * SQUARE_FLOOR,
                "triton": 1.05 * SQUARE_FLOOR,
            },
        ),
        made_up(MANY, {"octavo": 40.0, "cublas": 50.0}),
        made_up(other, {"octavo": 4 * other.floor_us(BANDWIDTH)}),
        made_up(layer, {"octavo_static_weight": 200.0, "cublas": 250.0, "cublaslt": 240.0}),
    ]


def test_ratios_of_a_row() -> None:
    row = made_up_rows()[0]
    assert row["over_floor"]["octavo_static_weight"] == pytest.approx(0.8)
    assert row["over_cublas"] == {
        "octavo": pytest.approx(1 / 1.1),
        "octavo_static_weight": pytest.approx(0.8 / 1.1),
    }
    cells = [cell.strip() for cell in format_row(row).strip("|").split("|")]
    assert len(cells) == len(bench_linear.HEADER.splitlines()[0].strip("|").split("|"))
    assert cells[:4] == ["4096x4096_m1", "33.6", f"{SQUARE_FLOOR:.1f}", f"{SQUARE_FLOOR:.1f}"]
    assert cells[9:] == ["1.00", "0.80", "0.91", "0.73", "0.002", "0.0021", "made_up"]
    without = made_up(ONE, {"cublas": 9.0}, skipped={"octavo": "WRONG: error 1, tolerance 0.1"})
    assert without["over_cublas"] == {}
    assert made_up(ONE, {"octavo": 9.0})["over_cublas"] == {}


def test_summary_of_single_products() -> None:
    lines = format_summary(made_up_rows()).splitlines()
    assert lines[-2] == "| 1 | 2.00 (4.00) | 0.80 (0.80) | 0.91 (0.91) | 0.73 (0.73) |"
    many = 40.0 / SQUARE_FLOOR
    assert lines[-1] == f"| 256 | {many:.2f} ({many:.2f}) |  | 0.80 (0.80) |  |"


def write(path: Path, rows: Sequence[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_wrong_octavo_fails_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    for name, status in (("octavo", 1), ("octavo_static_weight", 1), ("cublas", 0)):
        write(path, [made_up(ONE, {}, skipped={name: "WRONG: error 1, tolerance 0.1"})])
        assert bench_linear.main(["--from-json", str(path)]) == status
        assert f"4096x4096_m1: {name}: WRONG" in capsys.readouterr().out


def cells_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_tables(tmp_path: Path) -> None:
    tables = (results_table.linear, results_table.linear_shapes)
    assert [len(table(tmp_path).splitlines()) for table in tables] == [2, 2]  # headers alone
    write(tmp_path / "linear-h200.jsonl", made_up_rows())
    summary, shapes = (cells_of(table(tmp_path)) for table in tables)
    assert summary[2] == ["H200", "1", "2.00 (4.00)", "0.80 (0.80)", "0.91 (0.91)", "0.73 (0.73)"]
    assert shapes[0] == ["N x K", "GPU", "floor", "M = 1", "M = 8", "M = 16", "M = 64", "M = 128"]
    square = [f"{ratio * SQUARE_FLOOR:.1f}" for ratio in (1.0, 0.8, 1.1, 1.05)]
    assert shapes[2] == ["4096 x 4096", "H200", f"{SQUARE_FLOOR:.1f}", " / ".join(square), "", "", "", ""]
    assert shapes[3][:2] == ["12288 x 4096", "H200"] and shapes[3][3].endswith(" / - / -")
    assert shapes[4][0] == "7b, layer" and shapes[4][5] == "- / 200.0 / 240.0"
    assert {len(row) for row in shapes} == {8}


def test_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "docs" / "pictures"))
    import draw

    path = tmp_path / "linear-some.jsonl"
    write(path, made_up_rows())
    draw.linear(path).save(tmp_path / "picture.svg")
    drawn_picture = (tmp_path / "picture.svg").read_text(encoding="utf-8")
    for words in ("Products with weights, Made-up GPU", "4096 x 4096", "12288 x 4096", "M = 1", "cuBLAS"):
        assert f">{words}</text>" in drawn_picture
    assert ">M = 256</text>" not in drawn_picture and "layer" not in drawn_picture
    assert drawn_picture.count("<circle") == 4 + 4 + 1  # the legend, and two shapes with one row each
