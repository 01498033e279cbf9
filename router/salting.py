# SPDX-License-Identifier: Apache-2.0
"""The tenant's salt in what goes to a worker: every leg of every attempt carries it."""

from __future__ import annotations

from collections.abc import Mapping

from router.gateway.parse import begins_object
from router.request import InferenceRequest, RequestKind


def with_salt(request: InferenceRequest, keys: Mapping[str, object]) -> dict[str, object]:
    """Top-level keys to add to the body, those of the tenant among them.

    The salt goes into whatever is, or claims to be, a JSON object. A call that takes a prompt gets it in any case:
    whoever adds keys refuses a body that is no object. A client's own ``cache_salt`` comes earlier in the body, so
    it loses.
    """
    if request.tenant.salt_key is None or request.method != "POST":
        return dict(keys)
    takes_prompt = request.kind is not RequestKind.OTHER
    if takes_prompt or request.document is not None or begins_object(request.body):
        return {**keys, "cache_salt": request.cache_salt}
    return dict(keys)
