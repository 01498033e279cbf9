# SPDX-License-Identifier: Apache-2.0
"""Questions drawn by chance, and the records of what a policy answers to them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from router.costs.model import CostModel, Costs
from router.costs.profile import load_profile
from router.decisions.constants import constants_id
from router.decisions.inputs import PlanSettings
from router.decisions.log import DecisionLog
from router.decisions.log_writer import LogWriter
from router.decisions.record import DecisionRecord, make_record
from router.decisions.recorder import DecisionRecorder, PricedWith
from router.decisions.trust import Trust
from router.metrics import RouterMetrics
from router.plan.candidate import NOTHING, Candidate, Question, Residence, Source, Span
from router.plan.decider import Decision
from router.plan.planner import Planner
from router.plan.policies import KvAware, Policy

BLOCK = 16
SETTINGS = PlanSettings(gpu_seconds_weight=0.1, pull_deadline_s=5.0, min_pull_tokens=0)
PROFILE = load_profile("default")


def planner_with(costs: Costs, settings: PlanSettings = SETTINGS) -> Planner:
    return Planner(costs, settings.gpu_seconds_weight, settings.pull_deadline_s, settings.min_pull_tokens)


def random_question(random: Random, candidates: int = 8, *, idle: bool = False, prompts: int = 1) -> Question:
    """Prompts of up to 8,000 tokens, of which each worker holds some on some tiers; half of them can pull."""
    tokens = [random.randrange(1, 8000) for _ in range(prompts)]
    ranks = [_candidate(random, f"w{i}", tokens, idle=idle) for i in range(candidates)]
    sources = [
        Source(
            one.worker,
            0,
            "10.0.0.1",
            5710,
            Residence(ram=one.residence[0].ram),
            random.randrange(3),
            one.trust,
            one.fingerprint,
        )
        for one in ranks
        if one.can_pull and one.residence[0].ram
    ]
    return Question(
        prompt_tokens=tokens,
        candidates=ranks,
        sources=sources if prompts == 1 else (),
        output_tokens=random.randrange(1, 500),
        slo_tpot_s=random.choice([None, 0.001, 0.05]),
        pressure=random.choice([0.0, random.random() * 3]),
    )


def extended_question(random: Random, candidates: int = 4, *, idle: bool = False) -> Question:
    """The same where most workers run our extension and hold little, and busy others much: splits are common."""
    question = random_question(random, candidates, idle=idle)
    names = [f"h{i}" for i in range(5)]
    ranks = [
        replace(
            one,
            extension=random.random() < 0.8,
            residence=[random.choice([NOTHING, NOTHING, one.residence[0]])],
            chunk_blocks=1,
            pulls=0,
            sessions=frozenset(name for name in names if random.random() < 0.5),
            fingerprint="fp8",
        )
        for one in question.candidates
    ]
    blocks = random.randrange(200, 500)
    sources = [
        Source(
            name,
            0,
            "10.0.0.1",
            5710,
            Residence(ram=((0, random.randrange(blocks // 2, blocks) + 1),)),
            random.randrange(1, 6),
            random.choice([1.0, 1.0, 0.4]),
            "fp8",
            p2p=random.random() < 0.8,
            extension=random.random() < 0.8,
            extension_address="10.0.0.1:5720",
        )
        for name in names
    ]
    return replace(question, prompt_tokens=[blocks * BLOCK + 3], candidates=ranks, sources=sources)


def _candidate(random: Random, name: str, tokens: list[int], *, idle: bool) -> Candidate:
    room = Random(f"{name}:{tokens}")
    return Candidate(
        worker=name,
        dp_rank=0,
        block_size_tokens=BLOCK,
        chunk_blocks=random.choice([1, 1, 4]),
        residence=[_residence(random, count // BLOCK) for count in tokens],
        queue_s=0.0 if idle else random.random(),
        decodes=0 if idle else random.randrange(8),
        in_flight=0 if idle else random.randrange(9),
        can_pull=random.random() < 0.5,
        pulls=random.randrange(3),
        sessions=frozenset(f"w{i}" for i in range(8) if random.random() < 0.5),
        prefill_tokens=random.randrange(10_000),
        active_tokens=random.randrange(20_000),
        trust=random.choice([1.0, 1.0, 0.4]),
        fingerprint=random.choice(["fp8", "fp8", "bf16"]),
        fresh_tokens=room.randrange(8000),
        resident_tokens=room.randrange(120_000),
        kv_capacity_tokens=room.choice([0, 100_000]),
    )


def _residence(random: Random, blocks: int) -> Residence:
    if random.random() < 0.2:
        return NOTHING
    return Residence(*(_spans(random, blocks) for _ in range(3)))


def _spans(random: Random, blocks: int) -> tuple[Span, ...]:
    """A run from the start, with a hole now and then."""
    if blocks < 4 or random.random() < 0.3:
        return ()
    end = random.randrange(1, blocks + 1)
    hole = random.randrange(end)
    return ((0, end),) if random.random() < 0.8 or not 0 < hole < end - 1 else ((0, hole), (hole + 1, end))


@dataclass
class Scribe:
    """Answers questions and records what came of it."""

    costs: Costs = field(default_factory=lambda: CostModel(PROFILE))
    settings: PlanSettings = SETTINGS
    writer: LogWriter | None = None
    policy: Policy | None = None
    random: Random = field(default_factory=lambda: Random(1))
    log: DecisionLog = field(default_factory=lambda: DecisionLog(1 << 30))
    recorder: DecisionRecorder = field(init=False)

    def __post_init__(self) -> None:
        self.recorder = DecisionRecorder(
            log=self.log,
            priced_with=PricedWith(self.costs, constants_id("default", PROFILE), self.settings),
            trust=Trust(),
            metrics=RouterMetrics(),
            unix_s=lambda: 1_700_000_000.0,
            writer=self.writer,
        )

    def decide(self, question: Question) -> Decision:
        policy = self.policy or KvAware(planner_with(self.costs, self.settings))
        return Decision(policy.rank(question, self.random), 1, 0.1, indexed=True, question=question)

    def record(self, question: Question, name: str = "r", decision: Decision | None = None) -> DecisionRecord:
        """Decided, recorded, its inputs complete."""
        decision = decision or self.decide(question)
        record = make_record(
            request_id=name,
            attempt=1,
            time_unix_s=1_700_000_000.0,
            model="m",
            policy=self.policy.name if self.policy else "kv_aware",
            prompt_tokens=sum(question.prompt_tokens),
            decision=decision,
            tokens_from="local",
            transfer_params=None,
            fallback=None,
        )
        self.recorder.complete(record, decision)
        return record
