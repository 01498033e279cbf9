# SPDX-License-Identifier: Apache-2.0
"""Pulls of kind `p2p`: vLLM's in-tree tier carries them, under our deadlines. Pure; the tier itself is a Protocol.

There the source writes into our chunks and nobody can take that back, so a pull that we give up leaves its chunks in
quarantine until the in-tree tier says how it ended. It says "failed" both when the source has confirmed the abort and
when it only stopped waiting, so after a failure the chunks stay `linger_s` longer. That is a bound, not a proof: one
of the reasons why such peers must be allowed explicitly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from engine_ext.vllm.quarantine import Quarantine

from .jobs import Part
from .metrics import UNPROVEN, Tally


class ForeignPeers(Protocol):
    """vLLM's in-tree P2P tier, as far as a consumer needs it."""

    def open(self, name: str, address: str) -> Any:
        """A handle for one request to one peer. Where there can be no session, its lookups miss."""
        ...

    def lookup(self, handle: Any, key: bytes) -> bool | None:
        """Whether the peer has it; None while unknown."""
        ...

    def load(self, handle: Any, chunks: Mapping[bytes, int]) -> int:
        """Asks the peer to write these; an id that the end will carry, never the engine's."""
        ...

    def close(self, handle: Any) -> None:
        """Drops what is asked, aborts what is under way."""
        ...


class ForeignPulls:
    """Parts that the in-tree tier carries now. `peers` None: such peers are not allowed here."""

    def __init__(
        self, peers: ForeignPeers | None, quarantine: Quarantine, tally: Tally, linger_s: float
    ) -> None:
        self._peers = peers
        self._quarantine = quarantine
        self._tally = tally
        self._linger_s = linger_s
        self._parts: dict[int, Part] = {}
        self._lingering: list[tuple[float, list[int]]] = []

    def open(self, name: str, address: str) -> Any | None:
        """None: not allowed."""
        return self._peers.open(name, address) if self._peers is not None else None

    def lookup(self, handle: Any, key: bytes) -> bool | None:
        return self._peers.lookup(handle, key) if self._peers is not None else False

    def close(self, handle: Any) -> None:
        if self._peers is not None:
            self._peers.close(handle)

    def begin(self, part: Part) -> bool:
        """Asks for those chunks that the peer still keeps for us; drops the others. False: none is left.

        In the in-tree protocol a load ends the round of lookups before it, and with it what the source had pinned.
        """
        if self._peers is None:
            return False
        kept = {key: c for key, c in part.chunks.items() if self._peers.lookup(part.foreign, key) is True}
        part.chunks = kept
        if kept:
            self._parts[self._peers.load(part.foreign, kept)] = part
        return bool(kept)

    def open_parts(self) -> list[Part]:
        """Those that somebody waits for."""
        return [part for part in self._parts.values() if not part.over]

    def give_up(self, part: Part) -> None:
        """Nobody waits for this part any more, but its chunks may still be written."""
        part.over = True
        self._quarantine.hold(part.chunks.values())
        self.close(part.foreign)

    def ended(self, part_id: int, now_s: float, *, complete: bool) -> Part | None:
        """How the in-tree tier says a part ended; the part, if its job still waits for it."""
        part = self._parts.pop(part_id, None)
        if part is None:
            return None  # said twice
        if complete and part.over:
            self._quarantine.release(part.chunks.values())
        elif not complete:
            if not part.over:
                self._quarantine.hold(part.chunks.values())
            self._lingering.append((now_s + self._linger_s, list(part.chunks.values())))
        return None if part.over else part

    def tick(self, now_s: float) -> None:
        """Releases what has lingered long enough."""
        while self._lingering and self._lingering[0][0] <= now_s:
            chunks = self._lingering.pop(0)[1]
            self._tally.count(UNPROVEN, by=len(chunks))
            self._quarantine.release(chunks)
