"""Continuous batching over one KV cache.

Sequences join, share prefixes, split into samples or beams, give way when pages run out, and leave, while
one batch after another runs through the model (Orca: Yu et al. 2022; PagedAttention: Kwon et al. 2023,
arXiv:2309.06180; prompts in chunks beside decoding sequences: Agrawal et al. 2023, arXiv:2308.16369).
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo._cache import int_argument
from octavo._core import OutOfPages
from octavo._kv_cache import KVCache, KVCacheStep
from octavo.serving.batcher import Batch, Batcher
from octavo.serving.beams import BeamSearch
from octavo.serving.group import Group, groups_of
from octavo.serving.limits import Limits
from octavo.serving.logits import BatchLogits
from octavo.serving.request import (
    Drawn,
    Output,
    Request,
    at_least,
    int_of,
    length_penalty_of,
    namespace_of,
    sampling_of,
    stop_sequences_of,
    token_list,
)
from octavo.serving.sampling import Sampling, log_softmax, sample
from octavo.serving.statistics import Statistics

Forward = Callable[[KVCacheStep, NDArray[np.int64]], Any]

_GREEDY = Sampling()


class Scheduler:
    """Runs requests through a model, as many at once as the cache has pages for.

    **A step.** The batch has a token of every sequence that is decoding, and what is left of the token
    budget goes to prompts, which are computed in chunks.

    **Who goes first.** Requests are in one order: a priority higher by one counts as much as having been
    submitted `priority_steps` steps earlier, and among equals the earlier comes first. Nothing changes that
    order later, and only finitely many requests can come before a given one, so that none starves. The
    batch is filled in that order; who comes first takes rows and pages from who comes last.

    **When pages run out,** the last in the order gives way: its pages move to host memory if the cache has
    any to spare there; otherwise they are freed and computed again later. The first can have all pages of the
    cache, and a request that does not fit into those is refused by submit().

    **Threads.** One thread at a time calls step(), run(), close() and prefill_remaining. Any thread may call
    the other methods, and read requests. A cancelled request gets no token from that moment on; its pages are
    freed at the end of the step under way, or in the next one.

    **Exceptions.** If `forward` raises, step() raises the same, every sequence is as it was before, and
    step() may be called again. After an exception from elsewhere, such as KeyboardInterrupt at any moment, it
    may as well: it starts over with the requests and the tokens that had been drawn. It returns those that no
    step has returned yet, and computes the keys and values of all sequences again.

    Args:
        cache: octavo.KVCache, whose sequences are the scheduler's own from now on.
        forward: called as forward(step, tokens) with what cache.step() returns, and int64 NumPy [T], the new
            tokens of all sequences one after the other. It returns logits, float32 [batch, vocabulary], of
            the rows step.last_rows, without padding: anything that numpy.asarray takes, or
            octavo.serving.Logits, which may stay on a GPU.
        max_batch: sequences in a batch. Default: the cache's.
        token_budget: tokens in a batch, at least max_batch. Default: the cache's max_tokens.
        max_length: the most tokens of a prompt with its new ones, as the model allows. Default: no limit but
            the cache's.
        vocab_size: tokens that the model knows, from 0; submit() refuses others in a prompt. Default: they
            are left to `forward`, which may raise.
        stop_tokens: tokens that end every request's samples.
        decode_batches: numbers of sequences, from 1 to max_batch. A step in which each sequence has one token
            is padded to the next of these, as cache.step() does with pad_batch, so that `forward` meets few
            sizes: a CUDA graph for each serves all of them. The step's arrays then have more rows than there
            are tokens; logits are returned without padding. Default: no step is padded.
        priority_steps: how many steps earlier a request of a priority higher by one counts as submitted.

    Raises:
        ValueError: a number out of range.
        TypeError: a cache that is no octavo.KVCache, a forward that cannot be called, a number that is no
            int.
    """

    cache: KVCache
    """As given."""

    def __init__(
        self,
        cache: KVCache,
        forward: Forward,
        *,
        max_batch: int | None = None,
        token_budget: int | None = None,
        max_length: int | None = None,
        vocab_size: int | None = None,
        stop_tokens: Iterable[int] = (),
        decode_batches: Iterable[int] = (),
        priority_steps: int = 1000,
    ) -> None:
        if not callable(forward):
            raise TypeError(f"Scheduler: forward must be callable; got {type(forward).__name__}")
        self.cache = cache
        self._forward = forward
        self._limits = Limits.of(
            cache,
            max_batch=max_batch,
            token_budget=token_budget,
            max_length=max_length,
            vocab_size=vocab_size,
            decode_batches=decode_batches,
            priority_steps=priority_steps,
        )
        self._stop_tokens = frozenset(token_list("stop_tokens", stop_tokens))
        self._statistics = Statistics()
        self._batcher = Batcher(cache, self._limits, self._statistics)
        self._turn: dict[str, object] = {}  # of the thread in step() or close(), if there is one
        self._in_doubt = False  # whether the last turn did not come to its end, or one is under way
        self._lock = threading.Lock()  # of the requests' answers, and of what follows: any thread's
        self._closed = False
        self._num_requests = 0
        self._unfinished: dict[Request, BeamSearch | None] = {}
        self._submitted: list[Group] = []  # since the last step began
        self._drawn: list[Drawn] = []  # what step() has not returned yet
        self._cancelled: set[Request] = set()  # whose groups the batcher may still have

    # From any thread

    def submit(
        self,
        prompt: Iterable[int],
        *,
        max_tokens: int,
        sampling: Sampling = _GREEDY,
        num_samples: int = 1,
        num_beams: int = 1,
        length_penalty: float = 1.0,
        stop_tokens: Iterable[int] = (),
        stop_sequences: Iterable[Iterable[int]] = (),
        priority: int = 0,
        logprobs: bool = False,
        namespace: str = "",
    ) -> Request:
        """Queue a prompt.

        Args:
            prompt: tokens, at least one.
            max_tokens: new tokens of each sample, at most; at least 1.
            sampling: how tokens are drawn. Default: always the likeliest.
            num_samples: how many samples are drawn for the prompt, which is computed once.
            num_beams: the beams of beam search, whose num_samples best hypotheses come when it is done; 1: no
                beam search.
            length_penalty: beam search ranks hypotheses by the sum of their tokens' logprobs, divided by
                their number of tokens to this power; from -10 to 10.
            stop_tokens: tokens that end a sample, besides the scheduler's. They are among its tokens.
            stop_sequences: sequences of new tokens that end a sample as a stop token does; a part of the
                prompt does not count.
            priority: requests with a higher one go first, as the class says.
            logprobs: whether outputs have the logarithms of the tokens' probabilities.
            namespace: the prefix cache finds only what was stored in the same one.

        Raises:
            ValueError: a number out of range; an empty prompt, or one with a token beyond vocab_size; a
                request that could never run, because it exceeds max_length, max_batch or the pages of the
                cache; beam search with a temperature.
            RuntimeError: the scheduler is closed.
            TypeError: a number that is no int; a sampling or namespace that is none.
        """
        num_samples = at_least("num_samples", num_samples, 1)
        num_beams = at_least("num_beams", num_beams, 1)
        self._limits.check_rows(num_samples=num_samples, num_beams=num_beams)
        request = Request(
            index=-1,
            prompt=token_list("prompt", prompt),
            max_tokens=at_least("max_tokens", max_tokens, 1),
            sampling=sampling_of(sampling),
            num_samples=num_samples,
            num_beams=num_beams,
            length_penalty=length_penalty_of(length_penalty),
            stop_tokens=self._stop_tokens | set(token_list("stop_tokens", stop_tokens)),
            stop_sequences=stop_sequences_of(stop_sequences),
            priority=int_of("priority", priority),
            logprobs=bool(logprobs),
            namespace=namespace_of(namespace),
            rank=(0, 0),
        )
        self._limits.check(request, self._batcher.room)
        search = BeamSearch(request) if request.num_beams > 1 else None
        with self._lock:
            self._check_open("submit")
            request.index = self._num_requests
            self._num_requests += 1
            request.rank = (
                self._statistics.num_steps - request.priority * self._limits.priority_steps,
                request.index,
            )
            self._submitted += groups_of(request, search)
            self._unfinished[request] = search  # without this the groups are nobody's
        return request

    def cancel(self, request: Request, sample: int | None = None) -> bool:
        """End a request, or one of its samples; return whether there was anything left to end.

        What was unfinished keeps the tokens that it has, with the finish_reason "cancelled".

        Args:
            request: that submit() returned.
            sample: from 0 to num_samples - 1; not of beam search. Default: all of them.

        Raises:
            ValueError: the request is another scheduler's, and not finished; sample is out of range, or is
                given for beam search.
            TypeError: the request is none, or sample is no int.
        """
        if not isinstance(request, Request):
            raise TypeError(
                f"Scheduler.cancel: request must be one that submit() returned; got {type(request).__name__}"
            )
        if sample is not None:
            sample = int_argument("Scheduler.cancel", "sample", sample)
        if sample is not None and (request.num_beams > 1 or not 0 <= sample < request.num_samples):
            raise ValueError(
                f"Scheduler.cancel: sample ({sample}) must be None for beam search, else from 0 to "
                f"{request.num_samples - 1}"
            )
        with self._lock:
            self._settle(list(self._drawn))
            if request not in self._unfinished:
                if not request.finished:
                    raise ValueError("Scheduler.cancel: the request is another scheduler's")
                return False
            unfinished = [
                answer
                for index, answer in enumerate(request.answers)
                if sample in (None, index) and answer.finish_reason is None
            ]
            self._cancelled.add(request)
            for answer in unfinished:
                answer.finish_reason = "cancelled"
            if request.finished:
                del self._unfinished[request]
                self._statistics.num_cancelled += 1
            return bool(unfinished)

    @property
    def unfinished(self) -> bool:
        """Whether step() has anything left to do, be it to free the pages of a cancelled request."""
        with self._lock:
            return bool(self._unfinished or self._cancelled or self._drawn or self._in_doubt)

    def stats(self) -> Statistics:
        """Return a copy of the counts."""
        pages = self.cache.allocator.stats()
        with self._lock:
            return dataclasses.replace(
                self._statistics,
                num_requests=self._num_requests,
                num_waiting=sum(group.num_rows for group in (*self._submitted, *self._batcher.waiting)),
                num_running=sum(group.num_rows for group in self._batcher.running),
                num_pages=int(pages["num_pages"]),
                num_used_pages=int(pages["num_used_pages"]),
                num_shared_pages=int(pages["num_shared_pages"]),
                waste_percent=float(pages["waste_percent"]),
            )

    # From one thread

    @property
    def prefill_remaining(self) -> int:
        """Tokens of prompts, and of sequences that gave way, that are still to be computed."""
        if self._in_doubt and not self._turn:
            self._take_turn("prefill_remaining", lambda: None)
        with self._lock:
            submitted = sum(group.num_tokens for group in self._submitted if not group.is_over)
            return submitted + self._batcher.prefill_remaining()

    def run(self) -> Iterator[Output]:
        """Take steps until nothing is left; iterate over the new tokens.

        Those that an iteration leaves, which ends early, the next step returns.
        """
        while self.unfinished:
            self._check_open("step")
            if self._in_doubt or not self._drawn:
                self._take_turn("step", self._step)
            while self._drawn and not self._in_doubt:
                self._statistics.generated_tokens += 1
                output = self._drawn[0].output
                del self._drawn[0]  # as in step(), no call comes from here on
                yield output

    def step(self) -> list[Output]:
        """Run one batch through the model; return the new tokens.

        Raises:
            RuntimeError: another thread is in step(); the scheduler is closed.
            ValueError: `forward` returned something else than logits.
            octavo.OutOfPages: sequences that are not the scheduler's hold the pages that it needs.
        """
        self._check_open("step")
        self._take_turn("step", self._step)
        outputs = [drawn.output for drawn in self._drawn]
        self._statistics.generated_tokens += len(outputs)
        self._drawn = []  # no call comes from here on, in which an interrupt could lose them
        return outputs

    def close(self) -> None:
        """Cancel all requests and free their pages, so that the cache can be used for something else.

        Afterwards submit() and step() raise RuntimeError; to close again does nothing. A scheduler is a
        context manager that closes itself. One that is only dropped leaves its sequences in the cache.

        Raises:
            RuntimeError: another thread is in step().
        """
        self._take_turn("close", self._close)

    def _take_turn(self, method: str, work: Callable[[], None]) -> None:
        """Work from one consistent state to another, if nobody else does.

        What the last turn left by halves is mended first. CPython handles signals after calls and in jumps
        backwards alone: none comes between the call that takes the turn and its effect, nor while the turn is
        given back.
        """
        turn = object()
        try:
            if self._turn.setdefault("", turn) is not turn:
                raise RuntimeError(
                    "Scheduler.close: step() is under way; close the scheduler after it"
                    if method == "close"
                    else f"Scheduler.{method}: another thread is in it; one at a time may step"
                )
            if self._in_doubt:
                self._recover()
            self._in_doubt = True
            work()
            self._in_doubt = False
        finally:
            if self._turn == {"": turn}:
                del self._turn[""]

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            self._drawn = []
            unfinished = list(self._unfinished)
        for request in unfinished:
            self.cancel(request)
        self._take_over()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self, method: str) -> None:
        if self._closed:
            raise RuntimeError(f"Scheduler.{method}: the scheduler is closed")

    def _recover(self) -> None:
        """Start over from what is certain: the unfinished requests, and the tokens that were drawn."""
        with self._lock:
            self._settle(self._drawn)
            for request, search in list(self._unfinished.items()):
                if request.finished:
                    del self._unfinished[request]
                elif search is not None and search.done:
                    self._hypotheses(request, search)
            self._submitted, self._cancelled = [], set()
            self._batcher.start_over(
                [group for item in self._unfinished.items() for group in groups_of(*item)]
            )

    def _step(self) -> None:
        start = time.perf_counter()
        self._take_over()
        self._batcher.admit()
        batch = self._begin_batch()
        if batch is None:
            return
        logits = self._run_batch(batch)
        with self._lock:
            self._advance_all(batch, logits)
            self._batcher.count_time(batch, time.perf_counter() - start)
        self._take_over()

    def _begin_batch(self) -> Batch | None:
        try:
            return self._batcher.begin_batch()
        except OutOfPages:
            self._in_doubt = False  # there is no batch, and nothing by halves
            raise

    def _run_batch(self, batch: Batch) -> BatchLogits:
        sequences = self._batcher.sequences
        try:
            self._batcher.count_pages()
            logits = self._logits(batch)
        except BaseException:
            sequences.undo()
            self._in_doubt = False  # every sequence is as it was before
            raise
        sequences.written()
        return logits

    def _take_over(self) -> None:
        """Let the batcher know what other threads have asked for."""
        with self._lock:
            for group in self._submitted:
                if group.request in self._unfinished:
                    self._batcher.wait(group)
            self._submitted = []
            for request in self._cancelled:
                if request.finished:
                    self._unfinished.pop(request, None)
            self._batcher.drop(self._cancelled)
            self._cancelled = set()

    def _logits(self, batch: Batch) -> BatchLogits:
        num_rows = 0
        wanted: list[int] = []
        for group, _, _, num_rows_of_group in batch.shares:
            if group.request.needs_logits:
                wanted += range(num_rows, num_rows + num_rows_of_group)
            num_rows += num_rows_of_group
        return BatchLogits(self._forward(batch.step, batch.tokens), num_rows, wanted)

    # The next tokens

    def _advance_all(self, batch: Batch, logits: BatchLogits) -> None:
        row = 0
        for group, _, _, num_rows in batch.shares:
            end = row + num_rows
            if group.request in self._unfinished and self._batcher.num_missing(group) == 0:
                self._advance(group, logits, range(row, end))
            row = end

    def _advance(self, group: Group, logits: BatchLogits, rows: range) -> None:
        """Give a group whose tokens are all in the cache its next ones.

        Args:
            group: of which all wanted tokens are in the cache.
            logits: of the batch.
            rows: those of its handles.
        """
        if not group.is_forked:  # beams that were computed again up to where they part
            group.handles += self._batcher.sequences.fork(group.handles[0], len(group.generated) - 1)
        elif group.search is not None:
            self._advance_beams(group, group.search, logits.rows(rows))
        else:
            for member in [group, *self._batcher.fork_samples(group)]:
                if member.is_over:  # cancelled before the fork, or while the model ran
                    self._batcher.finish(member)
                else:
                    self._append(member, logits, rows[0])

    def _append(self, group: Group, logits: BatchLogits, row: int) -> None:
        request, answer = group.request, group.request.answers[group.sample]
        position = len(answer.tokens)
        token, logprob = logits.best(row), None
        if request.needs_logits:
            (of_row,) = logits.rows([row])
            token = sample(of_row, request.sampling, answer.draws.at(position))
            logprob = float(log_softmax(of_row)[token]) if request.logprobs else None
        reason = request.reason_to_end(answer.tokens, token)
        self._commit([Drawn(position, Output(request, group.sample, token, reason, logprob))])
        if reason:
            self._batcher.finish(group)

    def _advance_beams(self, group: Group, search: BeamSearch, logits: NDArray[np.float32]) -> None:
        parents = search.advance(logits)
        if search.done:
            self._hypotheses(group.request, search)
            self._batcher.finish(group)
        else:
            self._batcher.follow(group, parents)
            group.follow_search()

    def _hypotheses(self, request: Request, search: BeamSearch) -> None:
        """Make the best hypotheses of a search that is done the answers of a request."""
        del request.answers[len(search.finished) :]  # where max_tokens of a small vocabulary have no more
        self._commit(search.drawn())

    def _commit(self, drawn: list[Drawn]) -> None:
        """Make tokens part of their answers. An exception comes before all of them, or after."""
        self._drawn += drawn
        self._settle(drawn)

    def _settle(self, drawn: list[Drawn]) -> None:
        """Let answers have these tokens, if they have not, and requests that are done be finished."""
        for position, output, score in drawn:
            request, answer = output.request, output.request.answers[output.sample]
            if len(answer.tokens) == position:
                answer.tokens.append(output.token)
            if len(answer.logprobs) == position and output.logprob is not None:
                answer.logprobs.append(output.logprob)
            answer.score = score
            if output.finish_reason is not None and answer.finish_reason is None:
                answer.finish_reason = output.finish_reason
            if request in self._unfinished and request.finished:
                self._statistics.num_finished += 1
                del self._unfinished[request]
