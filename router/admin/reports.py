# SPDX-License-Identifier: Apache-2.0
"""``POST /admin/api/reports``: where engine extensions tell what became of plans.

It takes the token of the admin API and, so that engines need not have that one, ``admin.report_token``, which opens
nothing else. Without either it answers on loopback only, like the admin API.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from router.admin.access import Access
from router.decisions.reports import Taken
from router.decisions.reports_wire import MOST_BYTES
from router.errors import RequestError


class BatchTooLargeError(RequestError):
    """More bytes than a batch may have; an engine sends less at once."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


def reports_router(take: Callable[[bytes], Awaitable[Taken]], access: Access) -> APIRouter:
    """``take`` raises ``MalformedReportsError`` where a body is no batch."""
    router = APIRouter(prefix="/admin/api", dependencies=[Depends(access)])

    @router.post("/reports")
    async def reports(request: Request) -> Response:
        taken = await take(await _body(request))
        return Response(msgspec.json.encode(taken._asdict()), media_type="application/json")

    return router


async def _body(request: Request) -> bytes:
    """No more is read than a batch may have."""
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > MOST_BYTES:
            raise BatchTooLargeError(f"a batch of reports has at most {MOST_BYTES} bytes")
        pieces.append(piece)
    return b"".join(pieces)
