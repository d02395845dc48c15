"""octavo.transformers.generate_batch: models of transformers, served by octavo.serving."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from octavo._cache import int_argument
from octavo._kv_cache import KVCache, KVCacheStep
from octavo._transformers_graphs import DecodeGraphs, DeviceLogits, decode_batches
from octavo._transformers_layers import BloomSteps, Layers, LayerStep, look_at_layers, refusal
from octavo.serving import Request, Sampling, Scheduler

_GREEDY = Sampling()
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# transformers chooses their frequencies by the largest position of a forward pass, for all of its texts.
_ROPE_TYPES_OF_THE_LONGEST = {"dynamic", "longrope"}
# Fields of a generation config that change texts which are not drawn, and the values with which they do not.
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), 1.0),
    **dict.fromkeys(
        ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0
    ),
    **dict.fromkeys(("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
    **dict.fromkeys(("watermarking_config", "stop_strings", "constraints", "force_words_ids", "dola_layers")),
    **dict.fromkeys(("penalty_alpha", "diversity_penalty"), 0.0),
    "num_beam_groups": 1,
    "token_healing": False,
}
_SIZES = (
    "num_pages",
    "memory",
    "memory_fraction",
    "page_size",
    "max_batch",
    "max_tokens",
    "max_length",
    "num_host_pages",
    "dtype",
)
_MAX_BATCH = 64  # unless a batch has fewer tokens
_TRIAL = 7  # tokens of the text by which a model proves that it can be served


class ServedModel:
    """A model of transformers, as octavo.serving.Scheduler calls it: its attention reads the cache's pages.

    From then on the model's attention is Octavo's, as ``set_attn_implementation("octavo")`` makes it, until
    ``close()``.
    """

    def __init__(self, model: Any) -> None:
        _check(model)
        self._model = model
        self._bloom = BloomSteps(model) if model.config.model_type == "bloom" else None
        self._parameters = inspect.signature(model.forward).parameters
        parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
        self._before = [(part.config, part.config._attn_implementation) for part in parts]
        self._modes = [(module, module.training) for module in model.modules()]
        try:
            model.eval()
            if self._bloom is None:
                from octavo.transformers import register

                register()
                model.set_attn_implementation("octavo")
            self._expected, self._layers = self._look()
            self._try()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the model back the attention that it had, and each of its modules its train or eval mode."""
        for config, implementation in self._before:
            config._attn_implementation = implementation
        for module, training in self._modes:
            module.training = training

    def make_cache(self, **sizes: Any) -> KVCache:
        """Make the cache that the model needs: its layers, heads, windows, dtype and device."""
        first, *others = self._layers.all
        for layer in others:
            if layer[1:4] != first[1:4] or layer[6:] != first[6:]:
                raise refusal(self._model, "its layers differ in their KV heads, head dims, dtype or device")
        sizes.setdefault("like", torch.empty(0, dtype=first.dtype, device=first.device))
        return KVCache(
            len(self._layers.all),
            first.num_kv_heads,
            first.head_dim,
            windows=self.windows,
            head_dim_v=first.head_dim_v,
            **sizes,
        )

    @property
    def windows(self) -> list[int | None]:
        """The window of each layer, as KVCache takes them."""
        lefts = (layer.window_left for layer in self._layers.all)
        return [None if left < 0 else left for left in lefts]

    @property
    def finds_prefixes(self) -> bool:
        """Whether its cache can find prefixes again, which takes a layer without a window."""
        return None in self.windows

    def make_graphs(self, wanted: bool | None) -> DecodeGraphs | None:
        """Return what holds the CUDA graphs of a cache's decode steps, or None if there are to be none."""
        device = self._layers.all[0].device
        if wanted and device.type != "cuda":
            raise ValueError(
                f"octavo.transformers: cuda_graphs=True needs a model on a CUDA device; it is on {device}"
            )
        if wanted is False or device.type != "cuda":
            return None
        return DecodeGraphs(type(self._model).__name__, device, required=wanted is True)

    @torch.no_grad()
    def forward(
        self, step: KVCacheStep, tokens: NDArray[np.int64], graphs: DecodeGraphs | None = None
    ) -> DeviceLogits:
        """Return the logits [batch, vocabulary] after the last token of each sequence.

        Args:
            step: of a cache.
            tokens: int64 [T], without padding.
            graphs: of this model.
        """
        run = functools.partial(self._run, step)
        num_rows = step.positions.shape[0]
        is_decode = step.max_seqlen_q == 1 and step.num_tokens == step.batch
        if graphs is not None and is_decode and num_rows == step.seq_lens.shape[0]:
            logits = graphs.forward(step._cache, tokens, num_rows, run)
            if logits is not None:
                return logits
        padded = np.zeros(num_rows, np.int64)
        padded[: len(tokens)] = tokens
        return DeviceLogits(run(torch.from_numpy(padded).to(self._model.device)[None])[: step.batch])

    def _run(self, step: KVCacheStep, input_ids: Tensor) -> Tensor:
        """Return the logits [rows of the step's arrays, vocabulary] of tokens [1, T], padding included."""
        last_rows = step.last_rows.long()
        options: dict[str, Any] = {"use_cache": False}
        if "logits_to_keep" in self._parameters:
            options["logits_to_keep"] = last_rows
        of_layers = LayerStep(step, self._layers)
        if self._bloom is None:
            # A mask of four axes is passed on as it is; Octavo's attention has the step, and reads none.
            options["attention_mask"] = torch.zeros(1, 1, 1, 1, device=input_ids.device)
            options["position_ids"] = step.positions.long()[None]
            logits = self._model(input_ids, octavo_step=of_layers, **options).logits
        else:
            with self._bloom.during(of_layers):
                logits = self._model(input_ids, **options).logits
        if of_layers.num_calls != len(self._layers.all):
            raise refusal(self._model, "it does not pass its keywords on to the attention of every layer")
        if logits.shape[1] != len(last_rows):
            logits = logits[:, last_rows]
        result: Tensor = logits[0]
        return result

    @property
    def _trial_text(self) -> Tensor:
        vocabulary = self._model.get_input_embeddings().weight.shape[0]
        text: Tensor = torch.arange(1, _TRIAL + 1, device=self._model.device)[None] % vocabulary
        return text

    @torch.no_grad()
    def _look(self) -> tuple[Tensor, Layers]:
        """Have the model describe its layers, in an ordinary forward pass; return its logits, too."""
        if self._bloom is None:
            return look_at_layers(self._model, self._trial_text)
        layers = Layers(self._model)
        with self._bloom.during(layers):
            return self._model(self._trial_text, use_cache=False).logits[0], layers

    def _try(self) -> None:
        """See whether two texts in one batch, in parts, get the logits of the ordinary forward pass.

        A model that mixes tokens outside of its attention, or counts positions by itself, does not.
        """
        text = self._trial_text[0].cpu().numpy()
        cache = self.make_cache(num_pages=2 * _TRIAL, page_size=2, max_batch=2, max_tokens=2 * _TRIAL)
        seqs = [cache.create(), cache.create()]
        begins = [0, 0]
        for counts in ([3, 2], [3, 2], [1, 1]):
            parts = [text[begin : begin + count] for begin, count in zip(begins, counts, strict=True)]
            found = self.forward(cache.step(seqs, counts), np.concatenate(parts)).rows([0, 1])
            begins = [begin + count for begin, count in zip(begins, counts, strict=True)]
        expected = self._expected[[6, 4]].float().cpu().numpy()
        tolerance = 1e-3 if self._expected.dtype == torch.float32 else 0.1
        error = float(np.abs(found - expected).max() / np.abs(expected).max())
        if not error <= tolerance:
            raise refusal(
                self._model,
                f"in a batch of two texts its logits are others than those of each alone (by {error:.0%} of "
                "the largest): it mixes tokens outside of its attention, or counts positions by itself",
            )


def _check(model: Any) -> None:
    """Refuse by name what is known not to work, before anything runs."""
    _check_kind(model)
    config = model.config.get_text_config(decoder=True)
    types = set(getattr(config, "layer_types", None) or _LAYER_TYPES)
    if getattr(config, "attn_temperature_tuning", False):
        raise refusal(model, "it scales queries by positions that it counts itself (attn_temperature_tuning)")
    if model.config.is_encoder_decoder:
        raise refusal(model, "it has an encoder")
    if model.get_output_embeddings() is None:
        raise refusal(model, "it has no head that gives logits")
    if model._is_stateful or not types <= _LAYER_TYPES:
        others = ", ".join(sorted(types - _LAYER_TYPES)) or "a state"
        raise refusal(model, f"its layers have other memory than keys and values ({others})")
    of_longest = sorted(_rope_types(config) & _ROPE_TYPES_OF_THE_LONGEST)
    if of_longest:
        raise refusal(
            model,
            "its rotary embedding depends on the longest text of a batch, which changes the others "
            f"(rope_type {of_longest[0]!r})",
        )
    if getattr(config, "num_kv_shared_layers", None):
        raise refusal(model, "some of its layers share their keys and values (num_kv_shared_layers)")
    accepts = inspect.signature(model.forward).parameters
    if model.config.model_type != "bloom" and "position_ids" not in accepts:
        raise refusal(model, "it takes no position_ids")
    _check_generation(model)


def _check_kind(model: object) -> None:
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise TypeError(
            "octavo.transformers: model must be a model of transformers, such as "
            f"AutoModelForCausalLM.from_pretrained(...) returns; got {model!r:.60}"
        )


def changes_of_logits(model: Any) -> dict[str, tuple[Any, Any]]:
    """What generate() would do to logits and this does not: fields, their values, and the neutral ones."""
    changes = {}
    for name, neutral in _NEUTRAL.items():
        value = getattr(getattr(model, "generation_config", None), name, None)
        is_empty = isinstance(value, (list, tuple, dict)) and not value
        if value is not None and not is_empty and (neutral is None or value != neutral):
            changes[name] = value, neutral
    return changes


def _check_generation(model: Any) -> None:
    for name, (value, neutral) in changes_of_logits(model).items():
        raise refusal(
            model,
            f"its generation_config has {name}={value!r:.60}, which is not supported; set "
            f"model.generation_config.{name} = {neutral}, or the same in its generation_config.json, for "
            "texts without it",
        )


def _check_sizes(call: str, sizes: dict[str, Any], token_budget: int | None) -> None:
    for name in sizes:
        if name not in _SIZES:
            raise TypeError(
                f"octavo.transformers: {call} has no argument {name}; sizes are {', '.join(_SIZES)}, and how "
                "tokens are drawn says a Sampling"
            )
    # Those with which defaults of the others are computed; the cache checks the rest.
    numbers = {name: sizes[name] for name in ("page_size", "max_batch", "max_tokens") if name in sizes}
    _check_numbers(call, **numbers, **({} if token_budget is None else {"token_budget": token_budget}))


def _check_numbers(call: str, **numbers: int) -> None:
    for name, number in numbers.items():
        if int_argument(call, name, number) < 1:
            raise ValueError(f"{call}: {name} ({number}) must be at least 1")


def _rope_types(config: Any) -> set[str]:
    """Those of all layers: a config has parameters of one rotary embedding, or of one for each layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(x for x in parameters.values() if isinstance(x, dict))]
    return {str(kind["rope_type"]) for kind in kinds if "rope_type" in kind}


def make_scheduler(
    model: PreTrainedModel,
    *,
    stop_tokens: Iterable[int] | None = None,
    token_budget: int | None = None,
    prefix_cache: bool | None = None,
    cuda_graphs: bool | None = None,
    **sizes: Any,
) -> Scheduler:
    """Make a scheduler that serves a model: octavo.serving.Scheduler over an octavo.KVCache of its own.

    The model's attention is Octavo's from then on, and the model is in eval mode.

    Args:
        model: a decoder with a head, such as AutoModelForCausalLM gives.
        stop_tokens: that end every text. Default: the eos_token_id of the model's generation config.
        token_budget: tokens in a batch. Default: the cache's max_tokens.
        prefix_cache: whether prefixes are found again. Default: if a layer without a window allows it.
        cuda_graphs: whether steps in which each sequence has one token are padded to some batch sizes, and
            replay a CUDA graph for each, which is captured when it first comes. The model must then stay as
            it is: its weights where they are, its adapters the same; its hooks run when a graph is captured,
            not when it is replayed. While one is captured no other thread of the process may wait for a GPU.
            Graphs need memory beside the cache, which memory_fraction should leave. Default: on a CUDA
            device, unless a step cannot be captured, as where the model waits for the GPU in a forward pass;
            then there is a warning.
        **sizes: as for octavo.KVCache: num_pages, memory or memory_fraction, page_size, max_batch,
            max_tokens, max_length, num_host_pages, and dtype for a cache of codes. Default of max_batch: 64,
            or the tokens in a batch if these are fewer.

    Raises:
        ValueError: the model cannot be served, as generate_batch says, its generation config included; sizes
            out of range. The model is then as before. With cuda_graphs=True also if the model is not on a
            CUDA device, and, when a step comes to it, if that cannot be captured.
        TypeError: the model is none; an argument that neither this nor octavo.KVCache has.
    """
    _check_sizes("make_scheduler", sizes, token_budget)
    served = ServedModel(model)
    try:
        return _scheduler(served, stop_tokens, token_budget, prefix_cache, cuda_graphs, sizes)
    except BaseException:
        served.close()
        raise


def _scheduler(
    served: ServedModel,
    stop_tokens: Iterable[int] | None,
    token_budget: int | None,
    prefix_cache: bool | None,
    cuda_graphs: bool | None,
    sizes: dict[str, Any],
) -> Scheduler:
    model = served._model
    if prefix_cache is None:
        prefix_cache = served.finds_prefixes
    sizes = {"max_batch": _default_batch(sizes, token_budget), **sizes}
    if stop_tokens is None:
        config = model.generation_config
        stop_tokens = _as_list(config.eos_token_id if config is not None else None)
    graphs = served.make_graphs(cuda_graphs)
    cache = served.make_cache(prefix_cache=prefix_cache, **sizes)
    return Scheduler(
        cache,
        functools.partial(served.forward, graphs=graphs),
        token_budget=token_budget,
        decode_batches=() if graphs is None else decode_batches(cache.max_batch),
        max_length=getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None),
        stop_tokens=stop_tokens,
        vocab_size=model.get_input_embeddings().weight.shape[0],
    )


def _tokens_of(i: int, prompt: Sequence[int] | Tensor) -> list[int]:
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise TypeError(
            f"generate_batch: prompts[{i}] must be the tokens of a prompt, integers in a list or a tensor of "
            f"one axis; got {prompt!r:.60}"
        ) from None


def _default_batch(sizes: dict[str, Any], token_budget: int | None) -> int:
    """The cache's default, or as many sequences as have a token each in a batch."""
    numbers = (sizes.get("max_tokens"), token_budget)
    return min([_MAX_BATCH, *(max(1, x) for x in numbers if x is not None)])


def _as_list(tokens: int | list[int] | None) -> list[int]:
    if tokens is None:
        return []
    return [tokens] if isinstance(tokens, int) else list(tokens)


@contextlib.contextmanager
def _served(model: PreTrainedModel) -> Iterator[ServedModel]:
    served = ServedModel(model)
    try:
        yield served
    finally:
        served.close()


def generate_batch(
    model: PreTrainedModel,
    prompts: Iterable[Sequence[int] | Tensor],
    *,
    max_new_tokens: int,
    sampling: Sampling = _GREEDY,
    num_samples: int = 1,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    stop_tokens: Iterable[int] | None = None,
    stop_sequences: Iterable[Iterable[int]] = (),
    logprobs: bool = False,
    token_budget: int | None = None,
    prefix_cache: bool | None = None,
    cuda_graphs: bool | None = None,
    **sizes: Any,
) -> list[Request]:
    """Generate text after several prompts, in one continuous batch over pages.

    Prompts of any lengths run together, without padding: octavo.serving.Scheduler with an octavo.KVCache,
    which reads the model's layers, heads, windows, dtype and device from the model itself. Greedy texts are
    those of ``model.generate(do_sample=False)``, and those of beams those of its beam search with the same
    length_penalty and early_stopping=False.

    Of the model's generation config the eos_token_id is used. What it has for sampling and beam search, such
    as temperature, top_p or length_penalty, is not: the arguments say that. What would change the logits
    otherwise, such as repetition_penalty or suppress_tokens, is refused unless it has no effect.

    A model is served if its attention goes through transformers' AttentionInterface, is causal, in a sliding
    window or not, and is all that its tokens see of each other. BLOOM is, too; models whose rotary embedding
    depends on the longest text of a batch (rope_type "longrope" or "dynamic") are not. Before it generates
    anything the model has to give the logits of a short text through the pages, as it does without them.

    Args:
        model: a decoder with a head, such as AutoModelForCausalLM gives. Its attention and the mode of
            its modules, train or eval, are set for the call, and then as before.
        prompts: tokens of each: lists, or tensors of one axis.
        max_new_tokens: for each sample, at most.
        sampling: as for Scheduler.submit(), as are num_samples, num_beams, length_penalty, stop_sequences and
            logprobs. With a seed, prompt i draws from seed + i.
        num_samples: of each prompt, which is computed once for all of them.
        num_beams: of beam search; 1: none.
        length_penalty: of beam search.
        stop_tokens: that end a text. Default: the eos_token_id of the model's generation config.
        stop_sequences: that end a text.
        logprobs: whether the requests have the logarithms of their tokens' probabilities.
        token_budget: tokens in a batch. Default: the cache's max_tokens.
        prefix_cache: whether prompts share what they have in common. Default: if a layer without a window
            allows it.
        cuda_graphs: as for make_scheduler.
        **sizes: as for octavo.KVCache: num_pages, memory or memory_fraction, page_size, max_batch,
            max_tokens, max_length, num_host_pages, and dtype for a cache of codes. Default: pages for all
            prompts, or for max_batch of them if there are more; max_batch as for make_scheduler.

    Returns:
        octavo.serving.Request of each prompt, finished: ``request.tokens(sample)`` are the new tokens.

    Raises:
        ValueError: the model cannot be served, and which it is; a number out of range; a prompt that the
            model or the cache has no room for.
        TypeError: a prompt is not of integers; a model, number or sampling that is none; an argument that
            neither this nor octavo.KVCache has.
    """
    _check_sizes("generate_batch", sizes, token_budget)
    _check_numbers(
        "generate_batch", max_new_tokens=max_new_tokens, num_samples=num_samples, num_beams=num_beams
    )
    if not isinstance(sampling, Sampling):
        raise TypeError(
            f"generate_batch: sampling must be an octavo.serving.Sampling; got {type(sampling).__name__}"
        )
    texts = [_tokens_of(i, prompt) for i, prompt in enumerate(prompts)]
    if not {"num_pages", "memory", "memory_fraction"} & sizes.keys() and texts:
        longest = max(map(len, texts)) + max_new_tokens
        sizes.setdefault("max_batch", _default_batch(sizes, token_budget))
        at_once = min(len(texts) * max(num_samples, num_beams), sizes["max_batch"])
        sizes["num_pages"] = max(at_once, num_samples, num_beams) * -(-longest // sizes.get("page_size", 16))
        sizes.setdefault("max_length", longest)
    if not texts:
        return []
    with _served(model) as served:
        scheduler = _scheduler(served, stop_tokens, token_budget, prefix_cache, cuda_graphs, sizes)
        requests = [
            scheduler.submit(
                text,
                max_tokens=max_new_tokens,
                sampling=_seeded(sampling, number),
                num_samples=num_samples,
                num_beams=num_beams,
                length_penalty=length_penalty,
                stop_sequences=stop_sequences,
                logprobs=logprobs,
            )
            for number, text in enumerate(texts)
        ]
        for _ in scheduler.run():
            pass
    return requests


def _seeded(sampling: Sampling, number: int) -> Sampling:
    if sampling.seed is None:
        return sampling
    return Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed + number)
