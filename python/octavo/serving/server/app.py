"""The HTTP side: OpenAI's completions and chat completions, the page that shows the cache, and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from importlib import resources
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from octavo.serving import Sampling
from octavo.serving.server.engine import Engine, Job, Stream
from octavo.serving.server.errors import ApiError, too_long
from octavo.serving.server.guard import CountRequests, Guard
from octavo.serving.server.metrics import render
from octavo.serving.server.models import Model
from octavo.serving.server.protocol import Options, parse_chat, parse_completion, parse_json
from octavo.serving.server.responses import (
    DONE,
    ChatFormat,
    CompletionFormat,
    Format,
    Usage,
    error_event,
    event,
)
from octavo.serving.server.text import Delta

_Result = TypeVar("_Result")
_Text = TypeVar("_Text")
_PACKAGE = "octavo.serving.server"
_PAGE = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
}
_EVENTS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

BODY_SECONDS = 30.0  # that a client may take to send a body
SEND_SECONDS = 60.0  # that it may take to make room for the next events
PAGE_SECONDS = 0.2  # between two looks at the cache


class Api:
    """The endpoints.

    Args:
        engine: that runs the model.
        model: what it runs.
        max_body_bytes: of a request.
    """

    def __init__(self, engine: Engine, model: Model, max_body_bytes: int) -> None:
        self._engine = engine
        self._model = model
        self._max_body_bytes = max_body_bytes
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """The routes of the application."""
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/events", self.events, methods=["GET"]),
            Route("/", _file("page.html", "text/html"), methods=["GET"]),
            Route("/page.js", _file("page.js", "text/javascript"), methods=["GET"]),
            Route("/page.css", _file("page.css", "text/css"), methods=["GET"]),
        ]

    # Generation

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        tokenizer = self._model.tokenizer
        with self._engine.arrival():
            asked = parse_completion(await self._body(request), self._engine.max_length)
            self._check_model(asked.options)
            self._engine.check_room(asked.options.n * len(asked.prompts), num_arrived=1)
            for prompt in asked.prompts:
                self._check_size("prompt", prompt if isinstance(prompt, str) else "")
            prompts = [
                await _encode("prompt", tokenizer.encode, prompt) if isinstance(prompt, str) else list(prompt)
                for prompt in asked.prompts
            ]
        form = CompletionFormat(self._model.name, asked.options.include_usage)
        return await self._generate(request, asked.options, prompts, form, "prompt", continues=True)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        with self._engine.arrival():
            asked = parse_chat(await self._body(request))
            self._check_model(asked.options)
            self._engine.check_room(asked.options.n, num_arrived=1)
            self._check_size("messages", *(message["content"] for message in asked.messages))
            prompt = await _encode("messages", self._model.tokenizer.encode_messages, asked.messages)
        form = ChatFormat(self._model.name, asked.options.include_usage)
        return await self._generate(request, asked.options, [prompt], form, "messages", continues=False)

    async def _generate(
        self,
        request: Request,
        options: Options,
        prompts: Sequence[Sequence[int]],
        form: Format,
        prompt_field: str,
        *,
        continues: bool,
    ) -> Response:
        job = Job(
            prompts=prompts,
            num_samples=options.n,
            max_tokens=[self._max_tokens(prompt, options, prompt_field) for prompt in prompts],
            sampling=Sampling(
                temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, seed=options.seed
            ),
            stops=options.stop,
            logprobs=options.logprobs,
            continues=continues,
        )
        stream = await self._engine.submit(job)
        if options.stream:
            return EventStream(self._events(stream, form, options), lambda: self._engine.close(stream))
        try:
            deltas, usage = await _until_disconnect(request.receive, _collect(stream))
        finally:
            self._engine.close(stream)
        return JSONResponse(form.whole(deltas, usage))

    async def _events(self, stream: Stream, form: Format, options: Options) -> AsyncGenerator[bytes, None]:
        num_tokens = 0
        yield b"".join(event(chunk) for chunk in form.first_chunks(stream.job.num_answers))
        try:
            async for deltas in stream.deltas():
                num_tokens += sum(delta.num_tokens for delta in deltas)
                yield b"".join(event(chunk) for delta in deltas for chunk in form.chunks(delta))
        except ApiError as error:
            yield error_event(error)
        else:
            if options.include_usage:
                yield event(form.usage_chunk(_usage(stream.job, num_tokens)))
        yield event(DONE)

    def _max_tokens(self, prompt: Sequence[int], options: Options, field: str) -> int:
        """What was asked for, or all that the model has room for; `field` is that of the prompt."""
        asked = options.max_tokens
        if not prompt:
            raise ApiError(400, f"{field} must have at least one token", param=field, code="invalid_value")
        if len(prompt) + (asked or 1) > self._engine.max_length:
            answer = f"{asked} for the answer" if asked else "one for the answer"
            raise too_long(
                self._engine.max_length,
                f"the request has {len(prompt)}, and asks for {answer}",
                field if len(prompt) >= self._engine.max_length else options.max_tokens_field,
            )
        for token in prompt:
            if not 0 <= token < self._model.vocab_size:
                raise ApiError(
                    400,
                    f"{field} must hold tokens from 0 to {self._model.vocab_size - 1}; got {token}",
                    param=field,
                    code="invalid_value",
                )
        return asked or self._engine.max_length - len(prompt)

    def _check_size(self, param: str, *texts: str) -> None:
        """Refuses what has too many tokens, however it is encoded: to encode it would take long."""
        if self._model.max_token_bytes is None:
            return
        num_bytes = sum(len(text.encode()) for text in texts)
        least = -(-num_bytes // self._model.max_token_bytes)
        if least >= self._engine.max_length:
            raise too_long(
                self._engine.max_length, f"the request has {num_bytes} bytes, {least} tokens or more", param
            )

    def _check_model(self, options: Options) -> None:
        if options.model not in (None, self._model.name):
            raise self._no_such_model(str(options.model))

    def _no_such_model(self, name: str) -> ApiError:
        return ApiError(
            404,
            f"there is no model {json.dumps(name[:80])}; this server has {json.dumps(self._model.name)}",
            param="model",
            code="model_not_found",
        )

    async def _body(self, request: Request) -> dict[str, object]:
        # A browser sends JSON to another site only if that site allows it, which this one does not.
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(
                415,
                f"Content-Type must be application/json; got {json.dumps(kind[:80])}",
                code="invalid_type",
            )
        try:
            return parse_json(await asyncio.wait_for(self._read(request), BODY_SECONDS))
        except asyncio.TimeoutError as error:
            raise ApiError(
                408, f"the body must come within {BODY_SECONDS:g} seconds", code="timeout"
            ) from error

    async def _read(self, request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > self._max_body_bytes:
                raise ApiError(
                    413, f"the body must have at most {self._max_body_bytes} bytes", code="too_large"
                )
        return b"".join(parts)

    # Everything else

    async def models(self, _request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._describe()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        name = request.path_params["name"]
        if name != self._model.name:
            raise self._no_such_model(name)
        return JSONResponse(self._describe())

    def _describe(self) -> dict[str, object]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "octavo",
            "max_model_len": self._engine.max_length,
        }

    async def health(self, _request: Request) -> Response:
        """GET /health: 200 while requests are accepted."""
        engine = self._engine
        if engine.healthy:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "failed" if engine.failure else "stopping"}, 503)

    async def metrics(self, _request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        text = render(self._engine.metrics, await self._engine.snapshot(), self._engine.in_flight)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def events(self, request: Request) -> Response:
        """GET /events: snapshots, as server-sent events."""
        if request.method == "HEAD":
            head = Response(headers=_EVENTS, media_type=EventStream.media_type)
            del head.headers["content-length"]
            return head
        return EventStream(self._snapshots(), lambda: None)

    async def _snapshots(self) -> AsyncGenerator[bytes, None]:
        last = None
        stopping = asyncio.ensure_future(self._engine.stopping.wait())
        try:
            while not stopping.done():
                snapshot = await self._engine.snapshot()
                if snapshot != last:
                    yield event(
                        {
                            **dataclasses.asdict(snapshot),
                            "model": self._model.name,
                            "in_flight": self._engine.in_flight,
                            "max_in_flight": self._engine.max_in_flight,
                        }
                    )
                    last = snapshot
                await asyncio.wait([stopping], timeout=PAGE_SECONDS)
        except ApiError as error:
            yield error_event(error)
        finally:
            stopping.cancel()


class EventStream(Response):
    """Sends events until there are no more, or the client is gone; then calls `close`, in any case.

    A client that takes nothing for SEND_SECONDS, or for up to twice as long, counts as gone: its answers
    would be in flight for as long as it likes.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(headers=_EVENTS)
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._num_begun = self._num_sent = 0  # messages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            with contextlib.suppress(ClientDisconnect, OSError):
                await _until_disconnect(receive, self._send_all(send), self._stalled())
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await self._send(send, start)
        async with contextlib.aclosing(self._events) as events:
            async for data in events:
                if data:
                    await self._send(send, {"type": "http.response.body", "body": data, "more_body": True})
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: Message) -> None:
        self._num_begun += 1
        await send(message)
        self._num_sent += 1

    async def _stalled(self) -> None:
        """Returns when a message has been under way for SEND_SECONDS."""
        under_way = 0
        while self._num_sent >= under_way:
            under_way = self._num_begun if self._num_sent < self._num_begun else 0
            await asyncio.sleep(SEND_SECONDS)


async def _encode(param: str, encode: Callable[[_Text], list[int]], text: _Text) -> list[int]:
    """Tokens, made in another thread; a ValueError of the tokenizer is the client's."""
    try:
        return await asyncio.to_thread(encode, text)
    except ValueError as error:
        raise ApiError(400, f"{param}: {error}", param=param, code="invalid_value") from error


async def _until_disconnect(receive: Receive, work: Awaitable[_Result], *others: Awaitable[None]) -> _Result:
    """What the work returns; ClientDisconnect if the client leaves before, which ends the work.

    others: any of them, once it is done, says that the client counts as gone.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    tasks = [working, *map(asyncio.ensure_future, (disconnected(), *others))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _collect(stream: Stream) -> tuple[list[Delta], Usage]:
    """Each answer as one delta."""
    parts: list[list[Delta]] = [[] for _ in range(stream.job.num_answers)]
    async for deltas in stream.deltas():
        for delta in deltas:
            parts[delta.index].append(delta)
    whole = [
        Delta(
            index,
            "".join(delta.text for delta in deltas),
            sum(delta.num_tokens for delta in deltas),
            tuple(token for delta in deltas for token in delta.logprobs),
            deltas[-1].finish_reason,
        )
        for index, deltas in enumerate(parts)
    ]
    return whole, _usage(stream.job, sum(delta.num_tokens for delta in whole))


def _usage(job: Job, num_tokens: int) -> Usage:
    return Usage(sum(map(len, job.prompts)), num_tokens)


def _file(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    content = (resources.files(_PACKAGE) / name).read_bytes()

    async def serve(_request: Request) -> Response:
        return Response(content, media_type=media_type, headers=_PAGE)

    return serve


def create_app(
    engine: Engine,
    model: Model,
    *,
    api_key: str | None = None,
    local_only: bool = True,
    host: str | None = None,
    max_body_bytes: int = 4 * 2**20,
) -> Starlette:
    """The ASGI application, which starts the engine and stops it.

    Args:
        engine: that runs the model.
        model: what it runs.
        api_key: that clients have to send as a bearer token. None: they need none.
        local_only: without a key, refuse requests whose Host header names another machine than this one, as a
            page in a browser can send them once its name leads here.
        host: where the server listens, which names this machine as localhost, 127.0.0.1 and [::1] do.
        max_body_bytes: of a request.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await engine.stop()

    async def api_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return JSONResponse(error.body(), error.status, error.headers)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        wrong = ApiError(error.status_code, f"{request.method} {request.url.path[:80]}: {error.detail}")
        return JSONResponse(wrong.body(), error.status_code, error.headers)

    async def unexpected(_request: Request, error: Exception) -> Response:
        return JSONResponse(ApiError(500, f"unexpected: {type(error).__name__}").body(), 500)

    async def disconnected(_request: Request, _error: Exception) -> Response:
        return Response(status_code=499)  # read by nobody, but counted

    routes = Api(engine, model, max_body_bytes).routes()
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[
            Middleware(CountRequests, counts=engine.metrics.http, paths=[route.path for route in routes]),
            Middleware(Guard, api_key=api_key, local_only=local_only, host=host),
        ],
        exception_handlers={
            ApiError: api_error,
            HTTPException: http_error,
            ClientDisconnect: disconnected,
            Exception: unexpected,
        },
    )
