# SPDX-License-Identifier: Apache-2.0
"""One machine drives the decider over the native table and the one over plain questions; they must never differ.

Workers come, go, change and restart, publish and lose events, get and finish requests; constants and trust are learnt.
"""

from __future__ import annotations

from dataclasses import replace

from fleet_world import MODEL, MOST_BLOCKS, FleetWorld, branches, names, prompt_ids
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from indexer.identity import Namespace
from router.fleet.snapshot import excluding
from router.plan.candidate import Candidate, Plan, Question
from router.plan.decider import Decider, Decision, Prompts
from router.plan.load import Board
from router.plan.paths import derive_walk
from router.plan.planner import most_useful


class FleetMachine(FleetWorld):
    """Asks both."""

    @invariant()
    def decide_the_same(self) -> None:
        """After every step, so that whatever it changed shows."""
        for branch in "xy":
            prompts = Prompts([prompt_ids(branch, MOST_BLOCKS * 16)], Namespace(MODEL))
            self.compare(prompts, None, set(), listed=False, follow=self.random.random() < 0.2)

    @rule(
        branch=branches,
        tokens=st.lists(st.integers(0, MOST_BLOCKS * 16), min_size=1, max_size=2),
        single=st.booleans(),
        salt=st.sampled_from([None, None, None, "salt"]),
        slo_tpot_s=st.sampled_from([None, 0.01]),
        pinned=st.sampled_from([None, None, 0, 1, 7]),
        without=st.sets(names, max_size=2),
        listed=st.booleans(),
        follow=st.booleans(),
    )
    def decide(
        self,
        branch: str,
        tokens: list[int],
        single: bool,
        salt: str | None,
        slo_tpot_s: float | None,
        pinned: int | None,
        without: set[str],
        listed: bool,
        follow: bool,
    ) -> None:
        prompts = Prompts(
            [prompt_ids(branch, count) for count in tokens],
            Namespace(MODEL),
            salt,
            single and len(tokens) == 1,
            slo_tpot_s=slo_tpot_s,
        )
        self.compare(prompts, pinned, without, listed, follow)

    @rule(pinned=st.sampled_from([None, 1]), without=st.sets(names, max_size=2))
    def decide_by_load(self, pinned: int | None, without: set[str]) -> None:
        self.compare(None, pinned, without, listed=False, follow=True)

    def compare(
        self, prompts: Prompts | None, pinned: int | None, without: set[str], listed: bool, follow: bool
    ) -> None:
        candidates = excluding(self.snapshot, without)
        if not candidates:
            return

        def made_by(decider: Decider) -> Decision:
            some, peers = ([*candidates], [*self.snapshot]) if listed else (candidates, self.snapshot)
            return decider.decide(
                prompts, some, peers, self.now_s, self.random, pinned_rank=pinned, estimated_tokens=700
            )

        native, plain = made_by(self.native), made_by(self.plain)
        scores = [plan.score_s for plan in native.planned.ranking]
        assert scores == sorted(plan.score_s for plan in plain.planned.ranking)[: self.kept]
        assert by_rank(native).items() <= by_rank(plain).items()
        assert native.planned.count == plain.planned.count
        facts = [(one.index_version, one.index_age_s, one.indexed) for one in (native, plain)]
        assert facts[0] == facts[1]
        self.compare_questions(native, plain)
        chosen = native.planned.chosen
        assert native.resident(chosen) == plain.resident(chosen)
        if follow:
            self.promise(native)

    def teardown(self) -> None:
        self.patch.undo()
        for tickets in [*self.tickets, *self.decoding]:
            boards: tuple[Board, Board] = self.boards
            for board, ticket in zip(boards, tickets, strict=True):
                board.release(ticket, self.now_s)
        assert [board.residents.prompts for board in self.boards] == [0, 0]
        assert [board.residents.nodes for board in self.boards] == [0, 0]
        super().teardown()

    def compare_questions(self, native: Decision, plain: Decision) -> None:
        """The restricted question is the whole one, as far as it matters to its candidates."""
        assert native.question is not None
        assert plain.question is not None
        tried = {(one.worker, one.dp_rank): one for one in most_useful(plain.question.sources)}
        assert {(one.worker, one.dp_rank): one for one in native.question.sources} == tried
        sources = {one.worker for one in tried.values()}
        whole = {(one.worker, one.dp_rank): one for one in plain.question.candidates}
        left = len(whole) - len(native.question.candidates)
        assert left == max(len(whole) - self.kept, 0) or 0 < len(whole) - self.kept == left + 1
        reaches = [
            max(most_found(question, one) for one in question.candidates)
            for question in (native.question, plain.question)
        ]
        assert reaches[0] == reaches[1]
        for one in native.question.candidates:
            other = whole[one.worker, one.dp_rank]
            assert one == replace(other, sessions=other.sessions & sources)
        both = native.question, plain.question
        assert len({(one.output_tokens, one.slo_tpot_s, one.pressure, one.explore) for one in both}) == 1

    def promise(self, decision: Decision) -> None:
        plan, resident = decision.planned.chosen, decision.resident(decision.planned.chosen)
        terms = plan.terms
        native, plain = (
            board.promise(
                plan.worker,
                plan.dp_rank,
                terms.prefill_s,
                terms.total_s,
                self.now_s,
                plan.source_workers,
                resident=resident,
            )
            for board in self.boards
        )
        self.tickets.append((native, plain))


def most_found(question: Question, candidate: Candidate) -> int:
    """The most tokens of the prompts that any walk of the candidate, with one source or none, finds cached."""
    size, chunk = candidate.block_size_tokens, candidate.chunk_blocks
    sources = [one for one in most_useful(question.sources) if candidate.can_pull_from(one)]
    return max(
        sum(
            derive_walk(tokens, size, chunk, held, one.residence.ram if one else ()).loads().total
            for tokens, held in zip(question.prompt_tokens, candidate.residence, strict=True)
        )
        * size
        for one in (None, *sources)
    )


def by_rank(decision: Decision) -> dict[tuple[str, int], Plan]:
    return {(plan.worker, plan.dp_rank): plan for plan in decision.planned.ranking}


class OpenFleetMachine(FleetMachine):
    """Workers with our extension pull from stock ones too."""

    allow_unfingerprinted_peers = True


class FewKeptMachine(FleetMachine):
    """Only the best are priced, and whoever could have most of the prompt cached."""

    kept = 2


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(max_examples=100, stateful_step_count=40)
TestOpenFleetMachine = OpenFleetMachine.TestCase
TestOpenFleetMachine.settings = settings(max_examples=30, stateful_step_count=40)
TestFewKeptMachine = FewKeptMachine.TestCase
TestFewKeptMachine.settings = settings(max_examples=60, stateful_step_count=40)
