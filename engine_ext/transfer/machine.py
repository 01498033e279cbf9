# SPDX-License-Identifier: Apache-2.0
"""The state machine of the pull engine: jobs, deadlines, quarantine, peers, generations of agents, timers.

It has no clock, no thread and no I/O but the agents it is given; every call takes the time. Invariants:

- a job ends once, with Pulled or PullFailed, no later than the first `take` at or after its deadline;
- a block is in at most one open pull or in quarantine, and a pull into such a block is refused;
- a block leaves quarantine only by one of the proofs of `Proof`; without a proof it stays for good;
- Pulled says that all bytes were there at a moment before the deadline: `take` reads the clock after `poll` asked
  the agent, so a process that was stopped in between cannot take late bytes for timely ones;
- nothing new is begun on an agent that has a transfer past its limit, nor with a peer that is lost or silent.

Costs: submit O(n log n) for n blocks; poll O(parts under way + peers), with at most `depth` parts begun; deadlines
O(log jobs).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from .admission import refusal
from .agent import AgentFactory, PeerOffer, TransferState
from .config import TransferConfig
from .errors import AgentError, PeerGoneError
from .events import Counts, Event, FailReason, JobId, PeerLost, Pulled, PullFailed, PullRequest
from .generations import Generations
from .jobs import Generation, Job, Part, PartState, Peer
from .ledger import Ledger
from .pacing import Pacing
from .parts import cut
from .quarantine import Quarantine
from .region import Region


class Machine:
    """See the module's page. Not thread-safe."""

    def __init__(self, config: TransferConfig, region: Region, agents: AgentFactory) -> None:
        """Makes the first agent.

        Raises:
            AgentError: it could not be made; nothing is left behind.
        """
        self._config = config
        self._region = region
        self._generations = Generations(config, agents)
        self._ledger = Ledger()
        self._quarantine = Quarantine(config, self._generations, self._ledger)
        self._pacing = Pacing(config.first_poll_s, config.longest_poll_s)
        self._part_blocks = max(1, config.part_bytes // region.block_bytes)
        self._peers: dict[str, Peer] = {}
        self._jobs: dict[JobId, Job] = {}
        self._deadlines: list[tuple[float, JobId]] = []
        self._queued: dict[Peer, None] = {}
        """Peers with waiting parts, the next one first."""
        self._running: list[Part] = []
        """Posted parts of open jobs."""
        self._arrived: list[Job] = []
        self._events: list[Event] = []
        self._warm_until_s = 0.0
        self._round = 0
        """Grows with every `take`."""
        self._pulled = self._failed = self._pulled_bytes = 0
        self._closed = False

    # What the owner tells

    def connect(self, address: str, offer: PeerOffer, now_s: float) -> None:
        """A handshake succeeded. Another incarnation than before ends the old session and its pulls."""
        known = self._peers.get(address)
        if known is not None and known.boot_id == offer.boot_id and not known.lost:
            known.seen(now_s)
            return
        if known is not None and known.boot_id != offer.boot_id:
            self._lose(known, FailReason.PEER_RESTARTED, now_s)
        warm_until_s = now_s + self._config.warm_up_s
        self._peers[address] = Peer(address, offer, now_s, warm_until_s)
        self._warm_until_s = max(self._warm_until_s, warm_until_s)
        self._pacing.moved()

    def forget(self, address: str, now_s: float) -> None:
        """The peer left. Its open pulls fail."""
        peer = self._peers.pop(address, None)
        if peer is not None:
            self._lose(peer, FailReason.PEER_GONE, now_s)

    def submit(self, job_id: JobId, request: PullRequest, now_s: float) -> None:
        """Queues a pull. A refusal comes as PullFailed, with nothing quarantined."""
        wanted = set(request.destination)
        peer = self._peers.get(request.address)
        if self._closed:
            reason: FailReason | None = FailReason.CLOSED
        elif len(self._jobs) >= self._config.max_jobs:
            reason = FailReason.TOO_MANY
        else:
            reason = refusal(request, wanted, peer, self._region, self._ledger)
        if peer is None or reason is not None:
            self._failed += 1
            self._events.append(PullFailed(job_id, reason or FailReason.UNKNOWN_PEER))
            return
        job = Job(job_id, peer, now_s, request.deadline_s, self._region.block_bytes)
        pieces = cut(request.source, request.destination, self._part_blocks)
        job.parts = [Part(job, source, destination) for source, destination in pieces]
        self._ledger.take(wanted)
        self._jobs[job_id] = job
        heapq.heappush(self._deadlines, (job.deadline_s, job_id))
        peer.waiting.append(job)
        self._queued[peer] = None
        self._pacing.moved()

    def abort(self, job_id: JobId, now_s: float) -> None:
        """Nobody waits for this pull any more. Unknown or ended ids are ignored."""
        job = self._jobs.get(job_id)
        if job is not None:
            self._fail(job, FailReason.ABORTED, now_s)

    def close(self, now_s: float) -> bool:
        """Fails every pull, destroys every agent, and takes no more. True once no block can be written any more.

        After False, call it again: an agent could not be destroyed. Until True the region must stay mapped.
        """
        self._closed = True
        for job in list(self._jobs.values()):
            self._fail(job, FailReason.CLOSED, now_s)
        self._peers.clear()
        self._generations.close()
        self._end_retired(now_s)
        return self._generations.alive == 0

    # What time brings

    def poll(self, now_s: float) -> None:
        """Asks the agents, begins what may begin, and moves every timer to `now_s`. Never waits."""
        moved = self._check_running(now_s)  # before the deadlines: what is over needs no quarantine
        self._expire(now_s)
        moved |= self._check_quarantine(now_s)
        moved |= self._begin(now_s)
        self._warm(now_s)
        self._end_retired(now_s)
        if moved:
            self._pacing.moved()
        else:
            self._pacing.rested()

    def take(self, now_s: float) -> list[Event]:
        """The events so far; `now_s` must have been read after the last `poll` returned."""
        for job in self._arrived:
            if job.open and now_s < job.deadline_s:
                self._hand_out(job, now_s)
        self._arrived.clear()
        self._expire(now_s)
        while self._deadlines and self._deadlines[0][1] not in self._jobs:
            heapq.heappop(self._deadlines)
        self._round += 1
        events, self._events = self._events, []
        return events

    def next_poll_s(self, now_s: float) -> float | None:
        """Seconds until `poll` is next of use; None: not before the owner tells something."""
        if self._events or self._arrived:
            return 0.0
        due = [*self._quarantine.due(), *self._generations.due(waiting=bool(self._queued))]
        if self._running or self._can_begin():
            due.append(now_s + self._pacing.pause_s)
        if now_s < self._warm_until_s:
            due.append(now_s + self._config.longest_poll_s)
        if self._deadlines:
            due.append(self._deadlines[0][0])
        return max(0.0, min(due) - now_s) if due else None

    def busy(self, blocks: Iterable[int]) -> bool:
        """Whether any of our blocks belongs to an open pull or is in quarantine."""
        return self._ledger.busy(blocks)

    def counts(self) -> Counts:
        return Counts(
            peers=len(self._peers),
            open_jobs=len(self._jobs),
            transfers=self._generations.transfers,
            open_blocks=self._ledger.open_blocks,
            quarantined_blocks=self._ledger.quarantined_blocks,
            agents=self._generations.alive,
            agents_destroyed=self._generations.destroyed,
            pulled=self._pulled,
            failed=self._failed,
            pulled_bytes=self._pulled_bytes,
        )

    # Jobs

    def _hand_out(self, job: Job, now_s: float) -> None:
        job.open = False
        del self._jobs[job.job_id]
        size_bytes = 0
        for part in job.parts:
            self._ledger.give_back(part.destination)
            size_bytes += len(part.destination) * job.block_bytes
        job.parts = []  # no cycles: the engine's process may hardly ever collect garbage
        self._pulled += 1
        self._pulled_bytes += size_bytes
        self._events.append(Pulled(job.job_id, size_bytes, now_s - job.submitted_s))

    def _fail(self, job: Job, reason: FailReason, now_s: float, detail: str = "") -> None:
        job.open = False
        del self._jobs[job.job_id]
        arrived: list[int] = []
        quarantined: list[int] = []
        for part in job.parts:
            if part.state is PartState.POSTED:
                self._quarantine.hold(part, now_s)
                quarantined.extend(part.destination)
                continue
            self._ledger.give_back(part.destination)
            timely = now_s < job.deadline_s or part.over_round < self._round
            if part.state is PartState.OVER and timely:
                arrived.extend(part.destination)
            part.state = PartState.OVER
        job.parts = []
        if quarantined:
            self._running = [part for part in self._running if part.job is not job]
        self._failed += 1
        self._events.append(PullFailed(job.job_id, reason, tuple(arrived), tuple(quarantined), detail))

    def _expire(self, now_s: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_s:
            job = self._jobs.get(heapq.heappop(self._deadlines)[1])
            if job is None:
                continue
            peer, posted_s = job.peer, job.first_post_s
            silent = posted_s is not None and not job.arrived and peer.last_sign_s <= posted_s
            self._fail(job, FailReason.DEADLINE, now_s)
            if silent and not peer.lost and not peer.silent:
                peer.silent = True
                self._events.append(PeerLost(peer.address, peer.boot_id, FailReason.PEER_SILENT))

    # Transfers

    def _check_running(self, now_s: float) -> bool:
        asked, self._running = self._running, []
        still: list[Part] = []
        for part in asked:
            if not part.job.open:
                continue  # its job failed while another part of this round was asked
            state = part.posted_on.agent.check(part.handle)
            if state is TransferState.RUNNING:
                still.append(part)
            else:
                self._ended(part, state, now_s)
        moved = len(still) != len(asked)
        self._running = [part for part in still if part.job.open] if moved else still
        return moved

    def _ended(self, part: Part, state: TransferState, now_s: float) -> None:
        """A part of an open job is no longer under way."""
        job = part.job
        if state is TransferState.DONE:
            self._generations.over(part)
            job.peer.seen(now_s)
            job.over_parts += 1
            part.over_round = self._round
            if job.arrived:
                self._arrived.append(job)
            return
        reason = FailReason.PEER_GONE if state is TransferState.GONE else FailReason.AGENT
        self._fail(job, reason, now_s)
        self._quarantine.note(part, state, now_s)
        if state is TransferState.GONE:
            self._lose(job.peer, reason, now_s)

    def _check_quarantine(self, now_s: float) -> bool:
        released, gone = self._quarantine.check(now_s)
        self._events.extend(released)
        for peer in gone:
            self._lose(peer, FailReason.PEER_GONE, now_s)
        return bool(released or gone)

    def _end_retired(self, now_s: float) -> None:
        for part in self._generations.end_retired(now_s):
            self._events.append(self._quarantine.destroyed(part))

    # Beginning

    def _can_begin(self) -> bool:
        return self._generations.current is not None and any(
            peer.posted < self._config.depth for peer in self._queued
        )

    def _begin(self, now_s: float) -> bool:
        """Posts up to `depth` parts, peers and the pulls of a peer in turn: a long pull holds up no short one.

        Parts that were copied inside their post end the round once they make up `part_bytes`.
        """
        if not self._queued:
            return False
        generation = self._generations.ready(now_s)
        if generation is None:
            return False
        begun = inline_blocks = 0
        for peer in list(self._queued):
            while (
                begun < self._config.depth
                and inline_blocks < self._part_blocks
                and self._may_begin(peer, generation)
            ):
                job = peer.waiting.popleft()
                if job.has_waiting:
                    inline_blocks += self._post(job, generation, now_s)
                    begun += 1
                if job.has_waiting:
                    peer.waiting.append(job)
            self._queued.pop(peer, None)
            if peer.waiting:
                self._queued[peer] = None
            if begun == self._config.depth or inline_blocks >= self._part_blocks:
                break
        return begun > 0

    def _may_begin(self, peer: Peer, generation: Generation) -> bool:
        may = peer.posted < self._config.depth and peer.boot_id not in generation.leaving
        return may and bool(peer.waiting)

    def _post(self, job: Job, generation: Generation, now_s: float) -> int:
        """Posts the job's next part; how many blocks were copied meanwhile."""
        peer, part = job.peer, job.parts[job.next_part]
        if not self._introduce(peer, generation, now_s):
            return 0
        try:
            handle, state = generation.agent.post(peer.boot_id, part.source, part.destination)
        except PeerGoneError as error:
            self._fail(job, FailReason.PEER_GONE, now_s, str(error))
            self._lose(peer, FailReason.PEER_GONE, now_s)
            return 0
        except AgentError as error:
            self._fail(job, FailReason.AGENT, now_s, str(error))
            return 0
        job.next_part += 1
        if job.first_post_s is None:
            job.first_post_s = now_s
        self._generations.posted(part, generation, handle)
        if state is TransferState.RUNNING:
            self._running.append(part)
            return 0
        self._ended(part, state, now_s)
        return len(part.destination)

    # Peers

    def _introduce(self, peer: Peer, generation: Generation, now_s: float) -> bool:
        try:
            self._generations.introduce(peer, generation)
        except AgentError as error:
            self._lose(peer, FailReason.AGENT, now_s, str(error))
            return False
        return True

    def _warm(self, now_s: float) -> None:
        """Drives new connections on before their first pull."""
        generation = self._generations.current
        if generation is None or now_s >= self._warm_until_s:
            return
        for peer in self._peers.values():
            if now_s < peer.warm_until_s and not peer.lost and peer.boot_id not in generation.leaving:
                self._introduce(peer, generation, now_s)
        generation.agent.progress()

    def _lose(self, peer: Peer, reason: FailReason, now_s: float, detail: str = "") -> None:
        """Ends a session: its open pulls fail, and each agent drops it once its transfers are over."""
        if peer.lost:
            return
        peer.lost = True
        for job in [job for job in self._jobs.values() if job.peer is peer and not job.arrived]:
            self._fail(job, reason, now_s, detail)
        peer.waiting.clear()
        self._queued.pop(peer, None)
        self._generations.drop(peer)
        self._events.append(PeerLost(peer.address, peer.boot_id, reason))
