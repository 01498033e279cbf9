# SPDX-License-Identifier: Apache-2.0
"""The picker's own answers to a client: status, OpenAI's error body, and why the request was dropped.

Statuses: the protocol fixes 503 without a ready endpoint and 429 for what is shed. The header and its values
``rejected-no-endpoints``, ``rejected-saturated`` and ``rejected-ttl-expired`` are those of llm-d-router
(``pkg/common/error``); the others name what that one has no word for.
"""

from __future__ import annotations

from http import HTTPStatus

from router.errors import InvalidApiKey, NoWorkerAvailable, Overloaded, RouterError, ShedReason
from router.extproc.messages import Immediate
from router.extproc.names import DROPPED_REASON
from router.gateway.headers import REQUEST_ID
from router.gateway.refusal import BodyTooLargeError, refusal_headers, refuse


def immediate(error: RouterError, request_id: str | None = None) -> Immediate:
    """The answer that an error ends in."""
    status, body = refuse(error)
    headers = [
        (b"content-type", b"application/json"),
        (DROPPED_REASON, _reason(error, status).encode("ascii")),
        *refusal_headers(error),
    ]
    if request_id is not None:
        headers.append((REQUEST_ID, request_id.encode("ascii", "replace")))
    return Immediate(status, headers, body, f"pointsman_{type(error).__name__}")


def _reason(error: RouterError, status: int) -> str:
    if isinstance(error, NoWorkerAvailable):
        return "rejected-no-endpoints"
    if isinstance(error, Overloaded):
        return "rejected-ttl-expired" if error.reason is ShedReason.TIMEOUT else "rejected-saturated"
    if isinstance(error, BodyTooLargeError):
        return "rejected-too-large"
    if isinstance(error, InvalidApiKey):
        return "rejected-unauthorized"
    return "rejected-invalid" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "rejected-internal"
