# SPDX-License-Identifier: Apache-2.0
"""The ASGI application for ``/v1/*``: reads the request, runs the exchange, turns errors into OpenAI's shape."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from http import HTTPStatus

from router.errors import RouterError
from router.gateway.asgi import ClientGoneError, Receive, Scope, Send, WhileClientStays, read_body, send_json
from router.gateway.exchange import ClientCall, Exchange
from router.gateway.headers import request_id_of
from router.gateway.parse import parse_request
from router.gateway.refusal import InternalError, UnknownPathError, refusal_headers, refuse
from router.gateway.routing import Dispatcher
from router.gateway.service_terms import ServiceTerms, without_key
from router.gateway.settings import GatewaySettings
from router.gateway.upstream import UpstreamClient

_log = logging.getLogger(__name__)


def new_request_id() -> str:
    """A random request id of 32 hexadecimal digits."""
    return f"{random.getrandbits(128):032x}"


class GatewayApp:
    """OpenAI-compatible proxy in front of the workers that ``dispatcher`` chooses.

    ``models`` gives the JSON body of ``GET /v1/models``; it may raise a ``RouterError``.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        client: UpstreamClient,
        settings: GatewaySettings,
        *,
        models: Callable[[], bytes],
        make_request_id: Callable[[], str] = new_request_id,
        terms: ServiceTerms | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._client = client
        self._settings = settings
        self._models = models
        self._make_request_id = make_request_id
        self._terms = terms or ServiceTerms()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Only the scope type ``http`` is known here."""
        if scope["type"] != "http":
            raise RuntimeError(f"the gateway serves http, not {scope['type']}")
        request_id = request_id_of(scope["headers"], self._make_request_id)
        try:
            await self._serve(scope, receive, send, request_id)
        except RouterError as error:
            status, body = refuse(error)
            await send_json(send, status, body, request_id, refusal_headers(error))
        except ClientGoneError:
            pass

    async def _serve(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        path: str = scope["path"]
        if not path.startswith("/v1/") or ".." in path.split("/"):
            raise UnknownPathError(f"no such path: {path}")
        headers = scope["headers"]
        tenant = self._terms.tenant(headers)
        if path == "/v1/models" and scope["method"] == "GET":
            await send_json(send, HTTPStatus.OK, self._models(), request_id)
            return
        body = await read_body(receive, headers, self._settings.max_body_bytes)
        request = parse_request(scope["method"], path, headers, body, request_id)
        request = self._terms.apply(request, headers, tenant)
        call = ClientCall(_target(scope), without_key(headers, tenant))
        exchange = Exchange(
            request,
            call,
            send,
            dispatcher=self._dispatcher,
            client=self._client,
            settings=self._settings,
        )
        try:
            async with WhileClientStays(receive):
                await exchange.run()
        except (RouterError, ClientGoneError):
            raise
        except Exception as error:
            _log.exception("request %s failed inside the gateway", request_id)
            if not exchange.started:
                raise InternalError("the gateway failed on this request") from error


def _target(scope: Scope) -> str:
    raw_path: bytes = scope.get("raw_path") or scope["path"].encode("utf-8")
    query: bytes = scope["query_string"]
    return (raw_path + b"?" + query if query else raw_path).decode("latin-1")
