"""The text: NumPy's documentation, which NumPy ships as docstrings. Its tokens, and batches of them."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

END_OF_TEXT = "<|endoftext|>"
MODULES = ("numpy", "numpy.linalg", "numpy.fft", "numpy.random", "numpy.polynomial", "numpy.ma", "numpy.lib")
MODULES += ("numpy.strings", "numpy.char", "numpy.rec", "numpy.testing")


class Document(NamedTuple):
    name: str
    text: str


def numpy_documentation() -> list[Document]:
    """The documentation of NumPy's public functions, classes and methods, each once, under its name."""
    documents: dict[str, Document] = {}
    for module in map(importlib.import_module, MODULES):
        for name, thing in _public(module):
            things = [(f"{module.__name__}.{name}", thing)]
            if inspect.isclass(thing) and thing.__module__.startswith("numpy"):
                things += [(f"{things[0][0]}.{member}", value) for member, value in _public(thing)]
            for full_name, documented in things:
                if text := inspect.getdoc(documented):
                    documents.setdefault(text, Document(full_name, f"{full_name}\n\n{text}\n"))
    return list(documents.values())


def _public(parent: ModuleType | type) -> Iterator[tuple[str, object]]:
    for name, value in sorted(vars(parent).items()):
        if not name.startswith("_") and not inspect.ismodule(value):
            yield name, value


def is_held_out(document: Document) -> bool:
    """A tenth. Functions and methods of one name resemble each other, and are on the same side."""
    return zlib.crc32(document.name.rpartition(".")[2].encode()) % 10 == 0


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """GPT-2's kind: byte-pair encoding of bytes, so that any text has tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(f"the text yields {tokenizer.get_vocab_size()} tokens, fewer than {vocabulary}")
    return tokenizer


class Text:
    """Documents as tokens. Each begins with END_OF_TEXT, which the one before has to predict as its end."""

    def __init__(self, documents: Sequence[Document], vocabulary: int) -> None:
        training = [document.text for document in documents if not is_held_out(document)]
        held_out = [document.text for document in documents if is_held_out(document)]
        self.tokenizer = train_tokenizer(training, vocabulary)
        self.end_of_text: int = self.tokenizer.token_to_id(END_OF_TEXT)
        self.vocabulary = vocabulary
        self.training = [self.encode(text) for text in training]
        self.held_out = [self.encode(text) for text in held_out]

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.array([self.end_of_text, *self.tokenizer.encode(text).ids])

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    @property
    def fingerprint(self) -> str:
        """Another one where the tokens are others, such as those of another version of NumPy."""
        return hashlib.sha256(np.concatenate(self.training).tobytes()).hexdigest()

    @property
    def unigram_loss(self) -> float:
        """The loss on what is held out of a model that knows only how often each token occurs."""
        counts = 1 + np.bincount(np.concatenate(self.training), minlength=self.vocabulary)
        log_probabilities = np.log(counts / counts.sum())
        return float(-log_probabilities[np.concatenate(self.held_out)].mean())


@dataclass(frozen=True)
class Batch:
    """Packed sequences: parts of documents, none of them longer than the context."""

    tokens: Tensor  # int64 [total]
    targets: Tensor  # int64 [total]: the token after each
    positions: Tensor  # int64 [total]: of each token in its sequence
    cu_seqlens: Tensor  # int32 [sequences + 1]
    context: int

    def to(self, device: torch.device) -> Batch:
        arrays = (self.tokens, self.targets, self.positions, self.cu_seqlens)
        return Batch(*(array.to(device, non_blocking=True) for array in arrays), self.context)


class Batches:
    """The batch of every step, which follows from its number: so a run can go on at any of them.

    A step's batch has `rows` rows of `context` tokens, of which each process gets its share. The documents of
    an epoch follow each other in an order of its own. They are cut where a row ends, and what follows is a
    sequence of its own; so the sequences do not depend on the number of processes.
    """

    def __init__(
        self,
        documents: Sequence[NDArray[np.int64]],
        *,
        context: int,
        rows: int,
        seed: int,
        process: int = 0,
        num_processes: int = 1,
    ) -> None:
        if rows % num_processes:
            raise ValueError(f"rows ({rows}) must be a multiple of the number of processes ({num_processes})")
        self._documents = documents
        self._context = context
        self._seed = seed
        self._tokens_of_step = rows * context
        self._share = rows // num_processes * context
        self._begin = process * self._share
        total = sum(map(len, documents))
        self.steps_of_epoch = (total - 1) // self._tokens_of_step  # the last token is a target only
        if self.steps_of_epoch == 0:
            raise ValueError(f"the text has {total} tokens, too few for a step of {self._tokens_of_step}")
        self._epoch = -1
        self._stream = np.empty(0, np.int64)  # of this epoch
        self._is_first = np.empty(0, np.bool_)  # whether a token begins a document

    def __getitem__(self, step: int) -> Batch:
        epoch, step_of_epoch = divmod(step, self.steps_of_epoch)
        if epoch != self._epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._documents))
            documents = [self._documents[i] for i in order]
            self._stream = np.concatenate(documents)
            self._is_first = np.zeros(len(self._stream), np.bool_)
            self._is_first[np.cumsum([0, *map(len, documents[:-1])])] = True
            self._epoch = epoch
        begin = step_of_epoch * self._tokens_of_step + self._begin
        end = begin + self._share
        index = np.arange(self._share)
        is_first = (index % self._context == 0) | self._is_first[begin:end]
        starts = np.flatnonzero(is_first)
        positions = index - np.maximum.accumulate(np.where(is_first, index, 0))
        return Batch(
            tokens=torch.from_numpy(self._stream[begin:end]),
            targets=torch.from_numpy(self._stream[begin + 1 : end + 1]),
            positions=torch.from_numpy(positions),
            cu_seqlens=torch.from_numpy(np.append(starts, self._share).astype(np.int32)),
            context=self._context,
        )
