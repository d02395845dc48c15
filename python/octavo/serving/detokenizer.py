"""From tokens to text while they come, for any tokenizer that can decode a list of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

UNFINISHED = "\ufffd"  # what decoders make of bytes that are no whole character
_SEED = 4  # tokens of a prompt, to which those of an answer are added
_MOST_UNREAD = 16  # tokens that wait for the rest of a character, before it is looked what is sure already
_MOST_BROKEN = 3  # bytes at the end of a text that may still become a character


class Detokenizer:
    """Turns tokens into text as they come; a character that spans tokens comes with its last one.

    The texts of `feed` and `flush` together are what `decode` makes of all tokens at once. To find what a
    token adds, those since the last text but one are decoded with it and without it, as in the text
    generation inference server of Hugging Face: decoders treat the beginning of a text in their own ways.

    Args:
        decode: the text of tokens; control tokens have none.
        byte_tokens: those that stand for one byte each, of byte fallback. Their decoder makes U+FFFD of
            every byte of a run that is not UTF-8 as a whole, so that a run has to wait for its end.
        prompt: tokens that the text continues, of which nothing is returned. A character within which they
            end is returned with its last token.
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
        # Where a prompt ends within a character, those without some of its last bytes: as a run of bytes is
        # decoded as a whole, all of its characters may have become U+FFFD.
        self._shorter: list[str] = []
        if self._text.endswith(UNFINISHED):
            ends = range(max(0, self._num_read - _MOST_BROKEN), self._num_read)
            self._shorter = [decode(self._tokens[:end]) for end in ends]

    def feed(self, token: int) -> str:
        """The text that this token completes; "" while a character still lacks bytes."""
        self._tokens.append(token)
        # One without a text, such as a control token, ends no run of bytes.
        if token in self._byte_tokens or not self._decode([token]):
            return ""
        text = self._decode(self._tokens)
        if not self._added(text):
            return ""
        if text.endswith(UNFINISHED):
            is_long = len(self._tokens) - self._num_read >= _MOST_UNREAD
            return self._read_part(text) if is_long else ""
        return self._read(text)

    def flush(self) -> str:
        """The rest, once there are no more tokens."""
        if len(self._tokens) == self._num_read:
            return ""
        return self._read(self._decode(self._tokens))

    def _read(self, text: str, num_tokens: int | None = None) -> str:
        """What these tokens (default: all) add to what was returned; `text` is that of all of these."""
        new = self._added(text)
        end = len(self._tokens) if num_tokens is None else num_tokens
        self._tokens, self._num_read = self._tokens[self._num_read :], end - self._num_read
        self._text = self._decode(self._tokens[: self._num_read])
        self._shorter = []
        return new

    def _added(self, text: str) -> str:
        """What a text adds to the one that was returned."""
        if not self._text.endswith(UNFINISHED):
            return text[len(self._text) :]
        texts = (self._text, *self._shorter)
        return text[max(_num_common(text, returned) for returned in texts) :]

    def _read_part(self, text: str) -> str:
        """What is sure of a text that ends in broken characters, if all of it does: the last bytes wait.

        So the tokens do not pile up, all of which every step decodes. They are parted where that changes
        nothing, neither of the text that they have now nor of what they make of tokens to come.
        """
        kept = self._tokens[self._num_read :]
        kept_text = self._decode(kept)
        last = len(self._tokens) - 1
        for end in range(last, max(last - _MOST_UNREAD // 2, self._num_read), -1):
            if self._tokens[end - 1] in self._byte_tokens and self._tokens[end] in self._byte_tokens:
                continue  # within a run
            head = self._decode(self._tokens[:end])
            kept_head = self._decode(kept[: end - self._num_read])
            rest = text[len(head) :]
            if len(rest) >= _MOST_BROKEN and head + rest == text and kept_head + rest == kept_text:
                return self._read(head, end)
        return ""


def _num_common(a: str, b: str) -> int:
    """With how many characters both begin."""
    places = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(places, min(len(a), len(b)))


def byte_tokens(token_to_id: Callable[[str], int | None]) -> frozenset[int]:
    """The tokens of byte fallback, <0x00> to <0xFF>, as far as a vocabulary has them."""
    found = (token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token for token in found if token is not None)
