# SPDX-License-Identifier: Apache-2.0
"""What must be equal on both sides before blocks may move between them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from .errors import RefusalReason

ShortText = Annotated[str, msgspec.Meta(max_length=512)]


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that gives the bytes of a block their meaning, and who may read them.

    A KV block is a function of tokens, weights and numerics; two engines may exchange one only if all of these
    agree, in the names that both engines use for them.
    """

    model: ShortText
    weights_revision: ShortText
    """A revision or digest of the weights; adapters reloaded under one name need another revision."""
    dtype: ShortText
    """Of the KV cache, with its quantisation if any, e.g. `bfloat16` or `fp8_e4m3`."""
    block_length_bytes: Annotated[int, msgspec.Meta(ge=1)]
    """Of one block as it lies in the shared region."""
    layout: ShortText
    """Order of layers, heads and K/V inside a block."""
    tp_map: ShortText
    """Which shards of the heads lie in a block, e.g. `tp=2:0,1`."""
    hash_seed: ShortText
    """A digest that tells hash functions and seeds apart, never the seed itself."""
    tenant: ShortText
    """Empty for a region shared by all."""

    def differences(self, other: Fingerprint) -> tuple[RefusalReason, ...]:
        """The fields that differ, as refusal reasons, in a fixed order; empty if the two are compatible."""
        return tuple(
            reason for name, reason in _REASONS.items() if getattr(self, name) != getattr(other, name)
        )


_REASONS = {
    "model": RefusalReason.MODEL,
    "weights_revision": RefusalReason.WEIGHTS_REVISION,
    "dtype": RefusalReason.DTYPE,
    "block_length_bytes": RefusalReason.BLOCK_LENGTH,
    "layout": RefusalReason.LAYOUT,
    "tp_map": RefusalReason.TP_MAP,
    "hash_seed": RefusalReason.HASH_SEED,
    "tenant": RefusalReason.TENANT,
}
