# SPDX-License-Identifier: Apache-2.0
"""A plan as ``kv_transfer_params`` that unmodified vLLM 0.27 and later understands. Pure.

A worker with our extension gets one key more (``router.plan.extension_plan``), and its pulls only there.

Keys: vLLM ``docs/features/kv_offloading_usage.md``; of NixlConnector, ``docs/features/nixl_connector_usage.md`` and
``nixl/pull_scheduler.py``. Nothing is sent where the engine's default is what the plan
says, so a worker without a connector never sees the key.
"""

from __future__ import annotations

from router.fleet.worker import Transfer
from router.plan.candidate import Plan
from router.plan.extension_plan import PLAN_KEY, ExtensionTerms, extension_plan
from router.plan.handover import Handover

_NIXL_PREFILL: dict[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def transfer_params(
    plan: Plan,
    kv_request_id: str,
    max_offload_tokens: int | None = None,
    terms: ExtensionTerms | None = None,
) -> dict[str, object] | None:
    """The parameters of one attempt; None when the engine needs none.

    ``kv_request_id`` must be fresh for each attempt: two engine requests under one id break the session. It is the
    id of the plan too. ``terms``: what else a worker with our extension is told.
    ``max_offload_tokens``: leading tokens of the prompt that are worth offloading; None: all.

    Of a plan with a handover these are the decode leg's: where the blocks come from and nothing beside it, since
    ``remote_prefiller`` together with ``remote_kv_source`` contradicts itself. With NixlConnector they are known
    only from the prefill worker's answer.
    """
    if plan.handover is not None:
        return _take_over(plan, plan.handover, kv_request_id, terms or ExtensionTerms())
    params: dict[str, object] = {}
    if plan.source is not None and not plan.pulls:
        params["remote_kv_source"] = {
            "kv_request_id": kv_request_id,
            "remote_host": plan.source.host,
            "remote_port": plan.source.port,
        }
    if plan.max_load_tokens is not None:
        params["max_load_tokens"] = plan.max_load_tokens
    # Ranges of pulls end before what storage has; their tier is no medium of the list.
    if not plan.use_storage and plan.max_load_tokens != 0 and not plan.pulls:
        # An empty list would exclude the peer as well; the tier in RAM is always consulted.
        params["kv_load_tiers"] = [{"medium": "CPU"}] if plan.source else []
    if max_offload_tokens is not None:
        params["max_offload_tokens"] = max_offload_tokens
    if plan.extension:
        params[PLAN_KEY] = extension_plan(plan, kv_request_id, terms or ExtensionTerms())
    return params or None


def prefill_params(
    handover: Handover, kv_request_id: str, pull_id: str, terms: ExtensionTerms | None = None
) -> dict[str, object]:
    """The parameters of the prefill leg.

    ``kv_request_id`` is the one that ``transfer_params`` gave the decode leg; ``pull_id``, fresh and another one,
    names the prefill worker's own pull from a peer (``remote_decoder`` beside ``remote_kv_source`` is legal).
    """
    own = transfer_params(handover.prefill, pull_id, terms=terms) or {}
    if handover.transfer is Transfer.NIXL:
        return own | _NIXL_PREFILL
    return own | {"remote_decoder": {"kv_request_id": kv_request_id}}


def _take_over(
    plan: Plan, handover: Handover, kv_request_id: str, terms: ExtensionTerms
) -> dict[str, object] | None:
    if handover.transfer is Transfer.NIXL:
        return None
    params: dict[str, object] = {
        "remote_prefiller": {
            "kv_request_id": kv_request_id,
            "remote_host": handover.host,
            "remote_port": handover.port,
        }
    }
    if plan.extension:
        params[PLAN_KEY] = extension_plan(plan, kv_request_id, terms, pulls=False)
    return params
