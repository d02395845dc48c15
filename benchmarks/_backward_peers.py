"""FlashAttention-3 and -4 from a folder that build_backward_peers.py has made.

What stands here their Python packages do: reserve the workspace, zero what kernels add to, and launch.
Zeroing is part of a call, and so are all launches.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _backward_contestants import Call, Contestant
from _backward_inputs import Inputs
from _backward_rows import Task, fa4_kernels
from _contestants import UnsupportedError
from torch import Tensor

FA3_LIBRARY = "libdew_flash_attn3.so"
FA4_FOLDER = "fa4"


def _multiple(number: int, of: int) -> int:
    """The next multiple."""
    return -(-number // of) * of


def _after(forward: Callable[[], object], backward: Call) -> Call:
    """Both, and the gradients."""

    def call() -> Sequence[Tensor]:
        forward()
        return backward()

    return call


def _unsupported(task: Task, *kinds: str) -> None:
    case = task.case
    wanted = {"dropout": task.dropout_p > 0.0, "ALiBi": bool(case.alibi), "softcap": case.softcap > 0.0}
    for kind in kinds:
        if wanted[kind]:
            raise UnsupportedError(f"no {kind}")


def _heads_first(lse: Tensor) -> Tensor:
    """[batch, seqlen, heads] -> [batch, heads, seqlen]."""
    return lse.transpose(1, 2).contiguous()


def _results(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out and lse, as both libraries have them: those of the inputs, or room for those of a forward."""
    if inputs.out is not None and inputs.lse is not None:
        return inputs.out, _heads_first(inputs.lse)
    batch, seqlen, num_heads, _ = inputs.q.shape
    return torch.empty_like(inputs.q), inputs.q.new_empty(batch, num_heads, seqlen, dtype=torch.float32)


# FlashAttention-3

_TYPES = {
    "pointer": ctypes.c_void_p,
    "index": ctypes.c_int64,
    "int": ctypes.c_int32,
    "float": ctypes.c_float,
    "byte": ctypes.c_uint8,
    "bool": ctypes.c_bool,
}
# Flash_bwd_params, which begins with Flash_fwd_params, as hopper/flash.h of FlashAttention has it at 0251105.
_PARAMETERS = """
pointer q k v
index q_batch k_batch v_batch q_row k_row v_row q_head k_head v_head v_dim
int h h_k
pointer o o_accum
index o_batch o_row o_head
pointer lse lse_accum q_descale k_descale v_descale
index q_descale_batch q_descale_head k_descale_batch k_descale_head v_descale_batch v_descale_head
int b seqlen_q seqlen_k seqlen_knew d seqlen_q_rounded seqlen_k_rounded d_rounded rotary_dim
int total_q total_k total_knew b_k d_v d_v_rounded
float scale_softmax softcap
pointer cu_seqlens_q cu_seqlens_k cu_seqlens_knew leftpad_k seqused_q seqused_k
index o_accum_split o_accum_batch o_accum_row o_accum_head lse_accum_split lse_accum_batch lse_accum_head
pointer knew vnew
index knew_batch vnew_batch knew_row vnew_row knew_head vnew_head
pointer qv
index qv_batch qv_row qv_head
pointer rotary_cos rotary_sin seqlens_rotary kv_batch_idx page_table
index page_table_batch
int page_size num_pages
bool pagedkv_tma
float p_dropout
byte p_dropout_in_uint8
float rp_dropout
int window_size_left window_size_right attention_chunk
pointer rng_state
bool is_bf16 is_fp32 is_e4m3 is_causal is_local is_rotary_interleaved
int num_splits
bool pack_gqa
pointer tile_count_semaphore num_m_blocks num_splits_dynamic varlen_batch_idx num_nheads_in_l2
bool skip_scheduler_metadata varlen_sort_batches
int tile_count_semaphore_offset
bool head_swizzle prepare_varlen_pdl
int arch num_sm
pointer do dq dk dv dq_accum dk_accum dv_accum
index do_batch do_row do_head dq_batch dk_batch dv_batch dq_row dk_row dv_row dq_head dk_head dv_head
pointer dsoftmax_sum lse_log2 dq_semaphore dk_semaphore dv_semaphore
bool deterministic
index dq_accum_split
"""


class _Fa3Parameters(ctypes.Structure):
    _fields_ = [
        (name, _TYPES[kind])
        for kind, *names in (line.split() for line in _PARAMETERS.strip().splitlines())
        for name in names
    ]

    def set(self, **values: Any) -> None:
        for name, value in values.items():
            getattr(self, name)  # a wrong name is an error
            setattr(self, name, value)

    def set_tensors(self, **tensors: Tensor) -> None:
        """[batch, seqlen, heads, head_dim]."""
        for name, x in tensors.items():
            self.set(
                **{
                    name: x.data_ptr(),
                    f"{name}_batch": x.stride(0),
                    f"{name}_row": x.stride(1),
                    f"{name}_head": x.stride(2),
                }
            )


class FlashAttention3(Contestant):
    """Its library without Python: the wheel that has one is made for JAX, and its functions take a struct."""

    name = "fa3"
    # The rows of queries and of keys in a tile of the backward, without and with a causal mask.
    tiles = {  # noqa: RUF012
        64: ((128, 128), (128, 128)),
        128: ((80, 128), (64, 128)),
        192: ((64, 96), (64, 96)),
        256: ((64, 80), (64, 80)),
    }

    def __init__(self, folder: Path) -> None:
        path = folder / FA3_LIBRARY
        if not path.is_file():
            raise ImportError(f"{path} is not there: see build_backward_peers.py")
        library = ctypes.CDLL(str(path))
        self.run_forward = library["_Z11run_mha_fwdR16Flash_fwd_paramsP11CUstream_st"]
        self.run_backward = library["_Z11run_mha_bwdR16Flash_bwd_paramsP11CUstream_st"]
        for function in (self.run_forward, self.run_backward):
            function.restype, function.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p]

    def prepare(self, task: Task, inputs: Inputs) -> Call:
        _unsupported(task, "dropout", "ALiBi", "softcap")
        if task.case.head_dim not in self.tiles:
            raise UnsupportedError(f"this build takes head dims {tuple(self.tiles)}")
        if task.deterministic and task.case.head_dim == 256:
            raise UnsupportedError("no deterministic mode for head dim 256")
        out, lse = _results(inputs)
        backward = self._backward(task, inputs, out, lse)
        if not task.forward:
            return backward
        return _after(self._forward(task, inputs, out, lse), backward)

    def _parameters(
        self, task: Task, inputs: Inputs, out: Tensor, lse: Tensor, tile: tuple[int, int]
    ) -> _Fa3Parameters:
        """What forward and backward share."""
        (batch, seqlen_q, num_heads, dim), (_, seqlen_k, num_kv_heads, _) = inputs.q.shape, inputs.k.shape
        parameters = _Fa3Parameters()
        parameters.set_tensors(q=inputs.q, k=inputs.k, v=inputs.v, o=out)
        parameters.set(
            v_dim=1,
            lse=lse.data_ptr(),
            h=num_heads,
            h_k=num_kv_heads,
            b=batch,
            b_k=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            seqlen_q_rounded=_multiple(seqlen_q, tile[0]),
            seqlen_k_rounded=_multiple(seqlen_k, tile[1]),
            total_q=batch * seqlen_q,
            total_k=batch * seqlen_k,
            d=dim,
            d_rounded=dim,
            d_v=dim,
            d_v_rounded=dim,
            scale_softmax=dim**-0.5,
            p_dropout=1.0,  # what stays
            p_dropout_in_uint8=255,
            rp_dropout=1.0,
            window_size_left=seqlen_k - 1,
            window_size_right=0 if task.case.causal else seqlen_q - 1,
            is_bf16=inputs.q.dtype == torch.bfloat16,
            is_causal=task.case.causal,
            num_splits=1,
            arch=90,
            num_sm=torch.cuda.get_device_properties(inputs.q.device).multi_processor_count,
        )
        return parameters

    def _forward(self, task: Task, inputs: Inputs, out: Tensor, lse: Tensor) -> Callable[[], None]:
        parameters = self._parameters(task, inputs, out, lse, (128, 128))
        tile_counter = torch.zeros(1, dtype=torch.int32, device=out.device)
        parameters.set(
            head_swizzle=task.case.causal,
            varlen_sort_batches=True,
            tile_count_semaphore=tile_counter.data_ptr() if task.case.causal else None,
        )

        def call() -> None:
            if task.case.causal:
                tile_counter.zero_()
            self.run_forward(ctypes.addressof(parameters), torch.cuda.current_stream().cuda_stream)

        return call

    def _backward(self, task: Task, inputs: Inputs, out: Tensor, lse: Tensor) -> Call:
        (batch, seqlen_q, num_heads, dim), (_, seqlen_k, num_kv_heads, _) = inputs.q.shape, inputs.k.shape
        tile = self.tiles[dim][task.case.causal]
        rows, keys = _multiple(seqlen_q, tile[0]), _multiple(seqlen_k, tile[1])
        gradients = [torch.empty_like(x) for x in (inputs.q, inputs.k, inputs.v)]
        floats = partial(inputs.q.new_empty, dtype=torch.float32)
        ints = partial(inputs.q.new_zeros, dtype=torch.int32)
        # The first kernel zeroes dq_accum and dq_semaphore.
        workspace = {
            "dq_accum": floats(batch, num_heads, rows * dim),
            "dsoftmax_sum": floats(batch, num_heads, rows),
            "lse_log2": floats(batch, num_heads, rows),
            "dq_semaphore": ints(rows // tile[0], batch, num_heads),
        }
        zeroed: dict[str, Tensor] = {}
        if num_kv_heads != num_heads:
            zeroed |= {name: floats(batch, num_kv_heads, keys * dim) for name in ("dk_accum", "dv_accum")}
            if task.deterministic:
                shape = (keys // tile[1], batch, num_kv_heads)
                zeroed |= {name: ints(*shape) for name in ("dk_semaphore", "dv_semaphore")}
        parameters = self._parameters(task, inputs, out, lse, tile)
        parameters.set_tensors(do=inputs.dout, **dict(zip(("dq", "dk", "dv"), gradients, strict=True)))
        pointers = {name: x.data_ptr() for name, x in (workspace | zeroed).items()}
        pointers["tile_count_semaphore"] = pointers["dq_semaphore"]  # must not be null; nobody counts there
        parameters.set(deterministic=task.deterministic, **pointers)

        def call(_kept: object = (inputs, out, lse, workspace)) -> Sequence[Tensor]:
            for x in zeroed.values():
                x.zero_()
            self.run_backward(ctypes.addressof(parameters), torch.cuda.current_stream().cuda_stream)
            return gradients

        return call


# FlashAttention-4


class FlashAttention4(Contestant):
    """Its kernels, compiled beforehand, called as flash_attn/cute/interface.py calls them on Hopper.

    What a kernel of theirs does not use was None when it was compiled, and is None here.
    """

    name = "fa4"

    def __init__(self, folder: Path) -> None:
        import tvm_ffi

        self.folder, self.load_module = folder / FA4_FOLDER, tvm_ffi.load_module
        index = self.folder / "index.json"
        if not index.is_file():
            raise ImportError(f"{index} is not there: see build_backward_peers.py")
        self.index: dict[str, dict[str, Any]] = json.loads(index.read_text())
        self.modules: dict[str, Any] = {}

    def _kernel(self, name: str) -> Callable[..., None]:
        if name not in self.modules:
            self.modules[name] = self.load_module(str(self.folder / name))
        return self.modules[name]["func"]

    def prepare(self, task: Task, inputs: Inputs) -> Call:
        _unsupported(task, "dropout", "ALiBi")
        kernels = self.index.get(fa4_kernels(task))
        if kernels is None:
            raise UnsupportedError(f"no kernels {fa4_kernels(task)} in {self.folder}")
        out, lse = _results(inputs)
        backward = self._backward(task, inputs, out, lse, kernels)
        if not task.forward:
            return backward
        run, scale = self._kernel(kernels["forward"]), task.case.head_dim**-0.5
        arguments = inputs.q, inputs.k, inputs.v, out, lse, scale, *[None] * 9, (None, None), None, None
        return _after(partial(run, *arguments), backward)

    def _backward(
        self, task: Task, inputs: Inputs, out: Tensor, lse: Tensor, kernels: dict[str, Any]
    ) -> Call:
        (batch, seqlen_q, num_heads, dim), (_, seqlen_k, num_kv_heads, _) = inputs.q.shape, inputs.k.shape
        prepare, run, *convert = (self._kernel(name) for name in kernels["backward"])
        tile_q, tile_k = kernels["tile"]
        rows, keys = _multiple(seqlen_q, tile_q), _multiple(seqlen_k, tile_k)
        dim_rounded, scale = _multiple(dim, kernels["head_dim_multiple"]), dim**-0.5
        dq, dk, dv = (torch.empty_like(x) for x in (inputs.q, inputs.k, inputs.v))
        floats = partial(inputs.q.new_empty, dtype=torch.float32)
        ints = partial(inputs.q.new_empty, dtype=torch.int32)
        dq_accum = floats(batch, num_heads, rows * dim_rounded)  # which the first kernel zeroes
        delta, lse_log2 = (floats(batch, num_heads, rows) for _ in range(2))
        zeroed: list[Tensor] = []
        to_keys = [dk, dv]
        semaphores: list[Tensor | None] = [None] * 3
        has_groups = num_kv_heads != num_heads
        if has_groups:
            to_keys = [floats(batch, num_kv_heads, keys * dim_rounded) for _ in "kv"]
            zeroed += to_keys
        if task.deterministic:
            semaphores = [ints(batch, num_heads, rows // tile_q, 1), None, None]
            if has_groups:
                semaphores[1:] = [ints(batch, num_kv_heads, keys // tile_k, 2) for _ in "kv"]
            zeroed += [x for x in semaphores if x is not None]

        def call() -> Sequence[Tensor]:
            for x in zeroed:
                x.zero_()
            prepare(out, inputs.dout, delta, lse, lse_log2, dq_accum, *[None] * 5, 1.0, None, None)
            run(
                *(inputs.q, inputs.k, inputs.v, inputs.dout, lse_log2, delta, dq_accum, *to_keys, scale),
                *([None] * 6),
                *semaphores,
                (None, None),
                None,
                None,
            )
            convert[0](dq_accum, dq, scale, *[None] * 4)
            if has_groups:
                convert[1](to_keys[0], dk, scale, *[None] * 4)
                convert[1](to_keys[1], dv, 1.0, *[None] * 4)
            return dq, dk, dv

        return call
