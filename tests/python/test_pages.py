"""python -m octavo.pages: the trace and the picture."""

import subprocess
import sys

import numpy as np
import pytest

import octavo
from octavo import pages


@pytest.fixture
def trace():
    alloc = octavo.PageAllocator(8, 4, prefix_cache=True)
    arrays = octavo.StepArrays(np.empty((2, 8), np.int32), np.empty(2, np.int32))
    trace = pages.Trace(alloc)
    assert trace.page_map().shape == (0, 8)
    a = alloc.create()
    alloc.step([a], 6, arrays, tokens=range(6))
    trace.record()
    b = alloc.fork(a)[0]
    alloc.step([a, b], 3, arrays, tokens=range(6))
    trace.record()
    alloc.take_copies()
    alloc.free(a)
    trace.record()
    trace.handles = (a, b)
    return trace


def test_what_is_recorded(trace, tmp_path):
    a, b = trace.handles
    expected = [
        [a, a, -1, -1, -1, -1, -1, -1],
        [-3, b, a, a, b, -1, -1, -1],
        [b, b, -2, -1, b, -1, -1, -1],
    ]
    assert trace.page_map().tolist() == expected
    trace.save(tmp_path / "trace.npz")
    with np.load(tmp_path / "trace.npz") as saved:
        assert saved["page_map"].tolist() == expected
        assert saved["page_size"] == 4


def test_colours(trace):
    rgb = pages.colours(trace.page_map())
    assert rgb.shape == (3, 8, 3)
    assert rgb[0, 7].tolist() == [1, 1, 1]
    assert rgb[1, 0].tolist() == list(pages.STATES[pages.SHARED][1])
    assert rgb[2, 2].tolist() == list(pages.STATES[pages.CACHED][1])
    assert (rgb[0, 0] == rgb[1, 2]).all()  # a's
    assert (rgb[1, 1] == rgb[2, 0]).all()  # b's
    assert np.abs(rgb[1, 1] - rgb[1, 2]).max() > 0.2


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_command_draws(trace, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    trace.save(tmp_path / "trace.npz")
    picture = tmp_path / f"map.{suffix}"
    command = [sys.executable, "-m", "octavo.pages", str(tmp_path / "trace.npz"), "-o", str(picture)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    begin = picture.read_bytes()[:400]
    assert b"<svg" in begin if suffix == "svg" else begin.startswith(b"\x89PNG")


def test_the_command_refuses(trace, tmp_path, capsys):
    trace.save(tmp_path / "trace.npz")
    with pytest.raises(SystemExit):
        pages.main([str(tmp_path / "trace.npz"), "-o", "map.gif"])
    assert "output must end in .svg or .png; got map.gif" in capsys.readouterr().err
    (tmp_path / "text.npz").write_text("no trace")
    np.savez(tmp_path / "other.npz", something=np.zeros(3))
    np.save(tmp_path / "array.npy", np.zeros(3))
    for name in ("missing.npz", "text.npz", "other.npz", "array.npy"):
        with pytest.raises(SystemExit):
            pages.main([str(tmp_path / name)])
        assert f"{name} must be a file that Trace.save() wrote (" in capsys.readouterr().err
