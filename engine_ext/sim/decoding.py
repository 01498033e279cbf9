# SPDX-License-Identifier: Apache-2.0
"""The sequences that compute one token in every step, and the steps in which one of them needs more than that.

Between two such steps nothing happens to them but time, so nobody looks at them: a member's tokens are counted
from the number of steps taken, and written down when it is *due*. A member is due in the step that

* needs another HBM block for it,
* fills a block, which is then announced and perhaps stored,
* or ends its answer;
* and in the next one, when its last store found no room or every token is asked for.

A step costs O(members that are due), not O(members).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from engine_ext.sim.request import Live


class DecodeSet:
    """Running requests that lack exactly one token of being computed."""

    def __init__(self, block_size_tokens: int, max_model_len: int, *, every_token: bool) -> None:
        """``every_token``: every member is due in every step."""
        self._block_size = block_size_tokens
        self._max_model_len = max_model_len
        self._every_token = every_token
        self._calendar: dict[int, list[Live]] = {}
        self._due_steps: list[int] = []
        self._members = 0
        self._context_tokens = 0
        self._step = 0

    def __len__(self) -> int:
        return self._members

    @property
    def context_tokens(self) -> int:
        """Computed tokens of all members together: what the next step reads."""
        return self._context_tokens

    def join(self, live: Live, *, soon: bool) -> None:
        """A request has its first token (or is back from preemption). ``soon``: it is due in the next step."""
        live.decoding = True
        live.settled_step = self._step
        self._members += 1
        self._context_tokens += live.computed
        self.plan(live, soon=soon)

    def leave(self, live: Live) -> None:
        """It ends, or is scheduled by itself from now on."""
        self.settle(live)
        live.decoding = False
        self._members -= 1
        self._context_tokens -= live.computed

    def advance(self, steps: int) -> None:
        """That many steps are over. None of them may lie behind a due one."""
        self._step += steps
        self._context_tokens += self._members * steps

    def settle(self, live: Live) -> None:
        """Write down what a member has computed and sampled so far."""
        taken = self._step - live.settled_step
        if taken:
            live.settled_step = self._step
            live.computed += taken
            sampled = live.output_tokens
            live.tokens.extend(live.text.tokens(sampled, sampled + taken))
            live.grow_hashes()

    def plan(self, live: Live, *, soon: bool) -> None:
        """Enter the next step in which a settled member is due."""
        live.due_step = self._step
        if not (soon or self._every_token):
            live.due_step += max(self._due_at(live) - live.computed, 0)
        due = self._calendar.get(live.due_step)
        if due is None:
            self._calendar[live.due_step] = [live]
            heapq.heappush(self._due_steps, live.due_step)
        else:
            due.append(live)

    def _due_at(self, live: Live) -> int:
        """Computed tokens before the step in which it is due.

        That step computes one more and samples the token behind that one.
        """
        size = self._block_size
        last = min(live.request.max_tokens + live.prompt_tokens, self._max_model_len)
        stop = live.request.stop_after_tokens
        if stop is not None and stop > live.output_tokens:
            last = min(last, stop + live.prompt_tokens)
        return min(len(live.blocks) * size, (live.cached_blocks + 1) * size - 1, last - 2)

    def silent_steps(self) -> int:
        """Steps from now on in which nobody is due. Only for a set with members."""
        return self._next_due_step() - self._step

    def due_next(self) -> Sequence[Live]:
        """The members due in the step that ``silent_steps`` ends at; they may not be settled."""
        step = self._next_due_step()
        return self._members_due(self._calendar[step], step)

    def _next_due_step(self) -> int:
        while not any(self._is_due(live, self._due_steps[0]) for live in self._calendar[self._due_steps[0]]):
            del self._calendar[heapq.heappop(self._due_steps)]
        return self._due_steps[0]

    def take_due(self) -> list[Live]:
        """Those due in the coming step, settled, oldest first. Each is to be planned again, or to leave."""
        if not self._members or self.silent_steps():
            return []
        heapq.heappop(self._due_steps)
        due = self._members_due(self._calendar.pop(self._step), self._step)
        due.sort(key=_order)
        for live in due:
            self.settle(live)
        return due

    def _members_due(self, entries: Sequence[Live], step: int) -> list[Live]:
        return list(dict.fromkeys(live for live in entries if self._is_due(live, step)))

    def _is_due(self, live: Live, step: int) -> bool:
        """Entries of members that have left or been planned anew stay in the calendar until their step."""
        return live.decoding and live.due_step == step


def _order(live: Live) -> int:
    return live.order
