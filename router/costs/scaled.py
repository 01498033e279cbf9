# SPDX-License-Identifier: Apache-2.0
"""A profile's constants times the scale factors learnt for a worker or a link. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from router.costs.model import Link
from router.costs.profile import CostProfile


def scaled_profile(profile: CostProfile, worker: Sequence[float], link: Link) -> CostProfile:
    """Factors of seconds in the order of ``WORKER_TERMS``: a slower worker has smaller bandwidths."""
    start, token, square, decodes, ram, storage, decode_start = worker
    return msgspec.structs.replace(
        profile,
        admit_s=profile.admit_s * start,
        prefill_start_s=profile.prefill_start_s * start,
        prefill_s_per_token=profile.prefill_s_per_token * token,
        prefill_s_per_token_squared=profile.prefill_s_per_token_squared * square,
        decode_start_s=profile.decode_start_s * decode_start,
        decode_s_per_request=profile.decode_s_per_request * decodes,
        ram_start_s=profile.ram_start_s * ram,
        ram_bytes_per_s=profile.ram_bytes_per_s / ram,
        storage_start_s=profile.storage_start_s * storage,
        storage_bytes_per_s=profile.storage_bytes_per_s / storage,
        peer_connect_s=link.connect_s,
        peer_lookup_s=link.lookup_s,
        peer_bytes_per_s=link.bytes_per_s,
        peer_share_exponent=link.share_exponent,
    )


def scaled_link(profile: CostProfile, factors: Sequence[float]) -> Link:
    """Factors in the order of ``LINK_TERMS``."""
    connect, lookup, wire, share = factors
    return Link(
        profile.peer_connect_s * connect,
        profile.peer_lookup_s * lookup,
        profile.peer_bytes_per_s / wire,
        profile.peer_share_exponent * share,
    )
