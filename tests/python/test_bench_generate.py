"""The benchmark of whole decode steps: its rows, its engines and how it measures, without a GPU."""

from __future__ import annotations

import itertools
import json
import math
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _generate_measure  # noqa: E402
import bench_generate  # noqa: E402
from _generate_cases import CHECKED_STEPS, GROUPS, TIMED_STEPS, TINY, WARM_UP_STEPS, Case  # noqa: E402
from _generate_compiled import Compiled, CompiledWhole  # noqa: E402
from _generate_engines import Engine, Octavo, StaticWeightOctavo  # noqa: E402
from _generate_measure import Exact, Measured, TimeLimitError, checked_logits, measure_engine  # noqa: E402
from _generate_reference import Problem, reference_logits  # noqa: E402
from llama.weights import Weights  # noqa: E402

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_torch_thread", "seeded_torch", "without_gradients")


@pytest.fixture
def without_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def problem() -> Problem:
    case = TINY[1]
    return Problem.drawn(case, Weights.random(case.config, 0, torch.bfloat16, "cpu"), 0)


@pytest.fixture(scope="module")
def exact(problem: Problem) -> Exact:
    with torch.no_grad():
        return Exact(problem)


# The rows


def test_list_needs_neither_a_gpu_nor_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; sys.path.insert(0, sys.argv[1]); import bench_generate; "
        "bench_generate.main(['--list', *sys.argv[2:]])"
    )
    command = [sys.executable, "-c", program, str(BENCHMARKS)]

    def names(*options: str) -> list[str]:
        shown = subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout
        return [line.split()[1] for line in shown.splitlines()[2:]]

    assert names() == [case.name for case in GROUPS["main"]]
    every = names("--cases", "main,batch,context")
    assert len(set(every)) == len(every)
    batches, contexts = (
        {int(n) for n in found} for found in zip(*map(_batch_and_context, every), strict=True)
    )
    assert batches == {1, 2, 4, 8, 16, 32, 64} and contexts == {1024, 2048, 4096, 8192}
    assert names("--rows", "^7b_b1_", "--layers", "2") == ["7b_b1_s1024_layers2"]
    assert names("--tiny") == [case.name for case in TINY]


def _batch_and_context(name: str) -> list[str]:
    return [part[1:] for part in name.split("_")[1:3]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cases", "main,all"], "--cases: there is no 'all'; there are main, batch, context"),
        (["--engines", "octavo,vllm"], "--engines: there is no 'vllm'; there are hf_eager, hf_sdpa,"),
        (["--layers", "-1"], "--layers (-1) must be at least 1, or 0 for all of them"),
        (["--limit", "0"], "--limit (0) must be greater than 0"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_generate.parse_args(arguments)
    assert said in capsys.readouterr().err


def test_bytes_of_a_step() -> None:
    """By hand, for Llama-2-7B: 12.95 GB of layers, 0.26 GB of the head, 0.5 MB of cache a token."""
    one, many = Case("7b", 1, 1024), Case("7b", 16, 1024)
    layer = 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096)
    token = 2 * 32 * 2 * 32 * 128
    length = 1024 + CHECKED_STEPS + WARM_UP_STEPS + TIMED_STEPS // 2
    assert one.num_bytes == 32 * layer + 2 * (32000 * 4096 + 4096) + length * token
    assert many.num_bytes - one.num_bytes == 15 * length * token
    assert one.weight_bytes == one.num_bytes - length * token + 2 * 32000 * 4096
    assert one.capacity >= 1024 + CHECKED_STEPS + WARM_UP_STEPS + TIMED_STEPS
    assert one.cache_bytes == one.capacity * token
    fewer = Case("7b", 1, 1024, num_layers=2)
    assert (fewer.name, fewer.config.num_layers) == ("7b_b1_s1024_layers2", 2)
    assert one.num_bytes - fewer.num_bytes == 30 * (layer + length * token // 32)


def test_cases_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    small, large = Case("7b", 1, 1024), Case("7b", 64, 8192)
    assert bench_generate.fitting([small, large], 80 << 30) == [small]
    said = capsys.readouterr().err
    assert said == (
        "without 7b_b64_s8192: 13.5 GB of weights, 277.6 GB of keys and values and 3.2 GB for the rest "
        "do not fit in 85.9 GB\n"
    )


# The reference


def test_reference_is_the_model_of_transformers() -> None:
    """In float32, after a context that a prompt left behind, whose tokens transformers sees at once."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    case = TINY[1]
    config = transformers.LlamaConfig(
        vocab_size=case.config.vocabulary,
        hidden_size=case.config.hidden_size,
        intermediate_size=case.config.ffn_size,
        num_hidden_layers=case.config.num_layers,
        num_attention_heads=case.config.num_q_heads,
        num_key_value_heads=case.config.num_kv_heads,
        head_dim=case.config.head_dim,
        rms_norm_eps=case.config.rms_norm_eps,
        initializer_range=0.2,
        attn_implementation="eager",
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(case.config.vocabulary, (case.batch, case.context + CHECKED_STEPS))
    cache = transformers.DynamicCache(config=config)
    theirs(tokens[:, : case.context], past_key_values=cache)

    class AfterAPrompt(Problem):
        def contexts(self) -> Any:
            return [(layer.keys.transpose(1, 2), layer.values.transpose(1, 2)) for layer in cache.layers]

    weights = Weights.from_transformers(theirs)
    problem = AfterAPrompt(case, weights, tokens[:, case.context :], seed=0)
    found = reference_logits(problem, torch.float32)
    expected = theirs(tokens).logits[:, case.context :]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_contexts_are_the_same_for_all(problem: Problem) -> None:
    first, again = list(problem.contexts()), list(problem.contexts())
    assert len(first) == problem.case.config.num_layers
    for pair, other in zip(first, again, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(pair, other, strict=True))
    (k, v), (next_k, _) = first
    assert k.shape == (3, 33, 2, 32) and not torch.equal(k, v) and not torch.equal(k, next_k)


def test_errors_of_logits(problem: Problem, exact: Exact) -> None:
    logits = reference_logits(problem, torch.float32)
    assert exact.compare(logits) == (0.0, 1.0)
    assert 0.0 < exact.plain_error < 0.05 * float(logits.abs().max())
    wrong = logits.clone()
    wrong[1, 2] = wrong[1, 2].roll(1)
    wrong[0, 0, 7] += 100
    error, top1 = exact.compare(wrong)
    assert error == pytest.approx(100) and top1 == pytest.approx(1 - 2 / (3 * CHECKED_STEPS))
    wrong[2, 0, 0] = torch.nan
    assert math.isnan(exact.compare(wrong)[0])


# The engines


def engines(*names: str) -> dict[str, type[Engine]]:
    return {kind.name: kind for kind in bench_generate.usable_engines(names, CPU)}


def test_engines_have_the_names_of_the_arguments() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert set(engines(*bench_generate.ENGINES)) == set(bench_generate.ENGINES)
    assert list(engines("octavo", "hf_eager")) == ["hf_eager", "octavo"]


def test_says_which_packages_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = bench_generate.usable_engines(("hf_sdpa", "compiled", "octavo"), torch.device("cuda"))
    assert found == [Octavo]
    assert capsys.readouterr().err.splitlines() == [
        "without hf_sdpa: the package transformers is not installed",
        "without compiled: torch.compile needs Triton on a GPU, which is not installed",
    ]


@pytest.mark.parametrize("name", bench_generate.ENGINES)
def test_logits_of_every_engine(
    name: str, problem: Problem, exact: Exact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of steps that follow one another; what it would compile runs as it is written."""
    if name.startswith("hf_"):
        pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    engine = engines(name)[name](problem)
    found = checked_logits(engine, problem)
    error, top1 = exact.compare(found)
    assert error <= 2 * exact.plain_error
    assert top1 >= exact.plain_top1 - 0.1
    assert torch.equal(engine.tokens, found[:, -1].argmax(-1))  # which the next step starts from
    # A step sees what the steps before it stored: after another first token, the last logits are others.
    tokens = problem.tokens.clone()
    tokens[:, 0] = (tokens[:, 0] + 1) % problem.case.config.vocabulary
    other = replace(problem, tokens=tokens)
    assert not torch.equal(checked_logits(engines(name)[name](other), other)[:, -1], found[:, -1])


@pytest.mark.parametrize("kind", [Compiled, CompiledWhole])
def test_what_is_compiled_is_one_graph(
    kind: type[Compiled], problem: Problem, exact: Exact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fullgraph=True, with a backend that generates no code."""
    made = []
    compile_it = torch.compile

    def compile_with(function: Callable[..., Any], **options: Any) -> Any:
        assert options.pop("options") == {"coordinate_descent_tuning": True}

        def backend(graph: Any, _: Any) -> Any:
            made.append(graph)
            return graph

        return compile_it(function, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", compile_with)
    try:
        assert exact.compare(checked_logits(kind(problem), problem))[0] <= 2 * exact.plain_error
    finally:
        torch.compiler.reset()
    assert len(made) == (1 if kind.whole_step else 3)  # begin, end, and one for all layers


# Measuring


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("bench_cpu.read_bandwidth", lambda: 20.0)
    path = tmp_path / "rows.jsonl"
    assert bench_generate.main(["--tiny", "--json", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["case"] for row in rows] == [case.name for case in TINY]
    shown = capsys.readouterr().out
    for case, row in zip(TINY, rows, strict=True):
        assert row["shape"] == {"model": "tiny", "layers": 2, "batch": case.batch, "context": case.context}
        assert (row["dtype"], row["steps"], row["num_bytes"]) == ("bfloat16", TIMED_STEPS, case.num_bytes)
        assert row["floor_us"] == pytest.approx(case.num_bytes / 20e9 * 1e6)
        assert tuple(row["us"]) == bench_generate.NOT_COMPILED and row["skipped"] == {}
        for name, us in row["us"].items():
            assert us > 0
            assert row["tokens_per_s"][name] == pytest.approx(case.batch / us * 1e6)
            assert row["over_floor"][name] == pytest.approx(us / row["floor_us"])
            assert 0 < row["max_error"][name] <= 2 * row["plain_error"]
            assert 0.5 < row["top1"][name] <= 1
            assert f"| {case.name} | 2 | {row['floor_us'] / 1e3:.3f} | {name} | {us / 1e3:.3f} |" in shown
        machine = row["machine"]
        assert machine["device"].startswith("CPU, ") and machine["read_bandwidth"] == 20e9
        assert machine["versions"]["torch"] == torch.__version__ and "driver" in machine
    assert bench_generate.main(["--from-json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert set(lines) <= set(shown.splitlines()) and len(lines) == 2 + 2 * len(bench_generate.NOT_COMPILED)


@pytest.mark.gpu
def test_a_run_on_a_gpu(tmp_path: Path) -> None:
    """With all engines, those that compile too."""
    path = tmp_path / "rows.jsonl"
    options = ["--tiny", "--rows", "b3", "--engines", ",".join(bench_generate.ENGINES), "--json", str(path)]
    assert bench_generate.main(options) == 0
    (row,) = map(json.loads, path.read_text().splitlines())
    assert set(row["us"]) == set(bench_generate.ENGINES), row["skipped"]
    assert row["machine"]["driver"] and row["machine"]["read_bandwidth"] > 1e11


def test_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "docs" / "pictures"))
    import draw

    machine = {"device": "Some GPU", "driver": "1", "versions": {}, "read_bandwidth": 1e12}
    exact = types.SimpleNamespace(plain_error=0.1, plain_top1=1.0)
    case = Case("7b", 1, 1024)
    floor_us = case.num_bytes / 1e6
    found = Measured(us={"hf_eager": 8 * floor_us, "octavo": 1.25 * floor_us})
    path = tmp_path / "generate-some.jsonl"
    path.write_text(json.dumps(bench_generate.make_row(case, found, exact, machine)) + "\n")
    draw.generate(path).save(tmp_path / "picture.svg")
    drawn = (tmp_path / "picture.svg").read_text(encoding="utf-8")
    for words in ("Decode steps, Some GPU", "llama-2-7b, 32 layers, 1 x 1024", "transformers, eager"):
        assert f">{words}</text>" in drawn
    assert ">compiled PyTorch</text>" not in drawn
    assert drawn.count("<circle") == 2 * 2  # in the legend and in the line
    assert set(draw.ENGINES) == set(bench_generate.ENGINES)


class Peer(StaticWeightOctavo):
    """Octavo, which may do something else when it makes a step."""

    name = "peer"
    peer = True
    do: Callable[[Peer], object]

    def step(self) -> None:
        super().step()
        type(self).do(self)


def measured(
    problem: Problem,
    exact: Exact,
    do: Callable[[Peer], object],
    seconds: float = 100.0,
    **attributes: Any,
) -> Measured:
    kind = type("Kind", (Peer,), {"do": staticmethod(do), **attributes})
    found = Measured()
    measure_engine(kind, problem, exact, seconds, found)
    return found


def test_time_is_the_median_of_the_timed_steps(
    problem: Problem, exact: Exact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what comes before them nor a few slow ones count."""
    clock, steps = [0.0], itertools.count()
    monkeypatch.setattr(_generate_measure, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))

    def wait(_: Peer) -> None:
        step = next(steps)
        clock[0] += 50.0 if step < CHECKED_STEPS + WARM_UP_STEPS or step % 4 == 0 else 0.002

    assert measured(problem, exact, wait).us == {"peer": pytest.approx(2000.0)}
    assert next(steps) == CHECKED_STEPS + WARM_UP_STEPS + TIMED_STEPS


def test_what_is_wrong_has_no_time(
    problem: Problem, exact: Exact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(engine: Peer) -> None:
        engine.logits = engine.logits.roll(1, dims=-1)

    found = measured(problem, exact, spoil, name="octavo")
    assert not found.us and found.skipped["octavo"].startswith("WRONG: error ")
    assert found.top1["octavo"] < 0.5
    machine = {"device": "some", "driver": "1", "versions": {}, "read_bandwidth": 1e12}
    row = bench_generate.make_row(problem.case, found, exact, machine)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert bench_generate.main(["--from-json", str(path)]) == 1
    assert "tiny_b3_s33: octavo: WRONG" in capsys.readouterr().out


def test_a_peer_that_fails_says_why(problem: Problem, exact: Exact) -> None:
    def fail(_: Peer) -> None:
        raise KeyError("no such kernel\nand more")

    assert measured(problem, exact, fail).skipped == {"peer": "KeyError: 'no such kernel\\nand more'"}
    with pytest.raises(KeyError):
        measured(problem, exact, fail, peer=False)

    def exhaust(_: Peer) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nand more")

    found = measured(problem, exact, exhaust, peer=False)
    assert found.skipped == {"peer": "OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB."}


def test_an_engine_that_takes_too_long_is_left(problem: Problem, exact: Exact) -> None:
    def wait(_: Peer) -> None:
        try:
            time.sleep(60)
        except TimeLimitError as error:
            raise RuntimeError("the compiler failed") from error  # as PyTorch wraps what it meets

    start = time.monotonic()
    found = measured(problem, exact, wait, 1.0, peer=False)
    assert found.skipped == {"peer": "TimeLimitError: took longer than 1 s"} and not found.us
    assert time.monotonic() - start < 30
    others = signal.setitimer(signal.ITIMER_REAL, 100.0)  # such as that of the tests themselves
    try:
        with _generate_measure.time_limit(0.2):
            pass
        assert 50.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 100.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, *others)
