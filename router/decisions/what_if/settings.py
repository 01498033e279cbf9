# SPDX-License-Identifier: Apache-2.0
"""What is to be different when a log is decided again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from router.costs.profile import NUMBERS, load_profile
from router.decisions.inputs import PlanSettings
from router.errors import ConfigError
from router.plan.peers import LLM_D_CONFIGS
from router.replay.policies import REPLAY_POLICIES, ReplayPolicyName

LOOKS_AT_COSTS: ReplayPolicyName = "kv_aware"

_SETTINGS = PlanSettings.__struct_fields__
_ACCEPTED = ", ".join(
    [
        "costs.profile",
        *(f"costs.{name}" for name in NUMBERS),
        *(f"plan.{name}" for name in _SETTINGS),
        "plan.use_peers",
    ]
)


@dataclass(frozen=True, slots=True)
class Changes:
    """Nothing is changed where nothing is given: then what was learnt of each worker stays too."""

    constants: Mapping[str, float] = field(default_factory=dict)
    """Replace those of every worker and link."""
    settings: Mapping[str, float] = field(default_factory=dict)
    use_peers: bool = True
    policy: ReplayPolicyName | None = None
    """None: the one that each decision was made by."""
    kv_capacity_tokens: int = 0
    """What the HBM of one rank holds; no record tells it, and some policies of other routers need it."""

    def apply(self, recorded: PlanSettings) -> PlanSettings:
        """The planner's settings, of a decision that was made with ``recorded``."""
        if not self.settings:
            return recorded
        weight, deadline_s, tokens = (self.settings.get(name, getattr(recorded, name)) for name in _SETTINGS)
        return PlanSettings(weight, deadline_s, int(tokens))


def parse_changes(texts: Iterable[str], policy: str | None, kv_capacity_tokens: int | None) -> Changes:
    """``KEY=VALUE`` texts, the last one of a key counts.

    Raises:
        ConfigError: an unknown key or policy, or a value that is not accepted.
    """
    constants: dict[str, float] = {}
    settings: dict[str, float] = {}
    use_peers = True
    for text in texts:
        key, equals, value = text.partition("=")
        section, _, name = key.partition(".")
        if not equals:
            raise ConfigError("--set", text, "KEY=VALUE")
        if key == "costs.profile":
            profile = load_profile(value)
            constants |= {name: getattr(profile, name) for name in NUMBERS}
        elif key == "plan.use_peers":
            use_peers = _boolean(key, value)
        elif section == "costs" and name in NUMBERS:
            constants[name] = _number(key, value, above_zero=True)
        elif section == "plan" and name in _SETTINGS:
            settings[name] = _number(key, value, above_zero=name == "pull_deadline_s")
        else:
            raise ConfigError("--set", key, f"one of {_ACCEPTED}")
    return Changes(
        constants, settings, use_peers, _policy(policy, kv_capacity_tokens), kv_capacity_tokens or 0
    )


def _policy(name: str | None, kv_capacity_tokens: int | None) -> ReplayPolicyName | None:
    if kv_capacity_tokens is not None and kv_capacity_tokens < 1:
        raise ConfigError("--kv-capacity-tokens", kv_capacity_tokens, "a whole number from 1")
    if name is None:
        return None
    for known in REPLAY_POLICIES:
        if known == name:
            if name in LLM_D_CONFIGS and kv_capacity_tokens is None:
                raise ConfigError("--kv-capacity-tokens", None, f"a number of tokens; policy {name} needs it")
            return known
    raise ConfigError("--policy", name, f"one of {', '.join(REPLAY_POLICIES)}")


def _number(key: str, text: str, *, above_zero: bool) -> float:
    accepted = "a number above 0" if above_zero else "a number, at least 0"
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"--set {key}", text, accepted) from None
    if not math.isfinite(value) or value < 0 or (above_zero and value == 0):
        raise ConfigError(f"--set {key}", text, accepted)
    return value


def _boolean(key: str, text: str) -> bool:
    if text not in {"true", "false"}:
        raise ConfigError(f"--set {key}", text, "true or false")
    return text == "true"
