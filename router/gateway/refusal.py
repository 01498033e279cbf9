# SPDX-License-Identifier: Apache-2.0
"""The gateway's own errors in the shape of OpenAI's: ``{"error": {"message", "type", "code"}}``."""

from __future__ import annotations

import re
from http import HTTPStatus

import msgspec

from router.errors import (
    InvalidApiKey,
    NoWorkerAvailable,
    Overloaded,
    RequestError,
    RouterError,
    ShedReason,
    UpstreamError,
    http_status,
)
from router.gateway.headers import Headers

_SHED_TEXT = {
    ShedReason.FULL: "too many requests wait",
    ShedReason.TIMEOUT: "it waited as long as a request may",
    ShedReason.SHEDDABLE: "every worker is busy, and its objective is not to wait",
    ShedReason.SLO: "its time to first token cannot be met",
}
_WORD_START = re.compile(r"(?<=[a-z])(?=[A-Z])")


class BodyTooLargeError(RequestError):
    """The request body is above the configured limit."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class UnknownPathError(RequestError):
    """The path is none of the gateway's."""

    status = HTTPStatus.NOT_FOUND


class BodyNotRoutableError(RequestError):
    """Keys must be added to this body (a tenant's salt, for one), and it is not a JSON object."""


class InternalError(RouterError):
    """A fault of the gateway itself."""


def refuse(error: RouterError) -> tuple[int, bytes]:
    """Status and JSON body for an error that reaches the client."""
    status = http_status(error)
    if isinstance(error, NoWorkerAvailable):
        return status, error_body(
            f"No worker can take this request: {error.reason}", "service_unavailable", error.reason
        )
    if isinstance(error, Overloaded):
        message = f"All workers are busy and {_SHED_TEXT[error.reason]}; retry after {error.retry_after_s} s"
        return status, error_body(message, "rate_limit_error", "rate_limit_exceeded")
    if isinstance(error, UpstreamError):
        return status, error_body(str(error), "upstream_error", "worker_failed")
    kind = "invalid_request_error" if isinstance(error, RequestError) else "internal_error"
    code = _WORD_START.sub("_", type(error).__name__.removesuffix("Error")).lower()
    return status, error_body(str(error), kind, code)


def refusal_headers(error: RouterError) -> Headers:
    """What the status demands besides: RFC 9110 section 10.2.3 (Retry-After) and section 11.6.1."""
    if isinstance(error, Overloaded):
        return ((b"retry-after", str(error.retry_after_s).encode("ascii")),)
    if isinstance(error, InvalidApiKey):
        return ((b"www-authenticate", b"Bearer"),)
    return ()


def error_body(message: str, kind: str, code: str) -> bytes:
    """One error object as JSON."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "code": code}})


def error_event(error: RouterError, *, at_boundary: bool) -> bytes:
    """A server-sent event that tells of a broken stream; an event left open before it is closed first."""
    return (b"" if at_boundary else b"\n\n") + b"data: " + refuse(error)[1] + b"\n\n"
