"""The examples of several devices, which check themselves against one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import gpu_count

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "parallel"
ON_CPU = {
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
}


def run(command: list[str], environment: dict[str, str], num_ranks: int, device: str) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    for way in ("tensor_parallel", "context_parallel"):
        assert f"{way}: {num_ranks} x {device}, differs by" in done.stdout


def torchrun(num_ranks: int) -> list[str]:
    module = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return [*module, str(FOLDER / "decode_torch.py")]


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")


@needs_torch
def test_torch_on_two_processes() -> None:
    run(torchrun(2), ON_CPU, 2, "cpu")


@needs_jax
def test_jax_on_two_devices() -> None:
    run([str(FOLDER / "decode_jax.py")], ON_CPU, 2, "cpu")


@pytest.mark.gpu
@needs_torch
def test_torch_on_gpus() -> None:
    """Two where there are two; one still goes through NCCL."""
    num_ranks = min(2, gpu_count())
    run(torchrun(num_ranks), {}, num_ranks, "cuda")


@pytest.mark.gpu
@needs_jax
def test_jax_on_gpus() -> None:
    num_ranks = min(2, gpu_count())
    visible = ",".join(map(str, range(num_ranks)))
    run([str(FOLDER / "decode_jax.py")], {"CUDA_VISIBLE_DEVICES": visible}, num_ranks, "gpu")
