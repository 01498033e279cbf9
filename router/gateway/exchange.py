# SPDX-License-Identifier: Apache-2.0
"""One request's way through the fleet: attempts at workers until one of them answers, and that answer relayed.

Invariants:

- Every attempt that the dispatcher made is finished exactly once, whatever ends it.
- Nothing reaches the client before the first byte of an answer's body is there, so until then another worker can
  take over; after that the answer is that worker's, to its good or bad end.
- A broken answer never looks whole: the ASGI response is left without its last message, and the server then closes
  the connection without the terminating chunk. An event stream gets an error event before that, and no ``[DONE]``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from router.errors import NoWorkerAvailable, RouterError, UpstreamError
from router.gateway.answer import Answer
from router.gateway.asgi import ClientGoneError, Send
from router.gateway.body import NotAJsonObjectError, insert_keys
from router.gateway.headers import Headers, header, to_client, to_worker
from router.gateway.prefill import PrefillCall, PrefillFailedError
from router.gateway.refusal import BodyNotRoutableError, error_event
from router.gateway.routing import Attempt, Dispatcher, Route
from router.gateway.settings import GatewaySettings
from router.gateway.settlement import Settlement
from router.gateway.upstream import UpstreamClient, UpstreamRequest, UpstreamResponse
from router.request import InferenceRequest, Outcome

_log = logging.getLogger(__name__)
_AFTER_END_MARK_S = 1.0


@dataclass(frozen=True, slots=True)
class ClientCall:
    """What the client sent, besides its body."""

    target: str
    """Path and query exactly as on the request line."""
    headers: Headers


@dataclass(frozen=True, slots=True)
class _Held:
    """A 5xx answer whose body is still to be read."""

    upstream: UpstreamResponse
    route: Route


class Exchange:
    """One client request from dispatch to its last byte."""

    def __init__(
        self,
        request: InferenceRequest,
        call: ClientCall,
        send: Send,
        *,
        dispatcher: Dispatcher,
        client: UpstreamClient,
        settings: GatewaySettings,
    ) -> None:
        self._request = request
        self._call = call
        self._asgi_send = send
        self._dispatcher = dispatcher
        self._client = client
        self._settings = settings
        self._held: _Held | None = None
        self.started = False
        """The status line has gone to the client."""

    async def run(self) -> None:
        """Serve the request. On return without error the client has its answer, whole or visibly broken.

        Raises:
            RouterError: nothing was sent to the client, and this is why.
            ClientGoneError: the server said so while sending.
        """
        try:
            await self._try_workers()
        finally:
            self._hold(None)

    async def _try_workers(self) -> None:
        tried: frozenset[str] = frozenset()
        failure: RouterError | None = None
        left = self._settings.retries + 1
        lent = 1
        while left:
            try:
                attempt = await self._dispatcher.dispatch(self._request, tried)
            except NoWorkerAvailable as error:
                failure = error
                break
            failure = await self._try(attempt)
            if failure is None:
                return
            tried |= {failure.worker_id}
            if lent and isinstance(failure, PrefillFailedError):
                lent = 0  # without retries too: the worker that was to answer is not to blame
                continue
            left -= 1
            _log.warning("request %s: %s", self._request.request_id, failure)
        if self._held is not None:
            await self._relay_held(self._held)
        elif failure is not None:
            raise failure

    async def _try(self, attempt: Attempt) -> UpstreamError | None:
        """One attempt; returns why the client still has no byte, or None when it was answered."""
        settlement = Settlement(attempt)
        upstream: UpstreamResponse | None = None
        prefill = self._prefill_of(attempt)
        try:
            try:
                async with asyncio.timeout(self._settings.first_byte_timeout_s) as timer:
                    handed = await self._begin_prefill(attempt.route, prefill, timer)
                    upstream = await self._open(attempt.route, handed)
                    settlement.answer = self._answer_of(upstream)
                    if upstream.status >= 500:
                        self._hold(_Held(upstream, attempt.route))
                        raise UpstreamError(attempt.route.worker_id, f"status {upstream.status}")
                    await self._relay(upstream, settlement.answer, settlement, timer)
            except TimeoutError:
                if prefill is not None and prefill.failure is not None:
                    raise prefill.failure from None
                raise UpstreamError(attempt.route.worker_id, "silent for too long") from None
        except PrefillFailedError as error:
            settlement.finish(Outcome.CANCELLED)
            return error
        except UpstreamError as error:
            settlement.finish(Outcome.WORKER_ERROR)
            if not self.started:
                return error
            await self._break_off(settlement.answer, upstream, error)
        except (asyncio.CancelledError, ClientGoneError):
            settlement.abandon()
            raise
        except BodyNotRoutableError:
            settlement.finish(Outcome.CLIENT_ERROR)
            raise
        finally:
            if prefill is not None:
                prefill.stop()
            settlement.finish(Outcome.WORKER_ERROR)
            if upstream is not None and (self._held is None or self._held.upstream is not upstream):
                upstream.close()
        return None

    def _prefill_of(self, attempt: Attempt) -> PrefillCall | None:
        leg = attempt.route.prefill
        if leg is None:
            return None
        call = self._call
        return PrefillCall(
            attempt.prefill_finished,
            leg,
            self._request,
            call.target,
            call.headers,
            client=self._client,
            settings=self._settings,
        )

    async def _begin_prefill(
        self, route: Route, prefill: PrefillCall | None, timer: asyncio.Timeout
    ) -> Mapping[str, object]:
        """Send the prefill leg, if there is one; the keys that the other leg takes from its answer.

        A failure ends the other leg as long as the client has no byte: its worker would wait for blocks that
        nobody computes.
        """
        if prefill is None or route.prefill is None:
            return {}

        def give_up() -> None:
            if not self.started and not timer.expired():
                timer.reschedule(asyncio.get_running_loop().time())

        if not route.prefill.first:
            prefill.start(give_up)
            return {}
        prefill.start(lambda: None)
        return {"kv_transfer_params": await prefill.handed_over()}

    async def _open(self, route: Route, handed: Mapping[str, object]) -> UpstreamResponse:
        try:
            body = insert_keys(self._request.body, {**route.insert, **handed})
        except NotAJsonObjectError as error:
            raise BodyNotRoutableError(str(error)) from error
        return await self._client.open(
            UpstreamRequest(
                worker_id=route.worker_id,
                method=self._request.method,
                url=route.base_url.rstrip("/") + self._call.target,
                headers=to_worker(self._call.headers, route.upstream_headers, route.request_id),
                body=body,
            )
        )

    def _answer_of(self, upstream: UpstreamResponse) -> Answer:
        return Answer(self._request, upstream.status, upstream.headers, self._settings.max_inspected_bytes)

    async def _relay(
        self,
        upstream: UpstreamResponse,
        answer: Answer,
        settlement: Settlement,
        timer: asyncio.Timeout,
    ) -> None:
        """Pass the answer on, piece by piece; the next piece is asked for when the client has taken this one.

        The timer runs only while the worker is waited for: a slow client is not a silent worker. The attempt ends
        when the worker has ended, before the last piece goes out.
        """
        route = settlement.attempt.route
        now = asyncio.get_running_loop().time
        piece = await upstream.read()
        while piece:
            answer.feed(piece)
            settlement.progress(answer)
            if upstream.at_end:
                break
            timer.reschedule(None)
            await self._send_piece(upstream, route, piece)
            if answer.is_complete:
                piece = await _after_end_mark(upstream)
                continue
            timer.reschedule(now() + self._settings.idle_timeout_s)
            piece = await upstream.read()
        timer.reschedule(None)
        answer.end()
        if not answer.is_complete:
            if self.started:
                await self._send_piece(upstream, route, piece)
            raise UpstreamError(route.worker_id, "the stream ended without [DONE]")
        settlement.finish(answer.outcome)
        await self._send_piece(upstream, route, piece, last=True)

    async def _send_piece(
        self, upstream: UpstreamResponse, route: Route, piece: bytes, *, last: bool = False
    ) -> None:
        if not self.started:
            self.started = True
            headers = to_client(upstream.headers, route.response_headers, self._request.request_id)
            await self._send({"type": "http.response.start", "status": upstream.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": piece, "more_body": not last})

    async def _send(self, message: dict[str, object]) -> None:
        try:
            await self._asgi_send(message)
        except OSError as error:
            raise ClientGoneError from error

    async def _break_off(
        self, answer: Answer | None, upstream: UpstreamResponse | None, error: UpstreamError
    ) -> None:
        """Tell the client of the break, in so far as the format can, and leave the response unfinished."""
        _log.warning("request %s broke off: %s", self._request.request_id, error)
        if answer is None or answer.events is None or answer.events.error_seen or upstream is None:
            return
        if header(upstream.headers, b"content-length") is None:
            event = error_event(error, at_boundary=answer.events.at_boundary)
            await self._send({"type": "http.response.body", "body": event, "more_body": True})

    def _hold(self, held: _Held | None) -> None:
        """Keep a 5xx unread: it is the client's answer if no other worker gives one."""
        if self._held is not None:
            self._held.upstream.close()
        self._held = held

    async def _relay_held(self, held: _Held) -> None:
        """Pass the last 5xx on with its own status, headers and body. Its attempt is over already."""
        idle_s = self._settings.idle_timeout_s
        try:
            async with asyncio.timeout(idle_s) as timer:
                while piece := await held.upstream.read():
                    timer.reschedule(None)
                    await self._send_piece(held.upstream, held.route, piece)
                    timer.reschedule(asyncio.get_running_loop().time() + idle_s)
                timer.reschedule(None)
                await self._send_piece(held.upstream, held.route, b"", last=True)
        except (UpstreamError, TimeoutError) as error:
            if not self.started:
                raise UpstreamError(
                    held.route.worker_id, f"status {held.upstream.status}, then silence"
                ) from error


async def _after_end_mark(upstream: UpstreamResponse) -> bytes:
    """What follows ``[DONE]``: as a rule the end at once. A break or a stall there loses nothing."""
    try:
        async with asyncio.timeout(_AFTER_END_MARK_S):
            return await upstream.read()
    except (UpstreamError, TimeoutError):
        return b""
