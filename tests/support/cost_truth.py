# SPDX-License-Identifier: Apache-2.0
"""What a worker with known constants would show, for tests of what is learnt from it."""

from __future__ import annotations

from typing import Any

import msgspec

from router.costs.calibration import Calibration
from router.costs.model import CostModel, Link
from router.costs.observation import DecodeObservation, Observation
from router.costs.profile import CostProfile, load_profile

PROFILE = load_profile("llama-3.1-8b-h100")


SECONDS = ("admit_s", "prefill_start_s", "prefill_s_per_token", "prefill_s_per_token_squared")


def slower(profile: CostProfile, factor: float) -> CostProfile:
    """The same machine with every second ``factor`` times longer."""
    changes = {name: getattr(profile, name) * factor for name in SECONDS} | {
        "ram_start_s": profile.ram_start_s * factor,
        "ram_bytes_per_s": profile.ram_bytes_per_s / factor,
        "peer_connect_s": profile.peer_connect_s * factor,
        "peer_lookup_s": profile.peer_lookup_s * factor,
        "peer_bytes_per_s": profile.peer_bytes_per_s / factor,
    }
    return msgspec.structs.replace(profile, **changes)


def seen(
    truth: CostModel, link: Link | None = None, *, noise: float = 1.0, failed: bool = False, **fields: Any
) -> Observation:
    """What a worker with the constants of ``truth`` would show."""
    values: dict[str, Any] = {
        "worker": "w",
        "source": None,
        "prompt_tokens": 8000,
        "ram_tokens": 0,
        "peer_tokens": 0,
        "storage_tokens": 0,
        "planned_cached_tokens": 0,
        "decodes": 0,
        "other_pulls": 0,
        "connected": True,
        "queue_s": 0.0,
    } | fields
    cached = 0 if failed else values["planned_cached_tokens"]
    missing = max(values["prompt_tokens"] - cached, 1)
    load_s = truth.profile.admit_s + truth.promotion_s(values["ram_tokens"])
    load_s += truth.storage_s(values["storage_tokens"])
    load_s += truth.peer_s(
        values["peer_tokens"], values["other_pulls"], connected=values["connected"], link=link
    )
    ttft_s = max(values["queue_s"], load_s) + truth.prefill_s(
        values["prompt_tokens"] - missing, missing, values["decodes"]
    )
    defaults = {"cached_tokens": cached, "ttft_s": ttft_s * noise}
    return Observation(**defaults | values)


def pull(truth: CostModel, link: Link | None, source: str = "s", **fields: Any) -> Observation:
    tokens = fields.pop("tokens", 16_000)
    return seen(
        truth,
        link,
        source=source,
        prompt_tokens=tokens,
        peer_tokens=tokens,
        planned_cached_tokens=tokens,
        **fields,
    )


def pull_s(calibration: Calibration, source: str = "s", worker: str = "w", tokens: int = 16_000) -> float:
    link = calibration.link(source, worker)
    return calibration.model_for(worker).peer_s(tokens, 0, connected=True, link=link)


def answered(truth: CostModel, *, noise: float = 1.0, **fields: Any) -> DecodeObservation:
    """How long an answer takes after its first token, on a worker with the constants of ``truth``."""
    values: dict[str, Any] = {"worker": "w", "decodes": 1.0, "output_tokens": 200, "prefill_s": 0.0} | fields
    steps = values["output_tokens"] - 1
    profile = truth.profile
    step_s = profile.decode_start_s + profile.decode_s_per_request * (values["decodes"] - 1)
    return DecodeObservation(**{"decode_s": (steps * step_s + values["prefill_s"]) * noise} | values)


def decoding(profile: CostProfile, start: float, request: float) -> CostModel:
    changes = {
        "decode_start_s": profile.decode_start_s * start,
        "decode_s_per_request": profile.decode_s_per_request * request,
    }
    return CostModel(msgspec.structs.replace(profile, **changes))
