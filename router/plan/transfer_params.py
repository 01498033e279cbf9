# SPDX-License-Identifier: Apache-2.0
"""A plan as ``kv_transfer_params`` that unmodified vLLM 0.27 and later understands. Pure.

Keys: vLLM ``docs/features/kv_offloading_usage.md``. Nothing is sent where the engine's default is what the plan
says, so a worker without a connector never sees the key.
"""

from __future__ import annotations

from router.plan.candidate import Plan


def transfer_params(plan: Plan, kv_request_id: str) -> dict[str, object] | None:
    """The parameters of one attempt; None when the engine needs none.

    ``kv_request_id`` must be fresh for each attempt: two engine requests under one id break the session.
    """
    if plan.source is not None:
        return {
            "remote_kv_source": {
                "kv_request_id": kv_request_id,
                "remote_host": plan.source.host,
                "remote_port": plan.source.port,
            }
        }
    if not plan.external_load:
        return {"max_load_tokens": 0}
    return None
