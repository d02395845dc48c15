"""From tokens to text while they come, for any tokenizer that can decode a list of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

UNFINISHED = "\ufffd"  # what decoders make of bytes that are no whole character
_SEED = 4  # tokens of a prompt, to which those of an answer are added


class Detokenizer:
    """Turns tokens into text as they come; a character that spans tokens comes with its last one.

    The texts of `feed` and `flush` together are what `decode` makes of all tokens at once. To find what a
    token adds, those since the last text but one are decoded with it and without it, as in the text
    generation inference server of Hugging Face: decoders treat the beginning of a text in their own ways.

    Args:
        decode: the text of tokens; control tokens have none.
        byte_tokens: those that stand for one byte each, of byte fallback. Their decoder makes U+FFFD of
            every byte of a run that is not UTF-8 as a whole, so that a run has to wait for its end.
        prompt: tokens that the text continues. Of the last of these nothing is returned.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        byte_tokens: Collection[int] = frozenset(),
        prompt: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._byte_tokens = byte_tokens
        start = max(0, len(prompt) - _SEED)
        while start and prompt[start] in byte_tokens:  # a run is decoded as a whole
            start -= 1
        self._tokens = list(prompt[start:])
        self._num_read = len(self._tokens)  # tokens whose text was returned
        self._text = decode(self._tokens) if self._tokens else ""  # theirs

    def feed(self, token: int) -> str:
        """The text that this token completes; "" while a character still lacks bytes."""
        self._tokens.append(token)
        # One without a text, such as a control token, ends no run of bytes.
        if token in self._byte_tokens or not self._decode([token]):
            return ""
        text = self._decode(self._tokens)
        if len(text) <= len(self._text) or text.endswith(UNFINISHED):
            return ""
        return self._read(text)

    def flush(self) -> str:
        """The rest, once there are no more tokens."""
        if len(self._tokens) == self._num_read:
            return ""
        return self._read(self._decode(self._tokens))

    def _read(self, text: str) -> str:
        new = text[len(self._text) :]
        self._tokens = self._tokens[self._num_read :]
        self._num_read = len(self._tokens)
        self._text = self._decode(self._tokens)
        return new


def byte_tokens(token_to_id: Callable[[str], int | None]) -> frozenset[int]:
    """The tokens of byte fallback, <0x00> to <0xFF>, as far as a vocabulary has them."""
    found = (token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token for token in found if token is not None)
