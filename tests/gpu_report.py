"""Runs everything that needs a GPU and writes one JSON report: what CI cannot run.

    python tests/gpu_report.py --cuda-test build/tests/cpp/cuda_test --json benchmarks/results/gpu-suite.json

The GPU tests of tests/python (PyTorch, CuPy and JAX arrays), then the C++ tests of the CUDA operators by
themselves and under compute-sanitizer's memcheck and racecheck, and all tests of decoding on a small scale
under racecheck. The exit status is 1 if a test fails or is skipped for want of a GPU, if memcheck reports
anything, or if racecheck reports more than KNOWN_RACES.

With --only some of these parts are run, and take the place of those that the report has.

What does not fail a run is listed in the report: modules that are skipped because something that they need is
not installed, tests that are expected to fail, and the known races.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import octavo

LIBRARIES = ("torch", "jax", "cupy", "numpy")


def describe_device() -> dict[str, str]:
    fields = "name,driver_version,memory.total"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return dict(zip(fields.split(","), lines[0].split(", "), strict=True))


def version_of(distribution: str) -> str | None:
    for name in (distribution, f"{distribution}-cuda13x"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def reason_of(skipped: ElementTree.Element) -> str:
    """Why pytest skipped a test, or a whole module while it collected tests."""
    message = skipped.get("message", "")
    if message != "collection skipped":
        return message
    _, _, why = ast.literal_eval(skipped.text or "")
    return str(why).removeprefix("Skipped: ")


def read_junit(xml: Path) -> dict[str, Any]:
    """The outcomes of a run of pytest, in which a skipped test that is marked gpu fails (conftest.py)."""
    counts: Counter[str] = Counter()
    by_library: Counter[str] = Counter()
    failed = []
    without: dict[str, dict[str, list[str]]] = {
        "skipped": defaultdict(list),
        "expected to fail": defaultdict(list),
    }
    for case in ElementTree.parse(xml).iter("testcase"):
        name = "::".join(part for part in (case.get("classname"), case.get("name")) if part)
        by_library.update(library for library in LIBRARIES if library in case.get("name", ""))
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
            failed.append(name)
        elif skipped is not None:
            outcome = "expected to fail" if skipped.get("type") == "pytest.xfail" else "skipped"
            counts[outcome] += 1
            without[outcome][reason_of(skipped)].append(name)
        else:
            counts["passed"] += 1
    return {
        "ok": counts["passed"] > 0 and not failed,
        "counts": dict(counts),
        "by_library": dict(by_library),
        "failed": failed,
        **{outcome: dict(names) for outcome, names in without.items()},
    }


def run_pytest(arguments: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "report.xml"
        start = time.monotonic()
        # With -n, tests of one xdist_group go to one process.
        options = ["-m", "gpu", "-q", "--dist=loadgroup", f"--junitxml={xml}"]
        pytest = [sys.executable, "-m", "pytest", "tests", *options, *arguments]
        status = subprocess.run(pytest, check=False).returncode
        found = read_junit(xml)
    return {**found, "ok": found["ok"] and status == 0, "seconds": round(time.monotonic() - start, 1)}


@dataclass(frozen=True)
class KnownRace:
    """Reports of racecheck that were looked into, and are none of a race."""

    kernel: str  # without namespaces and template arguments
    accesses: str  # the kinds of those between which racecheck sees no barrier
    reports: int  # at most, over all instances of the kernel, or of each
    why: str
    instances: str = ""  # a regular expression, to be found in the names of its instances
    of_each: bool = False  # whether each instance may have so many reports
    places: int | None = None  # how many accesses a report names, if always as many

    def is_of(self, race: Race) -> bool:
        return (
            (self.kernel, self.accesses) == (race.kernel, race.kinds)
            and re.search(self.instances, race.instance) is not None
            and self.places in (None, len(race.accesses))
        )


KNOWN_RACES = (
    KnownRace(
        "sm90_attention_kernel",
        "Read and Write",
        8,
        "An arrival at an mbarrier lies between the accesses, and the readers' wait for it: see racecheck in "
        "docs/notebook/sm90_attention.md.",
        instances="<__(half|nv_bfloat16), [^<]*<(?!\\(int\\)192)",
    ),
    KnownRace(
        "sm90_attention_kernel",
        "Read and Write",
        12,
        "The same accesses in more blocks of columns: see racecheck in docs/notebook/sm90_attention.md.",
        instances="<__(half|nv_bfloat16), [^<]*<\\(int\\)192",
        of_each=True,
    ),
    KnownRace(
        "sm90_attention_kernel",
        "Read and Write",
        1,
        "Over codes, mbarriers order the factors that a converter of queries writes (QueryScales) and the "
        "consumers' read of them, both ways: see racecheck in docs/notebook/sm90_attention.md.",
        instances="<octavo::cuda::AnyFloat16,",
        of_each=True,
        places=2,
    ),
    KnownRace(
        "sm90_attention_kernel",
        "Read and Write",
        33,
        "Over codes, mbarriers order the tiles that converters write and the reads of row tiles of few "
        "rows, both ways: see racecheck in docs/notebook/sm90_attention.md.",
        instances="<octavo::cuda::AnyFloat16, [^<]*<[^<]*Feature\\)4,",
        of_each=True,
    ),
    KnownRace(
        "sm90_backward_kernel",
        "Read and Write",
        4,
        "Barriers weights_full and weights_empty order them, both ways: see racecheck in "
        "docs/notebook/attention_backward.md.",
        instances="Config<\\(int\\)[567],",
        of_each=True,
        places=2,
    ),
    KnownRace(
        "sm90_backward_kernel",
        "Read and Write",
        2,
        "Barriers q_full, dout_full, dropped_full and q_empty order bulk copies of statistics, and words of "
        "dropout, and their reads, both ways: see racecheck in docs/notebook/attention_backward.md.",
        instances="Config<\\(int\\)[02], \\([^)]*\\)[34]>",
        of_each=True,
    ),
    KnownRace(
        "sm90_backward_kernel",
        "Read and Write",
        4,
        "Barriers q_full and q_empty order the steps of a block mask, which lanes of the loader write, and "
        "their reads, both ways: see racecheck in docs/notebook/attention_backward.md.",
        instances="Config<\\(int\\)[02], \\([^)]*\\)5>",
        of_each=True,
    ),
    KnownRace(
        "sm90_backward_kernel",
        "Read and Write",
        1,
        "With ALiBi at head dim 64, barrier tile_empty orders the consumers' reads of a tile's facts and the "
        "scheduler's facts of a later one: see racecheck in docs/notebook/attention_backward.md.",
        instances="Config<\\(int\\)0, \\([^)]*\\)[12]>",
        of_each=True,
        places=2,
    ),
    KnownRace(
        "sm90_wide_attention_kernel",
        "Read and Write",
        10,
        "Barriers weights_full and weights_empty order weights and their factors, and those of work slots "
        "the factors of results, both ways: see racecheck in docs/notebook/sm90_attention.md.",
        of_each=True,
        places=2,
    ),
    KnownRace(
        "sm90_latent_attention_kernel",
        "Read and Write",
        10,
        "Two warpgroups hand on maxima, factors and sums of rows behind named barriers, at which one "
        "arrives and the other waits: see Sm90LatentBarrier in src/cuda/sm90_latent/shared.cuh.",
    ),
    KnownRace(
        "latent_decode_kernel",
        "Read and Write",
        167,
        "One lane of a warp arrives for all at the barrier that frees a tile's place, behind __syncwarp. "
        "With all lanes arriving there are no reports: see racecheck in docs/notebook/latent_attention.md.",
    ),
)

_RACE = re.compile(r"=+ (?:Error|Warning): Race reported between (Read|Write) access at (.+)")
_AND = re.compile(r"=+ +and (Read|Write) access at (.+?)(?: \[\d+ hazards?\])?")


def kernel_of(location: str) -> str:
    """The "kernel" in "void octavo::cuda::kernel<Config<64>>(Params)+0x1f0 in kernel.cuh:12"."""
    name = location.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    name = name.split("(")[0].split("+0x")[0]
    return name.split("::")[-1].split(" ")[-1]


@dataclass(frozen=True)
class Race:
    """A report of racecheck: accesses (kind, place) between which it sees no barrier."""

    accesses: tuple[tuple[str, str], ...]

    @property
    def kernel(self) -> str:
        return kernel_of(self.accesses[0][1])

    @property
    def instance(self) -> str:
        return self.accesses[0][1].split("+0x")[0]

    @property
    def kinds(self) -> str:
        return " and ".join(sorted({kind for kind, _ in self.accesses}))


def find_races(output: str) -> list[Race]:
    races: list[list[tuple[str, str]]] = []
    is_open = False
    for line in output.splitlines():
        if begin := _RACE.fullmatch(line):
            races.append([(begin[1], begin[2])])
            is_open = True
        elif is_open and (more := _AND.fullmatch(line)):
            races[-1].append((more[1], more[2]))
        else:
            is_open = False
    return [Race(tuple(accesses)) for accesses in races]


def compare_with_known(races: Iterable[Race], known: Sequence[KnownRace] = KNOWN_RACES) -> dict[str, Any]:
    """Counts a race once that several processes report. `ok`: none is new."""
    same: dict[tuple[str, str, int, str], set[Race]] = defaultdict(set)
    for race in races:
        number = next((i for i, other in enumerate(known) if other.is_of(race)), -1)
        instance = race.instance if number >= 0 and known[number].of_each else ""
        same[race.kernel, race.kinds, number, instance].add(race)
    rows = []
    for (kernel, accesses, number, instance), reports in sorted(same.items()):
        row: dict[str, Any] = {"kernel": kernel, "accesses": accesses}
        if instance:
            row["instance"] = instance
        row |= {"reports": len(reports), "known": known[number].reports if number >= 0 else 0}
        if number >= 0:
            row["why"] = known[number].why
        row["places"] = sorted(" / ".join(f"{kind} {at}" for kind, at in race.accesses) for race in reports)
        rows.append(row)
    return {"ok": all(row["reports"] <= row["known"] for row in rows), "races": rows}


# All C++ tests of decoding, which racecheck gets through on a small scale (tests/cpp/small_scale.h).
DECODE_TESTS = ":".join(
    f"*{name}*"
    for name in (
        "Decode",
        "SplitKv",
        "StreamK",
        "SharedPrefix",
        "CudaCodesTest",
        "ChosenPages",
        "CudaSoftmaxPhiTest",
    )
)

# The exit status of compute-sanitizer where it reports anything and the program itself succeeds.
REPORTED = 9


def is_good(tool: str | None, status: int, output: str) -> bool:
    """Whether all tests of a process passed, and its tool reported nothing but races."""
    ran = re.search(r"^\[=+\] (\d+) tests? from \d+ test suites? ran", output, re.MULTILINE)
    passed = re.search(r"^\[  PASSED  \] (\d+) tests?", output, re.MULTILINE)
    if not ran or not passed or ran[1] != passed[1]:
        return False
    if tool is None:
        return status == 0
    summary = re.findall(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)", output, re.MULTILINE)
    if not summary:
        return False
    if tool != "racecheck":
        return status == 0 and summary[-1] == "0"
    reports = re.findall(r"^=+ .*\b(?:Error|Warning)\b.*", output, re.MULTILINE)
    all_are_races = len(reports) == len(find_races(output)) and bool(reports) == (summary[-1] != "0")
    return all_are_races and status in (0, REPORTED)


def run_shard(
    command: list[str],
    shard: int,
    num_shards: int,
    more_environment: dict[str, str],
    deadline: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Ends the process, and what it started, at the deadline of time.monotonic."""
    shards = {"GTEST_TOTAL_SHARDS": str(num_shards), "GTEST_SHARD_INDEX": str(shard)}
    environment = {**os.environ, **shards, **more_environment}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, env=environment, start_new_session=True
        )
        try:
            status = process.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command, status, output.read(), errors.read())


def count_tests(binary: Path, tests: str) -> int:
    command = [str(binary), "--gtest_list_tests", f"--gtest_filter={tests}"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return sum(line.startswith("  ") for line in lines)


def run_cuda_test(
    binary: Path,
    jobs: int,
    tool: str | None,
    tests: str = "*",
    *,
    small_scale: bool = False,
    seconds: float | None = None,
) -> dict[str, Any]:
    expected = count_tests(binary, tests)
    jobs = max(min(jobs, expected), 1)  # a tool reports a process without a test as an error
    sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(REPORTED)] if tool else []
    if tool == "racecheck":  # else each process would have as many threads as there are CPUs
        sanitizer += ["--racecheck-num-workers", str(max((os.cpu_count() or 1) // jobs, 1))]
    environment = {"OCTAVO_SMALL_SCALE": "1"} if small_scale else {}
    start = time.monotonic()
    deadline = None if seconds is None else start + seconds
    command = [*sanitizer, str(binary), f"--gtest_filter={tests}"]
    with ThreadPoolExecutor(jobs) as pool:
        results = list(
            pool.map(lambda shard: run_shard(command, shard, jobs, environment, deadline), range(jobs))
        )
    num_passed = 0
    times: dict[str, int] = {}
    summaries: Counter[str] = Counter()
    bad = False
    for result in results:
        passed = re.findall(r"^\[       OK \] (\S+) \((\d+) ms\)", result.stdout, re.MULTILINE)
        times |= {test: int(ms) for test, ms in passed}
        # Where a process was ended, there is no such line.
        counted = re.search(r"^\[  PASSED  \] (\d+) tests?", result.stdout, re.MULTILINE)
        num_passed += int(counted[1]) if counted else len(passed)
        summaries.update(re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", result.stdout)[-1:])
        if not is_good(tool, result.returncode, result.stdout):
            bad = True
            print(result.stdout[-4000:], result.stderr[-2000:], file=sys.stderr)
    compared = compare_with_known(race for result in results for race in find_races(result.stdout))
    return {
        "ok": num_passed == expected > 0 and not bad and compared["ok"],
        "tests": tests,
        "found": expected,
        "passed": num_passed,
        "slowest": {test: times[test] / 1000 for test in sorted(times, key=lambda x: -times[x])[:5]},
        "summaries": dict(summaries),
        **({"races": compared["races"]} if tool == "racecheck" else {}),
        "seconds": round(time.monotonic() - start, 1),
    }


PARTS = ("pytest", "cuda_test", "memcheck", "racecheck", "racecheck_decode")


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs everything that needs a GPU; writes a JSON report.")
    parser.add_argument("--cuda-test", type=Path, required=True, help="built from tests/cpp")
    parser.add_argument("--json", type=Path, required=True, help="where the report goes")
    parser.add_argument(
        "--sanitize",
        metavar="FILTER",
        default="*",
        help="the C++ tests to run under memcheck and racecheck; the latter leaves out those of decoding, "
        "unless the filter itself leaves some out (default: all)",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="how many processes share the C++ tests (default: %(default)s)"
    )
    parser.add_argument(
        "--only", metavar="PART", nargs="+", action="extend", choices=PARTS, help="run these parts alone"
    )
    parser.add_argument(
        "--seconds", type=float, help="end each part's C++ processes after so long; it is not ok then"
    )
    parser.add_argument("pytest_arguments", nargs="*", help="passed on to pytest, after --")
    options = parser.parse_args()

    def cuda_test(tool: str | None, tests: str = "*", small_scale: bool = False) -> dict[str, Any]:
        return run_cuda_test(
            options.cuda_test,
            options.jobs,
            tool,
            tests,
            small_scale=small_scale,
            seconds=options.seconds,
        )

    parts = {
        "pytest": lambda: run_pytest(options.pytest_arguments),
        "cuda_test": lambda: cuda_test(None),
        "memcheck": lambda: cuda_test("memcheck", options.sanitize),
        "racecheck": lambda: cuda_test(
            "racecheck",
            options.sanitize if "-" in options.sanitize else f"{options.sanitize}-{DECODE_TESTS}",
        ),
        "racecheck_decode": lambda: cuda_test("racecheck", DECODE_TESTS, small_scale=True),
    }
    about = {
        "device": describe_device(),
        "octavo": octavo.build_info(),
        "versions": {library: version_of(library) for library in LIBRARIES},
    }
    if options.only:  # what ran where is then said of each part
        report = json.loads(options.json.read_text()) if options.json.exists() else {}
        report.pop("ok", None)
        report |= {part: {**parts[part](), **about} for part in PARTS if part in options.only}
    else:
        report = {**about, **{part: parts[part]() for part in PARTS}}
    report["ok"] = all(report[part]["ok"] for part in PARTS if part in report)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({key: value for key, value in report.items() if key != "octavo"}, indent=2))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
