"""Serving: many requests at once through one model, over one KV cache.

``Scheduler`` batches them, ``Sampling`` says how their tokens are drawn, and ``sample`` draws one. ``Logits``
is what a model on a GPU may return.
"""

from octavo.serving.logits import Logits
from octavo.serving.request import Output, Request
from octavo.serving.sampling import Sampling, sample
from octavo.serving.scheduler import Scheduler
from octavo.serving.statistics import Statistics

__all__ = ["Logits", "Output", "Request", "Sampling", "Scheduler", "Statistics", "sample"]
