# SPDX-License-Identifier: Apache-2.0
"""The engine's steps, one after the other: what each computes, how long it takes, what comes out.

Steps from which nothing comes out are *silent*: only time passes. A run of them is planned at once and costs one
addition a step; whatever happens within cuts it after the step under way. With ``every_token`` no step is silent,
and the results are the same.
"""

from __future__ import annotations

from collections.abc import Callable

from engine_ext.sim.agenda import Agenda
from engine_ext.sim.batch import Batch, Queue
from engine_ext.sim.decoding import DecodeSet
from engine_ext.sim.offload import Offloading
from engine_ext.sim.output import Finished, SimCounters, SimUsage, StepOutput, TokenOutput
from engine_ext.sim.profile import SimProfile
from engine_ext.sim.request import Live, Status
from engine_ext.sim.scheduler import Scheduler
from engine_ext.sim.timeline import Timeline


class Stepper:
    """The clock of one engine."""

    def __init__(
        self,
        *,
        profile: SimProfile,
        agenda: Agenda,
        scheduler: Scheduler,
        offload: Offloading,
        decoding: DecodeSet,
        counters: SimCounters,
        timeline: Timeline,
        max_model_len: int,
        every_token: bool,
        is_busy: Callable[[], bool],
        ended: Callable[[Live], None],
    ) -> None:
        """``is_busy``: some request is neither answered nor aborted. ``ended`` is told of each that is answered."""
        self._profile = profile
        self._agenda = agenda
        self._scheduler = scheduler
        self._offload = offload
        self._decoding = decoding
        self._counters = counters
        self._timeline = timeline
        self._max_model_len = max_model_len
        self._every_token = every_token
        self._is_busy = is_busy
        self._ended = ended
        self.asleep = False
        self._batch = Batch()
        self._leaving: list[Live] = []
        """Members of the decode set that were aborted during the step under way."""
        self._wake_s: float | None = None

    def next_event_s(self) -> float | None:
        """When ``advance`` has something to do; None while nothing is under way."""
        return self._next_s(self._timeline.visible_s)

    def advance(self, now_s: float) -> StepOutput:
        """Do everything due by ``now_s``, in order of time."""
        out = StepOutput()
        timeline = self._timeline
        while (due_s := self._next_s(timeline.end_s)) is not None and due_s <= now_s:
            if self._agenda.run(due_s):
                self._cut(timeline.over_before(due_s))
            if timeline and timeline.end_s <= due_s:
                self._end_steps(out)
            if self._offload.woken or self._scheduler.woken:
                self._offload.woken = self._scheduler.woken = False
                self.wake(due_s)
            if not timeline:
                self._start_step(due_s, out)
        out.replies.extend(self._offload.server.replies)
        self._offload.server.replies.clear()
        return out

    def _next_s(self, step_end_s: float) -> float | None:
        own = step_end_s if self._timeline else self._wake_s
        planned = self._agenda.next_s
        if own is None or planned is None:
            return planned if own is None else own
        return min(own, planned)

    def wake(self, now_s: float) -> None:
        """A step may be possible from then on."""
        self._wake_s = now_s if self._wake_s is None else min(self._wake_s, now_s)

    def _start_step(self, now_s: float, out: StepOutput) -> None:
        if self._wake_s is not None and self._wake_s <= now_s:
            self._wake_s = None
            self._batch = Batch() if self.asleep else self._scheduler.schedule(now_s)
            out.lookups.extend(self._offload.puller.lookups)
            self._offload.puller.lookups.clear()
        batch = self._batch
        if not batch:
            if self._offload.events:
                self._publish(out)  # an idle vLLM steps for its connector's completions
            return
        self._timeline.begin(now_s, self._step_s(batch))
        end_s = self._timeline.end_s
        for live in batch.due:
            self._offload.store(live, live.computed + 1, end_s)
        for live, count in batch.parts:
            self._offload.store(live, live.computed + count, end_s)
        if not batch.parts and not batch.due:
            self._plan_silent_steps()

    def _step_s(self, batch: Batch) -> float:
        sequences, context, prefill_s = batch.decodes, 0, 0.0
        if sequences:
            context = self._decoding.context_tokens
        for live, count in batch.parts:
            if count == 1 and live.computed >= live.prompt_tokens:
                sequences += 1
                context += live.computed
            else:
                prefill_s += self._profile.prefill_s(count, live.computed)
        return self._profile.step_s(sequences, context) + prefill_s

    def _plan_silent_steps(self) -> None:
        """Behind a silent step under way: all until a member is due."""
        decoding, scheduler = self._decoding, self._scheduler
        foretell = scheduler.queue is Queue.QUIET and scheduler.can_extend(decoding.due_next())
        steps = decoding.silent_steps() - 1
        self._timeline.add_silent(len(decoding), decoding.context_tokens, steps, foretell=foretell)

    def catch_up(self, now_s: float) -> None:
        """Start the step that follows the silent ones, if they are over by ``now_s``.

        The caller has advanced to everything else.
        """
        end_s = self._timeline.end_s
        if self._timeline and end_s <= now_s and end_s < self._timeline.visible_s:
            self._end_steps(StepOutput())
            self._start_step(end_s, StepOutput())

    def interrupt(self, now_s: float) -> None:
        """Something happens that the step after the one under way has to know."""
        self.catch_up(now_s)
        self._cut(self._timeline.over_by(now_s))

    def abort(self, live: Live, now_s: float) -> None:
        """Take a request out, at once or when the step or load that writes its blocks is over."""
        self.interrupt(now_s)
        live.aborted = True
        if live.decoding and self._batch.decodes:
            self._leaving.append(live)
            return
        in_step = any(member is live for member, _ in self._batch.parts)
        if live.status is not Status.LOADING and not in_step:
            self._scheduler.remove(live, now_s)
            self.wake(now_s)

    def _cut(self, over: int) -> None:
        """Something happens: ``over`` of the planned steps are over, the one under way is the last of them."""
        self._count_steps(self._timeline.cut(over))

    def _count_steps(self, steps: int) -> None:
        self._counters.steps += steps
        if self._batch.decodes and steps:
            self._decoding.advance(steps)
            self._counters.generation_tokens += steps * self._batch.decodes

    def _end_steps(self, out: StepOutput) -> None:
        now_s, batch, leaving = self._timeline.end_s, self._batch, self._leaving
        self._count_steps(self._timeline.end())
        self._counters.generation_tokens -= len(leaving)
        self._batch, self._leaving = Batch(), []
        if leaving:
            batch.due = sorted({*batch.due, *leaving}, key=lambda live: live.order)
        for live in batch.due:
            self._end_decode(live, now_s, out)
        for live, count in batch.parts:
            live.computed += count
            if live.aborted:
                self._scheduler.remove(live, now_s)
            elif live.computed == live.num_tokens:
                self._sample(live, now_s, out)
        self._publish(out)
        if self._is_busy():
            self.wake(now_s)

    def _end_decode(self, live: Live, now_s: float, out: StepOutput) -> None:
        """A member of the decode set that was due has its next token."""
        if live.aborted:
            self._scheduler.remove(live, now_s)
            return
        self._decoding.settle(live)
        if not self._finishes(live, now_s, out):
            soon = self._offload.wants_to_store(live, live.computed + 1)
            self._decoding.plan(live, soon=soon)

    def _sample(self, live: Live, now_s: float, out: StepOutput) -> None:
        """A prefill is done: its first token, or, after a preemption, its next."""
        live.tokens.append(live.text.token(live.output_tokens))
        live.grow_hashes()
        self._counters.generation_tokens += 1
        if not self._finishes(live, now_s, out):
            self._scheduler.decodes(live)

    def _finishes(self, live: Live, now_s: float, out: StepOutput) -> bool:
        """Put out the newest token of a request; whether it was the last one."""
        request, count = live.request, live.output_tokens
        stop = count == request.stop_after_tokens
        finished = stop or count >= request.max_tokens or live.num_tokens >= self._max_model_len
        if finished or count == 1 or self._every_token:
            out.tokens.append(TokenOutput(request.request_id, live.tokens[-1], finished, count == 1))
        if not finished:
            return False
        usage = SimUsage(live.prompt_tokens, count, live.cached_tokens, dict(live.cached_by_tier))
        reason = "stop" if stop else "length"
        out.finished.append(Finished(request.request_id, usage, reason, live.computed_blocks()))
        self._counters.finished_requests += 1
        self._offload.store(live, max(live.prompt_tokens, live.num_tokens - 1), now_s)
        self._scheduler.remove(live, now_s)
        self._ended(live)
        return True

    def _publish(self, out: StepOutput) -> None:
        events = [*self._scheduler.events, *self._offload.events.take()]
        self._scheduler.events = []
        if events:
            out.kv_batches.append(events)
