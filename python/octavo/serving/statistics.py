"""What the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Statistics:
    """Counts since the scheduler was made, and of this moment."""

    num_steps: int = 0
    num_waiting: int = 0
    """Sequences that hold no row of the batch: not begun, or put aside."""
    num_running: int = 0
    num_requests: int = 0
    num_finished: int = 0
    """Requests that came to an end by themselves."""
    num_cancelled: int = 0
    prefill_tokens: int = 0
    """Computed; those of a sequence whose pages were taken away count again."""
    prefill_seconds: float = 0.0
    """What the steps with any prefill in them took."""
    decode_tokens: int = 0
    """Tokens of the other steps."""
    decode_seconds: float = 0.0
    generated_tokens: int = 0
    """Given to callers."""
    asked_tokens: int = 0
    """What the sequences that began would have computed without the prefix cache."""
    found_tokens: int = 0
    """Those of them that were found in the prefix cache."""
    num_preemptions: int = 0
    num_moves_to_host: int = 0
    """Preemptions that kept what had been computed in host memory."""
    num_pages: int = 0
    num_used_pages: int = 0
    num_shared_pages: int = 0
    waste_percent: float = 0.0
    """Slots of used pages without a token."""
    peak_used_pages: int = 0
    peak_unshared_pages: int = 0
    """What the sequences of the step that used the most pages would have held without sharing."""
    peak_waste_percent: float = 0.0
    """The waste in that step."""

    @property
    def hit_rate(self) -> float:
        """The part of asked_tokens that the prefix cache had."""
        return self.found_tokens / self.asked_tokens if self.asked_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated, over the time of all steps."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.generated_tokens / seconds if seconds else 0.0
