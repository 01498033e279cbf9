# SPDX-License-Identifier: Apache-2.0
"""How long things take: the constants of one simulated engine, from JSON files beside this module.

step   = step_base + sum over prefill chunks of (a * n + b * n * (context + n / 2))
                   + sum over decoding sequences of (c + d * context)
load   = latency + bytes / bandwidth, on links that transfers share
"""

from __future__ import annotations

from importlib import resources

import msgspec

from engine_ext.sim.errors import SimConfigError


class SimProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Constants of one engine and its links; seconds, bytes and bytes per second."""

    description: str = ""
    step_base_s: float
    """Time of a step before any token: reading the weights once."""
    prefill_s_per_token: float
    prefill_s_per_token_per_context_token: float
    decode_s_per_sequence: float
    decode_s_per_context_token: float
    kv_bytes_per_token: int
    ram_latency_s: float
    ram_load_bytes_per_s: float
    """RAM to HBM (promotion)."""
    ram_store_bytes_per_s: float
    """HBM to RAM (demotion)."""
    peer_connect_s: float
    """Added to the first lookup at a peer."""
    peer_lookup_s: float
    peer_bytes_per_s: float
    peer_timeout_s: float
    """How long a request waits for a peer that does not answer, for a pull, or for its prefill elsewhere; then it
    recomputes."""
    peer_pending_s: float = 5.0
    """How long a source keeps a lookup open for blocks that are being written (vLLM: ``_LOOKUP_PENDING_TIMEOUT_S``)."""
    peer_parked_s: float = 60.0
    """How long it keeps what a prefill stored for a decoder that does not come (vLLM: ``unbound_store_timeout_s``)."""
    storage_latency_s: float
    storage_read_bytes_per_s: float
    storage_write_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, str):
                continue
            is_rate = name.endswith("_bytes_per_s") or name == "kv_bytes_per_token"
            if value < 0 or (is_rate and value == 0):
                raise ValueError(f"{name}: {value!r} must be {'positive' if is_rate else 'at least 0'}")

    def prefill_s(self, tokens: int, context_tokens: int) -> float:
        """Time that one chunk of ``tokens`` behind ``context_tokens`` adds to its step."""
        attention = tokens * (context_tokens + tokens / 2)
        return self.prefill_s_per_token * tokens + self.prefill_s_per_token_per_context_token * attention

    def step_s(self, sequences: int, context_tokens: int) -> float:
        """Time of a step in which ``sequences`` sequences decode, behind that many tokens together."""
        return (
            self.step_base_s
            + self.decode_s_per_sequence * sequences
            + self.decode_s_per_context_token * context_tokens
        )

    def scaled(self, factor: float) -> SimProfile:
        """The same engine, ``factor`` times faster in everything."""
        if factor <= 0:
            raise SimConfigError("time_scale", factor, "a positive number")
        changes = {
            name: getattr(self, name) * factor
            if name.endswith("_bytes_per_s")
            else getattr(self, name) / factor
            for name in self.__struct_fields__
            if name not in ("description", "kv_bytes_per_token")
        }
        return msgspec.structs.replace(self, **changes)


def profile_names() -> list[str]:
    """Names of the profiles that come with the package."""
    folder = resources.files("engine_ext.sim") / "profiles"
    return sorted(
        entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")
    )


def load_profile(name: str) -> SimProfile:
    """The profile of that name.

    Raises:
        SimConfigError: no such profile, or its file does not decode.
    """
    if name not in profile_names():
        raise SimConfigError("profile", name, " or ".join(profile_names()))
    data = (resources.files("engine_ext.sim") / "profiles" / f"{name}.json").read_bytes()
    try:
        return msgspec.json.decode(data, type=SimProfile)
    except msgspec.ValidationError as error:
        raise SimConfigError("profile", name, str(error)) from error
