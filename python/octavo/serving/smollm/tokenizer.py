"""Text to tokens and back, from the vocabulary, merges and chat template in the checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from octavo.serving.detokenizer import Detokenizer
from octavo.serving.smollm.weights import Checkpoint

CONTROL = 3  # GGUF's token type of <|im_start|> and the like


class ChatTokenizer:
    def __init__(self, checkpoint: Checkpoint) -> None:
        kind = checkpoint.field("tokenizer.ggml.model"), checkpoint.field("tokenizer.ggml.pre")
        if kind != ("gpt2", "smollm"):
            raise ValueError(f"the tokenizer is {'/'.join(kind)}, this one is gpt2/smollm")
        vocabulary = checkpoint.field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in checkpoint.field("tokenizer.ggml.merges")]
        self._tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
        # "smollm" splits every digit off, then applies GPT-2's pattern to bytes.
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        control = np.flatnonzero(np.array(checkpoint.field("tokenizer.ggml.token_type")) == CONTROL)
        self._tokenizer.add_special_tokens([AddedToken(vocabulary[i], special=True) for i in control])
        self.stop_tokens = frozenset(
            {checkpoint.field("tokenizer.ggml.eos_token_id"), self._tokenizer.token_to_id("<|endoftext|>")}
        )
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(checkpoint.field("tokenizer.chat_template"))

    @property
    def vocab_size(self) -> int:
        """Tokens are from 0 to vocab_size - 1."""
        return self._tokenizer.get_vocab_size()

    @property
    def vocabulary(self) -> Collection[str]:
        """The tokens, in the letters that stand for bytes."""
        return self._tokenizer.get_vocab().keys()

    def encode(self, text: str) -> list[int]:
        (encoded,) = self._tokenizer.encode_batch([text])  # unlike encode, without Python's lock
        return encoded.ids

    def encode_chat(self, prompt: str, system: str | None = None) -> list[int]:
        """The tokens up to where the assistant speaks. Without `system`, the template's own is used."""
        messages = [{"role": "system", "content": system}] if system is not None else []
        return self.encode_messages([*messages, {"role": "user", "content": prompt}])

    def encode_messages(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The tokens of messages, of role and content each, up to where the assistant speaks."""
        return self.encode(self._template.render(messages=messages, add_generation_prompt=True))

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)

    def text_stream(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """For the tokens of one answer, whose text continues that of the prompt."""
        return Detokenizer(self._tokenizer.decode, prompt=prompt)
