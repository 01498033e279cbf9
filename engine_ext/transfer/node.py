# SPDX-License-Identifier: Apache-2.0
"""Composition: one process's end of block transfers. Serves its region, pulls into it, and shakes hands.

    node = open_node(config, fingerprint, region, new_boot_id())
    answer, refused = node.handshake.answer(bytes_of_a_hello)         # as a source
    offer = node.handshake.conclude(bytes_of_an_answer)               # as a reader
    node.engine.connect(address, offer)

How the bytes of a handshake travel is the caller's business.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from .agent import ServingAgent
from .config import TransferConfig
from .engine import PullEngine
from .errors import AgentError, TransferConfigError
from .fingerprint import Fingerprint
from .handshake import Handshake
from .nixl_agent import NixlPullAgents, NixlServingAgent
from .region import Region


def new_boot_id() -> str:
    """A name for one life of a process: 32 hexadecimal digits that were never used before."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class TransferNode:
    """Both agents and the handshake of one boot."""

    boot_id: str
    handshake: Handshake
    engine: PullEngine
    serving: ServingAgent


def open_node(config: TransferConfig, fingerprint: Fingerprint, region: Region, boot_id: str) -> TransferNode:
    """Registers the region for serving and for pulling; all of it, or nothing.

    Raises:
        TransferConfigError: a setting is not usable, or the fingerprint's block length is not the region's.
        AgentError: NIXL is missing, a backend is, or a registration failed; nothing is left behind.
    """
    config.check()
    if fingerprint.block_length_bytes != region.block_bytes:
        raise TransferConfigError(
            "block_length_bytes", fingerprint.block_length_bytes, str(region.block_bytes)
        )
    serving = NixlServingAgent(boot_id, config, region)
    try:
        engine = PullEngine(config, region, NixlPullAgents(boot_id, config, region))
        handshake = Handshake(fingerprint, serving.offer())
    except AgentError:
        serving.close()
        raise
    return TransferNode(boot_id, handshake, engine, serving)
