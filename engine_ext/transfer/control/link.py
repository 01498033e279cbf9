# SPDX-License-Identifier: Apache-2.0
"""The owner's end of a link: composition, and the promises that hold whatever the threads are doing.

link = open_link(ControlConfig.load({...}), TransferConfig.load({...}), fingerprint, region)
find = link.find("10.0.0.7:5720", keys, tenant, time.monotonic() + 0.1)
... Found(find, keys) from take ...
pull = link.pull(find, {key: our_block, ...}, time.monotonic() + 0.8)
... BlocksPulled(pull) from take ...
link.forget(find)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine_ext.transfer.agent import ServingAgent
from engine_ext.transfer.config import TransferConfig
from engine_ext.transfer.errors import AgentError, TransferError
from engine_ext.transfer.events import Counts, Event, FailReason, JobId, Pulled, PullFailed, Released
from engine_ext.transfer.fingerprint import Fingerprint
from engine_ext.transfer.mailbox import Mailbox
from engine_ext.transfer.node import TransferNode, new_boot_id, open_node
from engine_ext.transfer.region import Region
from engine_ext.transfer.thread import PullThread

from .config import ControlConfig
from .curve import load_keys
from .peer import (
    Asked,
    BlocksNotPulled,
    BlocksPulled,
    BlocksReleased,
    Found,
    LeaseEnded,
    NotFound,
    NotFoundReason,
    PeerEvent,
)
from .reader import Reader
from .sockets import Sockets
from .source import Source
from .thread import ControlCounts, ControlThread, Heard

_LONGEST_WAIT_S = 86400.0


@dataclass(slots=True)
class _UnderWay:
    """What the owner waits for or has to give back."""

    finds: set[int]
    """Asked, or leased and not forgotten."""
    unanswered: set[int]
    lookups: set[int]
    quarantined: set[int]


class Link:
    """A PeerLink over ZMQ and the pull engine."""

    def __init__(
        self,
        control: ControlThread,
        pulls: PullThread,
        serving: ServingAgent,
        address: str,
        lease_s: float,
    ) -> None:
        """`control` is started here; everything given belongs to the link from here on."""
        self._control = control
        self._pulls = pulls
        self._serving = serving
        self._address = address
        self._lease_s = lease_s
        self._ids = itertools.count(1)
        self._mailbox = Mailbox()
        self._way = _UnderWay(set(), set(), set(), set())
        self._early: list[PeerEvent] = []
        self._closed = False
        control.start()

    @property
    def address(self) -> str:
        """As PeerLink.address."""
        return self._address

    def find(self, address: str, keys: Sequence[bytes], tenant: str, deadline_s: float) -> int:
        """As PeerLink.find."""
        find_id = next(self._ids)
        if self._over:
            self._early.append(NotFound(find_id, NotFoundReason.CLOSED))
            return find_id
        self._way.finds.add(find_id)
        self._way.unanswered.add(find_id)
        wanted, deadline_s = tuple(keys), _bounded(deadline_s)
        self._control.tell(
            lambda _, reader, now_s: reader.find(find_id, address, wanted, tenant, deadline_s, now_s)
        )
        return find_id

    def forget(self, find_id: int) -> None:
        """As PeerLink.forget."""
        self._way.finds.discard(find_id)
        self._way.unanswered.discard(find_id)
        self._control.tell(lambda _, reader, __: reader.forget(find_id))

    def pull(self, find_id: int, pairs: Mapping[bytes, int], deadline_s: float) -> int:
        """As PeerLink.pull."""
        pull_id = next(self._ids)
        if self._over:
            self._early.append(BlocksNotPulled(pull_id, FailReason.CLOSED))
            return pull_id
        wanted, deadline_s = dict(pairs), _bounded(deadline_s)
        self._mailbox.opened(JobId(pull_id), list(wanted.values()), deadline_s)
        self._control.tell(lambda _, reader, now_s: reader.pull(pull_id, find_id, wanted, deadline_s, now_s))
        return pull_id

    def abort(self, pull_id: int) -> None:
        """As PeerLink.abort."""
        for event in self._mailbox.aborted(JobId(pull_id)):
            self._early.extend(self._translate(event))
        self._control.tell(lambda _, reader, __: reader.abort(pull_id))

    def reply(self, lookup_id: int, found: Mapping[bytes, int]) -> None:
        """As PeerLink.reply."""
        blocks = dict(found)
        self._control.tell(lambda source, _, now_s: source.reply(lookup_id, blocks, now_s))

    def take(self) -> list[PeerEvent]:
        """As PeerLink.take."""
        told, self._early = self._early, []
        for heard in self._control.heard():
            told.extend(self._note(heard))
        for event in self._mailbox.expired(time.monotonic()):
            told.extend(self._translate(event))
        if self._control.error is not None:
            told.extend(self._after_an_error())
        return told

    def idle(self) -> bool:
        """As PeerLink.idle: no find that is not forgotten, no pull, no lookup or lease of a peer, no quarantine."""
        way = self._way
        return not (way.finds or way.lookups or way.quarantined or len(self._mailbox) or self._early)

    def counts(self) -> tuple[ControlCounts, Counts]:
        """Of the channel, and of the pull engine."""
        return self._control.counts(), self._pulls.counts()

    def close(self, timeout_s: float) -> bool:
        """As PeerLink.close. False also while peers hold leases: they may read until those end."""
        self._closed = True
        stop_s = time.monotonic() + timeout_s
        if not self._control.stop(timeout_s):
            return False
        if not self._pulls.close(max(0.0, stop_s - time.monotonic())):
            return False
        self._control.finish()
        try:
            self._serving.close()
        except AgentError:
            return False
        return True

    @property
    def _over(self) -> bool:
        return self._closed or self._control.error is not None

    def _note(self, heard: Heard) -> Iterator[PeerEvent]:
        if isinstance(heard, Pulled | PullFailed | Released):
            for event in self._mailbox.heard(heard):
                yield from self._translate(event)
            return
        if isinstance(heard, Found | NotFound):
            if heard.find_id not in self._way.unanswered:
                return  # forgotten
            self._way.unanswered.discard(heard.find_id)
            if isinstance(heard, NotFound) or not heard.keys:
                self._way.finds.discard(heard.find_id)
        elif isinstance(heard, Asked):
            self._way.lookups.add(heard.lookup_id)
        elif isinstance(heard, LeaseEnded):
            self._way.lookups.discard(heard.lookup_id)
        yield heard

    def _translate(self, event: Event) -> Iterator[PeerEvent]:
        if isinstance(event, Pulled):
            yield BlocksPulled(event.job_id, event.size_bytes, event.seconds)
        elif isinstance(event, PullFailed):
            self._way.quarantined.update(event.quarantined)
            yield BlocksNotPulled(event.job_id, event.reason, event.arrived, event.quarantined, event.detail)
        elif isinstance(event, Released):
            self._way.quarantined.difference_update(event.blocks)
            yield BlocksReleased(event.blocks, event.proof)

    def _after_an_error(self) -> Iterator[PeerEvent]:
        """The thread has ended: nothing is found or pulled any more, and nothing that was promised is taken back."""
        for find_id in sorted(self._way.unanswered):
            yield NotFound(find_id, NotFoundReason.CLOSED, repr(self._control.error))
        self._way.finds.clear()
        self._way.unanswered.clear()
        for event in self._mailbox.thread_ended():
            yield from self._translate(event)
        if time.monotonic() >= self._control.ended_s + self._lease_s:  # nobody renewed them since
            yield from (LeaseEnded(lookup_id, read=False) for lookup_id in sorted(self._way.lookups))
            self._way.lookups.clear()


def open_link(
    control_config: ControlConfig,
    transfer_config: TransferConfig,
    fingerprint: Fingerprint,
    region: Region,
    boot_id: str | None = None,
) -> Link:
    """Binds the channel, registers the region and starts both threads; all of it, or nothing.

    Raises:
        TransferConfigError: a setting is not usable, or the address cannot be bound.
        AgentError: NIXL is missing or refuses the region.
    """
    sockets = Sockets(control_config.check(), load_keys(control_config))
    try:
        node = open_node(transfer_config, fingerprint, region, boot_id or new_boot_id())
    except TransferError:
        sockets.close()
        raise
    return join(control_config, sockets, node)


def join(config: ControlConfig, sockets: Sockets, node: TransferNode) -> Link:
    """A link of parts that are open already, and belong to it from here on."""
    pulls = PullThread(node.engine, notify=sockets.wake)
    source = Source(config, node.handshake, sockets.answer)
    reader = Reader(config, node.handshake, sockets, pulls)
    control = ControlThread(config, sockets, source, reader, pulls)
    address = f"{config.advertise_host or config.bind_host}:{sockets.port}"
    return Link(control, pulls, node.serving, address, config.lease_s)


def _bounded(deadline_s: float) -> float:
    """Timers cannot wait for ever."""
    return min(deadline_s, time.monotonic() + _LONGEST_WAIT_S)
