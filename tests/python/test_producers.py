"""Producers made by hand: what the exchange of arrays asks of them, and gives back."""

from __future__ import annotations

import numpy as np
import pytest

import octavo
from support.array_calls import cache, expected, qkv
from support.producers import COPIED, READ_ONLY, ExchangeTable, NamespacedProducer, Producer


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("with_strides", [True, False])
@pytest.mark.parametrize("byte_offset", [0, 256])
def test_capsules(versioned: bool, with_strides: bool, byte_offset: int) -> None:
    options = {"versioned": versioned, "with_strides": with_strides, "byte_offset": byte_offset}
    k, v = (Producer(x, **options) for x in qkv()[1:])
    out = octavo.attention(qkv()[0], k, v)
    np.testing.assert_array_equal(out, expected("float32", *qkv()))
    for producer in (k, v):
        assert (producer.lent, producer.given_back) == (1, 1)
        assert producer.requests == [{"max_version": (1, 3)}]


@pytest.mark.parametrize("keywords", [("stream",), ()])
def test_producers_from_before_max_version(keywords: tuple[str, ...]) -> None:
    k = Producer(qkv()[1], keywords=keywords, versioned=False)
    out = octavo.attention(qkv()[0], k, qkv()[2])
    np.testing.assert_array_equal(out, expected("float32", *qkv()))
    assert k.requests == [{"max_version": (1, 3)}, {}]
    assert (k.lent, k.given_back) == (1, 1)


def test_tensors_are_given_back_after_an_error() -> None:
    k, v = (Producer(x) for x in qkv()[1:])
    with pytest.raises(ValueError, match="window_left"):
        octavo.attention(qkv()[0], k, v, window_left=-2)
    with pytest.raises(TypeError, match="cu_seqlens_q must be an array"):
        octavo.attention(qkv()[0], k, v, cu_seqlens_q=3)
    newer = Producer(qkv()[2], version=(2, 0))
    with pytest.raises(TypeError, match="version"):
        octavo.attention(qkv()[0], k, newer)
    for producer, times in ((k, 3), (v, 2), (newer, 1)):
        assert (producer.lent, producer.given_back) == (times, times)


@pytest.mark.parametrize(
    "answer", [("cpu", "0"), (1, 1 << 40), (1 << 70, 0), (None, None), "cpu"], ids=lambda x: repr(x)[:20]
)
def test_devices_that_are_none(answer: object) -> None:
    k = Producer(qkv()[1], device=answer)
    message = (
        f"attention: k: __dlpack_device__ must return two 32-bit ints, (device type, device); got {answer!r}"
    )
    with pytest.raises(TypeError) as caught:
        octavo.attention(k, k, k)
    assert str(caught.value) == message.replace("k:", "q:")


def test_pinned_host_memory_is_the_cpus() -> None:
    k = Producer(qkv()[1], device=(3, 0))
    np.testing.assert_array_equal(octavo.attention(qkv()[0], k, qkv()[2]), expected("float32", *qkv()))


def test_results_for_any_framework_with_a_namespace() -> None:
    q = NamespacedProducer(qkv()[0])
    out, lse = octavo.attention(q, *qkv()[1:], return_lse=True)
    assert isinstance(out, np.ndarray)  # what the namespace makes of them
    np.testing.assert_array_equal(out, expected("float32", *qkv()))
    assert lse.shape == (2, 3, 4)
    given = np.empty_like(qkv()[0])
    assert octavo.attention(Producer(qkv()[0]), *qkv()[1:], out=given) is given


def test_flags_of_outputs() -> None:
    call = cache()
    call.k_pages = Producer(call.k_pages, flags=READ_ONLY)
    with pytest.raises(ValueError, match="append_kv: k_pages must be writable; it is read-only"):
        octavo.append_kv(**vars(call))
    call.k_pages = Producer(call.k_pages.values, flags=COPIED)
    with pytest.raises(TypeError, match="append_kv: k_pages is written to, but was handed over as a copy"):
        octavo.append_kv(**vars(call))
    call.k = Producer(call.k, flags=READ_ONLY | COPIED)
    call.k_pages = Producer(call.k_pages.values)
    octavo.append_kv(**vars(call))
    assert call.k_pages.values.any()
    assert call.k_pages.given_back == 1


TABLE = ExchangeTable()


class ExchangedProducer(Producer):
    __dlpack_c_exchange_api__ = TABLE.capsule


def test_exchange_tables_of_unknown_libraries() -> None:
    arrays = [ExchangedProducer(x) for x in qkv()]
    out = np.empty_like(qkv()[0])
    octavo.attention(*arrays, out=out)
    np.testing.assert_array_equal(out, expected("float32", *qkv()))
    for producer in arrays:
        assert (producer.lent, producer.given_back) == (1, 1)
        assert producer.requests == [{"max_version": (1, 3), "stream": None}]
