"""What bench_backward.py times: cases of attention, and what of them. Needs NumPy alone, and no GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import _support_path  # noqa: F401

from support import cases
from support.benchmark_cases import PREFILL_TABLE
from support.case import Case

DROPOUT_P = 0.1
DROPOUT_SEED = 42


@dataclass(frozen=True)
class Task:
    """The gradients of a dense case; with `forward`, its output too.

    With `standard`, beside attention that keeps all scores, and with the memory that both take.
    """

    case: Case
    forward: bool = False
    dropout_p: float = 0.0
    deterministic: bool = False
    standard: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        kinds = {
            "forward": self.forward,
            "dropout": self.dropout_p > 0.0,
            "deterministic": self.deterministic,
            "standard": self.standard,
        }
        return "_".join([self.case.name, *(kind for kind, is_meant in kinds.items() if is_meant)])

    @property
    def flops(self) -> int:
        """Those of five matrix products where the forward has two, and of all seven with it."""
        return self.case.flops * (7 if self.forward else 5) // 2

    @property
    def plain(self) -> Task:
        """The same shape without the options that cost time."""
        return Task(replace(self.case, alibi="", alibi_symmetric=False, softcap=0.0), self.forward)

    @property
    def masks(self) -> dict[str, Any]:
        """What masks and changes scores, as the oracle names it, apart from the slopes of ALiBi."""
        assert self.case.window_left < 0 and self.case.softmax_scale is None, self
        case = self.case
        return {"causal": case.causal, "softcap": case.softcap, "alibi_symmetric": case.alibi_symmetric}


def _named(*names: str, **options: Any) -> list[Task]:
    return [Task(case, **options) for case in cases.named(*names)]


def _with(name: str, **options: Any) -> Case:
    """A named case with an option more, which its name then ends with."""
    (case,) = cases.named(name)
    return replace(case, name="_".join([name, *options]), **options)


def _with_symmetric_alibi(name: str) -> Task:
    (case,) = cases.named(name)
    return Task(replace(case, name=f"{name}_symmetric_alibi", alibi="head", alibi_symmetric=True))


def _dense(head_dim: int) -> list[Task]:
    """Those of the table of prefill, with equal numbers of heads."""
    dense = (case for case in PREFILL_TABLE if case.page_size == 0 and case.group_size == 1)
    return [Task(case) for case in dense if case.head_dim == head_dim]


def _with_options(name: str) -> list[Task]:
    (case,) = cases.named(name)
    return [
        Task(case, dropout_p=DROPOUT_P),
        Task(_with(name, alibi="head")),
        Task(_with(name, softcap=30.0)),
        Task(case, deterministic=True),
    ]


GROUPED_HEADS = "d128_causal_4x4096_gqa4"

# What one call may choose from. Each group takes some 15 to 60 seconds.
GROUPS: dict[str, list[Task]] = {
    "d64": _dense(64),
    "d128": _dense(128),
    "d256": _dense(256),
    "other": _named(GROUPED_HEADS, "d96_causal_2x8192", "d192_causal_2x8192"),
    "options": [
        *_with_options("d128_causal_8x2048"),
        *_with_options("d64_causal_8x2048"),
        _with_symmetric_alibi("d128_full_8x2048"),
        _with_symmetric_alibi("d64_full_8x2048"),
        *_named(
            "d128_full_8x2048", "d128_causal_1x16384", "d64_causal_1x16384", GROUPED_HEADS, deterministic=True
        ),
    ],
    "forward": _named(
        "d64_causal_8x2048",
        "d64_causal_1x16384",
        "d128_causal_8x2048",
        "d128_full_8x2048",
        "d128_causal_1x16384",
        "d256_causal_8x2048",
        GROUPED_HEADS,
        forward=True,
    ),
    "standard": _named(
        "d64_causal_16x1024",
        "d128_causal_1x4096",
        "d128_causal_1x8192",
        "d128_causal_1x16384",
        "d128_causal_1x65536",
        forward=True,
        standard=True,
    ),
}


def fa4_kernels(task: Task) -> str:
    """What FlashAttention-4's kernels for a task are called, where they are compiled beforehand."""
    case = task.case
    kinds = {f"softcap{case.softcap:g}": case.softcap > 0.0, "deterministic": task.deterministic}
    shape = f"d{case.head_dim}_group{case.group_size}_{'causal' if case.causal else 'full'}"
    return "_".join([shape, *(kind for kind, is_meant in kinds.items() if is_meant)])
