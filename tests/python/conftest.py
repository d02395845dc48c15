"""The `gpu` marker, the hypothesis profiles and the fixtures that several files share.

A test marked `gpu` is deselected where there is no NVIDIA GPU, and pytest counts it in its last line, though
not with `-n`; where there is a GPU, skipping it is a failure.
With `--no-skips` skipping any other test is a failure, too: what the tests need is said to be there.
Hypothesis: `ci` by default; `pytest --hypothesis-profile=thorough` searches longer, anew each time.
"""

from __future__ import annotations

import ctypes
import functools
import os
import types
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from support.libraries import ArrayLibrary

# JAX would otherwise take most of the GPU's memory for itself.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# The oracle multiplies small matrices. Where other processes keep the cores busy, NumPy's threads wait for
# one another: test_attention.py took 37 seconds on two such cores, and 7 with one thread.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # a process for each core: threads of PyTorch would wait likewise
    os.environ.setdefault("OMP_NUM_THREADS", "1")

_SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile(
    "ci", deadline=None, derandomize=True, max_examples=30, suppress_health_check=_SLOW_IS_FINE
)
settings.register_profile("thorough", deadline=None, max_examples=1000, suppress_health_check=_SLOW_IS_FINE)
settings.load_profile("ci")


@functools.cache
def gpu_count() -> int:
    """As the driver says, without asking any library under test."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips", action="store_true", help="fail where a test is skipped, unless it is marked gpu"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if gpu_count() > 0:
        return
    of_gpu, others = [], []
    for item in items:
        (of_gpu if item.get_closest_marker("gpu") else others).append(item)
    config.hook.pytest_deselected(items=of_gpu)
    items[:] = others


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture(scope="module")
def one_thread(torch: Any) -> Generator[None]:
    """In tests of many small operators, threads of two libraries would wait for each other on few cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def seeded_torch(torch: Any) -> None:
    """The same random tensors whichever tests ran before."""
    torch.manual_seed(0)


@pytest.fixture
def cuda_of_the_cpu(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a benchmark asks torch.cuda, where there is no GPU: of a Hopper without a cache, on stream 7."""
    gpu = types.SimpleNamespace(multi_processor_count=132, L2_cache_size=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: gpu)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=7))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)


@pytest.fixture(scope="module")
def library(torch: Any) -> ArrayLibrary:
    """Torch on the GPU."""
    from support.libraries import (
        get_library,  # here, since it imports ml_dtypes, which wheels are tested without
    )

    return get_library("torch", "cuda")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not report.skipped or hasattr(report, "wasxfail"):  # an expected failure
        return report
    if item.get_closest_marker("gpu"):
        refused = "on a machine with a GPU" if gpu_count() > 0 else ""
    else:
        refused = "under --no-skips" if item.config.getoption("no_skips", False) else ""
    if refused:
        report.outcome = "failed"
        report.longrepr = f"skipped {refused}: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped and collector.config.getoption("no_skips", False):
        report.outcome = "failed"
        report.longrepr = f"skipped under --no-skips: {report.longrepr}"
    return report


@pytest.fixture(scope="module")
def one_torch_thread() -> Generator[None, None, None]:
    """For many small operators: threads of several libraries on few cores wait for each other."""
    torch = pytest.importorskip("torch")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
