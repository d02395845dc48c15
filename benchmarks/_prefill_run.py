"""Measures prefill cases: every contestant in turn on the same inputs, checked against float64."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from _device import driver_version, matmul_flops, versions
from _prefill_cases import Case
from _timing import Captured, capture, repeats_for, replay_times
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import octavo

Call = Callable[[], object]
TOLERANCE = 0.02  # relative to a row's largest element; rounding the result costs up to 2^-9
ROWS_CHECKED = 64  # queries of a case, each in one head


class UnsupportedError(Exception):
    """The contestant cannot run the case."""


@dataclass(frozen=True)
class Inputs:
    """Packed: [tokens, heads, head_dim]; k and v may be pages [num_pages, page_size, heads, head_dim]."""

    q: Tensor
    k: Tensor
    v: Tensor
    page_table: Tensor | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seq_lens: Tensor
    alibi_slopes: Tensor | None
    out: Tensor

    def keys_of(self, case: Case, b: int) -> tuple[Tensor, Tensor]:
        """Of one sequence: [seqlen_k, heads, head_dim]."""
        length = case.seqlens_k[b]
        if self.page_table is None:
            begin = int(self.cu_seqlens_k[b])
            return self.k[begin : begin + length], self.v[begin : begin + length]
        pages = self.page_table[b, : -(-length // case.page_size)].long()
        return self.k[pages].flatten(0, 1)[:length], self.v[pages].flatten(0, 1)[:length]


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()


def make_inputs(case: Case) -> Inputs:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, case.head_dim, dtype=torch.bfloat16, device="cuda")

    q = draw(sum(case.seqlens_q), case.num_q_heads)
    table, tokens = None, (sum(case.seqlens_k),)
    if case.page_size > 0:
        pages_of = [-(-length // case.page_size) for length in case.seqlens_k]
        pages = torch.randperm(sum(pages_of), device="cuda").to(torch.int32)
        table = torch.zeros(case.batch, max(pages_of), dtype=torch.int32, device="cuda")
        for row, ids in zip(table, pages.split(pages_of), strict=True):
            row[: len(ids)] = ids
        tokens = (len(pages), case.page_size)  # type: ignore[assignment]
    heads = torch.arange(1, case.num_q_heads + 1, dtype=torch.float32, device="cuda")
    return Inputs(
        q,
        draw(*tokens, case.num_kv_heads),
        draw(*tokens, case.num_kv_heads),
        table,
        _cumulative(case.seqlens_q),
        _cumulative(case.seqlens_k),
        torch.tensor(case.seqlens_k, dtype=torch.int32, device="cuda"),
        torch.exp2(-8.0 * heads / case.num_q_heads) if case.alibi else None,
        torch.empty_like(q),
    )


def max_error(case: Case, inputs: Inputs) -> float:
    """Of some queries, against float64, relative to the largest element of each; NaN where out has one."""
    random = torch.Generator().manual_seed(0)
    errors = []
    for i in range(ROWS_CHECKED):
        b = int(torch.randint(case.batch, (), generator=random))
        row = (
            case.seqlens_q[b] - 1
            if i % 4 == 0
            else int(torch.randint(case.seqlens_q[b], (), generator=random))
        )
        head = int(torch.randint(case.num_q_heads, (), generator=random))
        at = int(inputs.cu_seqlens_q[b]) + row
        position = case.seqlens_k[b] - case.seqlens_q[b] + row
        end = position + 1 if case.causal else case.seqlens_k[b]
        begin = max(0, position - case.window_left) if case.window_left >= 0 else 0
        k, v = (
            x[begin:end, head * case.num_kv_heads // case.num_q_heads].double()
            for x in inputs.keys_of(case, b)
        )
        scores = k @ inputs.q[at, head].double() / math.sqrt(case.head_dim)
        if case.softcap > 0:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        if inputs.alibi_slopes is not None:
            scores -= inputs.alibi_slopes[head].double() * (
                position - torch.arange(begin, end, device="cuda")
            )
        want = torch.softmax(scores, 0) @ v
        errors.append((inputs.out[at, head].double() - want).abs().amax() / want.abs().amax())
    return torch.stack(errors).max().item()


def _batched(case: Case, *arrays: Tensor) -> list[Tensor]:
    return [x.view(case.batch, -1, *x.shape[1:]) for x in arrays]


def octavo_call(case: Case, inputs: Inputs) -> Call:
    options = {
        "causal": case.causal,
        "window_left": case.window_left,
        "softcap": case.softcap,
        "alibi_slopes": inputs.alibi_slopes,
    }
    if case.dense:
        q, k, v, out = _batched(case, inputs.q, inputs.k, inputs.v, inputs.out)
        return lambda: octavo.attention(q, k, v, out=out, **options)  # type: ignore[call-overload]
    options |= {"cu_seqlens_q": inputs.cu_seqlens_q, "max_seqlen_q": max(case.seqlens_q), "out": inputs.out}
    if case.page_size == 0:
        options |= {"cu_seqlens_k": inputs.cu_seqlens_k, "max_seqlen_k": max(case.seqlens_k)}
        return lambda: octavo.attention(inputs.q, inputs.k, inputs.v, **options)  # type: ignore[call-overload]
    pages = (inputs.q, inputs.k, inputs.v, inputs.page_table, inputs.seq_lens)
    return lambda: octavo.paged_attention(*pages, **options)  # type: ignore[call-overload]


def _torch_call(backend: SDPBackend) -> Callable[[Case, Inputs], Call]:
    def prepare(case: Case, inputs: Inputs) -> Call:
        if not case.dense or case.window_left >= 0 or case.softcap > 0 or case.alibi:
            raise UnsupportedError("dense arrays without window, softcap and ALiBi only")
        q, k, v, out = (x.transpose(1, 2) for x in _batched(case, inputs.q, inputs.k, inputs.v, inputs.out))
        gqa = case.num_q_heads != case.num_kv_heads

        def call() -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=gqa)

        out.copy_(call())  # it has no out=; the result is checked here, and the copy is not timed
        return call

    return prepare


def _flash_attention_3(case: Case, inputs: Inputs) -> Call:
    """As vLLM builds it: packed or paged, never dense."""
    if case.alibi:
        raise UnsupportedError("no ALiBi")
    unused = (
        "k_new v_new q_v cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k page_table kv_batch_idx leftpad_k "
        "rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale scheduler_metadata pack_gqa "
        "s_aux cp_tot_seqused_k"
    )
    arguments: dict[str, object] = dict.fromkeys(unused.split())
    if inputs.page_table is None:
        arguments |= {"cu_seqlens_k": inputs.cu_seqlens_k}
    else:
        arguments |= {"seqused_k": inputs.seq_lens, "page_table": inputs.page_table}
    arguments |= {
        "q": inputs.q,
        "k": inputs.k,
        "v": inputs.v,
        "out": inputs.out,
        "cu_seqlens_q": inputs.cu_seqlens_q,
        "max_seqlen_q": max(case.seqlens_q),
        "max_seqlen_k": max(case.seqlens_k),
        "softmax_scale": case.head_dim**-0.5,
        "is_causal": case.causal,
        "window_size_left": case.window_left,
        "window_size_right": 0 if case.causal and case.window_left >= 0 else -1,
        "softcap": case.softcap,
        "is_rotary_interleaved": True,
        "num_splits": 0 if case.page_size else 1,
        "sm_margin": 0,
        "cp_world_size": 1,
        "cp_rank": 0,
    }
    return lambda: torch.ops._vllm_fa3_C.fwd(**arguments)


def find_contestants() -> dict[str, Callable[[Case, Inputs], Call]]:
    found = {
        "octavo": octavo_call,
        "cudnn": _torch_call(SDPBackend.CUDNN_ATTENTION),
        "fa2": _torch_call(SDPBackend.FLASH_ATTENTION),
    }
    places = [Path(place) / sub for place in sys.path for sub in ("", "vllm/vllm_flash_attn")]
    for library in (place / "_vllm_fa3_C.abi3.so" for place in places):
        if library.is_file():
            torch.ops.load_library(str(library))
            return found | {"fa3": _flash_attention_3}
    print("FlashAttention-3 (vLLM's _vllm_fa3_C.abi3.so) is not on PYTHONPATH", file=sys.stderr)
    return found


def _capture(
    prepare: Callable[[Case, Inputs], Call], case: Case, copies: Sequence[Inputs], repeats: int
) -> Captured:
    for inputs in copies:
        inputs.out.fill_(torch.nan)
    return capture([prepare(case, inputs) for inputs in copies], repeats)


def measure(case: Case, rounds: int, machine: dict[str, object], l2_bytes: int) -> dict[str, object]:
    """One row. What is wrong has no time."""
    copies = [make_inputs(case) for _ in range(max(2, 1 + 2 * l2_bytes // case.num_bytes))]
    repeats = repeats_for(len(copies), max(case.flops / 6e8, case.num_bytes / 3e6))
    graphs: dict[str, Captured] = {}
    errors: dict[str, float] = {}
    skipped: dict[str, str] = {}
    for name, prepare in find_contestants().items():
        try:
            graph = _capture(prepare, case, copies, repeats)
        except UnsupportedError as why:
            skipped[name] = str(why)
            continue
        except Exception as error:
            if name == "octavo":
                raise
            skipped[name] = f"{type(error).__name__}: {str(error).strip()[:200]}"  # for a peer itself to say
            continue
        graph.replay()
        errors[name] = max_error(case, copies[0])
        if errors[name] <= TOLERANCE:
            graphs[name] = graph
        else:
            skipped[name] = f"WRONG: error {errors[name]:.2g}, tolerance {TOLERANCE}"
    calls = repeats * len(copies)
    us = {name: time / calls for name, time in replay_times(graphs, rounds).items()}
    return {
        "case": case.name,
        "shape": {
            "lengths": case.lengths,
            "heads": f"{case.num_q_heads}/{case.num_kv_heads}",
            "head_dim": case.head_dim,
            "page_size": case.page_size,
        },
        "flops": case.flops,
        "us": us,
        "tflops": {name: case.flops / time / 1e6 for name, time in us.items()},
        "max_error": errors,
        "skipped": skipped,
        "machine": machine,
    }


def measure_all(cases: Sequence[Case], rounds: int) -> Iterator[dict[str, object]]:
    torch.manual_seed(0)
    machine: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "versions": versions(["torch", "vllm"]) | {"cuDNN": str(torch.backends.cudnn.version())},
        "matmul_flops": matmul_flops(min(rounds, 9)),
    }
    l2_bytes = torch.cuda.get_device_properties().L2_cache_size
    for case in cases:
        row = measure(case, rounds, machine, l2_bytes)
        gc.collect()
        torch.cuda.empty_cache()
        yield row
