"""octavo.transformers: decode steps that are padded, and on a GPU replay CUDA graphs."""

import functools
import gc
import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from octavo._transformers_batch import ServedModel  # noqa: E402
from octavo._transformers_graphs import DecodeGraphs, DeviceLogits, decode_batches  # noqa: E402
from octavo.serving import Logits, Sampling, Scheduler  # noqa: E402
from octavo.transformers import generate_batch, make_scheduler  # noqa: E402
from support.tiny_models import make_model  # noqa: E402

MODELS = ["llama", "gemma3", "gpt2", "bloom"]


def make_prompts(number=6):
    generator = torch.Generator().manual_seed(1)
    lengths = (3, 21, 1, 12, 30, 7, 2, 9)[:number]
    return [torch.randint(2, 61, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", MODELS)
def test_padded_steps_give_the_same_text(name):
    model = make_model(name)
    texts = [request.tokens() for request in generate_batch(model, make_prompts(), max_new_tokens=9)]
    served = ServedModel(model)
    cache = served.make_cache(num_pages=64, page_size=4, max_batch=8)
    scheduler = Scheduler(cache, served.forward, decode_batches=[4, 8])
    requests = [scheduler.submit(prompt, max_tokens=9) for prompt in make_prompts()]
    list(scheduler.run())
    served.close()
    assert [request.tokens() for request in requests] == texts


def test_graphs_are_refused_on_the_cpu():
    for run in (
        lambda: make_scheduler(make_model("llama"), cuda_graphs=True, num_pages=8),
        lambda: generate_batch(make_model("llama"), [[1, 2]], max_new_tokens=2, cuda_graphs=True),
    ):
        with pytest.raises(ValueError, match="cuda_graphs=True needs a model on a CUDA device; it is on cpu"):
            run()


def test_each_cache_gets_graphs_of_its_own(monkeypatch):
    captured = []

    def capture(graphs, input_ids, run):
        """In place of a capture, which needs a GPU: a graph that writes nothing."""
        captured.append(input_ids.shape[1])
        graphs._logits = torch.zeros(graphs._input_ids.shape[1], 64)
        best = torch.zeros(2, input_ids.shape[1], dtype=torch.float64)
        return SimpleNamespace(graph=SimpleNamespace(replay=lambda: None), best=best)

    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    graphs = DecodeGraphs("model", torch.device("cpu"), required=True)
    served = ServedModel(make_model("llama"))
    for _ in range(2):
        cache = served.make_cache(num_pages=64, page_size=4, max_batch=8)
        forward = functools.partial(served.forward, graphs=graphs)
        scheduler = Scheduler(cache, forward, decode_batches=[2, 4, 8])
        for prompt in make_prompts(3):
            scheduler.submit(prompt, max_tokens=5)
        list(scheduler.run())
    served.close()
    assert captured == [4, 4] and graphs.num_replays == 8


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ("called a synchronizing CUDA operation", "the model waits for the GPU in a forward pass"),
        ("out of memory", "out of memory"),
    ],
)
def test_steps_that_cannot_be_captured(monkeypatch, error, why):
    """They run without graphs, with one warning; where graphs are required each of them is an error."""

    def capture(*args):
        raise RuntimeError(error)

    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    model = make_model("llama")
    texts = [request.tokens() for request in generate_batch(model, make_prompts(3), max_new_tokens=5)]
    served = ServedModel(model)
    for required in (False, True):
        graphs = DecodeGraphs("model", torch.device("cpu"), required=required)
        cache = served.make_cache(num_pages=64, page_size=4, max_batch=4)
        scheduler = Scheduler(
            cache, functools.partial(served.forward, graphs=graphs), decode_batches=decode_batches(4)
        )
        requests = [scheduler.submit(prompt, max_tokens=5) for prompt in make_prompts(3)]
        if required:
            for _ in range(2):
                with pytest.raises(ValueError, match=f"decode steps of model cannot be captured, .*: {why}"):
                    list(scheduler.run())
        else:
            with pytest.warns(RuntimeWarning, match=f"model run without CUDA graphs, .*: {why}") as found:
                list(scheduler.run())
            assert len(found) == 1 and [request.tokens() for request in requests] == texts
        assert graphs.num_replays == 0
    served.close()


def test_a_cache_goes_when_its_scheduler_does():
    """At once, not when Python collects cycles: its pages may be most of a GPU's memory."""
    scheduler = make_scheduler(make_model("llama"), num_pages=64, page_size=4)
    scheduler.submit([1, 2, 3], max_tokens=3)
    list(scheduler.run())
    cache = weakref.ref(scheduler.cache)
    gc.collect()
    gc.disable()
    try:
        del scheduler
        assert cache() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("max_batch", [1, 2, 3, 5, 8, 30, 64, 100, 256, 300, 1000])
def test_sizes_of_graphs(max_batch):
    sizes = decode_batches(max_batch)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == max_batch
    for batch in range(1, max_batch + 1):
        size = min(size for size in sizes if size >= batch)
        assert size < batch + max(4, batch / 4, 8 if batch > 4 else 0), "little of a step is padding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_a_tensor(dtype):
    values = torch.randn(5, 37, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[0, [3, 30]] = 9.0
    values[1, 4] = torch.nan
    values[2] = -torch.inf
    logits = DeviceLogits(values)
    assert isinstance(logits, Logits) and logits.shape == (5, 37)
    tokens, largest = logits.best()
    expected = values.float().numpy()
    assert tokens.dtype == np.int64 and tokens.tolist() == expected.argmax(axis=1).tolist()
    np.testing.assert_array_equal(largest, expected.max(axis=1))
    np.testing.assert_array_equal(logits.rows([3, 1]), expected[[3, 1]])


# On a GPU


def serve(model, graphs, submit, **sizes):
    """Run requests with steps that are padded as for graphs; return their texts."""
    served = ServedModel(model)
    try:
        cache = served.make_cache(page_size=4, max_batch=8, max_length=64, **{"num_pages": 200, **sizes})
        forward = functools.partial(served.forward, graphs=graphs)
        scheduler = Scheduler(cache, forward, token_budget=16, decode_batches=decode_batches(8))
        requests = submit(scheduler)
        list(scheduler.run())
        cache.allocator.check_invariants()
        return [request.tokens(sample) for request in requests for sample in range(request.num_samples)]
    finally:
        served.close()


def on_gpu(name):
    return make_model(name).to("cuda", torch.bfloat16)


def submit_all(scheduler):
    greedy = [scheduler.submit(text, max_tokens=5 + 3 * i) for i, text in enumerate(make_prompts())]
    sampling = Sampling(0.8, seed=5)
    samples = scheduler.submit([5, 6, 7], max_tokens=12, num_samples=3, sampling=sampling, logprobs=True)
    return [*greedy, samples, scheduler.submit([9, 3], max_tokens=8, num_beams=3)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "pages",
    [{}, {"num_pages": 24, "num_host_pages": 8}, {"dtype": "int8"}],
    ids=["all", "few pages", "int8"],
)
@pytest.mark.parametrize("name", MODELS)
def test_graphs_give_the_text_of_steps_without(name, pages):
    """With admissions, forks, beams, sequences that end and, with few pages, preemption in between."""
    model = on_gpu(name)
    graphs = DecodeGraphs(name, torch.device("cuda", 0), required=True)
    assert serve(model, graphs, submit_all, **pages) == serve(model, None, submit_all, **pages)
    assert graphs.num_replays > 12


@pytest.mark.gpu
def test_graphs_of_two_caches_of_a_model():
    model = on_gpu("llama")
    graphs = DecodeGraphs("llama", torch.device("cuda", 0), required=True)
    with torch.inference_mode():  # in which tensors are made that are not written elsewhere
        first = serve(model, graphs, submit_all)
    assert serve(model, graphs, submit_all) == first == serve(model, None, submit_all)


@pytest.mark.gpu
def test_graphs_are_the_default():
    model = on_gpu("llama")
    scheduler = make_scheduler(model, num_pages=64, max_batch=4)
    graphs = scheduler._forward.keywords["graphs"]
    for prompt in make_prompts(3):
        scheduler.submit(prompt, max_tokens=6)
    list(scheduler.run())
    assert graphs.num_replays >= 5
    with_graphs = generate_batch(model, make_prompts(), max_new_tokens=8)
    assert len(with_graphs[0].tokens()) == 8
    assert make_scheduler(model, num_pages=8, cuda_graphs=False)._forward.keywords["graphs"] is None


@pytest.mark.gpu
def test_a_model_that_waits_for_the_gpu_runs_without_graphs():
    model = on_gpu("llama")
    expected = [
        x.tokens() for x in generate_batch(model, make_prompts(), max_new_tokens=8, cuda_graphs=False)
    ]
    hook = model.model.layers[1].register_forward_hook(
        lambda module, inputs, out: float(inputs[0].sum()) and None
    )
    try:
        with pytest.raises(ValueError, match=r"LlamaForCausalLM cannot be captured, .*: the model waits"):
            generate_batch(model, make_prompts(), max_new_tokens=8, cuda_graphs=True)
        with pytest.warns(RuntimeWarning, match="LlamaForCausalLM run without CUDA graphs") as found:
            requests = generate_batch(model, make_prompts(), max_new_tokens=8)
        assert len(found) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            generate_batch(model, make_prompts(), max_new_tokens=2, cuda_graphs=False)
    finally:
        hook.remove()
    assert [len(request.tokens()) for request in requests] == [len(text) for text in expected]
    assert torch.rand(2, device="cuda").isfinite().all(), "random numbers can still be had"
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.gpu
def test_steps_leave_no_memory_behind():
    model = on_gpu("llama")
    scheduler = make_scheduler(model, num_pages=64, max_batch=2, page_size=16)
    sizes = []
    for _ in range(6):
        scheduler.submit([1, 2, 3], max_tokens=12)
        list(scheduler.run())
        sizes.append(torch.cuda.memory_allocated())
    assert sizes[1:] == [sizes[1]] * 5
