"""examples/simulate_pages.py: its tables, on a small trace of requests."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SIMULATE = Path(__file__).resolve().parents[2] / "examples" / "simulate_pages.py"


def run(*arguments):
    command = [sys.executable, str(SIMULATE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)


def simulate(*arguments):
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("| ")]
    return {
        cells[0]: cells[1:] for cells in ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    }


def percent(cell):
    return float(cell.removesuffix(" %"))


def test_a_made_trace(tmp_path):
    requests, trace = tmp_path / "requests.jsonl", tmp_path / "pages.npz"
    rows = simulate("--num-requests", 60, "--pages", 512, "--save-requests", requests, "--trace", trace)
    header = rows["memory"]
    waste, found = header.index("waste"), header.index("prompt tokens found")
    running = header.index("running")
    assert percent(rows["contiguous, maximum length"][waste]) > 50
    for name in ("pages", "pages, prefix cache"):
        assert percent(rows[name][waste]) < 4  # PagedAttention's claim
        assert float(rows[name][running]) > 1.5 * float(rows["contiguous, maximum length"][running])
    assert percent(rows["pages, prefix cache"][found]) > 20
    samples, beams = ([percent(rows[width][i]) for width in "246"] for i in (0, 1))
    assert samples == sorted(samples) and 10 < samples[0] < samples[-1] < 35
    assert beams == sorted(beams) and beams[-1] > 55
    with np.load(trace) as recorded:
        page_map = recorded["page_map"]
    assert page_map.shape == (int(rows["pages, prefix cache"][0]), 512)
    assert (page_map[-1] < 0).sum() > 0 and {-3, -2, -1} <= set(np.unique(page_map))
    assert simulate("--requests", requests, "--pages", 512) == rows


def test_a_given_trace(tmp_path):
    requests = tmp_path / "requests.jsonl"
    request = {"arrival": 0, "prompt_len": 33, "output_len": 3, "prefix": "a", "prefix_len": 32}
    requests.write_text(json.dumps(request) + "\n" + json.dumps({**request, "arrival": 9}) + "\n")
    rows = simulate("--requests", requests, "--pages", 128)
    assert rows["pages"][0] == "12"
    # The second request finds 32 of the 33 + 33 tokens that were asked for.
    assert percent(rows["pages, prefix cache"][rows["memory"].index("prompt tokens found")]) == pytest.approx(
        48.5
    )


def test_a_preempted_request_finds_its_own_pages(tmp_path):
    requests = tmp_path / "requests.jsonl"
    request = {"arrival": 0, "prompt_len": 17, "output_len": 150}
    requests.write_text(2 * (json.dumps(request) + "\n"))
    rows = simulate("--requests", requests, "--pages", 16, "--max-length", 256)
    header = rows["memory"]
    for name in ("pages", "pages, prefix cache"):
        assert rows[name][header.index("preemptions")] == "1"
    # The prompt has one full page; all others are of its answer.
    assert percent(rows["pages, prefix cache"][header.index("prompt tokens found")]) > 70


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--pages", 127), "--pages (127) of --page-size (16) must hold --max-length (2048)"),
        (("--rate", 0), "--rate (0.0) must be greater than 0"),
        (("--num-requests", 0), "there must be at least one request"),
        (("--prefix-len", -1), "--prefix-len (-1) must be at least 0"),
    ],
)
def test_wrong_arguments(arguments, message):
    result = run(*arguments)
    assert result.returncode == 2 and message in result.stderr, result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there must be at least one request"),
        ('{"arrival": 0}\n', "--requests must have an object with"),
        ('{"arrival": 0, "prompt_len": 3, "output_len": 0}\n', "output_len (0) must be at least 1"),
        ('{"arrival": 0, "prompt_len": 0, "output_len": 3}\n', "prompt_len (0) must be at least 1"),
        (
            '{"arrival": 0, "prompt_len": 2000, "output_len": 49}\n',
            "none of more tokens than --max-length (2048); got 2049",
        ),
        (
            '{"arrival": 0, "prompt_len": 3, "output_len": 3, "prefix_len": 4}\n',
            "prefix_len (4) must be from 0 to prompt_len (3)",
        ),
        (
            '{"arrival": 0, "prompt_len": 3, "output_len": 3, "prefix_len": -1}\n',
            "prefix_len (-1) must be from 0 to prompt_len (3)",
        ),
    ],
)
def test_a_wrong_trace(tmp_path, text, message):
    requests = tmp_path / "requests.jsonl"
    requests.write_text(text)
    result = run("--requests", requests)
    assert result.returncode == 2 and message in result.stderr, result.stderr
