# SPDX-License-Identifier: Apache-2.0
"""One choice, the recorded or the new one, in the figures that are compared. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from router.decisions.constants import RowReader
from router.decisions.inputs import DecisionInputs, PlanSettings
from router.decisions.pricing import PlacedTokens, Pulled, placed_tokens, price, pulled_s
from router.decisions.what_if.logged import LoggedRecord
from router.plan.candidate import Plan
from router.plan.displacement import displaced_s, occupied_s


@dataclass(frozen=True, slots=True)
class Choice:
    """A worker and a path, priced with the constants of the question asked."""

    worker: str
    dp_rank: int
    sources: tuple[str, ...]
    path_blocks: Mapping[str, int]
    block_size_tokens: int
    kv_bytes_per_token: float
    total_s: float
    gpu_s: float
    score_s: float

    @property
    def placed(self) -> PlacedTokens:
        return placed_tokens(self.path_blocks, self.block_size_tokens)


def choice_of(plan: Plan, kv_bytes_per_token: float) -> Choice:
    """A plan of the new ranking."""
    return Choice(
        plan.worker,
        plan.dp_rank,
        plan.source_workers,
        plan.path_blocks,
        plan.block_size_tokens,
        kv_bytes_per_token,
        plan.terms.total_s,
        plan.terms.prefill_s,
        plan.score_s,
    )


def is_recorded(plan: Plan, record: LoggedRecord) -> bool:
    """Whether a plan is what the record chose."""
    return (
        plan.worker == record.worker
        and plan.dp_rank == record.dp_rank
        and plan.path_blocks == record.path_blocks
        and (plan.source.worker if plan.source else None) == record.source
        and _ranges(plan) == [(one.source, one.start_token, one.end_token) for one in record.pulls]
    )


def _ranges(plan: Plan) -> list[tuple[str, int, int]]:
    size = plan.block_size_tokens
    return [(one.source.worker, one.start_block * size, one.end_block * size) for one in plan.pulls]


def recorded_choice(
    record: LoggedRecord, inputs: DecisionInputs, settings: PlanSettings, reader: RowReader
) -> Choice | None:
    """What the record chose, at the present constants; None where the inputs do not hold it.

    Of several prompts the blocks of each are not known, so they count as one prompt: a little too much attention.
    """
    one = next(
        (c for c in inputs.candidates if (c.worker, c.dp_rank) == (record.worker, record.dp_rank)), None
    )
    if one is None:
        return None
    model = reader.model(inputs.constants[one.constants])
    placed = placed_tokens(record.path_blocks, one.block_size_tokens)
    expected = one.trust * (placed.total - placed.peer)
    pulls = []
    for name, tokens in _pulled_from(record, placed.peer, one.block_size_tokens):
        position = next((i for i, source in enumerate(inputs.sources) if source.worker == name), None)
        if position is None or not one.links:
            return None
        source = inputs.sources[position]
        expected += source.trust * tokens
        link = reader.link(inputs.links[one.links[position]])
        pulls.append(Pulled(tokens, link, max(one.pulls, source.pulls), name in one.sessions))
    links = [reader.link(inputs.links[i]) for i in one.links]
    capacity_bytes_per_s = max((link.share_bytes_per_s(one.pulls) for link in links), default=1.0)
    peer_s = pulled_s(model, pulls, capacity_bytes_per_s)
    prompt_tokens = sum(inputs.prompt_tokens)
    terms = price(model, prompt_tokens, placed, expected, one.queue_s, one.decodes, peer_s)
    each_s = model.profile.decode_s_per_request * inputs.output_tokens
    decode_s = settings.gpu_seconds_weight * (2 * one.decodes * each_s)
    if inputs.slo_tpot_s is not None:
        excess_s = model.decode_step_s(one.decodes + 1) - inputs.slo_tpot_s
        decode_s += max(excess_s, 0.0) * inputs.output_tokens
    weight = settings.gpu_seconds_weight + inputs.pressure
    lost_s = decode_s + displaced_s(weight, model, prompt_tokens - placed.hbm)
    lost_s += occupied_s(model, one, inputs.output_tokens)
    return Choice(
        record.worker,
        record.dp_rank,
        tuple(name for name, _ in _pulled_from(record, placed.peer, one.block_size_tokens)),
        record.path_blocks,
        one.block_size_tokens,
        model.profile.kv_bytes_per_token,
        terms.total_s,
        terms.prefill_s,
        terms.total_s + weight * terms.prefill_s + lost_s,
    )


def _pulled_from(record: LoggedRecord, tokens: int, block_size_tokens: int) -> list[tuple[str, int]]:
    """(source, tokens) of each pull of a recorded choice."""
    if record.pulls:
        return [(one.source, one.blocks * block_size_tokens) for one in record.pulls]
    return [(record.source, tokens)] if record.source is not None else []
