"""Octavo and its peers behind one face: each turns a case's inputs into a call that fills `inputs.out`."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import _support_path  # noqa: F401
import torch
from _inputs import Inputs, as_dense
from _report import INT64, INVARIANT, OCTAVO
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import octavo
from support.case import TOKEN_SCALES, Case

# Relative to a row's largest element. Rounding the result costs at most 2^-9 of it in bfloat16.
TOLERANCE = {"float16": 0.005, "bfloat16": 0.02}
TOLERANCE_FP8_PRODUCTS = 0.2


class UnsupportedError(Exception):
    """The contestant cannot run the case."""


class Contestant(ABC):
    name: str
    peer = True
    writes_out = True  # a call does; otherwise only prepare() does, for the result to be checked

    @abstractmethod
    def prepare(self, case: Case, inputs: Inputs) -> Callable[[], object]:
        """Everything that need not be done at every step; raises UnsupportedError."""

    def compilations(self, cases: Sequence[Case]) -> list[Callable[[], object]]:  # noqa: ARG002
        """What makes the kernels of the cases, where they are compiled at run time; can all run at once."""
        return []

    def tolerance(self, case: Case) -> float:
        return TOLERANCE[case.dtype]

    def kernel(self, case: Case, inputs: Inputs) -> str:  # noqa: ARG002
        """What runs, where that can be asked."""
        return ""


class Octavo(Contestant):
    name = OCTAVO
    peer = False
    batch_invariant = False

    def prepare(self, case: Case, inputs: Inputs) -> Callable[[], object]:
        if case.cascade and self.batch_invariant:
            raise UnsupportedError("no cascade")
        return self._call(case, inputs)

    def kernel(self, case: Case, inputs: Inputs) -> str:
        call = self._call(case, inputs)
        found = octavo.explain(call.func.__name__, *call.args, **call.keywords)
        attention = found.plan.get("attention")
        return f"{found.kernel}, then {attention}" if attention else found.kernel

    def _call(self, case: Case, inputs: Inputs) -> partial[object]:
        return self._paged(case, inputs) if case.page_size > 0 else self._dense_or_packed(case, inputs)

    def _paged(self, case: Case, inputs: Inputs) -> partial[object]:
        arrays = (inputs.q, inputs.k, inputs.v, inputs.page_table, inputs.seq_lens)
        options = {
            **case.masks,
            "alibi_slopes": inputs.alibi_slopes,
            "return_lse": case.return_lse,
            "batch_invariant": self.batch_invariant,
            "shared_prefix_len": case.shared_prefix if case.cascade else 0,
            "out": inputs.out,
            **inputs.scales,
        }
        if not case.is_decode:
            options |= {"cu_seqlens_q": inputs.cu_seqlens_q, "max_seqlen_q": max(case.seqlens_q)}
        return partial(octavo.paged_attention, *arrays, **options)

    def _dense_or_packed(self, case: Case, inputs: Inputs) -> partial[object]:
        arrays, out = [inputs.q, inputs.k, inputs.v], inputs.out
        options = {
            **case.masks,
            "alibi_slopes": inputs.alibi_slopes,
            "return_lse": case.return_lse,
        }
        if case.is_dense:
            *arrays, out = as_dense(case, *arrays, out)
        else:
            options |= {
                "cu_seqlens_q": inputs.cu_seqlens_q,
                "cu_seqlens_k": inputs.cu_seqlens_k,
                "max_seqlen_q": max(case.seqlens_q),
                "max_seqlen_k": max(case.seqlens_k),
            }
        return partial(octavo.attention, *arrays, out=out, **options)


class BatchInvariantOctavo(Octavo):
    name = INVARIANT
    batch_invariant = True


class Int64Octavo(Octavo):
    """Octavo with page table, lengths and offsets of int64."""

    name = INT64

    def prepare(self, case: Case, inputs: Inputs) -> Callable[[], object]:
        return super().prepare(
            case,
            replace(
                inputs,
                page_table=None if inputs.page_table is None else inputs.page_table.long(),
                seq_lens=inputs.seq_lens.long(),
                cu_seqlens_q=inputs.cu_seqlens_q.long(),
                cu_seqlens_k=inputs.cu_seqlens_k.long(),
            ),
        )


class TorchAttention(Contestant):
    """One of the backends of PyTorch's scaled_dot_product_attention."""

    writes_out = False

    def __init__(self, name: str, backend: SDPBackend) -> None:
        self.name = name
        self.backend = backend

    def prepare(self, case: Case, inputs: Inputs) -> Callable[[], object]:
        is_plain = case.window_left < 0 and case.softcap == 0 and not case.alibi
        if case.page_size > 0 or not case.is_dense or case.seqlens_q != case.seqlens_k or not is_plain:
            raise UnsupportedError("dense arrays without window, softcap and ALiBi only")
        arrays = as_dense(case, inputs.q, inputs.k, inputs.v, inputs.out)
        q, k, v, out = (x.transpose(1, 2) for x in arrays)
        gqa = case.num_q_heads != case.num_kv_heads

        def call() -> Tensor:
            with sdpa_kernel(self.backend):
                return scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=gqa)

        out.copy_(call())  # it has no out=; the copy is not timed
        return call


class FlashAttention3(Contestant):
    """As vLLM builds it: packed queries over packed keys or a paged cache, never dense."""

    name = "fa3"
    library = "_vllm_fa3_C.abi3.so"
    # Its arguments that no case needs.
    unused = (
        "k_new v_new q_v cu_seqlens_k_new seqused_q kv_batch_idx leftpad_k rotary_cos rotary_sin "
        "seqlens_rotary scheduler_metadata s_aux cp_tot_seqused_k"
    )

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
        if inputs.scales:
            raise UnsupportedError(f"no {case.kv_dtype}")
        q, descale = inputs.q, None
        if case.cache_dtype == "float8_e4m3fn":
            q = q.to(torch.float8_e4m3fn)
            descale = torch.ones(case.batch, case.num_kv_heads, device=q.device)
        is_paged = inputs.page_table is not None
        arguments: dict[str, Any] = dict.fromkeys(self.unused.split()) | {
            "q": q,
            "k": inputs.k,
            "v": inputs.v,
            "out": inputs.out,
            "cu_seqlens_q": inputs.cu_seqlens_q,
            "cu_seqlens_k": None if is_paged else inputs.cu_seqlens_k,
            "seqused_k": inputs.seq_lens if is_paged else None,
            "max_seqlen_q": max(case.seqlens_q),
            "max_seqlen_k": max(*case.seqlens_k, case.room),
            "page_table": inputs.page_table,
            "q_descale": descale,
            "k_descale": descale,
            "v_descale": descale,
            "softmax_scale": case.head_dim**-0.5,
            "is_causal": case.causal,
            "window_size_left": case.window_left,
            "window_size_right": 0 if case.causal and case.window_left >= 0 else -1,
            "softcap": case.softcap,
            "is_rotary_interleaved": True,
            "num_splits": 0 if is_paged else 1,  # 0: it chooses
            "pack_gqa": None,  # it chooses
            "sm_margin": 0,
            "cp_world_size": 1,
            "cp_rank": 0,
        }
        return lambda: torch.ops._vllm_fa3_C.fwd(**arguments)


class FlashInfer(Contestant):
    """Its decode wrapper with one of its two kinds of kernels; plan() is not timed."""

    workspace_bytes = 256 << 20  # twice what its documentation recommends
    # With head dim 96 a row ended in an illegal memory access, and the run with it.
    head_dims = (64, 128, 256)

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
            q_len_per_req=case.seqlens_q[0],
        )
        return wrapper

    def compilations(self, cases: Sequence[Case]) -> list[Callable[[], object]]:
        kinds = {
            (c.head_dim, c.dtype, c.cache_dtype, c.alibi, c.window_left >= 0, c.softcap > 0): c
            for c in cases
            if c.head_dim in self.head_dims
            and (self.use_tensor_cores or c.is_decode)
            and c.kv_dtype not in TOKEN_SCALES
        }
        one_page = torch.zeros(1, dtype=torch.int32, device="cuda")
        return [partial(self._plan, case, one_page, [min(case.page_size, 8)]) for case in kinds.values()]

    def prepare(self, case: Case, inputs: Inputs) -> Callable[[], object]:
        if case.head_dim not in self.head_dims:
            raise UnsupportedError(f"takes head dims {self.head_dims}")
        if not case.is_decode and not self.use_tensor_cores:
            raise UnsupportedError("one query token only")
        if inputs.scales:
            raise UnsupportedError(f"no {case.kv_dtype}")
        assert inputs.page_table is not None
        used = torch.cat(
            [
                row[: -(-length // case.page_size)]
                for row, length in zip(inputs.page_table, case.seqlens_k, strict=True)
            ]
        )
        wrapper = self._plan(case, used, case.seqlens_k)
        cache = (inputs.k, inputs.v)
        if case.head_major:
            cache = (inputs.k.transpose(1, 2), inputs.v.transpose(1, 2))
        lse = None
        if case.return_lse:
            lse = torch.empty(inputs.q.shape[:2], dtype=torch.float32, device=inputs.q.device)
        return lambda: wrapper.run(inputs.q, cache, out=inputs.out, lse=lse, return_lse=case.return_lse)


class Xqa(Contestant):
    """TensorRT-LLM's kernel for caches of fp8, in FlashInfer: on Hopper its queries are of fp8 too."""

    name = "flashinfer_xqa"
    workspace_bytes = 256 << 20
    num_semaphores = 1 << 20
    page_sizes = (16, 32, 64, 128)

    def __init__(self) -> None:
        from flashinfer.xqa import get_xqa_module, xqa

        self.get_module, self.xqa = get_xqa_module, xqa
        self.workspace = torch.zeros(self.workspace_bytes, dtype=torch.uint8, device="cuda")
        self.semaphores = torch.zeros(self.num_semaphores, dtype=torch.uint32, device="cuda")

    def tolerance(self, case: Case) -> float:  # noqa: ARG002
        return TOLERANCE_FP8_PRODUCTS

    def _why_not(self, case: Case) -> str:
        if case.cache_dtype != "float8_e4m3fn" or case.kv_dtype in TOKEN_SCALES:
            return "fp8 with one scale only"
        if not case.is_decode:
            return "one query token only"
        if case.page_size not in self.page_sizes:
            return f"takes pages of {self.page_sizes}"
        is_plain = case.window_left < 0 and case.softcap == 0 and not case.alibi and not case.return_lse
        return "" if is_plain else "no masks, biases and LSE"

    def compilations(self, cases: Sequence[Case]) -> list[Callable[[], object]]:
        kinds = {
            (c.dtype, c.page_size, c.head_dim, c.num_q_heads // c.num_kv_heads)
            for c in cases
            if not self._why_not(c)
        }
        return [
            partial(
                self.get_module,
                getattr(torch, dtype),
                torch.float8_e4m3fn,
                page_size,
                head_dim,
                group_size,
                False,
                getattr(torch, dtype),
                1,
            )
            for dtype, page_size, head_dim, group_size in sorted(kinds)
        ]

    def prepare(self, case: Case, inputs: Inputs) -> Callable[[], object]:
        if why_not := self._why_not(case):
            raise UnsupportedError(why_not)
        assert inputs.page_table is not None and inputs.seq_lens is not None
        return partial(
            self.xqa,
            inputs.q[:, None],
            inputs.k,
            inputs.v,
            inputs.page_table,
            inputs.seq_lens.view(torch.uint32)[:, None],
            inputs.out[:, None],
            self.workspace,
            self.semaphores,
            case.num_kv_heads,
            case.page_size,
        )


AnyContestant = TypeVar("AnyContestant")


def importable(makers: dict[str, Callable[[], AnyContestant]]) -> list[AnyContestant]:
    """Those that can be made; says why of the others."""
    found = []
    for label, make in makers.items():
        try:
            found.append(make())
        except (ImportError, OSError, RuntimeError) as error:
            print(f"without {label}: {error}", file=sys.stderr)
    return found


def decode_contestants(flashinfer: bool) -> list[Contestant]:
    """Octavo, in both modes, and whichever peers can be imported."""
    peers: dict[str, Callable[[], Contestant]] = {"FlashAttention-3": FlashAttention3}
    if flashinfer:
        peers["FlashInfer, CUDA cores"] = lambda: FlashInfer(use_tensor_cores=False)
        peers["FlashInfer, tensor cores"] = lambda: FlashInfer(use_tensor_cores=True)
        peers["XQA"] = Xqa
    return [Octavo(), BatchInvariantOctavo(), *importable(peers)]


def prefill_contestants() -> list[Contestant]:
    """Octavo and whichever peers can be imported."""
    return [
        Octavo(),
        TorchAttention("cudnn", SDPBackend.CUDNN_ATTENTION),
        TorchAttention("fa2", SDPBackend.FLASH_ATTENTION),
        *importable({"FlashAttention-3": FlashAttention3}),
    ]
