# SPDX-License-Identifier: Apache-2.0
"""A decision as the gateway carries it out: address, keys to insert, headers. Pure."""

from __future__ import annotations

from router.decisions.record import DecisionRecord, path_text
from router.fleet.worker import WorkerStatus
from router.gateway.routing import PrefillLeg, Route
from router.plan.candidate import Plan
from router.request import InferenceRequest
from router.salting import with_salt


def make_route(
    request: InferenceRequest,
    plan: Plan,
    status: WorkerStatus,
    record: DecisionRecord,
    params: dict[str, object] | None,
    prefill: PrefillLeg | None,
) -> Route:
    """Where one attempt goes; ``status`` is that of the chosen worker."""
    upstream = [(b"x-request-id", request.request_id.encode())]
    if status.spec.ranks > 1:
        upstream.append((b"x-data-parallel-rank", str(plan.dp_rank).encode()))
    response = [
        (b"x-request-id", request.request_id.encode()),
        (b"x-pointsman-worker", plan.worker.encode()),
    ]
    if prefill is not None:
        response.append((b"x-pointsman-prefill-worker", prefill.worker_id.encode()))
    if record.path_blocks and record.prompt_tokens:
        response.append((b"x-pointsman-path", path_text(record.path_blocks).encode()))
    if record.fallback:
        response.append((b"x-pointsman-fallback", record.fallback.encode()))
    return Route(
        request_id=request.request_id,
        worker_id=plan.worker,
        base_url=status.spec.url,
        insert=with_salt(request, {"kv_transfer_params": params} if params else {}),
        upstream_headers=tuple(upstream),
        response_headers=tuple(response),
        prefill=prefill,
    )
