"""The shapes of a Llama. Needs no array library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def qkv_size(self) -> int:
        """Rows of the matrix that makes the queries, keys and values of all heads."""
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def elements_of_layers(self) -> int:
        """Elements of the weights of all layers."""
        matrices = self.qkv_size + self.num_q_heads * self.head_dim + 3 * self.ffn_size
        return self.num_layers * self.hidden_size * (matrices + 2)

    @property
    def elements_of_a_step(self) -> int:
        """Elements of the weights that a step reads: all but the embedding, of which it reads a few rows."""
        return self.elements_of_layers + self.hidden_size * (self.vocabulary + 1)

    @property
    def elements(self) -> int:
        """Elements of all weights."""
        return self.elements_of_a_step + self.hidden_size * self.vocabulary

    @property
    def elements_of_a_token(self) -> int:
        """Elements of the keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


CONFIGS = {
    "tiny": Config(2, 64, 160, 4, 2, 32, 500),
    "llama-2-7b": Config(32, 4096, 11008, 32, 32, 128, 32000),
    "llama-3-8b": Config(32, 4096, 14336, 32, 8, 128, 128256, rope_theta=500000.0),
}
