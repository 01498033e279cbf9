# SPDX-License-Identifier: Apache-2.0
"""The policies that a trace can be replayed with: those of the configuration and those of other routers."""

from __future__ import annotations

from typing import Literal, get_args

from router.plan.peers import (
    CacheAware,
    FixedCredits,
    FleetView,
    LlmD,
    LongestPrefix,
    PeerPolicyName,
)
from router.plan.planner import Planner
from router.plan.policies import Policy, PolicyName, make_policy
from router.replay.oracle import OraclePolicyName

ReplayPolicyName = Literal[PolicyName, PeerPolicyName]

REPLAY_POLICIES: tuple[ReplayPolicyName, ...] = get_args(ReplayPolicyName)

AnyPolicyName = Literal[ReplayPolicyName, OraclePolicyName]
"""The clairvoyant one included."""


def make_replay_policy(
    name: ReplayPolicyName,
    planner: Planner,
    kv_capacity_tokens: int,
    view: FleetView | None = None,
) -> Policy:
    """The policy of that name; ``kv_capacity_tokens`` is what the HBM of one worker holds."""
    match name:
        case "longest_prefix":
            return LongestPrefix(planner)
        case "cache_aware":
            return CacheAware(planner)
        case "fixed_credits":
            return FixedCredits(planner, view)
        case "affinity" | "affinity_pull" | "load" | "load_pull" | "fixed_pull":
            return LlmD(planner, name, kv_capacity_tokens, view)
        case _:
            return make_policy(name, planner)
