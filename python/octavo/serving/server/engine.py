"""The thread that steps the scheduler, and how asyncio's handlers talk to it.

Handlers leave commands in a queue, which the thread empties between steps; what a step brings goes back to
the event loop at once, in one call for all handlers. Nothing else touches the scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from octavo import KVCache
from octavo.serving import Output, Request, Sampling, Scheduler
from octavo.serving.server.errors import ApiError, stopping
from octavo.serving.server.metrics import Metrics
from octavo.serving.server.snapshot import Snapshot, Snapshots
from octavo.serving.server.text import Answer, Delta, Tokenizer

_log = logging.getLogger("octavo.serving")
_Result = TypeVar("_Result")

LONGEST_RETRY = 60  # seconds


@dataclass(frozen=True)
class Job:
    """What one request of HTTP asks the scheduler for.

    Answers are numbered prompt by prompt: those of prompt i are i * num_samples and the following.
    """

    prompts: Sequence[Sequence[int]]
    num_samples: int
    max_tokens: Sequence[int]  # of each prompt's answers
    sampling: Sampling
    stops: tuple[str, ...] = ()
    logprobs: bool = False
    continues: bool = False  # the answers' texts go on where those of the prompts end

    @property
    def num_answers(self) -> int:
        """Over all prompts."""
        return len(self.prompts) * self.num_samples


@dataclass(eq=False)
class Stream:
    """The answers to a job, as they come."""

    job: Job
    submitted: float = field(default_factory=time.monotonic)
    events: asyncio.Queue[Delta | ApiError] = field(default_factory=asyncio.Queue)
    # For the engine's thread alone:
    requests: list[Request] = field(default_factory=list)
    answers: dict[tuple[Request, int], Answer] = field(default_factory=dict)
    has_begun: bool = False

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """What is new at a time, until each answer is finished; ApiError where they are cut off."""
        unfinished = self.job.num_answers
        while unfinished:
            events = [await self.events.get()]
            while not self.events.empty():
                events.append(self.events.get_nowait())
            deltas = [event for event in events if isinstance(event, Delta)]
            unfinished -= sum(delta.finish_reason is not None for delta in deltas)
            if deltas:
                yield deltas
            for event in events:
                if isinstance(event, ApiError) and unfinished:
                    raise event


class Engine:
    """Runs jobs through a scheduler.

    Args:
        scheduler: the engine's own from now on.
        cache: the scheduler's.
        tokenizer: of the model.
        max_in_flight: answers that run or wait, and requests that are still read; what would exceed them is
            refused with status 429.
        on_failure: called in the event loop when a step failed. Nothing is served from then on.

    Methods are for the thread of the event loop in which start() was called.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: KVCache,
        tokenizer: Tokenizer,
        *,
        max_in_flight: int = 256,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        if max_in_flight < 1:
            raise ValueError(f"Engine: max_in_flight ({max_in_flight}) must be at least 1")
        self.metrics = Metrics()
        self.max_in_flight = max_in_flight
        # The most tokens of a prompt and an answer. One answer can have all pages.
        held = [group.num_pages * group.page_size for group in cache.page_groups if group.window_left < 0]
        self.max_length = min([cache.max_length, *held])
        self.in_flight = 0  # answers that run or wait
        self._num_arriving = 0  # requests that are read and encoded
        self.failure: BaseException | None = None
        self.on_failure = on_failure
        self._scheduler = scheduler
        self._max_samples = scheduler._limits.max_batch
        self._cache = cache
        self._tokenizer = tokenizer
        self._snapshots = Snapshots(scheduler, cache)
        self._streams: set[Stream] = set()
        self._finish_times: deque[float] = deque(maxlen=32)
        self._closed = False  # no command will be taken
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._stream_of: dict[Request, Stream] = {}  # of the engine's thread
        self._leak: str | None = None  # set by it at its end

    # Called in the event loop

    def start(self) -> None:
        """Starts the thread."""
        self._loop = asyncio.get_running_loop()
        self.stopping = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether jobs are accepted, if there is room."""
        return self.failure is None and not self.stopping.is_set()

    async def submit(self, job: Job) -> Stream:
        """Queues a job.

        Raises:
            ApiError: 503 while the server stops, 429 where too many answers are in flight, 400 for a job that
                could never run.
        """
        if self.stopping.is_set():
            raise stopping()
        self.check_room(job.num_answers)
        if job.num_samples > self._max_samples:
            raise ApiError(
                400,
                f"n ({job.num_samples}) must be at most {self._max_samples}, the sequences in a step",
                param="n",
                code="cannot_run",
            )
        stream = Stream(job)
        self._streams.add(stream)
        self.in_flight += job.num_answers
        self._idle.clear()
        try:
            await self.call(lambda: self._submit(stream))
        except BaseException as error:
            self.close(stream)
            if isinstance(error, ValueError):
                raise ApiError(400, str(error), code="cannot_run") from error
            raise
        return stream

    @contextlib.contextmanager
    def arrival(self) -> Iterator[None]:
        """While a request is read and encoded, it counts as one answer in flight; ApiError (429) beyond."""
        self.check_room(1)
        self._num_arriving += 1
        try:
            yield
        finally:
            self._num_arriving -= 1

    def check_room(self, num_answers: int, num_arrived: int = 0) -> None:
        """Refuses a job by its size: ApiError, 400 if that many answers never fit, 429 if not now.

        num_arrived: of these answers that count already, since the request arrives.
        """
        if num_answers > self.max_in_flight:
            raise ApiError(
                400,
                f"the request asks for {num_answers} answers; this server has {self.max_in_flight} at most",
                code="too_many_answers",
            )
        others = self.in_flight + self._num_arriving - num_arrived
        if others + num_answers > self.max_in_flight:
            raise ApiError(
                429,
                f"the server is full: {others} answers of at most {self.max_in_flight} are in flight",
                code="server_full",
                headers={"Retry-After": str(self._retry_after())},
            )

    def _retry_after(self) -> int:
        """Seconds until a job may be expected to end, by how often they ended lately."""
        if not self._finish_times:
            return 1
        interval = (time.monotonic() - self._finish_times[0]) / len(self._finish_times)
        return min(max(1, math.ceil(interval)), LONGEST_RETRY)

    def close(self, stream: Stream) -> None:
        """Ends a job, be it finished or not; may be called again."""
        if stream not in self._streams:
            return
        self._streams.remove(stream)
        self.in_flight -= stream.job.num_answers
        if not self.in_flight:
            self._idle.set()
        self._finish_times.append(time.monotonic())
        self._commands.put((lambda: self._drop(stream), Future()))

    async def call(self, function: Callable[[], _Result]) -> _Result:
        """What the function returns in the engine's thread, between two steps.

        Raises:
            ApiError: the engine has failed (500) or stopped (503).
        """
        if self._closed:
            raise stopping()
        future: Future[_Result] = Future()
        self._commands.put((function, future))
        return await asyncio.wrap_future(future)

    async def snapshot(self) -> Snapshot:
        """Who holds which page, and how much is going on."""
        return await self.call(lambda: self._snapshots.take(self.metrics.tokens_per_second(time.monotonic())))

    async def drain(self, grace_seconds: float) -> None:
        """Accepts no more jobs, and waits for the others; those that take longer are cut off."""
        self.stopping.set()
        if self._idle.is_set():
            return
        try:
            await asyncio.wait_for(self._idle.wait(), grace_seconds)
        except asyncio.TimeoutError:
            _log.warning("stopping: %d answers are cut off after %g s", self.in_flight, grace_seconds)
            self._cut_off(stopping())

    async def stop(self) -> None:
        """Cuts off what there still is, ends the thread, and checks the pages.

        Raises:
            RuntimeError: some are still held, or the allocator's invariants do not hold.
        """
        self.stopping.set()
        self._cut_off(stopping())
        for stream in list(self._streams):
            self.close(stream)
        if not self._closed:
            self._closed = True
            self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        if self._leak is not None:
            raise RuntimeError(self._leak)

    def _cut_off(self, error: ApiError) -> None:
        for stream in self._streams:
            stream.events.put_nowait(error)

    def _publish(self, events: list[tuple[Stream, Delta | ApiError]]) -> None:
        for stream, event in events:
            stream.events.put_nowait(event)

    def _fail(self) -> None:
        self._cut_off(self._failed())
        if self.on_failure is not None:
            self.on_failure()

    def _failed(self) -> ApiError:
        # Why is in the log, and may be nothing for clients.
        return ApiError(500, "the engine has failed", code="engine_failed")

    # Called in the engine's thread

    def _run(self) -> None:
        running = True
        while running or (self.failure is None and self._scheduler.unfinished):
            running = self._take_commands() and running
            if self.failure is None and self._scheduler.unfinished:
                try:
                    self._deliver(self._scheduler.step())
                except BaseException as error:
                    _log.exception("a step of the scheduler failed; nothing is served from now on")
                    self.failure = error
                    self._loop.call_soon_threadsafe(self._fail)
        if self.failure is None:
            self._check_pages()

    def _take_commands(self) -> bool:
        """Carries out those that there are, after waiting for one if there is nothing else to do.

        Returns:
            Whether more may come.
        """
        has_work = self.failure is None and self._scheduler.unfinished
        for _ in range(max(self._commands.qsize(), 0 if has_work else 1)):
            command = self._commands.get()  # of which this thread is the only taker
            if command is None:
                return False
            function, future = command
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if self.failure is not None:
                    raise self._failed()
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
        return True

    def _submit(self, stream: Stream) -> None:
        job = stream.job
        try:
            for number, (prompt, max_tokens) in enumerate(zip(job.prompts, job.max_tokens, strict=True)):
                request = self._scheduler.submit(
                    prompt,
                    max_tokens=max_tokens,
                    sampling=job.sampling,
                    num_samples=job.num_samples,
                    logprobs=job.logprobs,
                )
                stream.requests.append(request)
                self._stream_of[request] = stream
                for sample in range(job.num_samples):
                    index = number * job.num_samples + sample
                    continued = prompt if job.continues else ()
                    answer = Answer(index, self._tokenizer, job.stops, job.logprobs, continued)
                    stream.answers[request, sample] = answer
        except BaseException:
            stream.answers = {}
            self._drop(stream)
            raise
        self.metrics.accept(job.prompts, job.num_answers)

    def _drop(self, stream: Stream) -> None:
        """Forgets a job; what of it still runs is cancelled."""
        for request in stream.requests:
            if self._stream_of.pop(request, None) is not None and not request.finished:
                self._scheduler.cancel(request)
        self.metrics.cancelled += sum(answer.finish_reason is None for answer in stream.answers.values())
        stream.requests, stream.answers = [], {}

    def _deliver(self, outputs: Sequence[Output]) -> None:
        now = time.monotonic()
        events: list[tuple[Stream, Delta | ApiError]] = []
        for output in outputs:
            stream = self._stream_of.get(output.request)
            if stream is None:  # nobody reads it any more
                continue
            answer = stream.answers[output.request, output.sample]
            if not stream.has_begun:
                stream.has_begun = True
                self.metrics.first_token.observe(now - stream.submitted)
            elif answer.last_token is not None:
                self.metrics.next_token.observe(now - answer.last_token)
            answer.last_token = now
            try:
                delta = answer.feed(output.token, output.logprob, output.finish_reason)
            except Exception:  # of the tokenizer: nothing that concerns others
                _log.exception("the text of an answer cannot be made; its request is cancelled")
                failed = ApiError(500, "the text of the answer cannot be made", code="text_failed")
                events.append((stream, failed))
                self._drop(stream)
                continue
            if answer.finish_reason is not None:
                self.metrics.finish(answer.finish_reason, now - stream.submitted)
                if output.finish_reason is None:  # a text at which to stop; the scheduler knows only tokens
                    self._scheduler.cancel(output.request, output.sample)
            if delta is not None:
                events.append((stream, delta))
        self.metrics.step(now, len(outputs))
        if events:
            self._loop.call_soon_threadsafe(self._publish, events)

    def _check_pages(self) -> None:
        allocator = self._cache.allocator
        try:
            allocator.check_invariants()
        except Exception as error:
            self._leak = f"the allocator is not as it should be: {error}"
            return
        used = [int(allocator.stats(group)["num_used_pages"]) for group in range(allocator.num_groups)]
        if any(used):
            self._leak = f"pages are still held, by group: {used}"
