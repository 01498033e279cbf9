# SPDX-License-Identifier: Apache-2.0
"""Both roles over one link: events go to the role that they concern. Pure; time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

from engine_ext.transfer.control.peer import Asked, LeaseEnded, PeerLink

from .reader import Reader
from .source import Source


@dataclass(frozen=True, slots=True)
class Exchange:
    link: PeerLink
    reader: Reader
    source: Source

    def poll(self, now_s: float) -> None:
        """Takes what happened, then looks at deadlines."""
        for event in self.link.take():
            match event:
                case Asked():
                    self.source.asked(event, now_s)
                case LeaseEnded(lookup_id, _):
                    self.source.lease_ended(lookup_id)
                case _:
                    self.reader.on_event(event, now_s)
        self.reader.tick(now_s)

    def quiesce(self, now_s: float) -> bool:
        """One round of coming to rest: pulls are aborted, questions get nothing. True once nothing is under way.

        Leases of peers run on, because chunks must not change while somebody may read them; a lease has an end.
        """
        self.reader.abort_all(now_s)
        self.source.refuse_all(self.link)
        self.poll(now_s)
        return not self.reader.busy and not self.source.leases
