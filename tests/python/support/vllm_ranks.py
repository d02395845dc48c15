"""What two ranks of decode context parallelism do, which torchrun starts with a device.

Each has half of the query heads and of the tokens, and checks its own heads against the oracle.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.v1.kv_cache_interface import KVCacheLayout

from support.vllm_cases import STEPS, random_step, run_steps
from support.vllm_layer import Layer

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"logits_soft_cap": 2.0},
    "sinks": {"sinks": torch.tensor([2.0, -1.0])},
}


def check_captured_step(layer: Layer) -> None:
    """A step that vLLM captured without a context, over contexts, and over none behind these."""
    captured = layer.builder.build_for_cudagraph_capture(layer.captured((6, 7), (1, 1)).metadata)
    for sequences, counts in [*STEPS, ((5,), (9,))]:
        batch = layer.captured(sequences, counts)
        layer.builder.build(0, batch.metadata)
        layer.run_layer(batch, captured)
        layer.check(sequences, counts, batch)


def main(device: str) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device))):
        parallel_state.init_distributed_environment(ranks, rank, local_rank=rank, backend=backend)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=ranks, decode_context_model_parallel_size=ranks
        )
    dtypes = ["float32", "bfloat16"] if device == "cpu" else ["float16", "bfloat16"]
    for dtype in dtypes:
        for interleave in (1, 4, 16):
            for options in OPTIONS.values():
                layer = Layer(
                    device,
                    dtype,
                    list(KVCacheLayout)[interleave % len(KVCacheLayout)],
                    num_heads=2,
                    num_kv_heads=1,
                    ranks=ranks,
                    rank=rank,
                    interleave=interleave,
                    options=options,
                )
                run_steps(layer)
                for _ in range(4):
                    sequences, counts = random_step(layer)
                    batch = layer.batch(sequences, counts, padded_tokens=3, padded_rows=1)
                    layer.run(batch)
                    layer.check(sequences, counts, batch)
    for interleave in (1, 16):
        heads = {"num_heads": 2, "num_kv_heads": 1}
        check_captured_step(Layer(device, dtypes[0], **heads, ranks=ranks, rank=rank, interleave=interleave))
    with pytest.raises(ValueError, match="ALiBi beside DCP not supported"):
        Layer(device, options={"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]}, ranks=ranks, rank=rank)
    print(f"rank {rank} is done")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
