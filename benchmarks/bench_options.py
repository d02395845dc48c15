"""What masks, biases and head dims cost on an NVIDIA GPU: calls with them beside plain ones, in one run.

    python benchmarks/bench_options.py --json options.jsonl

bfloat16. Each row has two calls: with an option of `attention` or `paged_attention`, and the same one without
it. Head dim 512 stands beside 256 with twice the heads, which makes products and bytes equal, and values of
128 beside those of 192. Windows and chunks leave less to multiply or to read. A time is the median over
replays of a CUDA graph, divided by its calls, which rotate over copies of all inputs, more than twice the L2
cache; the graphs take turns. Some rows of both results are compared with float32: a wrong one gets no time,
and fails the run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from _command import Table, on_machine
from _inputs import alibi_slopes
from _timing import copies_beyond, l2_cache_bytes, time_in_turns

import octavo

PAGE_SIZE = 16


@dataclass(frozen=True)
class Call:
    """Queries are the newest tokens of their sequences. If all tokens are queries, nothing is paged."""

    batch: int
    queries: int
    keys: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int | None = None  # of values, if it is another one
    causal: bool = True
    # Of the operator: numbers, and True for arrays, which make_options makes.
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def paged(self) -> bool:
        return self.queries < self.keys

    @property
    def value_dim(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def num_bytes(self) -> int:
        """Of the inputs, in which copies of a call differ."""
        row = self.num_kv_heads * (self.head_dim + self.value_dim)
        return 2 * self.batch * (self.keys * row + self.queries * self.num_q_heads * self.head_dim)

    def plain(self) -> Call:
        return replace(self, options={})


@dataclass(frozen=True)
class OptionCase:
    name: str
    call: Call
    plain: Call


def _case(name: str, call: Call, plain: Call | None = None) -> OptionCase:
    return OptionCase(name, call, plain or call.plain())


IMAGE, EVERY = 256, 1024  # tokens of an image whose tokens see each other, and from one image to the next

GPT_OSS = Call(2, 8192, 8192, 64, 8, 64, options={"sinks": True})
LLAMA_4 = Call(1, 16384, 16384, 40, 8, 128, options={"attention_chunk": 8192})
GEMMA = Call(2, 8192, 8192, 16, 8, 256)
ENCODER = Call(8, 2048, 2048, 12, 12, 64, causal=False)
DEEPSEEK = Call(2, 8192, 8192, 16, 16, 192)

CASES = (
    _case("prompt_sinks", GPT_OSS),
    _case(
        "prompt_sinks_window127",
        replace(GPT_OSS, options={"sinks": True, "window_left": 127}),
        replace(GPT_OSS, options={"window_left": 127}),
    ),
    _case("prompt_chunks8192", LLAMA_4),
    _case("prompt_alibi_d64", Call(2, 8192, 8192, 32, 32, 64, options={"alibi_slopes": True})),
    _case("prompt_alibi_d128", Call(2, 8192, 8192, 16, 16, 128, options={"alibi_slopes": True})),
    _case("prompt_softcap", replace(GEMMA, options={"softcap": 50.0})),
    _case("prompt_images", replace(GEMMA, options={"bidirectional_ranges": True})),
    _case("prompt_d512", Call(2, 8192, 8192, 8, 2, 512), Call(2, 8192, 8192, 16, 4, 256)),
    _case("prompt_d192_values128", replace(DEEPSEEK, head_dim_v=128), DEEPSEEK),
    _case(
        "encoder_window64",
        replace(ENCODER, options={"window_left": 64, "window_right": 64}),
    ),
    _case(
        "encoder_alibi",
        replace(ENCODER, options={"alibi_slopes": True, "alibi_symmetric": True}),
    ),
    _case("step_sinks", Call(32, 1, 4096, 64, 8, 64, options={"sinks": True})),
    _case("step_chunks8192", Call(16, 1, 12288, 40, 8, 128, options={"attention_chunk": 8192})),
    _case("step_d512", Call(32, 1, 2048, 16, 2, 512), Call(32, 1, 2048, 32, 4, 256)),
    _case("drafts16_tree", Call(32, 16, 2048, 32, 8, 128, options={"tree_mask": True})),
    _case("drafts64_tree", Call(8, 64, 4096, 32, 8, 128, options={"tree_mask": True})),
)


def make_options(call: Call) -> dict[str, Any]:
    options = dict(call.options)
    made: dict[str, Callable[[], Any]] = {
        "sinks": lambda: torch.randn(call.num_q_heads, device="cuda"),
        "alibi_slopes": lambda: torch.tensor(alibi_slopes(call.num_q_heads), device="cuda"),
        "bidirectional_ranges": lambda: torch.tensor(
            [[begin, begin + IMAGE] for begin in range(0, call.keys, EVERY)], device="cuda"
        ).repeat(call.batch, 1, 1),
        # Binary trees.
        "tree_mask": lambda: octavo.tree_mask(
            torch.tensor([(i - 1) // 2 for i in range(call.queries)], device="cuda")
        ).repeat(call.batch),
    }
    return options | {name: make() for name, make in made.items() if name in options}


def make_inputs(call: Call) -> dict[str, Any]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    options = {"causal": call.causal, **make_options(call)}
    tokens = (call.batch, call.keys, call.num_kv_heads)
    k, v = random(*tokens, call.head_dim), random(*tokens, call.value_dim)
    if not call.paged:
        q = random(call.batch, call.queries, call.num_q_heads, call.head_dim)
        return {"q": q, "k": k, "v": v, **options}
    columns = call.keys // PAGE_SIZE
    table = torch.randperm(call.batch * columns, device="cuda").reshape(call.batch, columns)
    inputs = {
        "q": random(call.batch * call.queries, call.num_q_heads, call.head_dim),
        "k_pages": k.view(-1, PAGE_SIZE, call.num_kv_heads, call.head_dim),
        "v_pages": v.view(-1, PAGE_SIZE, call.num_kv_heads, call.value_dim),
        "page_table": table.int(),
        "seq_lens": torch.full((call.batch,), call.keys, device="cuda", dtype=torch.int32),
        **options,
    }
    if call.queries > 1:
        begins = torch.arange(0, call.batch + 1, device="cuda", dtype=torch.int32) * call.queries
        inputs |= {"cu_seqlens_q": begins, "max_seqlen_q": call.queries}
    return inputs


def run(call: Call, inputs: dict[str, Any]) -> Any:
    return octavo.paged_attention(**inputs) if call.paged else octavo.attention(**inputs)


def kernel(call: Call, inputs: dict[str, Any]) -> str:
    return octavo.explain("paged_attention" if call.paged else "attention", **inputs).kernel


def seen(call: Call, inputs: dict[str, Any], b: int, rows: torch.Tensor) -> torch.Tensor:
    """Which keys these queries of a sequence see: [rows, keys]."""
    own = call.keys - call.queries + rows[:, None]
    key = torch.arange(call.keys, device="cuda")
    see = key <= own if call.causal else torch.ones(len(rows), call.keys, dtype=torch.bool, device="cuda")
    options = call.options
    if "window_left" in options:
        see &= key >= own - options["window_left"]
    if "window_right" in options:
        see &= key <= own + options["window_right"]
    if "attention_chunk" in options:
        see &= key >= own // options["attention_chunk"] * options["attention_chunk"]
    if "tree_mask" in options:
        bit = key - (call.keys - call.queries)
        word = inputs["tree_mask"][b * call.queries + rows, None]
        see &= (bit < 0) | (word >> bit.clamp(min=0) & 1 == 1)
    if "bidirectional_ranges" in options:
        see |= (own // EVERY == key // EVERY) & (own % EVERY < IMAGE) & (key % EVERY < IMAGE)
    return see


def error_of(call: Call, inputs: dict[str, Any], out: Any) -> float:
    """The largest difference from float32 in some queries of two sequences, relative to a query's result."""
    rows = torch.arange(7 % call.queries, call.queries, call.queries // 16 + 1, device="cuda")
    group, errors = call.num_q_heads // call.num_kv_heads, []
    for b in {0, call.batch - 1}:
        if call.paged:
            q, got = (x.view(call.batch, call.queries, *x.shape[1:])[b, rows] for x in (inputs["q"], out))
            pages = inputs["page_table"][b].long()
            k, v = (inputs[name][pages].flatten(0, 1) for name in ("k_pages", "v_pages"))
        else:
            q, got, k, v = inputs["q"][b, rows], out[b, rows], inputs["k"][b], inputs["v"][b]
        k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q.float(), k) * call.head_dim**-0.5
        if softcap := call.options.get("softcap"):
            scores = softcap * torch.tanh(scores / softcap)
        if "alibi_slopes" in call.options:
            own = call.keys - call.queries + rows[:, None]
            far = (torch.arange(call.keys, device="cuda") - own).abs()
            scores -= inputs["alibi_slopes"][:, None, None] * far
        scores = scores.masked_fill(~seen(call, inputs, b, rows), -torch.inf)
        if "sinks" in call.options:
            scores = torch.cat([scores, inputs["sinks"][:, None, None].expand(-1, len(rows), 1)], -1)
        weights = torch.softmax(scores, -1)[..., : call.keys]
        wanted = torch.einsum("hnm,mhd->nhd", weights, v)
        off, size = (x.abs().amax((1, 2)) for x in (got.float() - wanted, wanted))
        errors.append((off / size).max().item())
    return max(errors)


def measure(case: OptionCase, rounds: int, _: float) -> dict[str, Any]:
    row: dict[str, Any] = {"name": case.name}
    calls: dict[str, list[Callable[[], Any]]] = {}
    errors = []
    for prefix, call in (("", case.call), ("plain_", case.plain)):
        copies = [make_inputs(call) for _ in range(copies_beyond(l2_cache_bytes(), call.num_bytes))]
        errors.append(error_of(call, copies[0], run(call, copies[0])))
        row |= {f"{prefix}call": asdict(call), f"{prefix}kernel": kernel(call, copies[0])}
        calls[f"{prefix}us"] = [lambda call=call, x=x: run(call, x) for x in copies]
    row["error"] = max(errors)
    if not row["error"] < 2e-2:
        return {**row, "wrong": True}
    row.update(time_in_turns(calls, 60.0 if case.call.paged else 300.0, rounds))
    row["ratio"] = row["us"] / row["plain_us"]
    return row


TABLE = Table(
    __doc__,
    CASES,
    on_machine(measure),
    {
        "case": lambda row: row["name"],
        "plain, us": lambda row: f"{row['plain_us']:.1f}",
        "with it, us": lambda row: f"{row['us']:.1f}",
        "ratio": lambda row: f"{row['ratio']:.3f}",
    },
)

if __name__ == "__main__":
    sys.exit(TABLE.main())
