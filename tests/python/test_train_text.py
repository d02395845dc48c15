"""The text of examples/train.py: its documents, its tokens, and the batches of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

for package in ("rich", "tokenizers", "torch"):
    pytest.importorskip(package, reason=f"examples/train.py needs {package}")

import torch  # noqa: E402
from gpt.data import is_held_out  # noqa: E402
from train import PROMPTS  # noqa: E402

from support.small_gpt import MODEL, Document, Text, batches, get_documents, get_text  # noqa: E402


@pytest.fixture(scope="module")
def text() -> Text:
    return get_text()


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return get_documents()


def test_documents(documents: list[Document], text: Text) -> None:
    names = [document.name for document in documents]
    assert len(set(names)) == len(names) > 1000
    assert {"numpy.sum", "numpy.ndarray.sum", "numpy.linalg.qr", "numpy.random.Generator.normal"} <= set(
        names
    )
    last_names = [
        {n.rpartition(".")[2] for n in names if is_held_out(Document(n, "")) == held} for held in (0, 1)
    ]
    assert not last_names[0] & last_names[1]
    assert len(text.held_out) == sum(map(is_held_out, documents)) > len(documents) / 20
    assert len(text.training) + len(text.held_out) == len(documents)
    assert not set(names) & {prompt.strip() for prompt in PROMPTS}


def test_tokens(documents: list[Document], text: Text) -> None:
    for words in (documents[0].text, "naïve: ½ of 12\t🙂 日本語\n"):
        tokens = text.encode(words).tolist()
        assert tokens[0] == text.end_of_text
        assert text.end_of_text not in tokens[1:]
        assert text.decode(tokens[1:]) == words
    assert sum(map(len, text.training)) < sum(len(d.text.encode()) for d in documents) / 2
    assert Text(documents, MODEL.vocabulary).fingerprint == text.fingerprint
    assert Text(documents[:-1], MODEL.vocabulary).fingerprint != text.fingerprint
    with pytest.raises(ValueError, match=r"the text yields \d+ tokens, fewer than 4096"):
        Text(documents[:5], 4096)


# Batches


def test_an_epoch_has_the_documents_one_after_another(text: Text) -> None:
    of_epoch = batches()
    steps = [of_epoch[step] for step in range(of_epoch.steps_of_epoch)]
    tokens = np.concatenate([batch.tokens.numpy() for batch in steps])
    targets = np.concatenate([batch.targets.numpy() for batch in steps])
    np.testing.assert_array_equal(tokens[1:], targets[:-1])
    documents = np.split(tokens, np.flatnonzero(tokens == text.end_of_text))[1:-1]  # the last may be cut
    known = {document.tobytes() for document in text.training}
    found = {document.tobytes() for document in documents}
    assert found <= known and len(found) >= len(known) - 3
    assert sum(map(len, text.training)) - len(tokens) <= 256
    again = batches()
    assert torch.equal(
        again[of_epoch.steps_of_epoch + 3].tokens, of_epoch[of_epoch.steps_of_epoch + 3].tokens
    )
    assert not torch.equal(of_epoch[of_epoch.steps_of_epoch].tokens, steps[0].tokens)  # another order


def test_sequences_end_with_documents_and_rows(text: Text) -> None:
    for step in range(20):
        batch = batches()[step]
        starts = sorted({*range(0, 256, 64), *(batch.tokens == text.end_of_text).nonzero()[:, 0].tolist()})
        assert batch.cu_seqlens.tolist() == [*starts, 256]
        expected = [
            i for begin, end in zip(starts, [*starts[1:], 256], strict=True) for i in range(end - begin)
        ]
        assert batch.positions.tolist() == expected


def test_processes_share_a_batch(text: Text) -> None:
    whole = batches()[5]
    halves = [batches(process=process, num_processes=2)[5] for process in range(2)]
    for name in ("tokens", "targets", "positions"):
        assert torch.equal(torch.cat([getattr(half, name) for half in halves]), getattr(whole, name))
    lengths = [batch.cu_seqlens.diff() for batch in (*halves, whole)]
    assert torch.equal(torch.cat(lengths[:2]), lengths[2])


def test_batches_that_cannot_be(text: Text) -> None:
    with pytest.raises(ValueError, match=r"rows \(4\) must be a multiple of the number of processes \(3\)"):
        batches(num_processes=3)
    with pytest.raises(ValueError, match="too few for a step of 64000000"):
        batches(rows=1_000_000)
