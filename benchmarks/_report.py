"""What a benchmark found: one row a case, as JSON, as a table and as a plot. Needs no GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import _support_path  # noqa: F401

from support.case import Case

OCTAVO = "octavo"
INVARIANT = "octavo_batch_invariant"
INT64 = "octavo_int64"
OWN = (OCTAVO, INVARIANT, INT64)
# Columns of the table, and the contestants of which each shows the fastest.
PEERS = {
    "FA3": ("fa3",),
    "FlashInfer": ("flashinfer_cuda_cores", "flashinfer_tensor_cores"),
    "XQA": ("flashinfer_xqa",),
}
LAUNCH_US = 3.0
DERIVED = ("floor_us", "best_peer_us", "goal_us")  # properties of a Row that its JSON has too


def floor_us(num_bytes: int, read_bandwidth: float) -> float:
    """What a kernel that only reads takes: a launch, and the bytes at the read bandwidth (bytes/s)."""
    return LAUNCH_US + num_bytes / read_bandwidth * 1e6


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def describe(case: Case) -> dict[str, object]:
    """The shape of a decode case, as a row of the results has it."""
    lengths, query_len = case.seqlens_k, case.seqlens_q[0]
    shown = f"{case.batch} x {min(lengths)}"
    if min(lengths) < max(lengths):
        shown += f"..{max(lengths)}, {sum(lengths)} in all"
    # Head dim, dtypes and whatever is not plain decoding on pages of 16.
    kind = {
        f"{case.head_dim}": True,
        case.dtype: True,
        f"KV {case.cache_dtype}": case.cache_dtype != case.dtype,
        f"page {case.page_size}": case.page_size != 16,
        "head-major": case.head_major,
        f"room {case.room}": case.room > 0,
        f"prefix {case.shared_prefix}": case.shared_prefix > 0,
        "cascade": case.cascade,
        f"{query_len} queries": query_len > 1,
        f"window {case.window_left}": case.window_left >= 0,
        f"softcap {case.softcap:g}": case.softcap > 0,
        "ALiBi": bool(case.alibi),
        "lse": case.return_lse,
    }
    return {
        "lengths": shown,
        "batch": case.batch,
        "min_seqlen": min(lengths),
        "max_seqlen": max(lengths),
        "num_q_heads": case.num_q_heads,
        "num_kv_heads": case.num_kv_heads,
        "kind": ", ".join(part for part, is_shown in kind.items() if is_shown),
    }


@dataclass(frozen=True)
class Machine:
    """Where the rows were measured."""

    device: str
    driver: str
    versions: dict[str, str]
    l2_bytes: int
    read_bandwidth: float  # bytes/s of one long contiguous read
    matmul_flops: float  # FLOP/s of an 8192^3 bfloat16 product
    probe_us: dict[str, dict[str, float]]  # pages scattered or contiguous -> MiB read -> microseconds


@dataclass(frozen=True)
class Row:
    case: str
    shape: dict[str, object]  # lengths, batch, heads and kind, for people and plots
    num_bytes: int
    us: dict[str, float]  # contestant -> median microseconds a call
    max_error: dict[str, float]  # contestant -> against float64, relative to the row's largest element
    skipped: dict[str, str]  # contestant -> why it has no time
    machine: Machine

    @property
    def floor_us(self) -> float:
        return floor_us(self.num_bytes, self.machine.read_bandwidth)

    @property
    def best_peer_us(self) -> float | None:
        return min((us for name, us in self.us.items() if name not in OWN), default=None)

    @property
    def goal_us(self) -> float:
        near_the_floor = 1.15 * self.floor_us
        return near_the_floor if self.best_peer_us is None else min(near_the_floor, self.best_peer_us)

    @property
    def octavo_us(self) -> float | None:
        return self.us.get(OCTAVO)

    def peer_us(self, column: str) -> float | None:
        return min((self.us[name] for name in PEERS[column] if name in self.us), default=None)


def write_json(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w") as file:
        for row in rows:
            derived = {name: getattr(row, name) for name in DERIVED}
            file.write(json.dumps(asdict(row) | derived) + "\n")


def read_json(path: Path) -> list[Row]:
    rows = []
    for line in path.read_text().splitlines():
        values = {name: value for name, value in json.loads(line).items() if name not in DERIVED}
        rows.append(Row(**values | {"machine": Machine(**values["machine"])}))
    return rows


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b is not None else None


HEADER = (
    "| case | batch x kv length | heads | head dim, dtype | MB | Octavo | batch-invariant | "
    + " | ".join(PEERS)
    + " | floor | goal | Octavo/goal | /best peer | /floor | TB/s |\n|---|---|---|---|"
    + "--:|" * (9 + len(PEERS))
)


def format_row(row: Row) -> str:
    us = row.octavo_us
    cells = [
        row.case,
        str(row.shape["lengths"]),
        f"{row.shape['num_q_heads']}/{row.shape['num_kv_heads']}",
        str(row.shape["kind"]),
        f"{row.num_bytes / 1e6:.1f}",
        *(
            _number(time, 1)
            for time in (us, row.us.get(INVARIANT), *map(row.peer_us, PEERS), row.floor_us, row.goal_us)
        ),
        *(_number(_ratio(us, other), 2) for other in (row.goal_us, row.best_peer_us, row.floor_us)),
        _number(_ratio(row.num_bytes / 1e6, us), 2),
    ]
    return f"| {' | '.join(cells)} |"


def format_machine(machine: Machine) -> str:
    lines = [
        f"{machine.device}, driver {machine.driver}; "
        + ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        f"pure read {machine.read_bandwidth / 1e12:.2f} TB/s, 8192^3 bfloat16 product "
        f"{machine.matmul_flops / 1e12:.0f} TFLOP/s",
        "",
    ]
    sizes = list(next(iter(machine.probe_us.values()), {}))
    lines += [f"| MiB read | {' | '.join(sizes)} |", "|---|" + "--:|" * len(sizes)]
    for pages, times in machine.probe_us.items():
        lines.append(f"| us, {pages} pages | {' | '.join(f'{us:.1f}' for us in times.values())} |")
    return "\n".join(lines)


def format_summary(rows: Sequence[Row]) -> str:
    """The geometric means, and what has no time."""
    timed = [(row, row.octavo_us) for row in rows if row.octavo_us is not None]
    against_peer = [us / row.best_peer_us for row, us in timed if row.best_peer_us is not None]
    against_floor = [us / row.floor_us for row, us in timed]
    invariant = [row.us[INVARIANT] / us for row, us in timed if INVARIANT in row.us]
    lines = [
        f"Octavo / best peer: geometric mean {geometric_mean(against_peer):.3f} of {len(against_peer)} rows",
        f"Octavo / floor: geometric mean {geometric_mean(against_floor):.3f} of {len(against_floor)} rows",
        f"Batch-invariant / Octavo: geometric mean {geometric_mean(invariant):.3f} of {len(invariant)} rows",
        f"At or below the goal: {sum(us <= row.goal_us for row, us in timed)} of {len(timed)} rows",
    ]
    lines += int64_summary([row.us for row in rows])
    lines += [f"{row.case}: {name}: {why}" for row in rows for name, why in row.skipped.items()]
    return "\n".join(lines)


def int64_summary(times: Sequence[dict[str, float]]) -> list[str]:
    """A line where rows were measured with it, too."""
    ratios = [us[INT64] / us[OCTAVO] for us in times if INT64 in us and OCTAVO in us]
    if not ratios:
        return []
    mean, most = geometric_mean(ratios), max(ratios)
    return [f"With int64 / with int32: geometric mean {mean:.3f} of {len(ratios)} rows, at most {most:.3f}"]


# Rows that are as their JSON has them, of benchmarks other than decode's.


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def append_row(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def list_with_flops(what: str, cases: Iterable[Any], describe: Callable[[Any], dict[str, Any]]) -> None:
    """Those of a benchmark of attention over many queries, with their shapes."""
    print(f"| {what} | batch x length | heads | head dim | GFLOP |\n|---|---|---|--:|--:|")
    for case in cases:
        shape = describe(case)
        heads_and_dim = f"{shape['heads']} | {shape['head_dim']}"
        print(f"| {case.name} | {shape['lengths']} | {heads_and_dim} | {case.flops / 1e9:.1f} |")


def exit_status(rows: Sequence[dict[str, Any]]) -> int:
    """Say which contestants have no time and why; 1 where Octavo was wrong, in any of its modes."""
    status = 0
    for row in rows:
        if "wrong" in row:  # in a row of Octavo alone
            status = 1
        for name, why in row.get("skipped", {}).items():
            print(f"{row['case']}: {name}: {why}")
            if name.startswith(OCTAVO) and why.startswith("WRONG"):
                status = 1
    return status


def best_ratio(row: dict[str, Any]) -> float | None:
    """How many times as fast as the fastest peer Octavo is."""
    peers = [us for name, us in row["us"].items() if not name.startswith(OCTAVO)]
    return min(peers) / row["us"][OCTAVO] if peers and OCTAVO in row["us"] else None


# Rows of a plot's line differ in nothing but the x axis.
_Axis = dict[tuple[object, ...], dict[float, Row]]


def _curves(rows: Iterable[Row], x: str, same: str) -> _Axis:
    curves: _Axis = {}
    for row in rows:
        shape = row.shape
        if shape["min_seqlen"] == shape["max_seqlen"]:
            key = (shape["num_q_heads"], shape["num_kv_heads"], shape["kind"], shape[same])
            curves.setdefault(key, {})[float(str(shape[x]))] = row
    return {key: dict(sorted(points.items())) for key, points in curves.items() if len(points) > 2}


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Time against the floor, over length (top) and over batch (bottom), wherever three rows make a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes_of = {
        "kv length": ("batch", _curves(rows, "max_seqlen", "batch")),
        "batch": ("kv length", _curves(rows, "batch", "max_seqlen")),
    }
    columns = max(len(curves) for _, curves in axes_of.values())
    if columns == 0:
        raise SystemExit("nothing to plot: no three rows differ in only their length, or only their batch")
    figure, grid = pyplot.subplots(
        2, columns, figsize=(5.5 * columns, 8), squeeze=False, layout="constrained"
    )
    for line, (x_label, (same, curves)) in zip(grid, axes_of.items(), strict=True):
        for axes in line[len(curves) :]:
            axes.axis("off")
        for axes, ((q_heads, kv_heads, kind, fixed), points) in zip(line, curves.items(), strict=False):
            axes.loglog(list(points), [row.floor_us for row in points.values()], "k--", label="floor")
            for label in PEERS:
                times = {x: us for x, row in points.items() if (us := row.peer_us(label)) is not None}
                axes.loglog(list(times), list(times.values()), "o-", markersize=4, label=label)
            times = {x: us for x, row in points.items() if (us := row.octavo_us) is not None}
            axes.loglog(
                list(times), list(times.values()), "o-", color="tab:red", linewidth=2.5, label="Octavo"
            )
            axes.set(xlabel=x_label, ylabel="microseconds")
            axes.set_xscale("log", base=2)
            axes.set_title(f"{q_heads}/{kv_heads} heads, head dim {kind}, {same} {fixed}", fontsize="medium")
            axes.grid(visible=True, which="major", alpha=0.3)
            axes.legend()
    figure.suptitle(f"Paged decode, {rows[0].machine.device}")
    figure.savefig(path)
    pyplot.close(figure)
