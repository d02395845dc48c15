"""Continuous batching over one KV cache.

Sequences join, share prefixes, split into samples or beams, give way when pages run out, and leave, while
one batch after another runs through the model (Orca: Yu et al. 2022; PagedAttention: Kwon et al. 2023,
arXiv:2309.06180; prompts in chunks beside decoding sequences: Agrawal et al. 2023, arXiv:2308.16369).
"""

from __future__ import annotations

import dataclasses
import operator
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo._kv_cache import KVCache, KVCacheStep
from octavo.serving.batcher import Batch, Batcher
from octavo.serving.beams import BeamSearch
from octavo.serving.group import Group
from octavo.serving.logits import BatchLogits
from octavo.serving.request import (
    Answer,
    FinishReason,
    Output,
    Request,
    at_least,
    int_of,
    length_penalty_of,
    namespace_of,
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

    If `forward` raises, step() raises the same, every sequence is as it was before, and step() may be
    called again. After an exception that comes later, such as KeyboardInterrupt, it may as well: it returns
    the tokens that had been drawn, and computes those of the other sequences again.

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
        self.cache = cache
        self._forward = forward
        self._max_batch = cache.max_batch if max_batch is None else max_batch
        self._token_budget = cache.max_tokens if token_budget is None else token_budget
        self._max_length = max_length
        self._vocab_size = vocab_size
        if not 1 <= self._max_batch <= cache.max_batch:
            raise ValueError(
                f"Scheduler: max_batch ({max_batch}) must be from 1 to the cache's ({cache.max_batch})"
            )
        if not self._max_batch <= self._token_budget <= cache.max_tokens:
            raise ValueError(
                f"Scheduler: token_budget ({self._token_budget}) must be from max_batch ({self._max_batch}) "
                f"to the cache's max_tokens ({cache.max_tokens})"
            )
        if max_length is not None and max_length < 2:
            raise ValueError(
                f"Scheduler: max_length ({max_length}) must be at least 2, of a token and a new one"
            )
        if vocab_size is not None and vocab_size < 1:
            raise ValueError(f"Scheduler: vocab_size ({vocab_size}) must be at least 1")
        sizes = sorted(set(map(operator.index, decode_batches)))
        if sizes and not 1 <= sizes[0] <= sizes[-1] <= self._max_batch:
            raise ValueError(
                f"Scheduler: decode_batches must be from 1 to max_batch ({self._max_batch}); "
                f"got {sizes[0] if sizes[0] < 1 else sizes[-1]}"
            )
        if priority_steps < 1:
            raise ValueError(f"Scheduler: priority_steps ({priority_steps}) must be at least 1")
        self._stop_tokens = frozenset(token_list("stop_tokens", stop_tokens))
        self._priority_steps = priority_steps
        self._statistics = Statistics()
        self._batcher = Batcher(cache, self._max_batch, self._token_budget, sizes, self._statistics)
        self._stepping = threading.Lock()  # held by step()
        self._lock = threading.Lock()  # of the requests' answers, and of what follows: any thread's
        self._closed = False
        self._num_requests = 0
        self._unfinished: set[Request] = set()
        self._submitted: list[Group] = []  # since the last step began
        self._outputs: list[Output] = []  # that step() has not returned yet
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
            TypeError: a number that is no int; a namespace that is no str.
        """
        request = Request(
            index=-1,
            prompt=token_list("prompt", prompt),
            max_tokens=at_least("max_tokens", max_tokens, 1),
            sampling=sampling,
            num_samples=at_least("num_samples", num_samples, 1),
            num_beams=at_least("num_beams", num_beams, 1),
            length_penalty=length_penalty_of(length_penalty),
            stop_tokens=self._stop_tokens | set(token_list("stop_tokens", stop_tokens)),
            stop_sequences=stop_sequences_of(stop_sequences),
            priority=int_of("priority", priority),
            logprobs=bool(logprobs),
            namespace=namespace_of(namespace),
            rank=(0, 0),
        )
        self._check(request)
        with self._lock:
            self._check_open("submit")
            request.index = self._num_requests
            self._num_requests += 1
            request.rank = (
                self._statistics.num_steps - request.priority * self._priority_steps,
                request.index,
            )
            self._unfinished.add(request)
            self._submitted.append(
                Group(
                    request,
                    sample=0,
                    num_samples=1 if request.num_beams > 1 else request.num_samples,
                    rng=np.random.default_rng(request.seeds(0)),
                    search=BeamSearch(request) if request.num_beams > 1 else None,
                )
            )
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
        """
        if sample is not None and (request.num_beams > 1 or not 0 <= sample < request.num_samples):
            raise ValueError(
                f"Scheduler.cancel: sample ({sample}) must be None for beam search, else from 0 to "
                f"{request.num_samples - 1}"
            )
        with self._lock:
            if request not in self._unfinished:
                if not request.finished:
                    raise ValueError("Scheduler.cancel: the request is another scheduler's")
                return False
            unfinished = [
                answer
                for index, answer in enumerate(request.answers)
                if sample in (None, index) and answer.finish_reason is None
            ]
            for answer in unfinished:
                answer.finish_reason = "cancelled"
            self._cancelled.add(request)
            if request.finished:
                self._unfinished.remove(request)
                self._statistics.num_cancelled += 1
            return bool(unfinished)

    @property
    def unfinished(self) -> bool:
        """Whether step() has anything left to do, be it to free the pages of a cancelled request."""
        with self._lock:
            return bool(self._unfinished or self._cancelled or self._outputs)

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

    def _check(self, request: Request) -> None:
        """Raise ValueError if the request could never run."""
        num_prompt, num_new = len(request.prompt), request.max_tokens
        if num_prompt == 0:
            raise ValueError("Scheduler.submit: prompt must hold a token at least")
        if self._vocab_size is not None and max(request.prompt) >= self._vocab_size:
            raise ValueError(
                f"Scheduler.submit: prompt must hold tokens below vocab_size ({self._vocab_size}); "
                f"got {max(request.prompt)}"
            )
        asked = f"Scheduler.submit: a prompt of {num_prompt} tokens and {num_new} new ones"
        if self._max_length is not None and num_prompt + num_new > self._max_length:
            raise ValueError(f"{asked} exceed max_length ({self._max_length})")
        for name, rows in (("num_samples", request.num_samples), ("num_beams", request.num_beams)):
            if rows > self._max_batch:
                raise ValueError(
                    f"Scheduler.submit: {name} ({rows}) must be at most max_batch ({self._max_batch})"
                )
        if request.num_beams > 1:
            if request.num_samples > request.num_beams:
                raise ValueError(
                    f"Scheduler.submit: num_samples ({request.num_samples}) must be at most num_beams "
                    f"({request.num_beams}), whose best hypotheses are returned"
                )
            if request.sampling.temperature != 0.0:
                raise ValueError(
                    "Scheduler.submit: sampling must have temperature 0 with num_beams, which draws nothing; "
                    f"got {request.sampling.temperature}"
                )
        num_cached = num_prompt + num_new - 1  # the last token is never read
        num_pages, page_group = self._batcher.room.needed(num_prompt, num_cached, request.num_beams)
        if num_pages > page_group.num_pages:
            beams = f" in {request.num_beams} beams" if request.num_beams > 1 else ""
            raise ValueError(
                f"{asked}{beams} need {num_pages} pages of {page_group.page_size}; "
                f"the cache has {page_group.num_pages}"
            )
        if num_cached > self.cache.max_length:
            raise ValueError(f"{asked} exceed the cache's max_length ({self.cache.max_length})")

    # From one thread

    @property
    def prefill_remaining(self) -> int:
        """Tokens of prompts, and of sequences that gave way, that are still to be computed."""
        with self._lock:
            submitted = sum(group.num_tokens for group in self._submitted if not group.is_over)
            return submitted + self._batcher.prefill_remaining()

    def run(self) -> Iterator[Output]:
        """Take steps until nothing is left; iterate over the new tokens."""
        while self.unfinished:
            yield from self.step()

    def step(self) -> list[Output]:
        """Run one batch through the model; return the new tokens.

        Raises:
            RuntimeError: another thread is in step(); the scheduler is closed.
            ValueError: `forward` returned something else than logits.
            octavo.OutOfPages: sequences that are not the scheduler's hold the pages that it needs.
        """
        if not self._stepping.acquire(blocking=False):
            raise RuntimeError("Scheduler.step: another thread is in it; one at a time may step")
        try:
            self._check_open("step")
            return self._step()
        finally:
            self._stepping.release()

    def close(self) -> None:
        """Cancel all requests and free their pages, so that the cache can be used for something else.

        Afterwards submit() and step() raise RuntimeError; to close again does nothing. A scheduler is a
        context manager that closes itself. One that is only dropped leaves its sequences in the cache.

        Raises:
            RuntimeError: another thread is in step().
        """
        if not self._stepping.acquire(blocking=False):
            raise RuntimeError("Scheduler.close: step() is under way; close the scheduler after it")
        try:
            with self._lock:
                self._closed = True
                self._outputs.clear()
                unfinished = list(self._unfinished)
            for request in unfinished:
                self.cancel(request)
            self._take_over()
        finally:
            self._stepping.release()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self, method: str) -> None:
        if self._closed:
            raise RuntimeError(f"Scheduler.{method}: the scheduler is closed")

    def _step(self) -> list[Output]:
        start = time.perf_counter()
        self._take_over()
        self._batcher.admit()
        batch = self._batcher.begin_batch()
        if batch is None:
            return self._take_outputs()
        try:
            self._batcher.count_pages()
            logits = self._logits(batch)
        except BaseException:
            self._batcher.undo(batch)
            raise
        row = 0
        with self._lock:
            try:
                for group, _, _, num_rows in batch.shares:
                    end = row + num_rows
                    if group.request in self._unfinished and self._batcher.num_missing(group) == 0:
                        self._advance(group, logits, range(row, end))
                    row = end
            except BaseException:
                self._batcher.step_back()
                raise
            finally:
                self._batcher.count_time(batch, time.perf_counter() - start)
        self._take_over()
        return self._take_outputs()

    def _take_outputs(self) -> list[Output]:
        with self._lock:
            outputs, self._outputs = self._outputs, []
            self._statistics.generated_tokens += len(outputs)
        return outputs

    def _take_over(self) -> None:
        """Let the batcher know what other threads have asked for."""
        with self._lock:
            submitted, cancelled = self._submitted, self._cancelled
            self._submitted, self._cancelled = [], set()
            for group in submitted:
                self._batcher.wait(group)
            if cancelled:
                self._batcher.drop(cancelled)

    def _logits(self, batch: Batch) -> BatchLogits:
        num_rows = 0
        wanted: list[int] = []
        for group, _, _, num_rows_of_group in batch.shares:
            if group.request.needs_logits:
                wanted += range(num_rows, num_rows + num_rows_of_group)
            num_rows += num_rows_of_group
        return BatchLogits(self._forward(batch.step, batch.tokens), num_rows, wanted)

    # The next tokens

    def _advance(self, group: Group, logits: BatchLogits, rows: range) -> None:
        """Give a group whose tokens are all in the cache its next ones.

        Args:
            group: of which all wanted tokens are in the cache.
            logits: of the batch.
            rows: those of its handles.
        """
        if not group.is_forked:  # beams that were computed again up to where they part
            group.handles += self.cache.fork(group.handles[0], len(group.generated) - 1)
        elif group.search is not None:
            self._advance_beams(group, group.search, logits.rows(rows))
        else:
            for member in [group, *self._batcher.fork_samples(group)]:
                if member.is_over:  # cancelled before the fork, or while the model ran
                    self._batcher.finish(member)
                else:
                    self._append(member, logits, rows[0])

    def _append(self, group: Group, logits: BatchLogits, row: int) -> None:
        request, (generated,) = group.request, group.generated
        num_generated = len(generated)
        state = group.rng.bit_generator.state if request.sampling.temperature else None
        try:
            token, logprob = logits.best(row), None
            if request.needs_logits:
                (of_row,) = logits.rows([row])
                token = sample(of_row, request.sampling, group.rng)
                logprob = float(log_softmax(of_row)[token]) if request.logprobs else None
            reason = request.reason_to_end(generated, token)
            generated.append(token)
            self._output(request, group.sample, token, reason, logprob)
        except BaseException:
            if len(request.answers[group.sample].tokens) == num_generated:  # draw the same token next time
                del generated[num_generated:]
                if state is not None:
                    group.rng.bit_generator.state = state
            raise
        if reason:
            self._batcher.finish(group)

    def _advance_beams(self, group: Group, search: BeamSearch, logits: NDArray[np.float32]) -> None:
        before = search.beams, search.finished
        num_outputs = len(self._outputs)
        try:
            parents = search.advance(logits)
            if search.done:
                self._hypotheses(group.request, search)
            else:
                self._batcher.follow(group, parents)
                group.generated = [list(beam.tokens) for beam in search.beams]
        except BaseException:
            if not group.is_over:
                search.beams, search.finished = before
                del self._outputs[num_outputs:]
                group.request.answers[:] = [Answer() for _ in range(group.request.num_samples)]
                self._batcher.put_back(group)
            raise
        if search.done:
            self._batcher.finish(group)

    def _hypotheses(self, request: Request, search: BeamSearch) -> None:
        best = search.finished[: request.num_samples]
        del request.answers[len(best) :]  # where max_tokens of a small vocabulary have no more
        for index, found in enumerate(best):
            request.answers[index].score = found.score
            *others, last = zip(found.tokens, found.logprobs, strict=True)
            for token, logprob in others:
                self._output(request, index, token, None, logprob)
            self._output(request, index, last[0], found.finish_reason, last[1])

    def _output(
        self, request: Request, index: int, token: int, reason: FinishReason | None, logprob: float | None
    ) -> None:
        answer = request.answers[index]
        answer.tokens.append(token)
        if request.logprobs and logprob is not None:
            answer.logprobs.append(logprob)
        answer.finish_reason = reason
        self._outputs.append(Output(request, index, token, reason, logprob if request.logprobs else None))
        if request.finished:
            self._unfinished.remove(request)
            self._statistics.num_finished += 1
