"""Paged decode in JAX programs on a GPU: octavo.jax beside JAX's own Pallas kernel.

    python benchmarks/bench_jax.py [--rounds 20] [--json rows.jsonl]

`attention` is a loop over tokens of the attentions of a few layers, each over pages of its own, so that none
finds them in the L2 cache. `decode loop` appends a token to every sequence before each, in a cache that the
program was given (Pallas has no append: XLA scatters). Microseconds a layer and token, the median over the
rounds. Pallas runs with several numbers of splits. Each contestant's first result is checked against float64.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import _support_path  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
from _report import append_row

import octavo.jax
from support import cases, oracle
from support.case import Case

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16  # of all cases
CASES = cases.named("8b_b1_s8192", "8b_b32_s2048", "8b_b64_s4096")
PALLAS_SPLITS = (2, 16, 32)  # on an H200, 4 and 8 are faster on none of the shapes
PROGRAM_BYTES = 80e9  # read by one run of a program, beside which its start does not count
POOL_BYTES = 300 << 20  # of keys and values in all layers, at least
MIN_LAYERS = 4

Cache = tuple[jax.Array, jax.Array]
Program = Callable[[Cache], tuple[Cache, jax.Array]]


@dataclass(frozen=True)
class Row:
    case: str
    program: str
    contestant: str
    us: float
    num_bytes: int  # of keys and values in a layer
    jax: str
    device: str


@dataclass(frozen=True)
class Contestant:
    name: str
    attend: Callable[[jax.Array, Cache, jax.Array, jax.Array], jax.Array]
    append: Callable[[jax.Array, Cache, jax.Array, jax.Array], Cache]  # the same token as key and value
    cache_of: Callable[[jax.Array], jax.Array]  # from [num_pages, page_size, num_kv_heads, head_dim]


def contestants() -> Iterator[Contestant]:
    yield Contestant(
        "octavo",
        lambda q, cache, table, lens: octavo.jax.paged_attention(q, *cache, table, lens),
        lambda kv, cache, table, lens: octavo.jax.append_kv(kv, kv, *cache, table, lens),
        lambda pages: pages,
    )
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    def attend(q: jax.Array, cache: Cache, table: jax.Array, lens: jax.Array, splits: int) -> jax.Array:
        scaled = (q * HEAD_DIM**-0.5).astype(q.dtype)
        return paged_attention(scaled, *cache, table, lens, k_splits=splits)

    def append(kv: jax.Array, cache: Cache, table: jax.Array, lens: jax.Array) -> Cache:
        page = jnp.take_along_axis(table, (lens[:, None] - 1) // PAGE_SIZE, axis=1)[:, 0]
        slot = (lens - 1) % PAGE_SIZE
        k, v = (pages.at[:, page, slot].set(kv.transpose(1, 0, 2)) for pages in cache)
        return k, v

    for splits in PALLAS_SPLITS:
        yield Contestant(
            f"pallas, {splits} splits",
            functools.partial(attend, splits=splits),
            append,
            lambda pages: pages.transpose(2, 0, 1, 3),
        )


def expected(q: jax.Array, pages: jax.Array, table: np.ndarray, length: int) -> np.ndarray:
    """Float64 attention of the first sequence, whose values are its keys: [num_q_heads, head_dim]."""
    used = jnp.asarray(table[0, : -(-length // PAGE_SIZE)])
    kv = np.array(pages[used], np.float64).reshape(-1, NUM_KV_HEADS, HEAD_DIM)[:length]
    sees_all = np.ones((1, length), bool)
    out, *_ = oracle.attend(np.array(q[:1], np.float64), kv, kv, sees_all, HEAD_DIM**-0.5, 0.0, None)
    return out[0]


class Problem:
    """One case's arrays, and the programs over them."""

    def __init__(self, case: Case) -> None:
        batch, length = case.batch, case.seqlens_k[0]
        columns = length // PAGE_SIZE
        self.num_bytes = case.kv_bytes
        layers = max(MIN_LAYERS, -(-POOL_BYTES // self.num_bytes))
        num_pages = layers * batch * columns
        tables = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
        self.tables = [jnp.asarray(table) for table in tables.reshape(layers, batch, columns)]
        self.tokens = math.ceil(PROGRAM_BYTES / self.num_bytes / layers)
        self.steps = layers * self.tokens
        self.lens = jnp.full(batch, length, jnp.int32)
        keys = jax.random.split(jax.random.key(0), 2)
        self.q = jax.random.normal(keys[0], (batch, NUM_Q_HEADS, HEAD_DIM), jnp.bfloat16)
        shape = num_pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM
        self.pages = jax.random.normal(keys[1], shape, jnp.bfloat16)
        self.expected = expected(self.q, self.pages, np.array(self.tables[0]), length)

    def check(self, contestant: Contestant, cache: Cache) -> None:
        out = np.array(contestant.attend(self.q, cache, self.tables[0], self.lens)[0], np.float64)
        error = np.abs(out - self.expected).max() / np.abs(self.expected).max()
        assert error < 0.02, f"{contestant.name} is off by {error}"

    def attention(self, contestant: Contestant) -> Program:
        def token(_: jax.Array, state: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
            cache, q = state
            for table in self.tables:
                q = contestant.attend(q, cache, table, self.lens)
            return cache, q

        return lambda cache: jax.lax.fori_loop(0, self.tokens, token, (cache, self.q))

    def decode_loop(self, contestant: Contestant) -> Program:
        def token(i: jax.Array, state: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
            cache, q = state
            lens = self.lens - i % PAGE_SIZE  # the last tokens, again and again
            for table in self.tables:
                cache = contestant.append(q[:, :NUM_KV_HEADS], cache, table, lens)
                q = contestant.attend(q, cache, table, lens)
            return cache, q

        return lambda cache: jax.lax.fori_loop(0, self.tokens, token, (cache, self.q))


def compile_program(program: Program, cache: Cache) -> jax.stages.Compiled:
    return jax.jit(program, donate_argnums=0).lower(cache).compile()


def time_program(program: Program, cache: Cache, rounds: int) -> tuple[float, Cache]:
    """Median seconds of a run. The program is given the cache, and returns it."""
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        cache, out = program(cache)
        out.block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]), cache


def measure(case: Case, rounds: int) -> Iterator[Row]:
    problem = Problem(case)
    device = jax.devices()[0].device_kind
    for contestant in contestants():
        cache = contestant.cache_of(problem.pages) + 0, contestant.cache_of(problem.pages) + 0
        problem.check(contestant, cache)
        sources = {"attention": problem.attention(contestant), "decode loop": problem.decode_loop(contestant)}
        compile_it = functools.partial(compile_program, cache=cache)
        with ThreadPoolExecutor() as pool:
            programs = dict(zip(sources, pool.map(compile_it, sources.values()), strict=True))
        for name, program in programs.items():
            seconds, cache = time_program(program, cache, rounds)
            us = round(seconds / problem.steps * 1e6, 2)
            yield Row(case.name, name, contestant.name, us, problem.num_bytes, jax.__version__, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="append one row a measurement to this file")
    arguments = parser.parse_args()
    for case in CASES:
        for row in measure(case, arguments.rounds):
            print(f"{row.case:14} {row.program:12} {row.contestant:18} {row.us:8.1f} us", flush=True)
            if arguments.json:
                append_row(arguments.json, asdict(row))


if __name__ == "__main__":
    main()
