"""What tests/gpu_report.py makes of the output of pytest, GoogleTest and compute-sanitizer; needs no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu_report
from gpu_report import KnownRace, compare_with_known, find_races, is_good, kernel_of, read_junit

TESTS = {
    "test_good.py": """
import pytest

def test_torch():
    pass

@pytest.mark.xfail(reason="not yet", raises=ZeroDivisionError)
def test_expected_to_fail():
    1 / 0
""",
    "test_module.py": """
import pytest

pytest.importorskip("no_such_module", reason="the weights are missing")
""",
    "test_skip.py": """
import pytest

@pytest.mark.skip(reason="no reason")
def test_skipped():
    pass
""",
    "test_bad.py": """
import pytest

@pytest.fixture
def broken():
    raise RuntimeError

def test_fails():
    assert False

def test_has_an_error(broken):
    pass
""",
}


def outcomes(folder: Path, *files: str) -> dict[str, Any]:
    for name in files:
        (folder / name).write_text(TESTS[name])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junitxml=report.xml", *files]
    subprocess.run(command, cwd=folder, check=False, capture_output=True)
    return read_junit(folder / "report.xml")


def test_skips_are_listed_and_do_not_fail(tmp_path: Path) -> None:
    assert outcomes(tmp_path, "test_good.py", "test_module.py", "test_skip.py") == {
        "ok": True,
        "counts": {"passed": 1, "expected to fail": 1, "skipped": 2},
        "by_library": {"torch": 1},
        "failed": [],
        "skipped": {"the weights are missing": ["test_module"], "no reason": ["test_skip::test_skipped"]},
        "expected to fail": {"not yet": ["test_good::test_expected_to_fail"]},
    }


def test_failures_and_errors_fail(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "test_good.py", "test_bad.py")
    assert not found["ok"]
    assert found["failed"] == ["test_bad::test_fails", "test_bad::test_has_an_error"]
    assert found["counts"] == {"passed": 1, "expected to fail": 1, "failed": 2}


def test_a_run_of_nothing_is_not_ok(tmp_path: Path) -> None:
    assert not outcomes(tmp_path, "test_module.py")["ok"]


KERNEL = "void octavo::cuda::sm90_attention_kernel<octavo::cuda::Config<__half, (int)128>>(Params, Plan)"
OTHER = "void octavo::cuda::(anonymous namespace)::decode_kernel<Config<(bool)1>, 64>(AttentionParams)"

PASSED = """\
Running main() from gtest_main.cc
[==========] Running 2 tests from 1 test suite.
[ RUN      ] Cuda.One
[       OK ] Cuda.One (5 ms)
[==========] 2 tests from 1 test suite ran. (9 ms total)
[  PASSED  ] 2 tests.
"""
FAILED = """\
[==========] 2 tests from 1 test suite ran. (9 ms total)
[  PASSED  ] 1 test.
[  FAILED  ] 1 test, listed below:
[  FAILED  ] Cuda.One
"""
SKIPPED = """\
[==========] 2 tests from 1 test suite ran. (9 ms total)
[  PASSED  ] 1 test.
[  SKIPPED ] 1 test, listed below:
[  SKIPPED ] Cuda.One
"""


def report(kernel: str, offset: int, *, first: str = "Write", other: str = "Read") -> str:
    return f"""\
========= Error: Race reported between {first} access at {kernel}+{offset:#x}
=========     and {other} access at {kernel}+{offset + 256:#x} [16 hazards]
=========     and {other} access at {kernel}+{offset + 512:#x} [1 hazard]
=========
"""


def racecheck(*reports: str, tests: str = PASSED) -> str:
    count = len(reports)
    return f"""\
========= COMPUTE-SANITIZER
{"".join(reports)}{tests}\
========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)
"""


def test_races_are_found() -> None:
    first, second = find_races(racecheck(report(KERNEL, 16), report(OTHER, 32, first="Read", other="Write")))
    assert first.accesses == (
        ("Write", f"{KERNEL}+0x10"),
        ("Read", f"{KERNEL}+0x110"),
        ("Read", f"{KERNEL}+0x210"),
    )
    assert (first.kernel, first.kinds) == ("sm90_attention_kernel", "Read and Write")
    assert (second.kernel, second.kinds) == ("decode_kernel", "Read and Write")
    assert find_races(racecheck()) == []
    assert find_races(report(KERNEL, 16, other="Write"))[0].kinds == "Write"


def test_kernel_of_a_place() -> None:
    assert kernel_of(KERNEL + "+0x10") == "sm90_attention_kernel"
    assert kernel_of(f"{OTHER}+0x10 in /tmp/decode (1)/kernel.cuh:12") == "decode_kernel"
    assert kernel_of("plain_kernel+0x10") == "plain_kernel"
    assert kernel_of("octavo::plain_kernel(int, float *)+0x10 in plain.cu:3") == "plain_kernel"


KNOWN = KnownRace("sm90_attention_kernel", "Read and Write", 2, "looked into")


def test_known_races_are_listed() -> None:
    """The second process reports the first one's second race again, with another number of hazards."""
    outputs = [
        racecheck(report(KERNEL, 16), report(KERNEL, 32)),
        racecheck(report(KERNEL, 32).replace("16 hazards", "4 hazards")),
    ]
    races = [race for output in outputs for race in find_races(output)]
    compared = compare_with_known(races, [KNOWN])
    assert compared["ok"]
    (row,) = compared["races"]
    assert len(row.pop("places")) == 2
    assert row == {
        "kernel": "sm90_attention_kernel",
        "accesses": "Read and Write",
        "reports": 2,
        "known": 2,
        "why": "looked into",
    }
    assert compare_with_known(races[:1], [KNOWN])["ok"]  # fewer, where only some tests run
    assert compare_with_known([], [KNOWN]) == {"ok": True, "races": []}


@pytest.mark.parametrize(
    "new",
    [
        report(KERNEL, 48),  # one more than are known
        report(KERNEL, 16, other="Write"),  # other accesses
        report(OTHER, 16),  # another kernel
    ],
)
def test_new_races_fail(new: str) -> None:
    output = racecheck(report(KERNEL, 16), report(KERNEL, 32), new)
    assert is_good("racecheck", gpu_report.REPORTED, output)
    compared = compare_with_known(find_races(output), [KNOWN])
    assert not compared["ok"]
    (bad,) = (row for row in compared["races"] if row["reports"] > row["known"])
    (race,) = find_races(new)
    assert " / ".join(f"{kind} {place}" for kind, place in race.accesses) in bad["places"]


def of_instance(head: str, offset: int, reads: int = 1) -> str:
    """As of the instance whose template arguments begin so: one write, and so many reads."""
    kernel = f"void octavo::cuda::sm90_attention_kernel<{head}, octavo::cuda::Sm90Config<(int)128>>(Params)"
    others = "".join(f"=========     and Read access at {kernel}+{64 * i:#x}\n" for i in range(1, reads + 1))
    return f"========= Error: Race reported between Write access at {kernel}+{offset:#x}\n{others}"


CODES = "octavo::cuda::AnyFloat16, (int)4"


def judge(*reports: str) -> dict[str, Any]:
    return compare_with_known(find_races("".join(reports)), gpu_report.KNOWN_RACES)


def test_races_of_instances() -> None:
    """Over numbers so many are known in all, over codes one of each instance, of two accesses."""
    eight = [of_instance("__half", 1024 + 16 * i, 8) for i in range(8)]
    each = [of_instance("octavo::cuda::AnyFloat16, " + feature, 1024) for feature in ("(int)1", "(int)4")]
    compared = judge(*eight, *each)
    assert compared["ok"]
    assert [(row["reports"], row["known"]) for row in compared["races"]] == [(8, 8), (1, 1), (1, 1)]
    assert ["instance" in row for row in compared["races"]] == [False, True, True]
    assert not judge(*eight, of_instance("__nv_bfloat16", 1024))["ok"]


@pytest.mark.parametrize(
    "reports",
    [
        [of_instance(CODES, 1024), of_instance(CODES, 2048)],  # other accesses of the same instance
        [of_instance(CODES, 1024, 2)],  # another kind of report
        [of_instance("float", 1024)],  # an instance of neither kind
        [of_instance(CODES, 1024).replace("Read", "Write")],
    ],
)
def test_new_races_of_instances_fail(reports: list[str]) -> None:
    assert len(find_races("".join(reports))) == len(reports)
    assert not judge(*reports)["ok"]


def test_known_races_have_reasons() -> None:
    root = Path(__file__).resolve().parents[2]
    sources = "".join(path.read_text() for path in (root / "src" / "cuda").rglob("*.cuh"))
    for race in gpu_report.KNOWN_RACES:
        assert f" {race.kernel}(" in sources
        page = race.why.split(" ")[-1].removesuffix(".")
        assert "racecheck" in (root / page).read_text()


def test_good_processes() -> None:
    assert is_good(None, 0, PASSED)
    assert is_good("memcheck", 0, PASSED + "========= ERROR SUMMARY: 0 errors\n")
    assert is_good("racecheck", 0, racecheck())
    assert is_good("racecheck", gpu_report.REPORTED, racecheck(report(KERNEL, 16)))
    assert is_good("racecheck", 0, racecheck(report(KERNEL, 16).replace("Error:", "Warning:")))


MEMORY = """\
========= Invalid __global__ read of size 4 bytes
=========     at kernel(int *)+0x10
"""
BARRIER = "========= Error: Barrier error detected. Divergent thread(s) in block\n"


@pytest.mark.parametrize(
    ("tool", "status", "output"),
    [
        (None, 1, FAILED),
        (None, 0, FAILED),
        (None, 0, SKIPPED),
        (None, 0, ""),  # ended early
        (None, 1, PASSED),
        ("memcheck", 0, PASSED),  # without a summary, it did not look
        ("memcheck", 9, MEMORY + PASSED + "========= ERROR SUMMARY: 1 error\n"),
        ("memcheck", 0, MEMORY + PASSED + "========= ERROR SUMMARY: 1 error\n"),
        ("memcheck", 1, FAILED + "========= ERROR SUMMARY: 0 errors\n"),
        ("racecheck", 0, PASSED),
        ("racecheck", 9, racecheck(report(KERNEL, 16), tests=FAILED)),
        ("racecheck", 9, racecheck(report(KERNEL, 16), tests="")),
        ("racecheck", 1, racecheck(report(KERNEL, 16))),
        ("racecheck", 9, racecheck(report(KERNEL, 16), BARRIER)),  # something else than a race
        ("racecheck", 9, racecheck("", "")),  # two hazards, in words that find_races does not know
    ],
)
def test_bad_processes(tool: str | None, status: int, output: str) -> None:
    assert not is_good(tool, status, output)


def test_shards_make_one_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(outputs: list[str], known: KnownRace = KNOWN) -> dict[str, Any]:
        def run_shard(
            command: list[str],
            shard: int,
            num_shards: int,
            more_environment: dict[str, str],
            deadline: float | None,
        ) -> subprocess.CompletedProcess[str]:
            assert num_shards == len(outputs)
            return subprocess.CompletedProcess(command, gpu_report.REPORTED, outputs[shard], "")

        monkeypatch.setattr(gpu_report, "run_shard", run_shard)
        monkeypatch.setattr(gpu_report, "count_tests", lambda binary, tests: 2 * len(outputs))
        monkeypatch.setattr(
            gpu_report, "compare_with_known", lambda races: compare_with_known(races, [known])
        )
        return gpu_report.run_cuda_test(Path("cuda_test"), len(outputs), "racecheck")

    shards = [racecheck(report(KERNEL, 16)), racecheck(report(KERNEL, 32)), racecheck(report(KERNEL, 16))]
    found = run(shards)
    assert found["ok"] and found["passed"] == 6
    assert found["summaries"] == {"RACECHECK SUMMARY: 1 hazards displayed (1 errors, 0 warnings)": 3}
    assert [(row["reports"], row["known"]) for row in found["races"]] == [(2, 2)]
    assert not run(shards, replace(KNOWN, reports=1))["ok"]
    assert capsys.readouterr().err == ""
    assert not run([*shards, racecheck(tests=FAILED)])["ok"]
    assert "Cuda.One" in capsys.readouterr().err


def program(folder: Path, *, listed: int = 2, seconds: int = 0) -> Path:
    """Lists so many tests and passes one for each shard, in so much time; names tell the scale as well."""
    script = folder / "cuda_test"
    names = "\n".join(f"  Test{i}  # GetParam() = {i}" for i in range(listed))
    script.write_text(f"""#!/bin/sh
if [ "$1" = --gtest_list_tests ]; then printf '%s\\n' Cuda. '{names}'; exit 0; fi
echo "[       OK ] Cuda.Test$GTEST_SHARD_INDEX$OCTAVO_SMALL_SCALE (1500 ms)"
sleep {seconds}
echo "[==========] 1 test from 1 test suite ran. (1500 ms total)"
echo "[  PASSED  ] 1 test."
""")
    script.chmod(0o755)
    return script


def test_all_tests_of_a_filter_have_to_run(tmp_path: Path) -> None:
    found = gpu_report.run_cuda_test(program(tmp_path), 2, None, small_scale=True)
    assert found["ok"] and (found["found"], found["passed"]) == (2, 2)
    assert found["slowest"] == {"Cuda.Test01": 1.5, "Cuda.Test11": 1.5}
    found = gpu_report.run_cuda_test(program(tmp_path, listed=3), 2, None)
    assert not found["ok"] and (found["found"], found["passed"]) == (3, 2)
    assert found["slowest"] == {"Cuda.Test0": 1.5, "Cuda.Test1": 1.5}
    found = gpu_report.run_cuda_test(program(tmp_path, listed=1), 2, None)
    assert found["ok"] and found["passed"] == 1, "no more processes than tests"


def test_processes_end_in_time(tmp_path: Path) -> None:
    found = gpu_report.run_cuda_test(program(tmp_path, seconds=100), 2, None, seconds=1.0)
    assert not found["ok"] and found["passed"] == 2
    assert found["seconds"] < 50


def test_a_part_takes_its_place_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "describe_device", lambda: {"name": "new"})
    json_file = tmp_path / "report.json"
    parts = {"memcheck": {"ok": True, "passed": 7}, "cuda_test": {"ok": False}}
    json_file.write_text(json.dumps({"device": {"name": "old"}, **parts, "ok": False}))
    options = ["--cuda-test", str(program(tmp_path)), "--json", str(json_file), "--jobs", "2"]
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", *options, "--only", "cuda_test"])
    assert gpu_report.main() == 0
    found = json.loads(json_file.read_text())
    assert found["ok"] and found["memcheck"] == parts["memcheck"] and found["device"] == {"name": "old"}
    assert found["cuda_test"]["passed"] == 2 and found["cuda_test"]["device"] == {"name": "new"}
