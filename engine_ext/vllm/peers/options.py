# SPDX-License-Identifier: Apache-2.0
"""The tier's entry in `kv_connector_extra_config.secondary_tiers`, beside `type` and `module_path`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


class TierConfigError(ValueError):
    """An option of the tier is unknown or unusable; the message names it and what is accepted."""


class TierOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every one has a working default, except that peers on other hosts need an address in `control`."""

    control: dict[str, Any] = msgspec.field(default_factory=dict)
    """`ControlConfig` of `engine_ext.transfer.control`: where we listen, leases, CURVE."""
    transfer: dict[str, Any] = msgspec.field(default_factory=dict)
    """`TransferConfig` of `engine_ext.transfer`."""
    p2p: dict[str, Any] | None = None
    """Options of vLLM's in-tree P2P tier (`host`, `port`, `backends`, ...), which then runs inside this one."""
    allow_unfingerprinted_peers: bool = False
    """Whether in-tree peers may be used at all: they check neither revision nor tenant, and write into our memory."""
    tenant: str = ""
    """Set where this engine serves one tenant only; peers and questions of others are refused."""
    weights_revision: str = ""
    """Names the weights. Empty: the revision that vLLM was given, else a digest of the model's files."""
    longest_pull_s: Seconds = 30.0
    """Upper bound on the deadlines of plans."""
    serve_patience_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.5
    """How long a peer's question waits for chunks that are just being written."""
    serve_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    """Of the host tier's chunks, how many may be pinned for peers."""
    stock_lookup_s: Seconds = 5.0
    """Of a stock `remote_kv_source` request: how long its lookups may wait for the peer."""
    linger_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 60.0
    """How long chunks stay in quarantine after a pull from an in-tree peer failed."""

    @classmethod
    def load(cls, options: Mapping[str, Any]) -> TierOptions:
        """
        Raises:
            TierConfigError: unknown key, wrong type or unusable value, or `p2p` without permission.
        """
        try:
            loaded = msgspec.convert(dict(options), cls)
        except msgspec.ValidationError as error:
            accepted = ", ".join(cls.__struct_fields__)
            raise TierConfigError(f"PointsmanTier: {error}; options are: {accepted}") from error
        if loaded.p2p is not None and not loaded.allow_unfingerprinted_peers:
            raise TierConfigError(
                "PointsmanTier: p2p is set, but allow_unfingerprinted_peers is false; in-tree peers check neither "
                "weights revision nor tenant, so set it to true to use them, or leave p2p out"
            )
        return loaded
