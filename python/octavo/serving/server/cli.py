"""The command `python -m octavo.serving`."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import math
import os
import signal
import socket
import sys
from collections.abc import Sequence

import numpy as np
import uvicorn

from octavo import KVCache
from octavo.serving import Scheduler
from octavo.serving.server.app import create_app
from octavo.serving.server.engine import Engine
from octavo.serving.server.models import Model, load

DESCRIPTION = """\
Serve a language model over HTTP, as OpenAI's completions and chat completions, with a page at / that shows
the pages of its KV cache. Without --model that is SmolLM2-135M-Instruct, on the CPU."""

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Server(uvicorn.Server):
    """uvicorn's, which says where it listens, and lets the engine finish before it closes connections."""

    def __init__(self, config: uvicorn.Config, engine: Engine, grace_seconds: float, what: str) -> None:
        super().__init__(config)
        self._engine = engine
        self._grace_seconds = grace_seconds
        self._what = what
        engine.on_failure = self._give_up

    def _give_up(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens."""
        await super().startup(sockets)
        if self.started:
            host, port, *_ = self.servers[0].sockets[0].getsockname()
            where = f"[{host}]" if ":" in host else host
            print(f"octavo.serving: {self._what} at http://{where}:{port}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops: what runs gets the grace period; then it is told that the server stops."""
        draining = asyncio.ensure_future(self._engine.drain(self._grace_seconds))
        await super().shutdown(sockets)
        if self.force_exit:  # a second Ctrl-C
            draining.cancel()
        else:
            await draining


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    api_key = os.environ.get("OCTAVO_API_KEY") if args.api_key is None else args.api_key
    if api_key is not None and (not api_key or not api_key.isascii() or not api_key.isprintable()):
        parser.error("the API key must have printable ASCII characters, one or more")
    if api_key is not None and api_key != api_key.strip():  # of headers nobody keeps those spaces
        name = "OCTAVO_API_KEY" if args.api_key is None else "--api-key"
        parser.error(f"{name}: the API key must not begin or end with a space")
    is_local = _is_loopback(args.host)
    if not is_local and api_key is None and not args.no_api_key:
        parser.error(
            f"--host {args.host} can be reached from other machines: give --api-key, or OCTAVO_API_KEY in "
            "the environment; or --no-api-key to serve whoever can reach it"
        )
    if args.max_batch > args.token_budget:
        parser.error(
            f"--max-batch ({args.max_batch}) must be at most --token-budget ({args.token_budget}): each "
            "sequence of a step has a token"
        )
    try:
        model = load(
            args.model,
            device=args.device,
            array=args.array,
            dtype=args.dtype,
            cuda_graphs=False if args.no_cuda_graphs else None,
        )
        engine, what = _make_engine(args, model)
    except (ImportError, MemoryError, ValueError) as error:
        print(f"octavo.serving: {error}", file=sys.stderr)
        return 1
    if not is_local and api_key is None:
        print(f"octavo.serving: no API key: {args.host} serves whoever can reach it", file=sys.stderr)
    app = create_app(
        engine,
        model,
        api_key=api_key,
        local_only=is_local,
        host=args.host,
        max_body_bytes=args.max_body,
    )
    config = uvicorn.Config(
        app,
        host=args.host,
        port=args.port,
        lifespan="on",
        log_level=args.log_level,
        # Streams end by the engine's word before; this is for clients that do not read what they get.
        timeout_graceful_shutdown=math.ceil(args.grace) + 5,
    )
    server = Server(config, engine, args.grace, what)
    # uvicorn stops at these, and at its end sends them once more to whoever handled them before.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    server.run()
    was_clean = server.started and not server.force_exit and not server.lifespan.should_exit
    return 0 if was_clean and engine.failure is None else 1


def _make_engine(args: argparse.Namespace, model: Model) -> tuple[Engine, str]:
    limits = [limit for limit in (model.max_length, args.max_length) if limit is not None]
    if args.num_pages is None and args.memory is None and args.memory_fraction is None:
        args.memory = 2**30
    cache = model.make_cache(
        num_pages=args.num_pages,
        memory=args.memory,
        memory_fraction=args.memory_fraction,
        page_size=args.page_size,
        max_batch=args.max_batch,
        max_tokens=args.token_budget,
        max_length=min(limits, default=None),
        prefix_cache=model.finds_prefixes and not args.no_prefix_cache,
        **({} if args.kv_dtype is None else {"dtype": args.kv_dtype}),
    )
    if args.kv_dtype is not None:
        _check_kv_dtype(args.kv_dtype, model, cache)
    scheduler = Scheduler(
        cache,
        model.forward,
        stop_tokens=model.stop_tokens,
        decode_batches=() if model.decode_batches is None else model.decode_batches(cache.max_batch),
    )
    engine = Engine(scheduler, cache, model.tokenizer, max_in_flight=args.max_in_flight)
    pages = f"{cache.allocator.num_pages} pages of {args.page_size} tokens"
    return engine, f"{model.name}, {pages},"


def _check_kv_dtype(name: str, model: Model, cache: KVCache) -> None:
    """Raises ValueError where the model has no keys for such pages, of which the first request would die."""
    seq = cache.create()
    try:
        model.forward(cache.step([seq]), np.zeros(1, np.int64))
    except TypeError as error:
        raise ValueError(
            f"--kv-dtype {name}: {error}; pages of codes, such as int8, take keys of any"
        ) from error
    finally:
        cache.free(seq)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m octavo.serving", description=DESCRIPTION)
    add = parser.add_argument
    add(
        "--model",
        default="smollm2",
        help="smollm2; a name or folder, as from_pretrained of transformers takes it; or module:function, "
        "which returns an octavo.serving.server.Model (%(default)s)",
    )
    add("--device", choices=["cpu", "cuda"], default="cpu", help="(%(default)s)")
    add("--array", choices=["numpy", "torch", "cupy"], help="library of smollm2 (cpu: numpy; cuda: torch)")
    add(
        "--dtype",
        choices=["float32", "float16", "bfloat16"],
        help="(the model's; of smollm2 float32; on a GPU 16 bits)",
    )
    add("--host", default="127.0.0.1", help="(%(default)s: this machine alone)")
    add("--port", type=_port, default=8000, help="0: any that is free (%(default)s)")
    add("--api-key", help="that clients have to send ($OCTAVO_API_KEY, which other users cannot see)")
    add("--no-api-key", action="store_true", help="serve other machines without a key")
    pages = parser.add_mutually_exclusive_group()
    pages.add_argument("--num-pages", type=_positive, help="of the cache")
    pages.add_argument("--memory", type=_bytes, help="of the cache, such as 512M (1G)")
    pages.add_argument("--memory-fraction", type=float, help="of the free memory, for the cache")
    add("--page-size", type=_positive, default=16, help="tokens in a page (%(default)s)")
    add("--kv-dtype", help="of the cache, such as int8 (that of the model)")
    add("--no-prefix-cache", action="store_true", help="compute each prompt anew")
    add("--no-cuda-graphs", action="store_true", help="launch each kernel of a model of transformers anew")
    add("--max-batch", type=_positive, default=64, help="sequences in a step (%(default)s)")
    add("--token-budget", type=_positive, default=512, help="new tokens in a step (%(default)s)")
    add("--max-length", type=_positive, help="of a prompt and its answer, in tokens (the model's)")
    add(
        "--max-in-flight",
        type=_positive,
        default=256,
        help="answers that run or wait; status 429 beyond (%(default)s)",
    )
    add("--max-body", type=_bytes, default=4 * 2**20, help="of a request, in bytes (4M)")
    add("--grace", type=_seconds, default=30.0, help="seconds that answers get at a stop (%(default)g)")
    add("--log-level", choices=["warning", "info", "debug"], default="info", help="(%(default)s)")
    return parser


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no positive integer")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port")
    return int(text)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no duration")
    return seconds


def _bytes(text: str) -> int:
    unit = _UNITS.get(text[-1:].upper(), 1)
    number = text if unit == 1 else text[:-1]
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(
            f"{text} is no size: a positive integer of bytes, or of {', '.join(_UNITS)}, such as 512M"
        )
    return int(number) * unit
