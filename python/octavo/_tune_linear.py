"""Measuring which kernel of ``linear`` is the fastest on this machine."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from octavo import _core, _linear_cache
from octavo._linear_cache import Row, Tuned
from octavo._linear_plan import LinearPlan, device_name, dtype_name
from octavo._linear_table import LinearTable, linear_table

LIBRARY_LEAD = 1.02
"""By which the library must be faster: what two runs differ by."""
MANY_ROWS = 128
"""With fewer, the library must be faster than weights that are read ahead, too."""
_MOST_OVER_ESTIMATE = 1.7  # tiles that are estimated to take longer than that times the least are left out
_MOST_TILES, _FINALISTS = 32, 4
_ROUNDS, _FINAL_ROUNDS = 5, 25
_MOST_WEIGHTS = 200  # of one graph
_MAX_LENGTH = 2**30  # of arrays that linear takes

_Choice = TypeVar("_Choice")
_Item = TypeVar("_Item")


class Problem(NamedTuple):
    """A product of x [M, K] with w [N, K]."""

    N: int
    K: int
    M: int
    dtype: str

    def __str__(self) -> str:
        return f"[{self.N}, {self.K}] x {self.M}"


def weights_of(problem: Problem, l2_bytes: int) -> int:
    """How many weights rotate, so that none of them is found in the L2 cache, and a graph has ten calls."""
    count = 2 * l2_bytes // (problem.N * problem.K * 2) + 1
    return min(max(10 if problem.N * problem.K < 1e8 else 2, count), _MOST_WEIGHTS)


class Times(NamedTuple):
    """Microseconds of a call, by ``static_weight``."""

    plain: float
    static_weight: float


class Measure(Protocol):
    """Gets the times of each plan: medians of this many runs (`rounds`)."""

    def __call__(self, problem: Problem, plans: Sequence[LinearPlan], rounds: int, /) -> list[Times]: ...


def library_is_faster(us: Times, library_us: float, rows: int) -> bool:
    """Whether the library should compute a product that takes Octavo these times."""
    return us.plain > LIBRARY_LEAD * library_us and (rows >= MANY_ROWS or us.static_weight > library_us)


def fastest(times: Mapping[_Choice, Times]) -> _Choice:
    """The one with the least sum of its losses against the best of each mode."""
    plain = min(us.plain for us in times.values())
    static_weight = min(us.static_weight for us in times.values())
    return min(times, key=lambda x: times[x].plain / plain + times[x].static_weight / static_weight)


def tune_linear(
    shapes: Iterable[tuple[int, int]],
    *,
    dtype: object,
    rows: Iterable[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
    save: bool = True,
    device: str | None = None,
) -> LinearTable:
    """Measure on this machine which kernel ``linear`` had better run for these weights, and have it run.

    For each shape and number of rows the kernels that ought to be among the fastest run in CUDA graphs, over
    weights that rotate over more than twice the L2 cache, and so does the product of PyTorch or CuPy. What is
    found is in force at once and, saved, in later processes that use a GPU of the same name. A number of rows
    between two of those measured has the plan of the larger one; for more than the largest there is the table
    that Octavo ships, or the estimate. Nothing else should use the GPU meanwhile.

    Args:
        shapes: [N, K] of the weights, such as ``[(4096, 4096), (22016, 4096)]``; K a multiple of 8.
        dtype: "float16" or "bfloat16", or such a dtype of NumPy, JAX or PyTorch.
        rows: the numbers of rows of ``x``, each at least 1. Default: (1, 2, 4, 8, 16, 32, 64, 128, 256).
        save: write the table to the folder of the environment variable ``OCTAVO_CACHE``, or to
            ``~/.cache/octavo``, as ``linear-<name of the GPU>.json``, together with what was tuned before. A
            file of another version of the kernels is not used, and replaced. Default: True.
        device: a GPU of this machine, such as "cuda:1". Default: the first one.

    Returns:
        The table that is in force, as of ``linear_table``.

    Raises:
        ValueError: a length below 1, a K that is no multiple of 8, another dtype or device.
        TypeError: an argument of another type.
        RuntimeError: there is no GPU here, or neither PyTorch nor CuPy to measure with.
        OSError: there is neither a home folder nor ``OCTAVO_CACHE`` to save the table in, and nothing was
            measured; or the file cannot be written, and the table is in force all the same.
    """
    where = device_name("tune_linear", device)
    if not where.startswith("cuda:"):
        raise ValueError(f"tune_linear: device must be a GPU of this machine, such as cuda:0; got {where}")
    problems = _problems(shapes, dtype, rows)
    _core.linear_most_rows(where, "tune_linear")  # refuses a device that is not there
    return tune(problems, where, _find_measure(where), save=save)


def tune(problems: Sequence[Problem], device: str, measure: Measure, *, save: bool) -> LinearTable:
    """``tune_linear`` with its arguments checked, and what takes the times."""
    gpu = _linear_cache.gpu_name(device)
    path = _path_to_save(gpu) if save else None  # refused before measuring, which takes minutes
    best: dict[str, list[Row]] = {}
    read_gb_per_s = 0.0
    with _progress(len(problems)) as advance:
        for problem in problems:
            row, us = _tune_one(problem, device, measure)
            best.setdefault(problem.dtype, []).append(row)
            read_gb_per_s = max(read_gb_per_s, problem.N * problem.K * 2 / us / 1e3)
            advance(problem)
    before = _linear_cache.in_force(device)
    today = time.strftime("%Y-%m-%d", time.gmtime())
    most = max(round(read_gb_per_s), before.read_gb_per_s if before else 0)
    tuned = Tuned(gpu, driver_version(), today, most, before.rows if before else {})
    for dtype, rows in best.items():
        tuned = tuned.with_rows(dtype, rows)
    _linear_cache.put_in_force(device, tuned)
    if path is not None:
        saved = _linear_cache.read(path, device)  # another process may have written more since
        if saved is not None:
            merged = replace(tuned, rows=saved.rows)
            for dtype, own in tuned.rows.items():
                merged = merged.with_rows(dtype, own)
            tuned = merged
        _linear_cache.write(path, tuned)
    return linear_table(device)


def _path_to_save(gpu: str) -> Path:
    try:
        return _linear_cache.path_of(gpu)
    except RuntimeError as error:
        raise OSError(
            "tune_linear: save=True needs a home folder, or one that the environment variable OCTAVO_CACHE "
            f"names: set OCTAVO_CACHE; got neither ({error})"
        ) from None


def _listed(what: str, given: Iterable[_Item], wanted: str) -> list[_Item]:
    if not isinstance(given, Iterable):
        raise TypeError(f"tune_linear: {what} must be {wanted}; got {given!r}")
    return list(given)


def _problems(shapes: Iterable[tuple[int, int]], dtype: object, rows: Iterable[int]) -> list[Problem]:
    name = dtype_name(dtype)
    if name not in ("float16", "bfloat16"):
        raise ValueError(f"tune_linear: dtype must be float16 or bfloat16; got {name}")
    wanted = "an iterable of pairs (N, K), such as [(4096, 4096)]"
    all_shapes, all_rows = _listed("shapes", shapes, wanted), _listed("rows", rows, "an iterable of ints")
    problems = []
    for shape in all_shapes:
        try:
            n, k = shape
        except (TypeError, ValueError):
            raise TypeError(f"tune_linear: shapes must be pairs (N, K); got {shape!r}") from None
        for what, length in (("N", n), ("K", k), *(("rows", m) for m in all_rows)):
            if not isinstance(length, int):
                raise TypeError(f"tune_linear: {what} must be an int; got {type(length).__name__}")
            if not 1 <= length <= _MAX_LENGTH:
                raise ValueError(f"tune_linear: {what} must lie in [1, {_MAX_LENGTH}]; got {length}")
        if k % 8:
            raise ValueError(
                f"tune_linear: K ({k}) must be a multiple of 8; a library computes other products"
            )
        problems += [Problem(n, k, m, str(name)) for m in sorted(set(all_rows))]
    if not problems:
        raise ValueError("tune_linear: shapes and rows must not be empty")
    return problems


def _tune_one(problem: Problem, device: str, measure: Measure) -> tuple[Row, float]:
    """The row of the table, and the microseconds of what it runs."""
    n, k, m, dtype = problem
    candidates = _core.linear_candidates(m, n, k, dtype, device)
    if not candidates:
        raise ValueError(f"tune_linear: no kernel of Octavo's computes {problem}")
    least = candidates[0][1]
    plans = [LinearPlan(**fields) for fields, us in candidates if us <= _MOST_OVER_ESTIMATE * least]
    plans = plans[:_MOST_TILES]
    first = dict(zip(plans, measure(problem, plans, _ROUNDS), strict=True))
    finalists = sorted(plans, key=lambda plan: min(first[plan]))[:_FINALISTS]
    finalists += [plan for plan in (fastest(first),) if plan not in finalists]
    library = LinearPlan("library", dtype)
    times = dict(
        zip((*finalists, library), measure(problem, (*finalists, library), _FINAL_ROUNDS), strict=True)
    )
    library_us = times.pop(library).plain
    best = fastest(times)
    is_slower = library_is_faster(times[best], library_us, m)
    row = (n, k, m, best.kernel, best.w_rows, best.splits, best.ctas_per_sm, is_slower)
    return row, library_us if is_slower else times[best].plain


def driver_version() -> str:
    """The version of the NVIDIA driver, as its kernel module says."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return "unknown"
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Problem], None]]:
    """A bar by tqdm, if that is installed; otherwise a line for each problem, on stderr too."""
    if importlib.util.find_spec("tqdm"):
        with importlib.import_module("tqdm.auto").tqdm(total=total, desc="tune_linear") as bar:

            def advance(problem: Problem) -> None:
                bar.set_postfix_str(str(problem), refresh=False)
                bar.update()

            yield advance
        return
    done = 0

    def write(problem: Problem) -> None:
        nonlocal done
        done += 1
        print(f"tune_linear: {done} of {total}: {problem}", file=sys.stderr)

    yield write


def _find_measure(device: str) -> Measure:
    index = int(device.removeprefix("cuda:"))
    reasons = []
    for library, module in (("torch", "_tune_by_torch"), ("cupy", "_tune_by_cupy")):
        if not importlib.util.find_spec(library):
            reasons.append(f"{library} is not installed")
            continue
        measure: Any = importlib.import_module(f"octavo.{module}")
        why_not = measure.why_unusable()
        if not why_not:
            return measure.Measure(index)  # type: ignore[no-any-return]
        reasons.append(why_not)
    raise RuntimeError(f"tune_linear: measures with PyTorch or CuPy on a GPU: {'; '.join(reasons)}")
