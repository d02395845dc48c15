"""Errors in the form that clients of OpenAI's API know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """What a client is told instead of an answer.

    Args:
        status: of HTTP.
        message: for people.
        param: the field of the request that is wrong, if it is one.
        code: for programs, such as "model_not_found".
        headers: of HTTP, besides the usual ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


def too_long(max_length: int, what: str, param: str) -> ApiError:
    """For requests that need more tokens than there is room for. what: says how many they have."""
    return ApiError(
        400,
        f"this server has room for {max_length} tokens; {what}",
        param=param,
        code="context_length_exceeded",
    )


def stopping() -> ApiError:
    """For requests that come, or are cut off, while the server stops."""
    return ApiError(503, "the server is stopping", code="server_stopping")
