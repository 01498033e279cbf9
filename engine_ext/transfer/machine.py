# SPDX-License-Identifier: Apache-2.0
"""The state machine of the pull engine: jobs, deadlines, quarantine, peers, generations of agents, timers.

It has no clock, no thread and no I/O but the agents it is given; every call takes the time. Invariants:

- a job ends once, with Pulled or PullFailed, no later than the first `take` at or after its deadline;
- a block is in at most one open pull or in quarantine, and a pull into such a block is refused;
- a block leaves quarantine only by one of the proofs of `Proof`; without a proof it stays for good;
- Pulled says that all bytes were there at a moment before the deadline: `take` reads the clock after `poll` asked
  the agent, so a process that was stopped in between cannot take late bytes for timely ones;
- nothing new is begun on an agent that has a transfer past its limit, nor with a peer that is lost or silent.

Costs: submit O(n log n) for n blocks; poll O(transfers under way + peers), with at most `depth` transfers begun, O(n log
n) for the n blocks of each; deadlines O(log jobs).
"""

from __future__ import annotations

from collections.abc import Iterable

from .admission import refusal
from .agent import AgentFactory, PeerOffer, TransferState
from .config import TransferConfig
from .errors import AgentError, PeerGoneError
from .events import Counts, Event, FailReason, JobId, PeerLost, Proof, PullRequest
from .generations import Generations
from .jobs import Generation, Job, Peer, Share, Transfer
from .ledger import Ledger
from .outcomes import Outcomes
from .pacing import Pacing
from .parts import gather
from .quarantine import Quarantine
from .region import Region
from .turns import Turns


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
        self._turns = Turns(config.depth, self._part_blocks, config.join_bytes // region.block_bytes)
        self._outcomes = Outcomes(region.block_bytes, self._ledger, self._quarantine)
        self._peers: dict[str, Peer] = {}
        self._running: list[Transfer] = []
        """Posted, with shares of open jobs."""
        self._warm_until_s = 0.0
        self._closed = False

    # What the owner tells

    def connect(self, address: str, offer: PeerOffer, now_s: float) -> None:
        """A handshake succeeded. Another offer than before ends the old session and its pulls."""
        known = self._peers.get(address)
        if known is not None and known.offer == offer and not known.lost:
            known.seen(now_s)
            return
        if known is not None:
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
        elif len(self._outcomes.jobs) >= self._config.max_jobs:
            reason = FailReason.TOO_MANY
        else:
            reason = refusal(request, wanted, peer, self._region)
            if reason is None and not self._ledger.take_if_free(wanted):
                reason = FailReason.DESTINATION_BUSY
        if peer is None or reason is not None:
            self._outcomes.refused(job_id, reason or FailReason.UNKNOWN_PEER)
            return
        job = Job(
            job_id, peer, now_s, request.deadline_s, request.source, request.destination, wanted, len(wanted)
        )
        self._outcomes.opened(job)
        self._turns.add(job)
        self._pacing.pause_s = 0.0

    def abort(self, job_id: JobId, now_s: float) -> None:
        """Nobody waits for this pull any more. Unknown or ended ids are ignored."""
        job = self._outcomes.jobs.get(job_id)
        if job is not None:
            self._fail(job, FailReason.ABORTED, now_s)

    def close(self, now_s: float) -> bool:
        """Fails every pull, destroys every agent, and takes no more. True once no block can be written any more.

        After False, call it again: an agent could not be destroyed. Until True the region must stay mapped.
        """
        self._closed = True
        for job in list(self._outcomes.jobs.values()):
            self._fail(job, FailReason.CLOSED, now_s)
        self._peers.clear()
        self._generations.close()
        self._end_retired(now_s)
        return self._generations.alive == 0

    # What time brings

    def poll(self, now_s: float) -> None:
        """Asks the agents, begins what may begin, and moves every timer to `now_s`. Never waits."""
        # What is over is seen before the deadlines: it needs no quarantine. What has nothing to do is not called: a
        # small pull over shared memory takes as long as some ten calls.
        moved = bool(self._running) and self._check_running(now_s)
        deadlines = self._outcomes.deadlines
        if deadlines and deadlines[0][0] <= now_s:
            self._expire(now_s)
        if self._quarantine.held:
            moved |= self._check_quarantine(now_s)
        if self._turns.queued:
            moved |= self._begin(now_s)
        if now_s < self._warm_until_s:
            self._warm(now_s)
        if self._generations.retired:
            self._end_retired(now_s)
        if moved:
            self._pacing.moved()
        else:
            self._pacing.rested()

    def take(self, now_s: float) -> list[Event]:
        """The events so far; `now_s` must have been read after the last `poll` returned."""
        self._outcomes.hand_out(now_s)
        deadlines = self._outcomes.deadlines
        if deadlines and deadlines[0][0] <= now_s:
            self._expire(now_s)
        return self._outcomes.take()

    def next_poll_s(self, now_s: float) -> float | None:
        """Seconds until `poll` is next of use; None: not before the owner tells something."""
        outcomes = self._outcomes
        if outcomes.told:
            return 0.0
        if not (outcomes.jobs or self._quarantine.held or self._generations.retired) and (
            now_s >= self._warm_until_s
        ):
            return None
        due = [*self._quarantine.due(), *self._generations.due(waiting=bool(self._turns.queued))]
        if self._running or self._can_begin():
            due.append(now_s + self._pacing.pause_s)
        if now_s < self._warm_until_s:
            due.append(now_s + self._config.longest_poll_s)
        if outcomes.deadlines:
            due.append(outcomes.deadlines[0][0])
        return max(0.0, min(due) - now_s) if due else None

    def busy(self, blocks: Iterable[int]) -> bool:
        """Whether any of our blocks belongs to an open pull or is in quarantine."""
        return self._ledger.busy(blocks)

    def counts(self) -> Counts:
        return Counts(
            peers=len(self._peers),
            open_jobs=len(self._outcomes.jobs),
            transfers=self._generations.transfers,
            open_blocks=self._ledger.open_blocks,
            quarantined_blocks=self._ledger.quarantined_blocks,
            agents=self._generations.alive,
            agents_destroyed=self._generations.destroyed,
            pulled=self._outcomes.pulled,
            failed=self._outcomes.failed,
            pulled_bytes=self._outcomes.pulled_bytes,
        )

    # Jobs

    def _fail(self, job: Job, reason: FailReason, now_s: float, detail: str = "") -> None:
        if self._outcomes.fail(job, reason, now_s, detail):
            self._running = [transfer for transfer in self._running if transfer.wanted]

    def _expire(self, now_s: float) -> None:
        for job in self._outcomes.expired(now_s):
            peer, posted_s = job.peer, job.first_post_s
            silent = posted_s is not None and job.left and peer.last_sign_s <= posted_s
            self._fail(job, FailReason.DEADLINE, now_s)
            if silent and not peer.lost and not peer.silent:
                peer.silent = True
                self._tell(PeerLost(peer.address, peer.boot_id, FailReason.PEER_SILENT))

    def _tell(self, event: Event) -> None:
        self._outcomes.events.append(event)

    # Transfers

    def _check_running(self, now_s: float) -> bool:
        asked, self._running = self._running, []
        still: list[Transfer] = []
        for transfer in asked:
            if not transfer.wanted:
                continue  # its jobs failed while another transfer of this round was asked
            state = transfer.generation.agent.check(transfer.handle)
            if state is TransferState.RUNNING:
                still.append(transfer)
            else:
                self._ended(transfer, state, now_s)
        moved = len(still) != len(asked)
        self._running = [transfer for transfer in still if transfer.wanted] if moved else still
        return moved

    def _ended(self, transfer: Transfer, state: TransferState, now_s: float) -> None:
        """A transfer that open jobs want is no longer under way."""
        if state is TransferState.DONE:
            transfer.peer.seen(now_s)
            self._outcomes.events.extend(self._quarantine.over(transfer, Proof.FINISHED))
            for share in transfer.shares:
                if not share.held:
                    self._outcomes.share_done(share)
            self._generations.over(transfer)
            return
        reason = FailReason.PEER_GONE if state is TransferState.GONE else FailReason.AGENT
        for share in transfer.shares:
            if not share.held:
                self._fail(share.job, reason, now_s)
        self._quarantine.note(transfer, state, now_s)
        if state is TransferState.GONE:
            self._lose(transfer.peer, reason, now_s)

    def _check_quarantine(self, now_s: float) -> bool:
        released, gone = self._quarantine.check(now_s)
        self._outcomes.events.extend(released)
        for peer in gone:
            self._lose(peer, FailReason.PEER_GONE, now_s)
        return bool(released or gone)

    def _end_retired(self, now_s: float) -> None:
        for transfer in self._generations.end_retired(now_s):
            self._outcomes.events.extend(self._quarantine.over(transfer, Proof.AGENT_DESTROYED))
            transfer.shares = []  # they refer to it

    # Beginning

    def _can_begin(self) -> bool:
        return self._generations.current is not None and self._turns.can_begin()

    def _begin(self, now_s: float) -> bool:
        generation = self._generations.current or self._generations.ready(now_s)
        return generation is not None and self._turns.begin(generation, self._post, now_s)

    def _post(self, peer: Peer, jobs: list[Job], generation: Generation, now_s: float) -> int:
        """Posts the next part of each of these jobs as one transfer; how many blocks were copied meanwhile."""
        if peer.boot_id not in generation.peers and not self._introduce(peer, generation, now_s):
            return 0
        agent = generation.agent
        source, destination = gather(jobs, self._part_blocks)
        try:
            handle, state = agent.post(peer.boot_id, source, destination)
        except AgentError as error:
            gone = isinstance(error, PeerGoneError)
            for job in jobs:
                self._fail(job, FailReason.PEER_GONE if gone else FailReason.AGENT, now_s, str(error))
            if gone:
                self._lose(peer, FailReason.PEER_GONE, now_s)
            return 0
        if state is TransferState.DONE:
            peer.seen(now_s)
            self._outcomes.copied(jobs, self._part_blocks)
            return len(destination)
        transfer = self._posted(peer, jobs, generation, handle, now_s)
        if state is TransferState.RUNNING:
            self._running.append(transfer)
            return 0
        self._ended(transfer, state, now_s)
        return len(destination)

    def _posted(
        self, peer: Peer, jobs: list[Job], generation: Generation, handle: int, now_s: float
    ) -> Transfer:
        shares: list[Share] = []
        transfer = Transfer(peer, generation, handle, shares, len(jobs))
        for job in jobs:
            share = job.take_share(self._part_blocks)
            share.transfer = transfer
            shares.append(share)
            if job.first_post_s is None:
                job.first_post_s = now_s
        self._generations.posted(transfer)
        return transfer

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
        for job in self._outcomes.of(peer):
            self._fail(job, reason, now_s, detail)
        self._turns.drop(peer)
        self._generations.drop(peer)
        self._tell(PeerLost(peer.address, peer.boot_id, reason))
