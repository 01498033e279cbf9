# SPDX-License-Identifier: Apache-2.0
"""The prefill leg of a split request: one call whose answer stays here.

Its body is the client's own with keys added at the end (``router.gateway.body``), as for every call: the prompt's bytes
stay what they are, so both workers hash the same tokens, and of two equal keys the later one wins. Nothing is
serialised again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec

from router.errors import UpstreamError
from router.gateway.answer import outcome_of_status
from router.gateway.body import NotAJsonObjectError, insert_keys
from router.gateway.headers import Headers, to_worker
from router.gateway.routing import PrefillLeg
from router.gateway.settings import GatewaySettings
from router.gateway.upstream import UpstreamClient, UpstreamRequest, UpstreamResponse
from router.gateway.usage import usage_of_json
from router.request import InferenceRequest, Outcome, RequestKind, Usage

_log = logging.getLogger(__name__)
_NEUTRAL = {"stream_options": None, "min_tokens": 0}
"""Keys that vLLM refuses beside ``stream`` false and ``max_tokens`` 1, and the values that mean nothing."""


Report = Callable[[Outcome, int | None, Usage | None], None]
"""Hears how the leg ended: outcome, status and counts, the latter two where it was answered."""


class PrefillFailedError(UpstreamError):
    """The prefill leg failed: the request can still be served without it."""


class _Handed(msgspec.Struct):
    kv_transfer_params: dict[str, object] | None = None


def one_token_keys(request: InferenceRequest) -> dict[str, object]:
    """What turns a request into its prefill: one token, one sequence, no stream."""
    keys: dict[str, object] = {"max_tokens": 1, "n": 1, "stream": False}
    if request.kind is RequestKind.CHAT:
        keys["max_completion_tokens"] = 1
    sent = request.document or {}
    return keys | {name: value for name, value in _NEUTRAL.items() if name in sent}


class PrefillCall:
    """The prefill leg of one attempt; its end is reported exactly once.

    ``start`` sends it, ``stop`` ends it if it has not ended. It never raises by itself: a failure is told to the
    listener of ``start``, or raised where its result is waited for.
    """

    def __init__(
        self,
        report: Report,
        leg: PrefillLeg,
        request: InferenceRequest,
        target: str,
        headers: Headers,
        *,
        client: UpstreamClient,
        settings: GatewaySettings,
    ) -> None:
        self._tell = report
        self._leg = leg
        self._request = request
        self._target = target
        self._headers = headers
        self._client = client
        self._settings = settings
        self._task: asyncio.Task[None] | None = None
        self._on_failure: Callable[[], None] | None = None
        self._handed: Mapping[str, object] | None = None
        self._reported = False
        self.failure: PrefillFailedError | None = None

    def start(self, on_failure: Callable[[], None]) -> None:
        """Send it now; ``on_failure`` is called at most once, and never after ``stop``."""
        self._on_failure = on_failure
        self._task = asyncio.get_running_loop().create_task(self._run(), name="prefill leg")

    async def handed_over(self) -> Mapping[str, object]:
        """The ``kv_transfer_params`` of its answer.

        Raises:
            PrefillFailedError: there are none.
        """
        if self._task is None:
            raise RuntimeError("the prefill leg is not started")
        await self._task
        if self.failure is not None:
            raise self.failure
        return self._handed or {}

    def stop(self) -> None:
        """End it; what has not been answered yet is cancelled."""
        self._on_failure = None
        self._report(Outcome.CANCELLED, None, None)
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(self._leg.timeout_s or self._settings.first_byte_timeout_s):
                await self._exchange()
        except (UpstreamError, TimeoutError) as error:
            detail = str(error).removeprefix(f"worker {self._leg.worker_id}: ") or "silent for too long"
            self._fail(detail, Outcome.WORKER_ERROR, None)
        except NotAJsonObjectError as error:
            self._fail(str(error), Outcome.CLIENT_ERROR, None)
        except Exception:
            _log.exception("the prefill leg of request %s failed", self._request.request_id)
            self._fail("failed inside the gateway", Outcome.WORKER_ERROR, None)

    async def _exchange(self) -> None:
        upstream = await self._client.open(self._upstream_request())
        try:
            body = await _read(upstream, self._settings.max_inspected_bytes)
        finally:
            upstream.close()
        if not 200 <= upstream.status < 300:
            self._fail(f"status {upstream.status}", outcome_of_status(upstream.status), upstream.status)
            return
        self._handed = _handed_over(body)
        if self._leg.first and not self._handed:
            self._fail("no kv_transfer_params in its answer", Outcome.WORKER_ERROR, upstream.status)
            return
        self._report(Outcome.OK, upstream.status, usage_of_json(body))

    def _upstream_request(self) -> UpstreamRequest:
        leg = self._leg
        keys = one_token_keys(self._request) | dict(leg.insert)
        return UpstreamRequest(
            worker_id=leg.worker_id,
            method=self._request.method,
            url=leg.base_url.rstrip("/") + self._target,
            headers=to_worker(self._headers, leg.upstream_headers, self._request.request_id),
            body=insert_keys(self._request.body, keys),
        )

    def _fail(self, detail: str, outcome: Outcome, status: int | None) -> None:
        self.failure = PrefillFailedError(self._leg.worker_id, f"prefill leg: {detail}")
        self._report(outcome, status, None)
        if self._on_failure is not None:
            self._on_failure()

    def _report(self, outcome: Outcome, status: int | None, usage: Usage | None) -> None:
        if not self._reported:
            self._reported = True
            self._tell(outcome, status, usage)


async def _read(upstream: UpstreamResponse, max_bytes: int) -> bytes:
    """The whole body; of one that is too large only that it ended."""
    pieces: list[bytes] = []
    size_bytes = 0
    while piece := await upstream.read():
        size_bytes += len(piece)
        if size_bytes <= max_bytes:
            pieces.append(piece)
    return b"".join(pieces) if size_bytes <= max_bytes else b""


def _handed_over(body: bytes) -> Mapping[str, object] | None:
    try:
        return msgspec.json.decode(body, type=_Handed).kv_transfer_params
    except msgspec.DecodeError:
        return None
