"""append_kv where keys and values are views of one array: legal while no element is both."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

import octavo

N, P, H, D = 4, 3, 2, 8  # num_pages, page_size, num_kv_heads, head_dim
MESSAGE = "append_kv: v_pages must not share elements with k_pages"
Floats = NDArray[np.float32]


def append(k_pages: Floats, v_pages: Floats) -> tuple[Floats, Floats]:
    """Five tokens in two pages; returns what was to be written."""
    new = np.arange(2 * 5 * H * D, dtype=np.float32).reshape(2, 5, H, D) + 1
    lengths = {"seq_lens": np.array([5], np.int32), "cu_seqlens": np.array([0, 5], np.int32)}
    octavo.append_kv(*new, k_pages, v_pages, np.array([[2, 0]], np.int32), **lengths)
    return new[0], new[1]


def zeros(*shape: int) -> Floats:
    return np.zeros(shape, np.float32)


def split(array: Floats) -> tuple[Floats, Floats]:
    return array[..., :D], array[..., D:]


APART = {
    "two arrays": (zeros(N, P, H, D), zeros(N, P, H, D)),
    "first axis": tuple(zeros(2, N, P, H, D)),
    "inside a page": tuple(zeros(N, 2, P, H, D).swapaxes(0, 1)),
    "by token": tuple(np.moveaxis(zeros(N, P, 2, H, D), 2, 0)),
    "by head": tuple(np.moveaxis(zeros(N, P, H, 2, D), 3, 0)),
    "halves of the last axis": split(zeros(N, P, H, 2 * D)),
    "head-major halves": split(zeros(N, H, P, 2 * D).swapaxes(1, 2)),
    "head-major inside a page": tuple(x.swapaxes(1, 2) for x in zeros(N, 2, H, P, D).swapaxes(0, 1)),
    "every other page": (lambda x: (x[::2], x[1::2]))(zeros(2 * N, P, H, D)),
    "backwards": (lambda x: (x[:N], x[: N - 1 : -1]))(zeros(2 * N, P, H, D)),
    "layers of heads": (lambda x: (x[:, :, :H], x[:, :, H:]))(zeros(N, P, 2 * H, D)),
    "another layout each": (lambda x: (x[0], x[1].reshape(N, H, P, D).swapaxes(1, 2)))(zeros(2, N, P, H, D)),
}


@pytest.mark.parametrize(("k_pages", "v_pages"), APART.values(), ids=APART)
def test_views_of_one_array(k_pages: Floats, v_pages: Floats) -> None:
    k, v = append(k_pages, v_pages)
    for pages, new in ((k_pages, k), (v_pages, v)):
        np.testing.assert_array_equal(pages[2], new[:P])
        np.testing.assert_array_equal(pages[0, : 5 - P], new[P:])
        assert not pages[1].any() and not pages[3].any()


SHARED = {
    "one array": (lambda x: (x, x))(zeros(N, P, H, D)),
    "one page": (lambda x: (x[:N], x[N - 1 :]))(zeros(2 * N - 1, P, H, D)),
    "backwards": (lambda x: (x, x[::-1]))(zeros(N, P, H, D)),
    "one head": (lambda x: (x[:, :, :H], x[:, :, H - 1 :]))(zeros(N, P, 2 * H - 1, D)),
    "one element of a row": (lambda x: (x[..., :D], x[..., D - 1 :]))(zeros(N, P, H, 2 * D - 1)),
    "another layout": (lambda x: (x, x.reshape(N, H, P, D).swapaxes(1, 2)))(zeros(N, P, H, D)),
}


@pytest.mark.parametrize(("k_pages", "v_pages"), SHARED.values(), ids=SHARED)
def test_shared_elements_are_refused(k_pages: Floats, v_pages: Floats) -> None:
    assert np.shares_memory(k_pages, v_pages)
    with pytest.raises(ValueError, match=MESSAGE):
        append(k_pages, v_pages)
    assert not k_pages.any() and not v_pages.any()


@st.composite
def drawn_views(draw: st.DrawFn) -> tuple[Floats, Floats]:
    """Two caches somewhere in one memory, with gaps between what axes count; often of equal strides."""
    memory = zeros(6000)
    lengths = [draw(st.integers(1, 4)) for _ in range(3)]

    def strides() -> tuple[int, ...]:
        found, span = [0, 0, 0, 1], D
        for axis in draw(st.permutations(range(3))):
            found[axis] = span + draw(st.sampled_from([0, 0, 1, D, 3 * D]))
            span += (lengths[axis] - 1) * found[axis]
        return tuple(stride * draw(st.sampled_from([1, 1, -1])) if stride > 1 else 1 for stride in found)

    k_strides = strides()
    v_strides = draw(st.sampled_from([k_strides, k_strides, strides()]))
    begin = 3000
    views = []
    for view_strides, offset in ((k_strides, 0), (v_strides, draw(st.integers(-300, 300)))):
        start = memory[begin + offset :]
        views.append(as_strided(start, (*lengths, D), tuple(4 * stride for stride in view_strides)))
    return views[0], views[1]


def is_refused(k_pages: Floats, v_pages: Floats) -> bool:
    new = np.zeros((0, *k_pages.shape[2:]), np.float32)
    try:
        octavo.append_kv(new, new, k_pages, v_pages, np.zeros((0, 1), np.int32), np.zeros(0, np.int32))
    except ValueError as error:
        return str(error).startswith(MESSAGE)
    return False


@given(views=drawn_views())
def test_what_is_refused_is_shared(views: tuple[Floats, Floats]) -> None:
    """And the other way round where the strides are equal."""
    k_pages, v_pages = views
    is_shared = np.shares_memory(k_pages, v_pages)
    if k_pages.strides == v_pages.strides:
        assert is_refused(k_pages, v_pages) == is_shared
    else:
        assert is_shared or not is_refused(k_pages, v_pages)
