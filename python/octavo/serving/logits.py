"""The logits of a batch, of which no more comes to the host than is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@runtime_checkable
class Logits(Protocol):
    """Logits that stay where they are, such as on a GPU, as ``forward`` of a Scheduler may return them.

    They are read before `forward` is called again.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """[batch, vocabulary]."""
        ...

    def best(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the likeliest token of each row, of equally likely ones the first, and its logit, [batch].

        The logit of a row with a NaN is NaN.
        """
        ...

    def rows(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Return these rows, [len(rows), vocabulary]."""
        ...


class HostLogits:
    """Logits on the host."""

    def __init__(self, logits: NDArray[np.float32]) -> None:
        self._logits = logits

    @property
    def shape(self) -> tuple[int, ...]:
        return self._logits.shape

    def best(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        tokens = self._logits.argmax(axis=1)
        return tokens, self._logits[np.arange(len(tokens)), tokens]

    def rows(self, rows: Sequence[int]) -> NDArray[np.float32]:
        return self._logits[rows]


def _on_host(logits: Any) -> NDArray[np.float32]:
    if str(getattr(logits, "dtype", None)) == "torch.bfloat16":  # NumPy has no such dtype
        logits = logits.float()
    try:
        return np.asarray(logits, np.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            "Scheduler.step: forward must return logits that numpy.asarray takes as float32, or "
            f"octavo.serving.Logits; got {type(logits).__name__}: {error}"
        ) from error


class BatchLogits:
    """What a scheduler has asked of a batch's logits: the likeliest tokens, and some rows.

    Args:
        logits: that a forward returned: Logits, or what numpy.asarray takes.
        num_rows: of the batch.
        rows: those that are wanted on the host.

    Raises:
        ValueError: these are no logits of a batch.
    """

    def __init__(self, logits: Any, num_rows: int, rows: Sequence[int]) -> None:
        if not isinstance(logits, Logits):
            logits = HostLogits(_on_host(logits))
        if len(logits.shape) != 2 or logits.shape[0] != num_rows:
            raise ValueError(
                f"Scheduler.step: forward must return logits of shape [{num_rows}, vocabulary]; "
                f"got {list(logits.shape)}"
            )
        best, largest = logits.best()
        wrong = np.flatnonzero(~np.isfinite(largest))
        if len(wrong):
            raise ValueError(
                "Scheduler.step: forward must return logits with a finite maximum in each row; "
                f"got {largest[wrong[0]]} in row {wrong[0]}"
            )
        self._best: list[int] = best.tolist()
        self._places = {row: place for place, row in enumerate(rows)}
        self._rows = logits.rows(rows) if rows else None

    def best(self, row: int) -> int:
        """Return the likeliest token of a row."""
        return self._best[row]

    def rows(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Return some of the rows that were wanted, float32 [len(rows), vocabulary]."""
        assert self._rows is not None
        result: NDArray[np.float32] = self._rows[[self._places[row] for row in rows]]
        return result
