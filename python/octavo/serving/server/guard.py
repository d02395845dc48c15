"""What stands in front of the endpoints: who may ask, and how many asked."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.serving.server.errors import ApiError

# The page itself holds nothing; what it shows comes from /events.
OPEN_PATHS = frozenset({"/", "/page.js", "/page.css", "/health"})
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Guard:
    """Asks for the key; without one, for a local name in the Host header where only those are served.

    host: an address that is served, too.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, local_only: bool, host: str | None = None) -> None:
        self._app = app
        self._digest = None if api_key is None else _digest(api_key)
        self._local_only = local_only
        self._local_names = LOCAL_NAMES
        if host is not None:
            self._local_names |= {f"[{host}]".lower() if ":" in host else host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refusal(scope)) is not None:
            await JSONResponse(error.body(), error.status, error.headers)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._digest is not None:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            known = scheme.lower() == "bearer" and hmac.compare_digest(_digest(key.strip()), self._digest)
            if known or scope["path"] in OPEN_PATHS:
                return None
            return ApiError(
                401,
                "the header Authorization must be Bearer and the API key of this server",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        host = headers.get("host", "")
        if self._local_only and _without_port(host) not in self._local_names:
            return ApiError(
                403,
                f"without an API key this server answers only to {', '.join(sorted(self._local_names))}; "
                f"the header Host says {host[:80]!r}",
                code="host_refused",
            )
        return None


class CountRequests:
    """Counts responses by path and status.

    Args:
        app: what to pass on to.
        counts: where to count.
        paths: that have counts of their own; all others share one.
    """

    def __init__(self, app: ASGIApp, counts: Counter[tuple[str, int]], paths: Collection[str]) -> None:
        self._app = app
        self._counts = counts
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._counts[path, message["status"]] += 1
            await send(message)

        await self._app(scope, receive, count if scope["type"] == "http" else send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).lower()
