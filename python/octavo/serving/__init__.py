"""Serving: many requests at once through one model, over one KV cache.

``Scheduler`` batches them, ``Sampling`` says how their tokens are drawn, and ``sample`` draws one.
"""

from octavo.serving.request import Output, Request
from octavo.serving.sampling import Sampling, sample
from octavo.serving.scheduler import Scheduler
from octavo.serving.statistics import Statistics

__all__ = ["Output", "Request", "Sampling", "Scheduler", "Statistics", "sample"]
