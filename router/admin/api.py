# SPDX-License-Identifier: Apache-2.0
"""The admin API: every decision, every worker, the index and the constants, as JSON. Adapters only."""

from __future__ import annotations

import uuid
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST

from indexer.identity import WorkerId
from indexer.snapshot.peers import CONTENT_TYPE as SNAPSHOT_TYPE
from router.admin.access import Access
from router.admin.reports import reports_router
from router.admin.served import show_record
from router.admin.views import AdminViews
from router.config_tenants import ANONYMOUS_NAME
from router.errors import NotFoundError, RequestError, RouterError, http_status
from router.gateway.parse import parse_request


class BadAdminRequestError(RequestError):
    """A body that is not what the call takes."""


def make_admin_app(
    views: AdminViews, token: str | None, *, enabled: bool, report_token: str | None = None
) -> FastAPI:
    """The FastAPI app for everything but ``/v1``. With ``report_token`` reports are taken even if not ``enabled``."""
    app = FastAPI(title="Pointsman", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(_public(views))
    if enabled:
        app.include_router(_admin(views, Access.of(token=token)))
    if enabled or report_token is not None:
        access = Access.of(token=token if enabled else None, report_token=report_token)
        app.include_router(reports_router(views.served.take_reports, access))
    app.add_exception_handler(RouterError, _on_error)
    return app


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _on_error(_: Request, error: Exception) -> Response:
    status = http_status(error) if isinstance(error, RouterError) else HTTPStatus.INTERNAL_SERVER_ERROR
    body = {"error": {"message": str(error), "type": type(error).__name__, "code": int(status)}}
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


def _public(views: AdminViews) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        """The process answers."""
        return _json({"status": "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        """At least one worker can be given requests."""
        view = await views.ready()
        response = _json(view)
        response.status_code = HTTPStatus.OK if view["ready"] else HTTPStatus.SERVICE_UNAVAILABLE
        return response

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(await views.served.metrics(), media_type=CONTENT_TYPE_LATEST)

    return router


def _admin(views: AdminViews, access: Access) -> APIRouter:
    router = APIRouter(prefix="/admin/api", dependencies=[Depends(access)])

    @router.get("/decisions")
    async def decisions(
        limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
        model: str | None = None,
        worker: str | None = None,
        path: str | None = None,
    ) -> Response:
        return _json({"decisions": await views.served.decisions(limit, model, worker, path)})

    @router.get("/decisions/{request_id:path}")
    async def decision(request_id: str) -> Response:
        return _json(await views.served.decision(request_id))

    @router.post("/explain")
    async def explain(
        request: Request, path: str = "/v1/chat/completions", tenant: str = ANONYMOUS_NAME
    ) -> Response:
        body = await request.body()
        headers = [(name.lower(), value) for name, value in request.headers.raw]
        parsed = parse_request("POST", _call_path(body, path), headers, body, f"explain-{uuid.uuid4().hex}")
        asking = views.terms.named(tenant)
        if asking is None:
            raise NotFoundError(f"no tenant {tenant}")
        return _json(show_record(await views.explain(views.terms.apply(parsed, headers, asking))))

    @router.get("/workers")
    async def workers() -> Response:
        return _json({"workers": views.workers()})

    @router.get("/queue")
    async def queue() -> Response:
        return _json(await views.served.queue())

    @router.get("/index")
    async def index() -> Response:
        return _json(views.index())

    @router.get("/snapshot")
    async def snapshot() -> StreamingResponse:
        """What all workers hold, for a replica that starts."""
        return StreamingResponse(views.recovery.pieces(), media_type=SNAPSHOT_TYPE)

    @router.post("/index/{worker:path}/clear")
    async def clear(worker: str) -> Response:
        if not views.holders.clear(WorkerId(worker)):
            raise NotFoundError(f"no worker {worker} in the index")
        return _json({"cleared": worker})

    @router.get("/costs")
    async def costs() -> Response:
        return _json(await views.costs())

    @router.put("/workers/{worker:path}/drain")
    async def drain(worker: str, request: Request) -> Response:
        wanted = _drain_flag(await request.body())
        if not views.set_drain(worker, wanted):
            raise NotFoundError(f"no worker {worker}")
        return _json({"worker": worker, "draining": wanted})

    return router


def _call_path(body: bytes, path: str) -> str:
    """A body with ``prompt`` and no ``messages`` is a completion, whatever the default says."""
    try:
        document: Any = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return path
    if isinstance(document, dict) and "prompt" in document and "messages" not in document:
        return "/v1/completions"
    return path


def _drain_flag(body: bytes) -> bool:
    if not body.strip():
        return True
    try:
        document = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise BadAdminRequestError(f"the body is not JSON: {error}") from error
    wanted = document.get("draining", True) if isinstance(document, dict) else document
    if not isinstance(wanted, bool):
        raise BadAdminRequestError('the body is {"draining": true} or {"draining": false}')
    return wanted
