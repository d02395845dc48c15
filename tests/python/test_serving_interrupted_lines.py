"""octavo.serving.Scheduler: KeyboardInterrupt before any line of a step, and nothing is lost or wrong."""

import collections
import linecache
import sys
from pathlib import Path

import pytest

from octavo.serving import Sampling, Scheduler, scheduler
from support.exact_model import ExactModel
from support.serving import check, finish, make_cache

PACKAGE = str(Path(scheduler.__file__).parent)
STRIDE = 17  # of the lines that a run meets: not every one is tried
# CPython handles signals in calls and in jumps backwards alone. Between the last of those and these lines
# there is none, so that no interrupt comes before them.
NEVER = {'if self._turn == {"": turn}:', 'del self._turn[""]', "return outputs", "yield output"}


class Tracer:
    """Counts the lines of the serving package that run, and raises before one of them."""

    def __init__(self, number=None):
        self.count = 0
        self._number = number

    def run(self, function):
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return function()
        finally:
            sys.settrace(before)

    def _enter(self, frame, event, argument):
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame, event, argument):
        if event == "line" and not self._is_never(frame):
            self.count += 1
            if self.count == self._number:
                raise KeyboardInterrupt
        return self._line

    def _is_never(self, frame):
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        # The line of a `with` comes once more, before it gives its lock back.
        return line in NEVER or (line == "with self._lock:" and frame.f_locals["self"]._lock.locked())


PLACES = {
    "pages that suffice": {"num_pages": 64, "prefix_cache": True},
    "few pages": {"num_pages": 6, "prefix_cache": True},
    "host memory": {"num_pages": 6, "num_host_pages": 40},
}


class Run:
    """Requests of each kind, through few pages."""

    def __init__(self, place):
        self.model = ExactModel()
        self.cache = make_cache(self.model, max_tokens=12, max_batch=6, **PLACES[place])
        self.scheduler = Scheduler(self.cache, self.model.forward)
        submit = self.scheduler.submit
        drawn = {"sampling": Sampling(1.2, seed=3), "logprobs": True}
        self.requests = [
            submit([1] * 9, max_tokens=3, num_samples=2, **drawn),
            submit([1] * 7, max_tokens=4, num_beams=2, num_samples=2),
            submit([1, 2, 3], max_tokens=2),
            submit([2] * 6, max_tokens=4, num_samples=2, **drawn),
        ]
        self.outputs = []

    def step(self):
        self.outputs += self.scheduler.step()

    def interrupt(self, number):
        """Run to the end, with an interrupt before this line; return how many lines there were until then."""
        tracer = Tracer(number)
        steps = 0
        try:
            while self.scheduler.unfinished:
                if steps == 3:
                    tracer.run(lambda: self.scheduler.cancel(self.requests[3], 1))
                tracer.run(self.step)
                steps += 1
        except KeyboardInterrupt:
            self.cache.allocator.check_invariants()
        return tracer.count

    def check(self):
        self.outputs += finish(self.scheduler, self.cache)  # which finds no sequence in the cache
        again = [self.scheduler.submit(request.prompt, max_tokens=1) for request in self.requests]
        finish(self.scheduler, self.cache)
        for request in again:  # which find what the others have left in the prefix cache
            check(self.model, request)
        given = collections.defaultdict(list)
        for output in self.outputs:
            given[output.request, output.sample].append(output)
        for request in self.requests:
            check(self.model, request)
            for sample in range(len(request.answers)):
                outputs = given[request, sample]
                assert [output.token for output in outputs] == request.tokens(sample)
                if request.finish_reason(sample) != "cancelled":
                    reasons = [output.finish_reason for output in outputs]
                    assert reasons == [*[None] * (len(outputs) - 1), request.finish_reason(sample)]


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_before_any_line_of_a_step(place):
    whole = Run(place)
    count = whole.interrupt(None)
    whole.check()
    preemptions = whole.scheduler.stats().num_preemptions
    assert count > 3000 and (preemptions > 0) is (place != "pages that suffice")
    for number in range(1, count + 1, STRIDE):
        run = Run(place)
        assert run.interrupt(number) == number
        run.check()


def test_an_interrupt_before_any_line_of_close():
    number, was_interrupted = 1, True
    while was_interrupted:
        run = Run("host memory")
        for _ in range(4):
            run.step()
        was_interrupted = False
        try:
            Tracer(number).run(run.scheduler.close)
        except KeyboardInterrupt:
            was_interrupted = True
        run.scheduler.close()
        assert run.cache.stats()["num_sequences"] == 0
        assert not run.scheduler.unfinished
        assert all(request.finished for request in run.requests)
        number += 3
    assert number > 50
