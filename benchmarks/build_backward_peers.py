"""Makes the folder of FlashAttention-3 and -4 that bench_backward.py takes, on a machine that needs no GPU.

    python -m venv peers && . peers/bin/activate
    pip install torch==2.11.0 "nvidia-cutlass-dsl[cu13]==4.8.1" apache-tvm-ffi==0.1.15.post2 \\
        torch-c-dlpack-ext einops quack-kernels==0.6.5 numpy ml_dtypes
    pip install --no-deps --pre flash-attn-4==4.0.0b36 dew-flash-attn-cu13==0.3.6
    python benchmarks/build_backward_peers.py FOLDER

It takes a minute or two. FlashAttention-3's library is that of the wheel dew-flash-attn-cu13.
FlashAttention-4 is compiled for sm_90a, a shared library for each of its kernels that a row of the benchmark
runs; these need CUDA 13's runtime, which PyTorch brings, and on the machine with the GPU the packages
apache-tvm-ffi and torch-c-dlpack-ext.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _backward_rows import GROUPS, Task, fa4_kernels

# Before flash_attn is imported: what it compiles for where there is no GPU, and nothing out of its own cache.
os.environ |= {
    "FLASH_ATTENTION_ARCH": "sm_90",
    "CUTE_DSL_ARCH": "sm_90a",
    "FLASH_ATTENTION_NUM_SMS": "132",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
}

# The DSL's runtime is 44 MB, of which kernels call a few functions. These are in a small static library, but
# for this one, which makes of a CUDA error what TVM's FFI raises.
_RAISE_CUDA_ERROR = r"""
#include <stdint.h>
#include <stdio.h>
typedef void (*raise_parts)(const char* kind, const char** parts, int32_t count);
void CuteDSLRT_TVMFFISetRaisedCudaError(raise_parts raise, int32_t code) {
    char number[16];
    snprintf(number, sizeof number, "%d", (int)code);
    const char* parts[] = {"CUDA error ", number};
    raise("RuntimeError", parts, 2);
}
"""


def package(name: str) -> Path:
    """Where a package lies; it is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the package {name} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


class Linker:
    """Makes shared libraries of compiled functions, each without need of the DSL's runtime."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.scratch = tempfile.TemporaryDirectory()
        raise_error = Path(self.scratch.name) / "raise_cuda_error.c"
        raise_error.write_text(_RAISE_CUDA_ERROR)
        dsl, nvidia = package("nvidia_cutlass_dsl"), package("nvidia")
        self.inputs = [
            raise_error,
            dsl / "cu13" / "lib" / "libcuda_dialect_runtime_static.a",
            nvidia / "cu13" / "lib" / "libcudart.so.13",
        ]

    def link(self, step: str, function: Any) -> str:
        """The name of the library, whose only function is `func`."""
        self.count += 1
        name = f"{step}_{self.count}.so"
        compiled = Path(self.scratch.name) / f"{step}.o"
        function.export_to_c(object_file_path=str(compiled), function_name="func")
        command = ["gcc", "-shared", "-fPIC", "-O1", "-s", "-Wl,--exclude-libs,ALL", "-o", self.folder / name]
        subprocess.run([*command, compiled, *self.inputs], check=True)
        return name


class Cache:
    """In place of FlashAttention-4's cache for one step: notes which libraries a call uses, in order."""

    def __init__(self, step: str, linker: Linker, used: list[tuple[Cache, Any]]) -> None:
        self.step, self.linker, self.used = step, linker, used
        self.libraries: dict[Any, str] = {}

    def __contains__(self, key: Any) -> bool:
        self.used.append((self, key))
        return key in self.libraries

    def __setitem__(self, key: Any, function: Any) -> None:
        self.libraries[key] = self.linker.link(self.step, function)


class Compiler:
    def __init__(self, folder: Path) -> None:
        import flash_attn.cute.interface as fa4
        from flash_attn.cute import utils

        self.fa4 = fa4
        self.used: list[tuple[Cache, Any]] = []
        linker = Linker(folder)
        for step, function in (
            ("forward", fa4._flash_attn_fwd),
            ("prepare", fa4._bwd_preprocess),
            ("backward", fa4._flash_attn_bwd),
            ("convert", fa4._bwd_postprocess_convert),
        ):
            function.compile_cache = Cache(step, linker, self.used)

        # Only the semaphores of the deterministic kernels are described by their memory, and here is none.
        def describe(x: Any, leading_dim: int, alignment: int = 16, **_: Any) -> Any:
            return fa4.to_cute_tensor(x, assumed_align=alignment, leading_dim=leading_dim)

        utils.convert_from_dlpack_leading_static = describe

    def _libraries(self) -> list[str]:
        """Those of the last call, each once."""
        names = list(dict.fromkeys(cache.libraries[key] for cache, key in self.used))
        self.used.clear()
        return names

    def compile(self, task: Task) -> dict[str, Any]:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode

        case = task.case
        options = {"causal": case.causal, "softcap": case.softcap}
        shapes = [
            (case.batch, case.seqlens_k[0], num_heads, case.head_dim)
            for num_heads in (case.num_q_heads, case.num_kv_heads, case.num_kv_heads)
        ]
        with FakeTensorMode():
            q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
            out, lse, *_ = self.fa4._flash_attn_fwd(q, k, v, return_lse=True, **options)
            (forward,) = self._libraries()
            dout = torch.empty_like(out)
            self.fa4._flash_attn_bwd(q, k, v, out, dout, lse, deterministic=task.deterministic, **options)
        tiles = self.fa4._tile_size_bwd_sm90(case.head_dim, case.head_dim, case.causal, False)
        return {
            "forward": forward,
            "backward": self._libraries(),  # prepare, backward, convert dq; with groups, convert dk and dv
            "tile": [tiles.m_block_size, tiles.n_block_size],
            "head_dim_multiple": 64 if tiles.dKV_swapAB else 32,
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    (folder / "fa4").mkdir(parents=True)
    shutil.copy(package("dew_flash_attn") / "libdew_flash_attn3.so", folder)
    compiler = Compiler(folder / "fa4")
    index: dict[str, dict[str, Any]] = {}
    for task in (task for group in GROUPS.values() for task in group):
        name = fa4_kernels(task)
        if name in index or task.standard or task.dropout_p > 0.0 or task.case.alibi:
            continue
        index[name] = compiler.compile(task)
        print(name, index[name], flush=True)
    (folder / "fa4" / "index.json").write_text(json.dumps(index, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
