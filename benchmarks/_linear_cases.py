"""What bench_linear.py times: products with weights, alone and as in a layer. Needs no array library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import _examples_path  # noqa: F401
from _report import floor_us
from llama.config import CONFIGS, Config

BYTES = 2  # of an element: bfloat16 or float16


@dataclass(frozen=True)
class Product:
    """x [M, depth] times w [w_rows, depth], transposed."""

    w_rows: int
    depth: int
    gated: bool = False  # silu(first half of the result) * second half
    residual: bool = False  # adds the input of the product before

    @property
    def outputs(self) -> int:
        return self.w_rows // 2 if self.gated else self.w_rows

    @property
    def num_bytes(self) -> int:
        """The bytes of the weights."""
        return BYTES * self.w_rows * self.depth


@dataclass(frozen=True)
class Case:
    """Products one after the other: each but the first takes the first columns of the result before."""

    label: str
    num_rows: int  # M
    products: tuple[Product, ...]

    @property
    def name(self) -> str:
        return f"{self.label}_m{self.num_rows}"

    @property
    def num_bytes(self) -> int:
        return sum(product.num_bytes for product in self.products)

    def floor_us(self, read_bandwidth: float) -> float:
        """That of each product on its own, added up."""
        return sum(floor_us(product.num_bytes, read_bandwidth) for product in self.products)


def alone(w_rows: int, depth: int, rows: Iterable[int]) -> list[Case]:
    return [Case(f"{w_rows}x{depth}", num_rows, (Product(w_rows, depth),)) for num_rows in rows]


def layer(config: Config, with_gate: bool) -> tuple[Product, ...]:
    """Queries, keys and values; the output of attention; gate and up; down.

    Attention itself is left out: the second product takes the queries.
    """
    attended = config.num_q_heads * config.head_dim
    return (
        Product(config.qkv_size, config.hidden_size),
        Product(config.hidden_size, attended),
        Product(2 * config.ffn_size, config.hidden_size, gated=with_gate),
        Product(config.hidden_size, config.ffn_size, residual=with_gate),
    )


ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
ROWS_OF_LAYERS = (1, 8, 16, 64)
# The layers of Llama-2-7B, of Llama-3-8B with its head, and of Llama-3-70B on eight GPUs.
SHAPES = (
    (12288, 4096),
    (4096, 4096),
    (22016, 4096),
    (11008, 4096),
    (4096, 11008),
    (6144, 4096),
    (28672, 4096),
    (4096, 14336),
    (1280, 8192),
    (8192, 1024),
    (128256, 4096),
)
# Those of Llama-2-13B, Llama-3-70B on eight GPUs, Qwen2.5-7B, Qwen3-4B, and a square one.
OTHER_SHAPES = (
    (15360, 5120),
    (5120, 5120),
    (7168, 8192),
    (8192, 3584),
    (3584, 18944),
    (2560, 9728),
    (2048, 2048),
)
MODELS = {"7b": "llama-2-7b", "8b": "llama-3-8b"}

# What one call may choose from.
GROUPS: dict[str, list[Case]] = {
    "shapes": [case for shape in SHAPES for case in alone(*shape, ROWS)],
    "others": [case for shape in OTHER_SHAPES for case in alone(*shape, ROWS)],
    "layers": [
        Case(f"{label}_{kind}", num_rows, layer(CONFIGS[model], with_gate))
        for label, model in MODELS.items()
        for kind, with_gate in (("products", False), ("layer", True))
        for num_rows in ROWS_OF_LAYERS
    ],
}
TINY = [
    *alone(256, 512, (1, 5)),
    *(
        Case(f"tiny_{kind}", 3, layer(Config(1, 256, 384, 4, 2, 64, 0), with_gate))
        for kind, with_gate in (("products", False), ("layer", True))
    ),
]
