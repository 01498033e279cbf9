# SPDX-License-Identifier: Apache-2.0
"""The HTTP client to the workers: a thin border around aiohttp that maps its errors to ``UpstreamError``.

Bodies are never decompressed, cookies are not kept, redirects are not followed, and the number of connections is not
limited here: a stream holds one for minutes, so a limit would be a hidden queue that no load figure shows.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from types import SimpleNamespace

import aiohttp
from yarl import URL

from router.errors import UpstreamError
from router.gateway.headers import Headers
from router.gateway.settings import GatewaySettings

_AUTOMATIC_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
_HEADER_LIMIT_BYTES = 64 * 1024
_LARGE_BODY_BYTES = (
    1024 * 1024
)  # aiohttp writes larger bytes objects in one go and warns; a file is sent in pieces


class UpstreamResponse:
    """An answer whose headers have arrived. Must be closed; a fully read one returns its connection to the pool."""

    __slots__ = ("_response", "_worker_id", "headers", "status")

    def __init__(self, worker_id: str, response: aiohttp.ClientResponse) -> None:
        self._worker_id = worker_id
        self._response = response
        self.status = response.status
        self.headers: Headers = [(name.lower(), value) for name, value in response.raw_headers]

    @property
    def at_end(self) -> bool:
        """Whether the whole body has been read, as far as is known without waiting."""
        return self._response.content.at_eof()

    async def read(self) -> bytes:
        """The bytes that have arrived, at least one; empty at the end of the body.

        Raises:
            UpstreamError: the connection broke, or the body ended before its announced length.
        """
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(self._worker_id, f"the connection broke ({type(error).__name__})") from error

    def close(self) -> None:
        """Close the connection unless the body was read to its end."""
        self._response.close()


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """What goes to a worker. ``url`` is used as it is, without normalisation."""

    worker_id: str
    method: str
    url: str
    headers: Headers
    body: bytes


class UpstreamClient:
    """Connections to all workers. Build it inside the running loop, close it with ``aclose``."""

    def __init__(self, settings: GatewaySettings) -> None:
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_reuse)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=settings.keepalive_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_AUTOMATIC_HEADERS,
            timeout=aiohttp.ClientTimeout(
                total=None,
                connect=settings.connect_timeout_s,
                sock_connect=settings.connect_timeout_s,
            ),
            max_line_size=_HEADER_LIMIT_BYTES,
            max_field_size=_HEADER_LIMIT_BYTES,
            trace_configs=[tracing],
        )

    async def open(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send a request and wait for the answer's headers.

        A kept-alive connection may have been closed by the worker just when it was picked; if it breaks before any
        byte of an answer, the request is sent once more to the same worker.

        Raises:
            UpstreamError: no connection, or it broke before the headers were complete.
        """
        reuse = SimpleNamespace(seen=False)
        try:
            try:
                return await self._send(request, reuse)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not reuse.seen:
                    raise
            return await self._send(request, SimpleNamespace(seen=False))
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(request.worker_id, f"no answer ({type(error).__name__})") from error

    async def aclose(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def _send(self, request: UpstreamRequest, reuse: SimpleNamespace) -> UpstreamResponse:
        body = request.body
        response = await self._session.request(
            request.method,
            URL(request.url, encoded=True),
            headers=[
                (name.decode("latin-1"), value.decode("utf-8", "replace")) for name, value in request.headers
            ],
            data=(io.BytesIO(body) if len(body) > _LARGE_BODY_BYTES else body) if body else None,
            allow_redirects=False,
            trace_request_ctx=reuse,
        )
        return UpstreamResponse(request.worker_id, response)


async def _note_reuse(
    _session: aiohttp.ClientSession,
    context: SimpleNamespace,
    _params: aiohttp.TraceConnectionReuseconnParams,
) -> None:
    context.trace_request_ctx.seen = True
