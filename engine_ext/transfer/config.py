# SPDX-License-Identifier: Apache-2.0
"""Settings of the pull engine, each with a working default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .errors import TransferConfigError


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Decode it from a mapping with `load`; unknown keys are errors."""

    backends: tuple[str, ...] = ("UCX",)
    """NIXL backends in order of preference; each must be able to register the region."""

    backend_options: dict[str, dict[str, str]] = msgspec.field(default_factory=dict)
    """Options per backend, passed on as they are, e.g. `{"UCX": {"num_workers": "2"}}`."""

    part_bytes: int = 16 << 20
    """A pull is cut into parts of at most this size, one NIXL transfer each (at least one block). Over shared
    memory UCX copies a part inside the call that posts it; a poll then copies about this much and returns."""

    join_bytes: int = 1 << 20
    """Pulls that wait for the same peer at the same time share a transfer up to this size, since a transfer costs some
    microseconds beside its bytes. 0: each has its own. The first of them is there when the last is."""

    depth: int = 4
    """Transfers under way per peer, those of failed pulls included. The quarantine of one peer never exceeds
    `depth * part_bytes` (or `depth` blocks, where a block is larger)."""

    max_jobs: int = 4096
    """Pulls that may be open at once."""

    progress_interval_s: float = 0.005
    """How often the serving agent's progress thread looks by itself; UCX also wakes it for most events."""

    first_poll_s: float = 20e-6
    longest_poll_s: float = 1e-3
    """While parts are under way the pause between two polls grows from the first to the longest."""

    warm_up_s: float = 0.25
    """For how long a new connection is driven on before its first pull; the wire-up takes some round trips."""

    linger_interval_s: float = 0.02
    """How often a part of a failed pull is asked whether it is over."""

    linger_limit_s: float = 60.0
    """A part that is not over this long after its pull failed gets its agent replaced and destroyed."""

    settle_s: float = 0.5
    """Blocks of a failed connection are kept this much longer: with several rails, UCX reports the first
    failure and ends the other rails' requests right after."""

    retry_s: float = 1.0
    """Pause before an agent that could not be created or destroyed is tried again."""

    def check(self) -> TransferConfig:
        """Itself, if every value is usable.

        Raises:
            TransferConfigError: names the first field that is not.
        """
        if not self.backends or not all(self.backends) or len(set(self.backends)) != len(self.backends):
            raise TransferConfigError("backends", self.backends, "distinct names, at least one")
        for name in self.backend_options:
            if name not in self.backends:
                raise TransferConfigError("backend_options", name, f"one of backends {self.backends}")
        for field in ("part_bytes", "depth", "max_jobs"):
            if getattr(self, field) < 1:
                raise TransferConfigError(field, getattr(self, field), "an integer of at least 1")
        if self.join_bytes < 0:
            raise TransferConfigError("join_bytes", self.join_bytes, "bytes, at least 0")
        for field in ("progress_interval_s", "first_poll_s", "linger_interval_s", "retry_s"):
            if not 0 < getattr(self, field) <= 60:
                raise TransferConfigError(field, getattr(self, field), "seconds, above 0 and at most 60")
        for field in ("warm_up_s", "linger_limit_s", "settle_s"):
            if not 0 <= getattr(self, field) <= 3600:
                raise TransferConfigError(field, getattr(self, field), "seconds, 0 to 3600")
        if not self.first_poll_s <= self.longest_poll_s <= 1:
            raise TransferConfigError("longest_poll_s", self.longest_poll_s, "first_poll_s to 1 second")
        return self

    @classmethod
    def load(cls, options: Mapping[str, Any]) -> TransferConfig:
        """From a mapping, as a configuration file or `kv_connector_extra_config` holds it.

        Raises:
            TransferConfigError: unknown key, wrong type or unusable value.
        """
        try:
            return msgspec.convert(dict(options), cls).check()
        except msgspec.ValidationError as error:
            raise TransferConfigError("transfer", dict(options), str(error)) from error
