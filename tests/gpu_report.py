"""Runs everything that needs a GPU and writes one JSON report: what CI cannot run.

    python tests/gpu_report.py --cuda-test build/tests/cpp/cuda_test --json benchmarks/results/gpu-suite.json

The GPU tests of tests/python (PyTorch, CuPy and JAX arrays), then the C++ tests of the CUDA operators by
themselves and under compute-sanitizer's memcheck and racecheck. A failed, skipped or missing test makes the
exit status 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


def run_pytest(arguments: list[str]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "report.xml"
        start = time.monotonic()
        pytest = [sys.executable, "-m", "pytest", "tests", "-m", "gpu", "-q", f"--junitxml={xml}"]
        status = subprocess.run([*pytest, *arguments], check=False).returncode
        cases = list(ElementTree.parse(xml).iter("testcase"))
    counts: Counter[str] = Counter()
    by_library: Counter[str] = Counter()
    bad = []
    for case in cases:
        marks = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
        outcome = marks[0] if marks else "passed"
        counts[outcome] += 1
        by_library.update(library for library in LIBRARIES if library in case.get("name", ""))
        if outcome != "passed":
            bad.append(f"{outcome}: {case.get('classname')}::{case.get('name')}")
    return {
        "ok": status == 0 and counts["passed"] > 0 and not bad,
        "counts": dict(counts),
        "by_library": dict(by_library),
        "not_passed": bad,
        "seconds": round(time.monotonic() - start, 1),
    }


def run_shard(command: list[str], shard: int, num_shards: int) -> subprocess.CompletedProcess[str]:
    shards = {"GTEST_TOTAL_SHARDS": str(num_shards), "GTEST_SHARD_INDEX": str(shard)}
    return subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, **shards})


def run_cuda_test(binary: Path, jobs: int, tool: str | None, tests: str = "*") -> dict[str, object]:
    sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"] if tool else []
    start = time.monotonic()
    command = [*sanitizer, str(binary), f"--gtest_filter={tests}"]
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda shard: run_shard(command, shard, jobs), range(jobs)))
    num_passed = 0
    summaries: Counter[str] = Counter()
    bad = []
    for shard, result in enumerate(results):
        passed = re.search(r"\[  PASSED  \] (\d+) tests?", result.stdout)
        skipped = re.search(r"\[  SKIPPED \]", result.stdout)
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", result.stdout)
        num_passed += int(passed[1]) if passed else 0
        summaries.update(summary[-1:])
        if result.returncode != 0 or not passed or skipped or (tool and not summary):
            bad.append(shard)
            print(result.stdout[-4000:], result.stderr[-2000:], file=sys.stderr)
    return {
        "ok": num_passed > 0 and not bad,
        "tests": tests,
        "passed": num_passed,
        "summaries": dict(summaries),
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs everything that needs a GPU; writes a JSON report.")
    parser.add_argument("--cuda-test", type=Path, required=True, help="built from tests/cpp")
    parser.add_argument("--json", type=Path, required=True, help="where the report goes")
    parser.add_argument(
        "--sanitize", metavar="FILTER", default="*", help="the C++ tests to run under the sanitizers"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="how many processes share the C++ tests (default: %(default)s)"
    )
    parser.add_argument("pytest_arguments", nargs="*", help="passed on to pytest, after --")
    options = parser.parse_args()

    report = {
        "device": describe_device(),
        "octavo": octavo.build_info(),
        "versions": {library: version_of(library) for library in LIBRARIES},
        "pytest": run_pytest(options.pytest_arguments),
        "cuda_test": run_cuda_test(options.cuda_test, options.jobs, None),
        "memcheck": run_cuda_test(options.cuda_test, options.jobs, "memcheck", options.sanitize),
        "racecheck": run_cuda_test(options.cuda_test, options.jobs, "racecheck", options.sanitize),
    }
    report["ok"] = all(report[part]["ok"] for part in ("pytest", "cuda_test", "memcheck", "racecheck"))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({key: value for key, value in report.items() if key != "octavo"}, indent=2))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
