"""The attention of a step in vLLM: Octavo's backend beside vLLM's own, through the classes that vLLM calls.

    python benchmarks/bench_vllm.py [--device cuda|cpu] [--rows REGEX] [--json rows.jsonl]

A step makes the metadata once, then writes keys and values and attends in each of a few layers. `step` is its
time as the host sees it, launches of kernels included. `layer` is that of one layer in a CUDA graph, as vLLM
runs it; on the CPU a layer's share of a step. *operators* are Octavo's operators alone on the same arrays:
the difference is what the backend's Python costs. Outputs must agree, or the run fails. Times are medians of
rounds in which the contestants take turns.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _support_path  # noqa: F401
from _command import Parser, matching
from _report import append_row

from support.case import Case
from support.cases import named

NUM_LAYERS = 4
BLOCK_SIZE = 32  # which all of vLLM's backends take
CASES = {
    "cuda": named(
        "8b_b1_s8192", "8b_b8_s4096", "8b_b32_s2048", "8b_b64_s4096", "8b_ragged64", "mixed", "chunk512_ctx8k"
    ),
    "cpu": [
        Case("tiny", (1,) * 4, (40,) * 4, num_q_heads=4, head_dim=32, dtype="float32"),
        Case("decode", (1,) * 8, (1024,) * 8, num_q_heads=8, num_kv_heads=2, dtype="float32"),
        Case("prefill", (256,), (256,), num_q_heads=8, num_kv_heads=2, dtype="float32"),
    ],
}
PEERS = {"cuda": "FLASH_ATTN", "cpu": "CPU_ATTN"}


class Step:
    """A step of a few layers by one backend, over arrays that all contestants share."""

    def __init__(self, case: Case, config: Any, backend: str, arrays: Arrays) -> None:
        import torch
        from vllm.v1.attention.backends.registry import AttentionBackendEnum
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        chosen = AttentionBackendEnum[backend].get_class()
        self.arrays = arrays
        heads = case.num_q_heads, case.head_dim, case.head_dim**-0.5, case.num_kv_heads
        with arrays.device:
            self.impls = [
                chosen.get_impl_cls()(*heads, alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto")
                for _ in range(NUM_LAYERS)
            ]
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE,
            num_kv_heads=case.num_kv_heads,
            head_size=case.head_dim,
            dtype=arrays.query.dtype,
        )
        self.builder = chosen.get_builder_cls()(spec, [], config, arrays.device)
        one = torch.ones((), device=arrays.device)
        self.layer = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)
        self.layer._k_scale_float = self.layer._v_scale_float = 1.0
        self.layer.isa = getattr(self.builder, "isa", None)  # of CPU_ATTN
        self.caches = [torch.zeros(arrays.cache_shape, **arrays.options) for _ in range(NUM_LAYERS)]
        for impl, cache in zip(self.impls, self.caches, strict=True):  # in the backend's own layout
            impl.do_kv_cache_update(self.layer, *arrays.before, cache, arrays.slots_before)
        self.output = torch.zeros_like(arrays.query)

    def build(self) -> Any:
        return self.builder.build(0, self.arrays.metadata)

    def run_layers(self, metadata: Any) -> None:
        a = self.arrays
        for impl, cache in zip(self.impls, self.caches, strict=True):
            impl.do_kv_cache_update(self.layer, a.key, a.value, cache, a.metadata.slot_mapping)
            impl.forward(self.layer, a.query, a.key, a.value, cache, metadata, self.output)


class Operators(Step):
    """Octavo's operators, as the backend calls them."""

    def __init__(self, case: Case, config: Any, arrays: Arrays) -> None:
        super().__init__(case, config, "OCTAVO", arrays)
        self.pages = [cache.transpose(1, 2).chunk(2, -1) for cache in self.caches]
        self.scale = case.head_dim**-0.5

    def build(self) -> Any:
        return None

    def run_layers(self, metadata: Any) -> None:  # noqa: ARG002
        from octavo import append_kv, paged_attention

        a, m = self.arrays, self.arrays.metadata
        for pages in self.pages:
            append_kv(a.key, a.value, *pages, slot_mapping=m.slot_mapping)
            paged_attention(
                a.query,
                *pages,
                m.block_table_tensor,
                m.seq_lens,
                cu_seqlens_q=m.query_start_loc,
                max_seqlen_q=m.max_query_len,
                softmax_scale=self.scale,
                out=self.output,
            )


class Arrays:
    """New queries, keys and values of a case, what is in the cache before, and vLLM's metadata."""

    def __init__(self, case: Case, device: str) -> None:
        import torch
        from vllm.v1.attention.backend import CommonAttentionMetadata

        self.device = torch.device(device)
        self.options = {"dtype": getattr(torch, case.dtype), "device": device}
        num_tokens = sum(case.seqlens_q)
        torch.manual_seed(0)
        self.query = torch.randn(num_tokens, case.num_q_heads, case.head_dim, **self.options)
        most = -(-max(case.seqlens_k) // BLOCK_SIZE)
        blocks = torch.randperm(case.batch * most, dtype=torch.int32).view(case.batch, most)
        self.cache_shape = blocks.numel(), case.num_kv_heads, BLOCK_SIZE, 2 * case.head_dim
        slots, slots_before, starts = [], [], [0]
        for row, new, length in zip(blocks.long(), case.seqlens_q, case.seqlens_k, strict=True):
            at = torch.arange(length)
            all_slots = row[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
            slots.append(all_slots[length - new :])
            slots_before.append(all_slots[: length - new])
            starts.append(starts[-1] + new)
        self.slots_before = torch.cat(slots_before).to(device)
        rows = case.num_kv_heads, case.head_dim
        self.before = torch.randn(2, len(self.slots_before), *rows, **self.options)
        self.key, self.value = torch.randn(2, num_tokens, *rows, **self.options)
        query_start_loc = torch.tensor(starts, dtype=torch.int32)
        self.metadata = CommonAttentionMetadata(
            query_start_loc=query_start_loc.to(device),
            query_start_loc_cpu=query_start_loc,
            seq_lens=torch.tensor(case.seqlens_k, dtype=torch.int32, device=device),
            num_reqs=case.batch,
            num_actual_tokens=num_tokens,
            max_query_len=max(case.seqlens_q),
            max_seq_len=max(case.seqlens_k),
            block_table_tensor=blocks.to(device),
            slot_mapping=torch.cat(slots).to(device),
        )


@contextlib.contextmanager
def vllm_config(case: Case) -> Iterator[Any]:
    """vLLM's configuration for a model with the heads of the case, while it is the current one."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    model = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": case.num_q_heads * case.head_dim,
        "intermediate_size": 64,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": case.num_q_heads,
        "num_key_value_heads": case.num_kv_heads,
        "head_dim": case.head_dim,
        "max_position_embeddings": 1 << 16,
        "vocab_size": 32,
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model), encoding="utf-8")
        args = EngineArgs(
            folder,
            skip_tokenizer_init=True,
            dtype=case.dtype,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=max(2048, sum(case.seqlens_q)),
            max_model_len=max(case.seqlens_k),
        )
        config = args.create_engine_config()
        with set_current_vllm_config(config):
            yield config


def make_steps(case: Case, config: Any, device: str) -> dict[str, Step]:
    import torch

    arrays = Arrays(case, device)
    steps = {
        "octavo": Step(case, config, "OCTAVO", arrays),
        PEERS[device]: Step(case, config, PEERS[device], arrays),
        "operators": Operators(case, config, arrays),
    }
    for step in steps.values():
        step.run_layers(step.build())
    for name, step in steps.items():
        expected = steps["octavo"].output
        torch.testing.assert_close(step.output, expected, atol=2e-2, rtol=2e-2, msg=f"{case}: {name} is off")
    return steps


def seconds(call: Callable[[], object], calls: int, wait: Callable[[], object]) -> float:
    wait()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return (time.perf_counter() - begin) / calls


def measure(steps: dict[str, Step], device: str, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of a step and of a layer."""
    import torch

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    times: dict[str, list[float]] = {name: [] for name in steps}
    calls = {
        name: max(1, int(0.02 / seconds(lambda step=step: step.run_layers(step.build()), 3, wait)))
        for name, step in steps.items()
    }
    for _ in range(rounds):
        for name, step in steps.items():
            once = seconds(lambda step=step: step.run_layers(step.build()), calls[name], wait)
            times[name].append(1e6 * once)
    us = {name: statistics.median(some) for name, some in times.items()}
    layer_us = {name: time / NUM_LAYERS for name, time in us.items()}
    if device == "cuda":
        from _timing import capture, replay_times

        graphs = {}
        for name, step in steps.items():
            metadata = step.build()
            graphs[name] = capture([lambda step=step, metadata=metadata: step.run_layers(metadata)], 8)
        layer_us = {name: time / (8 * NUM_LAYERS) for name, time in replay_times(graphs, rounds).items()}
    return {name: {"step": us[name], "layer": layer_us[name]} for name in steps}


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--device", choices=CASES, default="cuda")
    parser.add_shared("--rows")
    parser.add_argument("--list", action="store_true", help="print the rows; needs neither vLLM nor a GPU")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", metavar="PATH", type=Path, help="append one JSON object a row to this file")
    args = parser.parse_args(argv)
    cases = matching(CASES[args.device], args.rows)
    if args.list:
        for case in cases:
            print(f"{case.name}: {case.batch} sequences, {sum(case.seqlens_q)} new tokens")
        return
    import vllm

    import octavo
    import octavo.vllm

    octavo.vllm.register()
    contestants = ("octavo", PEERS[args.device], "operators")
    columns = [(what, name) for what in ("step", "layer") for name in contestants]
    print(f"| case | {' | '.join(f'{name}, {what}, us' for what, name in columns)} |")
    print("|---|" + "--:|" * len(columns))
    for case in cases:
        with vllm_config(case) as config:
            us = measure(make_steps(case, config, args.device), args.device, args.rounds)
        cells = [f"{us[name][what]:.1f}" for what, name in columns]
        print(f"| {case} | {' | '.join(cells)} |")
        if args.json:
            versions = {"octavo": octavo.build_info()["version"], "vllm": vllm.__version__}
            row = {"case": case.name, "device": args.device, "versions": versions, "us": us}
            append_row(args.json, row)


if __name__ == "__main__":
    main()
