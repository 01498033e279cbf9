# SPDX-License-Identifier: Apache-2.0
"""Goes through the lines of a log and decides each decision again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import msgspec

from router.decisions.constants import RowReader
from router.decisions.inputs import DecisionInputs
from router.decisions.what_if.choices import Choice, choice_of, is_recorded, recorded_choice
from router.decisions.what_if.logged import LoggedRecord, Piece, decisions, lines_of
from router.decisions.what_if.rankers import make_ranker
from router.decisions.what_if.settings import LOOKS_AT_COSTS, Changes
from router.decisions.what_if.tally import Flip, Tally
from router.plan.candidate import Plan

_NO_GAIN = 1e-6
"""Of the score: constants are kept to seven digits, so less than that is no difference."""


class Redecider:
    """Decides the records of one log again, in their order."""

    def __init__(self, changes: Changes, most_flips: int) -> None:
        self._changes = changes
        self._most_flips = most_flips
        self._reader = RowReader(changes.constants)
        self._ranker = make_ranker(changes)
        self._by_cost = changes.policy in {None, LOOKS_AT_COSTS}

    def run(self, lines: Iterable[bytes]) -> Tally:
        """Of the decisions among ``lines``."""
        tally = Tally(self._most_flips)
        for record in decisions(lines, tally.unusable):
            tally.decisions += 1
            if reason := self._reason_to_skip(record):
                tally.skip(reason)
            elif record.inputs is not None:
                self._redecide(record, record.inputs, tally)
        return tally

    def _reason_to_skip(self, record: LoggedRecord) -> str | None:
        if record.inputs is None:
            return "inputs were not kept"
        if record.inputs.prefillers:
            return "prefill workers were weighed"
        if record.trial:
            return "trials"
        if self._changes.policy is None and record.policy != LOOKS_AT_COSTS:
            return f"policy {record.policy} does not look at costs"
        return None

    def _redecide(self, record: LoggedRecord, inputs: DecisionInputs, tally: Tally) -> None:
        asked = inputs if self._changes.use_peers else msgspec.structs.replace(inputs, sources=())
        ranking = self._ranker.rank(asked)
        before = self._recorded(record, inputs, ranking)
        if before is None:
            tally.skip("the choice is not among the kept candidates")
            return
        tally.truncated += record.candidate_count > len(inputs.candidates)
        prompt_tokens = sum(inputs.prompt_tokens)
        if is_recorded(ranking[0], record):
            tally.keep(before, prompt_tokens)
            return
        after = self._choice(ranking[0], inputs)
        if self._is_as_good(before, after):
            tally.keep(before, prompt_tokens)
        else:
            tally.flip(Flip(record.id, record.attempt, record.predicted_ttft_s, before, after), prompt_tokens)

    def _recorded(
        self, record: LoggedRecord, inputs: DecisionInputs, ranking: Sequence[Plan]
    ) -> Choice | None:
        """The recorded choice at the present constants, from the ranking where it is one of its plans."""
        for plan in ranking:
            if is_recorded(plan, record):
                return self._choice(plan, inputs)
        return recorded_choice(record, inputs, self._changes.apply(inputs.settings), self._reader)

    def _is_as_good(self, before: Choice, after: Choice) -> bool:
        """Among equals chance decides. A recorded choice that is better than the best is no longer allowed."""
        return self._by_cost and abs(before.score_s - after.score_s) <= _NO_GAIN * after.score_s

    def _choice(self, plan: Plan, inputs: DecisionInputs) -> Choice:
        row = next(
            inputs.constants[one.constants]
            for one in inputs.candidates
            if one.worker == plan.worker and one.dp_rank == plan.dp_rank
        )
        return choice_of(plan, self._reader.model(row).profile.kv_bytes_per_token)


def redecide_pieces(pieces: Sequence[Piece], changes: Changes, most_flips: int, processes: int) -> Tally:
    """Of all pieces; with several processes each takes the next one when it is free."""
    whole = Tally(most_flips)
    if processes == 1 or len(pieces) < 2:
        redecider = Redecider(changes, most_flips)
        for piece in pieces:
            whole.merge(redecider.run(lines_of(piece)))
        return whole
    with ProcessPoolExecutor(
        min(processes, len(pieces)), get_context("spawn"), _start_worker, (changes, most_flips)
    ) as pool:
        for part in pool.map(_redecide_piece, pieces):
            whole.merge(part)
    return whole


_worker: list[Redecider] = []
"""Of a worker process, which lives over its pieces: policies that take turns go on."""


def _start_worker(changes: Changes, most_flips: int) -> None:
    _worker[:] = [Redecider(changes, most_flips)]


def _redecide_piece(piece: Piece) -> Tally:
    return _worker[0].run(lines_of(piece))
