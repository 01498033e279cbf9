# SPDX-License-Identifier: Apache-2.0
"""Transfers of failed pulls that are not known to be over, and the blocks they may still write.

NIXL cannot cancel a transfer: releasing its handle leaves the reads under way, and they land later. So the handle is
kept and asked until it ends, and the blocks are kept until one of these is known:

    FINISHED           the transfer says it is done
    CONNECTION_ENDED   its connection failed, which ended all its requests, and `settle_s` have passed
    AGENT_DESTROYED    the agent that would have written is gone; asked for `linger_limit_s` after the pull failed,
                       or at once where the library's error does not say whether writes may still land
"""

from __future__ import annotations

from collections.abc import Iterator

from .agent import TransferState
from .config import TransferConfig
from .events import Proof, Released
from .generations import Generations
from .jobs import Peer, Share, Transfer
from .ledger import Ledger


class Quarantine:
    """Transfers with shares of failed pulls. Those that open pulls still want are asked by the machine, with every poll.
    Costs O(transfers held) per check.
    """

    def __init__(self, config: TransferConfig, generations: Generations, ledger: Ledger) -> None:
        self._config = config
        self._generations = generations
        self._ledger = ledger
        self.held: dict[Transfer, None] = {}
        """Those of which something is in quarantine."""

    def hold(self, share: Share, transfer: Transfer, now_s: float) -> None:
        """A share that was under way when its pull failed, now."""
        share.held = True
        transfer.wanted -= 1
        self._ledger.quarantine(share.destination)
        if transfer not in self.held:
            self.held[transfer] = None
            transfer.failed_s = transfer.next_check_s = now_s

    def note(self, transfer: Transfer, state: TransferState, now_s: float) -> None:
        """How a held transfer failed."""
        if state is TransferState.GONE:
            transfer.settled_s = now_s + self._config.settle_s
        else:
            transfer.unknown = True

    def check(self, now_s: float) -> tuple[list[Released], list[Peer]]:
        """Asks what is due, retires agents whose transfers do not end; what is over, and the peers that are gone."""
        released: list[Released] = []
        gone: list[Peer] = []
        for transfer in list(self.held):
            if transfer.settled_s is not None:
                if now_s >= transfer.settled_s:
                    released += self._end(transfer, Proof.CONNECTION_ENDED)
                continue
            if not transfer.wanted and not transfer.unknown and now_s >= transfer.next_check_s:
                transfer.next_check_s = now_s + self._config.linger_interval_s
                state = transfer.generation.agent.check(transfer.handle)
                if state is TransferState.DONE:
                    transfer.peer.seen(now_s)
                    released += self._end(transfer, Proof.FINISHED)
                    continue
                if state is not TransferState.RUNNING:
                    self.note(transfer, state, now_s)
                if state is TransferState.GONE:
                    gone.append(transfer.peer)
                    continue
            if transfer.unknown or now_s >= transfer.failed_s + self._config.linger_limit_s:
                self._generations.retire(transfer.generation)
        return released, gone

    def due(self) -> Iterator[float]:
        """When each transfer is next to be looked at."""
        for transfer in self.held:
            if transfer.settled_s is not None:
                yield transfer.settled_s
            elif not transfer.unknown and not transfer.wanted:
                yield transfer.next_check_s
            elif not transfer.generation.retired:
                yield transfer.failed_s + (0.0 if transfer.unknown else self._config.linger_limit_s)

    def over(self, transfer: Transfer, proof: Proof) -> list[Released]:
        """A transfer, held or not, can write no more: what it held is free."""
        self.held.pop(transfer, None)
        released: list[Released] = []
        for share in transfer.shares:
            if share.held:
                self._ledger.release(share.destination)
                released.append(Released(share.job.job_id, tuple(share.destination), proof))
        return released

    def _end(self, transfer: Transfer, proof: Proof) -> list[Released]:
        released = self.over(transfer, proof)
        self._generations.over(transfer)
        return released
