"""The page allocator: a step, pages, the prefix cache; from C++ and from Python, beside plain Python.

Builds page_allocator_speed.cpp with this checkout's sources (c++, a few seconds) and runs it, then times the
installed octavo from Python, and the same work of _python_page_manager.py. One thread; best and median.

    python benchmarks/bench_page_allocator.py --json rows.jsonl
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from _command import Parser
from _python_page_manager import PythonPageManager
from _report import write_rows

import octavo

ROOT = Path(__file__).resolve().parents[1]
NUM_PAGES, PAGE_SIZE, BATCH, MAX_PAGES, LENGTH, STEPS = 65536, 16, 256, 256, 1000, 64
PROMPT_PAGES = 64

# (case, implementation) -> what it has to reach, in the row's unit.
GOALS = {
    ("step, 256 sequences", "C++"): 50.0,
    ("step, 256 sequences", "Python"): 15.0,
    ("hash, a prompt of 64 pages", "C++"): 60.0,
    ("hit, a prompt of 64 pages", "C++"): 60.0,
    ("construct a million pages", "C++"): 20.0,
    ("memory", "C++"): 8.0,
}


@dataclass(frozen=True)
class Row:
    case: str
    implementation: str  # "C++", "Python": octavo from either; "plain Python": without it
    best: float
    median: float
    unit: str
    goal: float | None
    cpu: str
    python: str


def make_row(case: str, implementation: str, best: float, median: float, unit: str) -> Row:
    return Row(
        case,
        implementation,
        round(best, 4),
        round(median, 4),
        unit,
        GOALS.get((case, implementation)),
        cpu_name(),
        platform.python_version(),
    )


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def rows_of_cpp() -> list[Row]:
    sources = [
        ROOT / "benchmarks/page_allocator_speed.cpp",
        *sorted((ROOT / "src/page_allocator").glob("*.cpp")),
    ]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "page_allocator_speed"
        command = ["c++", "-O3", "-DNDEBUG", "-std=c++17", f"-I{ROOT}/include", f"-I{ROOT}/src", "-pthread"]
        subprocess.run([*command, *sources, "-o", program], check=True)
        output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return [
        make_row(row["case"], "C++", row["best"], row["median"], row["unit"])
        for row in map(json.loads, output.splitlines())
    ]


def time_rounds(
    prepare: Callable[[], object], work: Callable[[], object], rounds: int
) -> tuple[float, float]:
    """Seconds of the fastest and of the median round; `prepare` is not timed."""
    seconds = []
    for _ in range(rounds):
        prepare()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds), statistics.median(seconds)


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    shapes = ((BATCH, MAX_PAGES), (BATCH,), (BATCH + 1,), (BATCH, 2))
    page_table, seq_lens, cu_seqlens_q, copies = (np.zeros(shape, np.int32) for shape in shapes)
    return page_table, seq_lens, cu_seqlens_q, copies


def rows_of_step(rounds: int) -> list[Row]:
    case = f"step, {BATCH} sequences"
    alloc = octavo.PageAllocator(NUM_PAGES, PAGE_SIZE)
    seqs = [alloc.create() for _ in range(BATCH)]
    for i, seq in enumerate(seqs):
        alloc.extend(seq, LENGTH + i % PAGE_SIZE)
    step_arrays = octavo.StepArrays(*arrays())

    def shorten() -> None:
        for seq in seqs:
            alloc.truncate(seq, LENGTH)

    def steps() -> None:
        for _ in range(STEPS):
            alloc.step(seqs, 1, step_arrays)

    of_octavo = time_rounds(shorten, steps, rounds)

    page_table, seq_lens, cu_seqlens_q, _ = arrays()
    manager = PythonPageManager(NUM_PAGES, PAGE_SIZE)
    handles = [manager.create() for _ in range(BATCH)]
    manager.step(handles, LENGTH, page_table, seq_lens, cu_seqlens_q)

    def plain_steps() -> None:
        for _ in range(STEPS):
            manager.step(handles, 1, page_table, seq_lens, cu_seqlens_q)

    of_python = time_rounds(lambda: None, plain_steps, min(rounds, 30))
    return [
        make_row(case, name, best / STEPS * 1e6, median / STEPS * 1e6, "us a call")
        for name, (best, median) in (("Python", of_octavo), ("plain Python", of_python))
    ]


def rows_of_prefix_cache(rounds: int) -> list[Row]:
    tokens = np.random.default_rng(0).integers(0, 128000, PROMPT_PAGES * PAGE_SIZE).astype(np.int32)
    token_list = tokens.tolist()
    alloc = octavo.PageAllocator(NUM_PAGES, PAGE_SIZE, prefix_cache=True)
    seq = alloc.create()
    alloc.step([seq], len(tokens), octavo.StepArrays(*arrays()), tokens)
    manager = PythonPageManager(NUM_PAGES, PAGE_SIZE)
    handle = manager.create()
    manager.step([handle], len(tokens), *arrays()[:3])
    manager.store(handle, token_list)
    found = {
        "Python": time_rounds(lambda: None, lambda: alloc.free(alloc.create(tokens)), rounds),
        "plain Python": time_rounds(lambda: None, lambda: manager.free(manager.create(token_list)), rounds),
    }
    case = f"hit, a prompt of {PROMPT_PAGES} pages"
    return [
        make_row(case, name, best / PROMPT_PAGES * 1e9, median / PROMPT_PAGES * 1e9, "ns a page")
        for name, (best, median) in found.items()
    ]


MEMORY = """
import ctypes, pathlib, sys
import numpy as np, octavo
def used():  # without pages of files, which the system may drop meanwhile; /proc/self/status would be rounded
    lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    fields = dict(line.split(":", 1) for line in lines)
    return sum(1024 * int(fields[name].split()[0]) for name in ("Anonymous", "Swap"))
cached, num_pages = sys.argv[1] == "cached", 1_000_000
alloc = octavo.PageAllocator(num_pages, 16, prefix_cache=cached)
arrays = octavo.StepArrays(np.empty((1, 1000), np.int32), np.empty(1, np.int32))
tokens = np.arange(16000, dtype=np.int32)
alloc.free(alloc.create())
# What the imports have freed would serve new lists without another page of memory: it is given back first.
if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
    libc.malloc_trim(0)
before = used()
for i in range(num_pages // 1000):
    seq = alloc.create()
    tokens[0] = -i
    alloc.step([seq], 16000, arrays, tokens if cached else None)
    alloc.free(seq) if cached else alloc.truncate(seq, 16000)
lists = 0 if cached else 4 * num_pages  # what sequences that hold pages need
print((used() - before - lists) / num_pages)
"""


def rows_of_memory() -> list[Row]:
    rows: list[Row] = []
    if not Path("/proc/self/smaps_rollup").exists():
        return rows
    for case, argument in ("memory", "plain"), ("memory, all in the prefix cache", "cached"):
        command = [sys.executable, "-c", MEMORY, argument]
        size = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rows.append(make_row(case, "C++", size, size, "bytes a page"))
    return rows


def show(rows: list[Row]) -> None:
    print("| case | implementation | best | median | unit | goal |\n|---|---|--:|--:|---|--:|")
    for row in rows:
        goal = "" if row.goal is None else f"{row.goal:g}"
        cells = (row.case, row.implementation, f"{row.best:.4g}", f"{row.median:.4g}", row.unit, goal)
        print(f"| {' | '.join(cells)} |")


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="timed rounds of each case from Python")
    parser.add_argument("--json", type=Path, help="write one JSON object a line here")
    args = parser.parse_args()
    rows = rows_of_cpp() + rows_of_step(args.rounds) + rows_of_prefix_cache(args.rounds) + rows_of_memory()
    show(rows)
    if args.json:
        write_rows(args.json, [asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
