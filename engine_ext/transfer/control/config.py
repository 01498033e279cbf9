# SPDX-License-Identifier: Apache-2.0
"""Settings of the control channel, each with a working default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from engine_ext.transfer.errors import TransferConfigError

_WILDCARDS = ("*", "0.0.0.0", "::", "[::]")
_KEY_CHARS = 40


class ControlConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Decode it from a mapping with `load`; unknown keys are errors."""

    bind_host: str = "127.0.0.1"
    """Where the channel listens; `*` for every interface."""

    port: int = 5720
    """0 takes a free one."""

    advertise_host: str = ""
    """The host under which peers reach `bind_host`, which it is where this is empty. Numeric: names are resolved on
    the thread that serves every connection."""

    lease_s: float = 10.0
    """How long a source keeps what it answered for a reader that is not heard of. Readers renew at a third of it."""

    longest_lease_s: float = 120.0
    """After this a lease is not renewed any more."""

    lease_margin_s: float = 0.5
    """A reader takes a lease for ended this much earlier: for clocks that do not run equally fast."""

    handshake_timeout_s: float = 1.0
    """Until a peer that does not answer counts as unreachable."""

    retry_s: float = 1.0
    """For how long a peer that did not answer is not asked again. One that refuses the connection costs no time, and
    is asked each time."""

    idle_s: float = 300.0
    """A connection over which nothing was asked for this long is closed."""

    max_peers: int = 256
    """Peers that we read from, and peers that read from us, at once."""

    max_finds: int = 4096
    """Lookups and leases of ours at once."""

    max_lookups: int = 1024
    """Lookups and leases of peers at once, all readers together."""

    max_lookups_per_reader: int = 256

    max_keys: int = 16384
    """Keys of one lookup, at most 16384."""

    curve_secret_key_file: str = ""
    """A file with a secret key in Z85 (40 characters), for serving and for asking. Empty: no encryption."""

    curve_server_key: str = ""
    """The public key of the peers that we ask; empty: our own, where a fleet shares one pair."""

    curve_server_keys: dict[str, str] = msgspec.field(default_factory=dict)
    """Public keys by address (`host:port`), for peers with another one."""

    curve_clients: tuple[str, ...] = ()
    """Public keys of those who may ask us; empty: whoever knows our public key."""

    def check(self) -> ControlConfig:
        """Itself, if every value is usable.

        Raises:
            TransferConfigError: names the first field that is not.
        """
        if not self.bind_host:
            raise TransferConfigError("bind_host", self.bind_host, "a host or *")
        if not 0 <= self.port <= 65535:
            raise TransferConfigError("port", self.port, "0 to 65535")
        if self.bind_host in _WILDCARDS and not self.advertise_host:
            raise TransferConfigError("advertise_host", "", "a host, where bind_host is a wildcard")
        self._check_times()
        for field in ("max_peers", "max_finds", "max_lookups", "max_lookups_per_reader"):
            if getattr(self, field) < 1:
                raise TransferConfigError(field, getattr(self, field), "an integer of at least 1")
        if not 1 <= self.max_keys <= 16384:
            raise TransferConfigError("max_keys", self.max_keys, "1 to 16384")
        self._check_keys()
        return self

    def _check_times(self) -> None:
        if not 0.2 <= self.lease_s <= 600:
            raise TransferConfigError("lease_s", self.lease_s, "seconds, 0.2 to 600")
        if not self.lease_s <= self.longest_lease_s <= 86400:
            raise TransferConfigError("longest_lease_s", self.longest_lease_s, "seconds, lease_s to 86400")
        if not 0 < self.lease_margin_s <= self.lease_s / 2:
            raise TransferConfigError(
                "lease_margin_s", self.lease_margin_s, f"seconds, above 0 and at most {self.lease_s / 2}"
            )
        for field in ("handshake_timeout_s", "idle_s"):
            if not 0 < getattr(self, field) <= 3600:
                raise TransferConfigError(field, getattr(self, field), "seconds, above 0 and at most 3600")
        if not 0 <= self.retry_s <= 60:
            raise TransferConfigError("retry_s", self.retry_s, "seconds, 0 to 60")

    def _check_keys(self) -> None:
        for field in ("curve_server_key", "curve_server_keys", "curve_clients"):
            if getattr(self, field) and not self.curve_secret_key_file:
                raise TransferConfigError(
                    field, getattr(self, field), "nothing, where there is no curve_secret_key_file"
                )
        for field, keys in (
            ("curve_server_key", [self.curve_server_key] if self.curve_server_key else []),
            ("curve_server_keys", list(self.curve_server_keys.values())),
            ("curve_clients", list(self.curve_clients)),
        ):
            for key in keys:
                if len(key) != _KEY_CHARS or not key.isascii():
                    raise TransferConfigError(field, key, f"public keys of {_KEY_CHARS} characters, in Z85")

    @classmethod
    def load(cls, options: Mapping[str, Any]) -> ControlConfig:
        """From a mapping, as a configuration file or `kv_connector_extra_config` holds it.

        Raises:
            TransferConfigError: unknown key, wrong type or unusable value.
        """
        try:
            return msgspec.convert(dict(options), cls).check()
        except msgspec.ValidationError as error:
            raise TransferConfigError("control", dict(options), str(error)) from error
