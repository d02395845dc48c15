"""Octavo and its peers behind one face: each turns a case's inputs into a call that fills `inputs.out`."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _decode_cases import Case
from _decode_inputs import Inputs
from _report import INVARIANT, OCTAVO

import octavo

# Relative to a row's largest element. Rounding the result costs at most 2^-9 of it in bfloat16.
TOLERANCE = {"float16": 0.005, "bfloat16": 0.02}
TOLERANCE_FP8_PRODUCTS = 0.2


class UnsupportedError(Exception):
    """The contestant cannot run the case."""


class Contestant(ABC):
    name: str
    peer = True

    @abstractmethod
    def prepare(self, case: Case, inputs: Inputs) -> Callable[[], object]:
        """Everything that need not be done at every step; raises UnsupportedError."""

    def compilations(self, cases: Sequence[Case]) -> list[Callable[[], object]]:  # noqa: ARG002
        """What makes the kernels of the cases, where they are compiled at run time; can all run at once."""
        return []

    def tolerance(self, case: Case) -> float:
        return TOLERANCE[case.dtype]


class Octavo(Contestant):
    name = OCTAVO
    peer = False
    batch_invariant = False

    def prepare(self, case: Case, inputs: Inputs) -> Callable[[], object]:
        if case.cascade and self.batch_invariant:
            raise UnsupportedError("no cascade")
        packed = {"cu_seqlens_q": inputs.cu_seqlens_q, "max_seqlen_q": case.query_len}

        def call() -> object:
            return octavo.paged_attention(  # type: ignore[call-overload]
                inputs.q,
                inputs.k_pages,
                inputs.v_pages,
                inputs.page_table,
                inputs.seq_lens,
                **(packed if case.query_len > 1 else {}),
                window_left=case.window_left,
                softcap=case.softcap,
                alibi_slopes=inputs.alibi_slopes,
                return_lse=case.return_lse,
                batch_invariant=self.batch_invariant,
                shared_prefix_len=case.shared_prefix if case.cascade else 0,
                out=inputs.out,
            )

        if case.cache_dtype != case.dtype:
            try:
                call()
            except TypeError as error:
                raise UnsupportedError(f"not supported yet ({error})") from error
        return call


class BatchInvariantOctavo(Octavo):
    name = INVARIANT
    batch_invariant = True


class FlashAttention3(Contestant):
    """As vLLM builds it: packed queries over a paged cache."""

    name = "fa3"
    library = "_vllm_fa3_C.abi3.so"

    def __init__(self) -> None:
        places = [Path(place) / sub for place in sys.path for sub in ("", "vllm/vllm_flash_attn")]
        found = next((place / self.library for place in places if (place / self.library).is_file()), None)
        if found is None:
            raise ImportError(f"{self.library} is not on PYTHONPATH")
        torch.ops.load_library(str(found))

    def tolerance(self, case: Case) -> float:
        """It takes fp8 keys only with fp8 queries, and multiplies in fp8."""
        return TOLERANCE_FP8_PRODUCTS if case.cache_dtype == "float8_e4m3fn" else super().tolerance(case)

    def prepare(self, case: Case, inputs: Inputs) -> Callable[[], object]:
        if case.alibi:
            raise UnsupportedError("no ALiBi")
        q, descale = inputs.q, None
        if case.cache_dtype == "float8_e4m3fn":
            q = q.to(torch.float8_e4m3fn)
            descale = torch.ones(case.batch, case.num_kv_heads, device=q.device)
        arguments: dict[str, Any] = {
            "q": q,
            "k": inputs.k_pages,
            "v": inputs.v_pages,
            "k_new": None,
            "v_new": None,
            "q_v": None,
            "out": inputs.out,
            "cu_seqlens_q": inputs.cu_seqlens_q,
            "cu_seqlens_k": None,
            "cu_seqlens_k_new": None,
            "seqused_q": None,
            "seqused_k": inputs.seq_lens,
            "max_seqlen_q": case.query_len,
            "max_seqlen_k": max(case.seq_lens),
            "page_table": inputs.page_table,
            "kv_batch_idx": None,
            "leftpad_k": None,
            "rotary_cos": None,
            "rotary_sin": None,
            "seqlens_rotary": None,
            "q_descale": descale,
            "k_descale": descale,
            "v_descale": descale,
            "softmax_scale": 1.0 / math.sqrt(case.head_dim),
            "is_causal": True,
            "window_size_left": case.window_left,
            "window_size_right": -1 if case.window_left < 0 else 0,
            "softcap": case.softcap,
            "is_rotary_interleaved": True,
            "scheduler_metadata": None,
            "num_splits": 0,  # it chooses
            "pack_gqa": None,  # it chooses
            "sm_margin": 0,
            "s_aux": None,
            "cp_world_size": 1,
            "cp_rank": 0,
            "cp_tot_seqused_k": None,
        }
        return lambda: torch.ops._vllm_fa3_C.fwd(**arguments)


class FlashInfer(Contestant):
    """Its decode wrapper with one of its two kinds of kernels; plan() is not timed."""

    workspace_bytes = 256 << 20  # twice what its documentation recommends
    head_dims = (
        64,
        128,
        256,
    )  # with head dim 96 a row ended in an illegal memory access, and the run with it

    def __init__(self, use_tensor_cores: bool) -> None:
        import flashinfer

        self.use_tensor_cores = use_tensor_cores
        self.name = f"flashinfer_{'tensor' if use_tensor_cores else 'cuda'}_cores"
        self.wrapper_type = flashinfer.BatchDecodeWithPagedKVCacheWrapper
        # All wrappers of a contestant run one after the other on one stream, and share it.
        self.workspace = torch.zeros(self.workspace_bytes, dtype=torch.uint8, device="cuda")

    def _plan(self, case: Case, indices: torch.Tensor, seq_lens: Sequence[int]) -> Any:
        pages = torch.tensor([0, *(-(-length // case.page_size) for length in seq_lens)], dtype=torch.int32)
        last = torch.tensor([(length - 1) % case.page_size + 1 for length in seq_lens], dtype=torch.int32)
        wrapper = self.wrapper_type(
            self.workspace, "HND" if case.head_major else "NHD", use_tensor_cores=self.use_tensor_cores
        )
        wrapper.plan(
            pages.cumsum(0, dtype=torch.int32),
            indices,
            last,
            case.num_q_heads,
            case.num_kv_heads,
            case.head_dim,
            case.page_size,
            pos_encoding_mode="ALIBI" if case.alibi else "NONE",
            window_left=case.window_left,
            logits_soft_cap=case.softcap,
            q_data_type=getattr(torch, case.dtype),
            kv_data_type=getattr(torch, case.cache_dtype),
            q_len_per_req=case.query_len,
        )
        return wrapper

    def compilations(self, cases: Sequence[Case]) -> list[Callable[[], object]]:
        kinds = {
            (c.head_dim, c.dtype, c.cache_dtype, c.alibi, c.window_left >= 0, c.softcap > 0): c
            for c in cases
            if c.head_dim in self.head_dims and (self.use_tensor_cores or c.query_len == 1)
        }
        one_page = torch.zeros(1, dtype=torch.int32, device="cuda")
        return [partial(self._plan, case, one_page, [min(case.page_size, 8)]) for case in kinds.values()]

    def prepare(self, case: Case, inputs: Inputs) -> Callable[[], object]:
        if case.head_dim not in self.head_dims:
            raise UnsupportedError(f"takes head dims {self.head_dims}")
        if case.query_len > 1 and not self.use_tensor_cores:
            raise UnsupportedError("one query token only")
        used = torch.cat(
            [
                row[: -(-length // case.page_size)]
                for row, length in zip(inputs.page_table, case.seq_lens, strict=True)
            ]
        )
        wrapper = self._plan(case, used, case.seq_lens)
        cache = (inputs.k_pages, inputs.v_pages)
        if case.head_major:
            cache = (inputs.k_pages.transpose(1, 2), inputs.v_pages.transpose(1, 2))
        lse = None
        if case.return_lse:
            lse = torch.empty(inputs.q.shape[:2], dtype=torch.float32, device=inputs.q.device)
        return lambda: wrapper.run(inputs.q, cache, out=inputs.out, lse=lse, return_lse=case.return_lse)


def find_contestants(flashinfer: bool) -> list[Contestant]:
    """Octavo, in both modes, and whichever peers can be imported; says why of the others."""
    makers: dict[str, Callable[[], Contestant]] = {"FlashAttention-3": FlashAttention3}
    if flashinfer:
        makers["FlashInfer, CUDA cores"] = lambda: FlashInfer(use_tensor_cores=False)
        makers["FlashInfer, tensor cores"] = lambda: FlashInfer(use_tensor_cores=True)
    contestants: list[Contestant] = [Octavo(), BatchInvariantOctavo()]
    for label, make in makers.items():
        try:
            contestants.append(make())
        except (ImportError, OSError, RuntimeError) as error:
            print(f"without {label}: {error}")
    return contestants
