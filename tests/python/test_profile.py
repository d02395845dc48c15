"""tools/profile.py: what it reads of the machine code and of Nsight Compute's tables."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

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


@pytest.mark.parametrize("name", ["decode", "prefill", "backward", "linear"])
def test_benchmarks_that_it_knows_are_there(tool: ModuleType, name: str) -> None:
    assert (tool.BENCHMARKS / tool.PROFILED[name].script).is_file()


def test_a_benchmark_that_there_is_not(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main(["counters", "training", "a"])
    assert "invalid choice: 'training'" in capsys.readouterr().err
