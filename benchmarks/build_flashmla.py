"""Builds FlashMLA's dense decoding of bfloat16 for bench_latent.py, without a GPU and in a minute.

    git clone https://github.com/deepseek-ai/FlashMLA && git clone https://github.com/NVIDIA/cutlass
    python benchmarks/build_flashmla.py FOLDER --flashmla FlashMLA --cutlass cutlass
    PYTHONPATH=FOLDER python benchmarks/bench_latent.py

It compiles these kernels alone, for sm_90a, behind a module flash_mla with the two functions that the
benchmark calls. FlashMLA's own setup.py builds the whole package, which serves as well.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = (
    "sm90/decode/dense/instantiations/bf16.cu",
    "smxx/decode/combine/combine.cu",
    "smxx/decode/get_decoding_sched_meta/get_decoding_sched_meta.cu",
)
FLAGS = (  # those of FlashMLA's setup.py that change code
    "-O3",
    "-std=c++20",
    "-DNDEBUG",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "--use_fast_math",
    "-Xptxas=--register-usage-level=10",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-Xcompiler=-fPIC",
)


def build(folder: Path, flashmla: Path, cutlass: Path) -> None:
    nvcc = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    csrc = flashmla / "csrc"
    includes = (csrc, csrc / "kerutils" / "include", csrc / "sm90", cutlass / "include")
    options = [*FLAGS, *(f"-I{path}" for path in includes)]
    package = folder / "flash_mla"
    package.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        objects = []
        for source in (*(csrc / name for name in SOURCES), HERE / "flashmla_entry.cu"):
            objects.append(Path(scratch) / f"{source.stem}.o")
            subprocess.run([nvcc, *options, "-c", source, "-o", objects[-1]], check=True)
        library = package / "libflashmla.so"
        subprocess.run([nvcc, "-shared", "-cudart=static", *objects, "-o", library], check=True)
    (package / "__init__.py").write_text((HERE / "flashmla_module.py").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--flashmla", type=Path, required=True, help="a checkout of FlashMLA")
    parser.add_argument("--cutlass", type=Path, required=True, help="a checkout of CUTLASS")
    arguments = parser.parse_args()
    build(arguments.folder, arguments.flashmla, arguments.cutlass)
    return 0


if __name__ == "__main__":
    sys.exit(main())
