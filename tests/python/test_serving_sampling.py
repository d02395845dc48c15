"""octavo.serving.Sampling: how tokens are drawn from their logits."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from octavo.serving import Sampling
from octavo.serving.sampling import log_softmax, sample

PROBABILITIES = np.array([0.1, 0.5, 0.0, 0.4])


@pytest.fixture
def logits():
    with np.errstate(divide="ignore"):
        return np.log(PROBABILITIES).astype(np.float32)


def frequencies(logits, sampling, number=4000):
    rng = np.random.default_rng(0)
    drawn = [sample(logits, sampling, rng) for _ in range(number)]
    return np.bincount(drawn, minlength=len(logits)) / number


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0, 1, 0, 0]),
        (Sampling(1.0), [0.1, 0.5, 0, 0.4]),
        (Sampling(0.5), [0.01 / 0.42, 0.25 / 0.42, 0, 0.16 / 0.42]),
        (Sampling(1e-300), [0, 1, 0, 0]),
        (Sampling(1.0, top_k=1), [0, 1, 0, 0]),
        (Sampling(1.0, top_k=2), [0, 5 / 9, 0, 4 / 9]),
        (Sampling(1.0, top_k=100), [0.1, 0.5, 0, 0.4]),
        (Sampling(1.0, top_p=0.95), [0.1, 0.5, 0, 0.4]),
        (Sampling(1.0, top_p=0.8), [0, 5 / 9, 0, 4 / 9]),
        (Sampling(1.0, top_p=0.5), [0, 1, 0, 0]),
        (Sampling(1.0, top_p=1e-9), [0, 1, 0, 0]),
        (Sampling(1.0, top_k=2, top_p=0.55), [0, 1, 0, 0]),  # 0.5 is 5/9 of what top_k leaves
    ],
)
def test_sampling_follows_the_probabilities(logits, sampling, expected):
    np.testing.assert_allclose(frequencies(logits, sampling), expected, atol=0.03)


def test_equal_seeds_draw_equal_tokens(logits):
    drawn = [
        [sample(logits, Sampling(1.0), np.random.default_rng(seed)) for _ in range(9)] for seed in (1, 1)
    ]
    assert drawn[0] == drawn[1]


def test_the_last_bits_of_logits_do_not_choose_between_neighbours():
    """What the rest of a batch changes in them must not change the text."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((50, 1000)).astype(np.float32)
    nearly = logits * (1 + 1e-6 * rng.standard_normal(logits.shape)).astype(np.float32)
    for row, (a, b) in enumerate(zip(logits, nearly, strict=True)):
        sampling = Sampling(1.0, top_p=0.9)
        assert sample(a, sampling, np.random.default_rng(row)) == sample(
            b, sampling, np.random.default_rng(row)
        )


def test_log_softmax(logits):
    np.testing.assert_allclose(log_softmax(logits[[0, 1, 3]]), np.log(PROBABILITIES[[0, 1, 3]]), rtol=1e-6)
    huge = np.array([[1e30, 0.0], [3.0, 3.0]], np.float32)
    np.testing.assert_allclose(log_softmax(huge), [[0, -1e30], [-np.log(2)] * 2], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature \(-0.1\) must be finite and at least 0"),
        ({"temperature": float("nan")}, r"temperature \(nan\) must be finite and at least 0"),
        ({"temperature": float("inf")}, r"temperature \(inf\) must be finite and at least 0"),
        ({"top_k": -1}, r"top_k \(-1\) must be at least 0"),
        ({"top_p": 0.0}, r"top_p \(0.0\) must be above 0 and at most 1"),
        ({"top_p": 1.5}, r"top_p \(1.5\) must be above 0 and at most 1"),
        ({"top_p": float("nan")}, r"top_p \(nan\) must be above 0"),
        ({"seed": -1}, r"seed \(-1\) must be at least 0"),
    ],
)
def test_numbers_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^Sampling: {message}"):
        Sampling(**options)


@pytest.mark.parametrize("options", [{"top_k": 1.5}, {"seed": "1"}])
def test_what_is_no_int_is_refused(options):
    with pytest.raises(TypeError):
        Sampling(**options)


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.uint64])
def test_numbers_of_numpy_are_those_of_python(logits, kind):
    sampling = Sampling(np.float32(0.5), top_k=kind(2), top_p=np.float64(0.9), seed=kind(7))
    assert sampling == Sampling(0.5, 2, 0.9, 7)
    numbers = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed)
    assert [type(number) for number in numbers] == [float, int, float, int]
    plain = frequencies(logits, Sampling(1.0, top_k=2), 100)
    assert frequencies(logits, Sampling(1.0, top_k=kind(2)), 100).tolist() == plain.tolist()


def test_decimals_and_fractions_are_numbers(logits):
    sampling = Sampling(Decimal("0.5"), top_p=Fraction(1, 2))
    assert sampling == Sampling(0.5, top_p=0.5)
    assert frequencies(logits, sampling, 10).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": "0.5"}, "temperature must be a number; got str"),
        ({"temperature": None}, "temperature must be a number; got NoneType"),
        ({"temperature": 10**400}, "temperature must be a number; got int"),
        ({"top_p": "all"}, "top_p must be a number; got str"),
        ({"top_k": 2.0}, "top_k must be an int; got float"),
        ({"top_k": "2"}, "top_k must be an int; got str"),
        ({"seed": "x"}, "seed must be an int; got str"),
    ],
)
def test_what_is_no_number_is_refused(options, message):
    with pytest.raises(TypeError, match=f"^Sampling: {message}$"):
        Sampling(**options)
