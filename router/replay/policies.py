# SPDX-License-Identifier: Apache-2.0
"""The policies that a trace can be replayed with: those of the configuration and those of other routers."""

from __future__ import annotations

from typing import Literal, get_args

from router.plan.peers import CacheAware, FixedCredits, FixedPull, LongestPrefix, PeerPolicyName
from router.plan.planner import Planner
from router.plan.policies import Policy, PolicyName, make_policy

ReplayPolicyName = Literal[PolicyName, PeerPolicyName]

REPLAY_POLICIES: tuple[ReplayPolicyName, ...] = get_args(ReplayPolicyName)


def make_replay_policy(name: ReplayPolicyName, planner: Planner, kv_capacity_tokens: int) -> Policy:
    """The policy of that name; ``kv_capacity_tokens`` is what the HBM of one worker holds."""
    if name == "longest_prefix":
        return LongestPrefix(planner)
    if name == "cache_aware":
        return CacheAware(planner)
    if name == "fixed_credits":
        return FixedCredits(planner)
    if name == "fixed_pull":
        return FixedPull(planner, kv_capacity_tokens)
    return make_policy(name, planner)
