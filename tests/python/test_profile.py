"""tools/profile.py: what it reads of the machine code and of Nsight Compute's tables."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.programs import run

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """profile.py, under a name that is not that of the standard library's module."""
    sys.path.insert(0, str(TOOLS))
    try:
        spec = importlib.util.spec_from_file_location("octavo_profile", TOOLS / "profile.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(TOOLS))
    return module


# A product in an outer loop, a loop inside of it, and a loop that has no product and none inside.
SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;                /* 0x00000a00ff017b82 */
                                                                         /* 0x000fe20000000800 */
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ; /* 0x0000000c0804723c */
        /*0020*/                   LDS R2, [R3+0x10] ;                   /* 0x0000100003027984 */
        /*0030*/              @!P0 BRA 0x20 ;                            /* 0xfffffffc00008947 */
        /*0040*/         @UP1      UIADD3 UR4, UR4, 0x1, URZ ;           /* 0x0000000104041890 */
        /*0050*/               @P1 BRA 0x10 ;                            /* 0xfffffff800008947 */
        /*0060*/                   FADD.FTZ R2, R2, R2 ;                 /* 0x0000000202027221 */
        /*0070*/               @P2 BRA 0x60 ;                            /* 0xfffffff800008947 */
        /*0080*/                   BRA 0x90;                             /* 0xfffffff800008947 */
        /*0090*/                   EXIT ;                                /* 0x000000000000794d */
"""


def test_instructions_and_loops(tool: ModuleType) -> None:
    read = [x for x in map(tool.read_instruction, SASS.splitlines()) if x is not None]
    assert [x.address for x in read] == list(range(0, 0xA0, 0x10))
    assert read[4].opcode == "UIADD3" and read[6].opcode == "FADD.FTZ"
    assert [x.target for x in read if x.opcode == "BRA"] == [0x20, 0x10, 0x60, 0x90]
    found = [(loop[0].address, loop[-1].address) for loop in tool.loops(read)]
    assert found == [(0x10, 0x50), (0x20, 0x30), (0x60, 0x70)]
    assert tool.format_counts(read, most=2) == "10 instructions: 1 HMMA, 4 BRA, ..."


NCU = """==PROF== Connected to process 12 (python3.12)
8b_b1_s8192 is printed by the benchmark
"ID","Process ID","Kernel Name","Block Size","dram__bytes_read.sum","gpu__time_duration.sum","other"
"","","","","byte","ns",""
"0","12","split_kv_decode_kernel","(128, 1, 1)","33,562,624","14,016","1"
"""


def test_counters(tool: ModuleType) -> None:
    assert tool.read_counters(NCU) == [
        {
            "kernel": ("split_kv_decode_kernel", ""),
            "dram__bytes_read.sum": ("33,562,624", "byte"),
            "gpu__time_duration.sum": ("14,016", "ns"),
        }
    ]
    assert tool.read_counters("==ERROR== nothing was profiled\n") == []


CASES = {
    "decode": "8b_b1_s8192",
    "sparse": "b1_s32768_p16_25%",
    "latent": "mla_b32_s4096_h16",
    "prefill": "mixed",
    "backward": "d128_causal_8x2048",
    "linear": "4096x4096_m1",
}


@pytest.mark.parametrize("name", CASES)
def test_benchmarks_have_the_options_that_it_passes(tool: ModuleType, name: str) -> None:
    assert CASES.keys() == tool.PROFILED.keys()
    benchmark = tool.PROFILED[name]
    script = str(tool.BENCHMARKS / benchmark.script)
    rows = "--rows", f"^{re.escape(CASES[name])}$"
    assert CASES[name] in run(sys.executable, script, *rows, *benchmark.options, "--list")


def program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!{sys.executable}\nimport sys\n{body}", encoding="utf-8")
    path.chmod(0o755)


def test_counters_of_a_case(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="ncu is not on the PATH"):
        tool.main(["counters", "decode", "8b_b1_s8192"])
    arguments = tmp_path / "arguments"
    program(tmp_path, "ncu", f"open({str(arguments)!r}, 'w').write('\\n'.join(sys.argv))\nprint({NCU!r})")
    assert tool.main(["counters", "decode", "8b_b1_s8192"]) == 0
    found = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert found == [
        ["split_kv_decode_kernel"],
        ["33,562,624", "byte", "read from memory"],
        ["14,016", "ns", "time"],
    ]
    asked = arguments.read_text(encoding="utf-8").splitlines()
    assert "regex:split_kv_decode|stream_k_decode" in asked
    assert asked[asked.index("--rows") + 1] == "^8b_b1_s8192$"
    assert asked[asked.index("--rows") - 1].endswith("bench_decode.py")

    program(tmp_path, "ncu", "print('==ERROR== no GPU')")
    assert tool.main(["counters", "decode", "8b_b1_s8192"]) == 1
    assert "no kernel of 8b_b1_s8192 was profiled\n==ERROR== no GPU" in capsys.readouterr().err


USAGE = """
Fatbin elf code:
arch = sm_90a
Resource usage:
 Function _Z13decode_kernelPf:
  REG:168 STACK:0 SHARED:1024 LOCAL:0
 Function _Z5otherv:
  REG:16 STACK:0 SHARED:0 LOCAL:0
"""


def test_instructions_of_a_library(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = str(tmp_path / "library.so")
    sass = f"arch = sm_90a\n\t\tFunction : _Z13decode_kernelPf\n{SASS}"
    answer = f"print({sass!r} if '--dump-sass' in sys.argv else {USAGE!r})"
    program(tmp_path, "cuobjdump", answer)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert tool.main(["instructions", library, "^decode_kernel"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "decode_kernel(float*) (sm_90a): 168 registers, 0 bytes of stack",
        "  10 instructions: 1 HMMA, 4 BRA, 1 LDC, 1 LDS, 1 UIADD3, 1 FADD, 1 EXIT",
    ]
    assert tool.main(["instructions", library, "prefill"]) == 1
    assert "has no kernel whose name 'prefill' finds" in capsys.readouterr().err


def test_a_benchmark_that_there_is_not(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main(["counters", "training", "a"])
    assert "invalid choice: 'training'" in capsys.readouterr().err
