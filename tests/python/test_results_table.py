"""The tables of results in the README and the documentation are those of the committed rows."""

import json
import re
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from results_table import (  # noqa: E402
    SUMMARY,
    TABLES,
    backward,
    backward_options,
    backward_with_forward,
    calls,
    fill_in,
    generate,
    jax,
    one_case,
    quantised_cache,
    summary,
)


def write(folder: Path, name: str, *rows: dict) -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def cells_of(table: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {label: cells for label, *cells in lines}


DECODE = (
    {"case": "8b_b64_s4096", "us": {"octavo": 200.0, "octavo_batch_invariant": 1.0, "fa3": 300.0}},
    {"case": "8b_b1_s8192", "us": {"octavo": 10.04, "fa3": 22.5, "flashinfer_tensor_cores": 20.08}},
    {"case": "8b_fp8_b1_s8192", "us": {"fa3": 5.0}},  # one that Octavo has no time in
)


@pytest.mark.parametrize("file", TABLES, ids=lambda path: path.name)
def test_files_have_the_tables_of_the_rows(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert fill_in(text, TABLES[file]) == text, "run: python benchmarks/results_table.py --write"


def test_results_name_every_file_of_rows() -> None:
    page = (BENCHMARKS.parent / "docs" / "results.md").read_text(encoding="utf-8")
    table = "".join(line for line in page.splitlines() if line.startswith("|"))
    patterns = re.findall(r"`([\w*-]+\.jsonl?)`", table)
    files = [path.name for path in (BENCHMARKS / "results").iterdir()]
    assert [name for name in files if not any(fnmatch(name, pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in files)] == []


def test_summary_has_columns_for_gpus_with_rows(tmp_path: Path) -> None:
    write(tmp_path, "decode-h200.jsonl", *DECODE)
    found = cells_of(summary(tmp_path))
    assert found[""] == ["unit", "Octavo, H200", "best peer, H200"]
    link = "(benchmarks/results/decode-h200.jsonl"
    assert found["Decode, 1 sequence of 8192 tokens"][1:] == [f"[10.0]{link}#L2)", "20.1 FlashInfer"]
    assert found["Decode, 64 sequences of 4096 tokens"][1:] == [
        f"[200.0]{link}#L1)",
        "300.0 FlashAttention-3",
    ]
    assert found["Decode, speed in all rows (mean)"][1:] == [f"[1.73]{link}) (1.50 to 2.00 in 2 rows)", "1"]
    assert found["Prefill, 8 x 2048 tokens"][1:] == ["", ""]

    prefill = {"case": "d128_causal_8x2048", "us": {"octavo": 2.0, "cudnn": 3.0}}
    write(tmp_path, "prefill-h100.jsonl", prefill | {"tflops": {"octavo": 600.4, "cudnn": 400.0}})
    found = cells_of(summary(tmp_path))
    assert found[""][1:3] == ["Octavo, H100", "best peer, H100"]
    rows = "benchmarks/results/prefill-h100.jsonl"
    assert found["Prefill, 8 x 2048 tokens"][1:] == [f"[600]({rows}#L1)", "400 cuDNN", "", ""]
    assert {len(cells) for cells in found.values()} == {5}


def test_every_line_of_the_summary_has_a_committed_row() -> None:
    found = cells_of(summary(BENCHMARKS / "results"))
    assert len(found) == len(SUMMARY) + 2
    assert all(any(found[label][1:]) for label, _, _ in SUMMARY)


def test_cost_of_calls(tmp_path: Path) -> None:
    times = {"cupy": 6.0, "torch": 5.0, "fa3": 25.0, "flashinfer_cuda_cores": 16.0, "torch add": 9.0}
    rows = [{"device": "cuda", "contestant": name, "best_us": us} for name, us in times.items()]
    write(tmp_path, "call-h100.jsonl", {"device": "cpu", "contestant": "torch", "best_us": 3.0}, *rows)
    cost = cells_of(summary(tmp_path))["Cost of a decode call on the host"]
    assert cost[1:] == ["[5.0](benchmarks/results/call-h100.jsonl#L3)", "16.0 FlashInfer"]
    found = cells_of(calls(tmp_path))
    assert (found["Octavo, torch tensors"], found["FlashInfer's `plan`, once a step"]) == (["5.0"], [""])


def test_jax_beside_the_best_splits(tmp_path: Path) -> None:
    times = {"octavo": 14.5, "pallas, 2 splits": 139.2, "pallas, 16 splits": 29.1}
    row = {"case": "8b_b1_s8192", "program": "attention"}
    write(tmp_path, "jax-h200.jsonl", *(row | {"contestant": name, "us": us} for name, us in times.items()))
    assert cells_of(jax(tmp_path))["1 x 8192"] == ["14.5", "29.1", "", ""]


def test_whole_decode_steps(tmp_path: Path) -> None:
    def row(us: dict[str, float], batch: int = 4) -> dict[str, Any]:
        shape = {"model": "llama-2-7b", "layers": 32, "batch": batch, "context": 1024}
        speeds = {name: batch / time * 1e6 for name, time in us.items()}
        return {"shape": shape, "us": us, "tokens_per_s": speeds, "floor_us": 4000.0}

    assert len(generate(tmp_path).splitlines()) == 2  # a header alone
    all_three = {"octavo": 5500.0, "octavo_static_weight": 5100.0, "octavo_static": 5000.0}
    peers = {"hf_eager": 40000.0, "hf_sdpa": 20000.0, "hf_static": 6500.0, "compiled": 6000.0}
    write(tmp_path, "generate-h200.jsonl", row(all_three | peers), row({"octavo": 8000.0}, batch=64))
    header, _, first, second = generate(tmp_path).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (first, second)]
    assert cells[0][:3] == ["llama-2-7b, 32 layers", "4 x 1024", "H200"]
    assert cells[0][3:] == ["727", "784", "800", "1.25", "667 PyTorch", "1.20", "200", "100", "8.00"]
    assert cells[1][1:] == ["64 x 1024", "H200", "8000", "", "", "2.00", "", "", "", "", ""]
    assert len(header.split("|")) == len(first.split("|"))


def backward_row(group: str, case: str, us: dict[str, float], **found: Any) -> dict[str, Any]:
    shape = {"lengths": "1 x 16384", "head_dim": 128}
    row = {"group": group, "case": case, "shape": shape, "us": us, "peak_bytes": {}}
    return row | {"tflops": {name: 1e5 / time for name, time in us.items()}} | found


def test_gradients_beside_peers(tmp_path: Path) -> None:
    rows = (
        backward_row("d128", "a", {"octavo": 200.0, "cudnn": 400.0, "fa3": 250.0, "fa4": 240.0}),
        backward_row("d64", "b", {"octavo": 100.0}),
        backward_row("other", "c", {"fa3": 100.0}),
        backward_row("forward", "d", {"octavo": 100.0, "fa2": 90.0}),
    )
    write(tmp_path, "backward-h200.jsonl", *rows)
    found = cells_of(backward(tmp_path))
    names = ["cuDNN", "FlashAttention-2", "FlashAttention-3", "FlashAttention-4"]
    assert found["case"] == ["GPU", "Octavo", *names, "ratio to the best peer"]
    assert found["a"] == ["H200", "500", "250", "", "400", "417", "1.20"]
    assert found["b"] == ["H200", "1000", "", "", "", "", ""]
    assert found["c"] == ["H200", "", "", "", "1000", "", ""]
    assert "d" not in found
    # A line of the README.
    assert one_case("backward", "a")(tmp_path, "H200") == (
        "[500](benchmarks/results/backward-h200.jsonl#L1)",
        "417 FlashAttention-4",
    )


def test_cost_of_options_of_the_backward(tmp_path: Path) -> None:
    both = {"octavo": 130.0, "octavo_plain": 100.0}
    rows = (
        backward_row("options", "dropout", both | {"fa2": 280.0, "cudnn": 200.0}),
        backward_row("options", "alibi", both),
        backward_row("options", "softcap", {"octavo_plain": 100.0, "fa4": 150.0}),
    )
    write(tmp_path, "backward-h100.jsonl", *rows)
    found = cells_of(backward_options(tmp_path))
    assert found["dropout"] == ["H100", "130", "100", "1.30", "200 cuDNN"]
    assert found["alibi"] == ["H100", "130", "100", "1.30", ""]
    assert found["softcap"] == ["H100", "", "100", "", "150 FlashAttention-4"]


def test_forward_and_backward_together(tmp_path: Path) -> None:
    memory = {"octavo": 3 * 2**20, "eager": 400 * 2**20}
    standard = backward_row("standard", "short_forward_standard", {"octavo": 400.0, "eager": 4400.0})
    rows = (
        backward_row("forward", "long_forward", {"octavo": 1200.0, "fa3": 1100.0}),
        standard | {"peak_bytes": memory},
        backward_row("d128", "long", {"octavo": 900.0}),
    )
    write(tmp_path, "backward-h200.jsonl", *rows)
    found = cells_of(backward_with_forward(tmp_path))
    assert found["case"][1:4] == ["Octavo", "FlashAttention-3", "eager"]
    assert found["long"] == ["H200", "1200", "1100", "", "", ""]
    assert found["short_standard"] == ["H200", "400", "", "4400", "3", "400"]


def test_a_call_over_caches_of_each_type(tmp_path: Path) -> None:
    write(tmp_path, "decode-extra-h100.jsonl", {"case": "head_major_b32_s2048", "us": {"octavo": 90.04}})
    times = {"int8_b32_s2048": {"octavo": 45.0, "fa3": 1.0}, "int4_b32_s2048": {"fa3": 2.0}}
    write(tmp_path, "quantised-h100.jsonl", *({"case": case, "us": us} for case, us in times.items()))
    found = cells_of(quantised_cache(tmp_path))
    assert found["type"] == ["bytes a token", "tokens in 64 GB", "a call on an H100, us"]
    assert found["float16, bfloat16"] == ["131072", "488281", "90.0"]
    assert found["int8, float8_e4m3fn, float8_e5m2"] == ["67584", "946969", "45.0"]
    assert found["int4"] == ["34816", "1838235", ""]


def test_a_table_without_a_mark_is_an_error() -> None:
    with pytest.raises(ValueError, match="'<!-- table: calls -->"):
        fill_in("no mark", {"calls": calls})
