# SPDX-License-Identifier: Apache-2.0
"""Constants of the cost model: one JSON file per profile, each with the source of its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

import msgspec

from router.errors import ConfigError


class MeasuredRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A published measurement: time to first token of one request on an idle pair with a session."""

    tokens: int
    recompute_s: float
    pull_s: float


class CostProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds and bytes of one model on one kind of machine."""

    source: str
    """Where the numbers come from."""
    prefill_start_s: float
    """Fixed part of a prefill: scheduling, launch, first sampling."""
    prefill_s_per_token: float
    """Per computed token, context aside."""
    prefill_s_per_token_squared: float
    """Per computed token and token of context it attends to."""
    kv_bytes_per_token: float
    admit_s: float
    """Until the scheduler first looks at a request: half a step."""
    step_tokens: float
    """Prompt tokens that the engine computes in one step at most (``--max-num-batched-tokens``)."""
    decode_start_s: float
    """A step that computes one token of one request."""
    decode_s_per_request: float
    """What each further request that decodes adds to a step, whether of a prefill or not."""
    ram_start_s: float
    ram_bytes_per_s: float
    """CPU to GPU promotion."""
    peer_connect_s: float
    """First pull of a pair, once."""
    peer_lookup_s: float
    peer_bytes_per_s: float
    """One pull alone on both links."""
    peer_share_exponent: float
    """Of the number of pulls on a link, in the time that each takes: 1 when they share it fairly."""
    storage_start_s: float
    storage_bytes_per_s: float
    measured: tuple[MeasuredRow, ...] = ()
    """What the constants of prefill and pull were fitted to, where that is published."""


NUMBERS = tuple(name for name in CostProfile.__struct_fields__ if name not in {"source", "measured"})


def constants(profile: CostProfile) -> tuple[float, ...]:
    """The numbers alone: two profiles with the same predict the same."""
    return tuple(getattr(profile, name) for name in NUMBERS)


def profile_names() -> list[str]:
    """Names of the profiles that come with the package."""
    files = resources.files(__package__).joinpath("profiles").iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def load_profile(name: str, overrides: Mapping[str, float] | None = None) -> CostProfile:
    """A packaged profile with single constants replaced.

    Raises:
        ConfigError: no such profile, no such constant, or a value that is not positive.
    """
    if name not in profile_names():
        raise ConfigError("costs.profile", name, f"one of {', '.join(profile_names())}")
    data = resources.files(__package__).joinpath("profiles", f"{name}.json").read_bytes()
    return with_overrides(msgspec.json.decode(data, type=CostProfile), overrides or {})


def with_overrides(profile: CostProfile, overrides: Mapping[str, float]) -> CostProfile:
    """The profile with single constants replaced.

    Raises:
        ConfigError: no such constant, or a value that is not positive.
    """
    for key, value in overrides.items():
        if key not in NUMBERS:
            raise ConfigError(f"costs.overrides.{key}", value, f"one of {', '.join(NUMBERS)}")
        if not value > 0:
            raise ConfigError(f"costs.overrides.{key}", value, "a number above 0")
    return msgspec.structs.replace(profile, **overrides)
