"""octavo.serving.Scheduler: decode steps that are padded, and logits that do not all come to the host."""

import numpy as np
import pytest

from octavo.serving import Logits, Sampling, Scheduler
from support.exact_model import ExactModel
from support.serving import check, finish, make_cache, prompts

WINDOWS = {"full": (None, None), "window": (None, 5), "windows": (3, 9)}


@pytest.fixture(params=WINDOWS)
def model(request):
    return ExactModel(windows=WINDOWS[request.param])


@pytest.fixture
def plain():
    return ExactModel()


def padded(model, seen):
    """A forward that takes padding, and notes what it has met: sequences, new tokens, rows."""

    def forward(step, tokens):
        rows = len(step.positions)
        seen.append((step.batch, step.num_tokens, rows, len(step.seq_lens)))
        assert len(tokens) == step.num_tokens
        all_tokens = np.concatenate((tokens, np.zeros(rows - len(tokens), np.int64)))
        return model.forward(step, all_tokens)[: step.batch]

    return forward


def test_decode_steps_are_padded(model):
    cache = make_cache(model, num_pages=24, prefix_cache=None in model.windows)
    seen = []
    scheduler = Scheduler(cache, padded(model, seen), token_budget=10, decode_batches=[6, 2, 3, 6])
    requests = [scheduler.submit(prompt, max_tokens=4 + i) for i, prompt in enumerate(prompts(8))]
    requests.append(scheduler.submit([1] * 9, max_tokens=5, num_beams=3))
    requests.append(scheduler.submit([2, 3], max_tokens=6, num_samples=2, sampling=Sampling(1.0, seed=3)))
    finish(scheduler, cache)
    for request in requests[:-1]:
        check(model, request)
    decoding = {counts for counts in seen if counts[0] == counts[1]}
    assert {(batch, rows) for batch, _, rows, _ in decoding if batch <= 6} <= {
        (1, 2), (2, 2), (3, 3), (4, 6), (5, 6), (6, 6)
    }  # fmt: skip
    assert len(decoding) > 3 and any(rows > batch for batch, _, rows, _ in decoding)
    assert all(rows == of_arrays for _, _, rows, of_arrays in decoding)
    for batch, num_tokens, rows, of_arrays in seen:
        if batch != num_tokens or batch > 6:
            assert (rows, of_arrays) == (num_tokens, batch), "only decode steps are padded, to what there is"


def test_padding_changes_no_text(plain):
    texts = []
    for sizes in ((), (8,)):
        cache = make_cache(plain)
        scheduler = Scheduler(cache, padded(plain, []), decode_batches=sizes)
        options = {"max_tokens": 7, "logprobs": True, "num_samples": 2}
        requests = [
            scheduler.submit(prompt, sampling=Sampling(0.8, top_k=5, seed=i), **options)
            for i, prompt in enumerate(prompts(4))
        ]
        finish(scheduler, cache)
        texts.append([(x.tokens(i), x.token_logprobs(i)) for x in requests for i in range(2)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([0, 4], r"from 1 to max_batch \(8\); got 0"),
        ([4, 9], r"from 1 to max_batch \(8\); got 9"),
        ([-1], "got -1"),
    ],
)
def test_sizes_out_of_range(plain, sizes, message):
    with pytest.raises(ValueError, match=rf"^Scheduler: decode_batches must be .*{message}"):
        Scheduler(make_cache(plain), plain.forward, decode_batches=sizes)


def test_a_size_that_is_no_int(plain):
    with pytest.raises(TypeError, match="float"):
        Scheduler(make_cache(plain), plain.forward, decode_batches=[2.5])


class FarLogits:
    """Logits that say how often rows of theirs were fetched."""

    def __init__(self, logits, fetched):
        self._logits = logits
        self._fetched = fetched

    @property
    def shape(self):
        return self._logits.shape

    def best(self):
        return self._logits.argmax(axis=1), self._logits.max(axis=1)

    def rows(self, rows):
        self._fetched.append(list(rows))
        return self._logits[list(rows)]


def run_far(model, fetched, submit):
    """Run requests with logits that are far away, and with near ones; return both groups of requests."""
    groups = []
    for far in (True, False):
        cache = make_cache(model)

        def forward(step, tokens, far=far):
            logits = model.forward(step, tokens)
            return FarLogits(logits, fetched) if far else logits

        scheduler = Scheduler(cache, forward)
        groups.append(submit(scheduler))
        finish(scheduler, cache)
    return groups


def test_greedy_requests_fetch_no_row(plain):
    fetched = []
    assert isinstance(FarLogits(np.zeros((1, 2)), fetched), Logits)
    for request in run_far(
        plain, fetched, lambda scheduler: [scheduler.submit(text, max_tokens=5) for text in prompts(5)]
    )[0]:
        check(plain, request)
    assert fetched == []


def test_only_rows_that_are_needed_are_fetched(plain):
    fetched = []

    def submit(scheduler):
        first = [scheduler.submit(text, max_tokens=5) for text in prompts(2)]
        return [
            *first,
            scheduler.submit([4, 5], max_tokens=6, sampling=Sampling(1.0, seed=1), num_samples=2),
            scheduler.submit([6], max_tokens=4, num_beams=2),
            scheduler.submit([7, 1, 2], max_tokens=3, logprobs=True),
        ]

    far, near = run_far(plain, fetched, submit)
    for one, other in zip(far, near, strict=True):
        for sample in range(one.num_samples):
            assert one.tokens(sample) == other.tokens(sample)
            assert one.token_logprobs(sample) == other.token_logprobs(sample)
            assert one.score(sample) == other.score(sample)
    assert fetched and not any({0, 1} & set(rows) for rows in fetched[:2]), "greedy ones come first"
    assert max(map(len, fetched)) > 1, "one transfer a step"


def test_far_logits_without_a_finite_maximum(plain):
    logits = np.zeros((1, 11), np.float32)
    logits[0, 3] = np.nan
    scheduler = Scheduler(make_cache(plain), lambda step, tokens: FarLogits(logits, []))
    scheduler.submit([1, 2], max_tokens=3)
    with pytest.raises(ValueError, match="a finite maximum in each row; got nan in row 0"):
        scheduler.step()


def test_of_equal_tokens_the_first_is_taken(plain):
    logits = np.zeros((1, 11), np.float32)
    logits[0, [4, 7]] = 2.0
    scheduler = Scheduler(make_cache(plain), lambda step, tokens: logits)
    request = scheduler.submit([1, 2], max_tokens=1)
    scheduler.step()
    assert request.tokens() == [4]


def test_logits_of_bfloat16(plain):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def forward(step, tokens):
        return torch.from_numpy(plain.forward(step, tokens)).bfloat16()

    cache = make_cache(plain)
    scheduler = Scheduler(cache, forward)
    request = scheduler.submit([1, 2, 3], max_tokens=4)
    finish(scheduler, cache)
    assert request.tokens() == plain.greedy([1, 2, 3], 4)


def test_logits_that_numpy_cannot_read_are_refused(plain):
    scheduler = Scheduler(make_cache(plain), lambda step, tokens: [["likely", "unlikely"]])
    scheduler.submit([1, 2, 3], max_tokens=4)
    message = (
        r"^Scheduler\.step: forward must return logits that numpy\.asarray takes as float32, .* got list: "
    )
    with pytest.raises(ValueError, match=message):
        scheduler.step()
