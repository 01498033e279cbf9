# SPDX-License-Identifier: Apache-2.0
"""What a virtual fleet is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from engine_ext.sim.config import SimConfig
from engine_ext.sim.core import SimEngine
from engine_ext.sim.network import PeerNetwork
from engine_ext.sim.noise import Noise
from engine_ext.sim.profile import SimProfile
from engine_ext.sim.tiers import StorageTier
from router.costs.profile import CostProfile
from router.replay.policies import AnyPolicyName


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualFleetSetup:
    """Everything a replay depends on."""

    workers: int
    engine: SimConfig
    engine_profile: SimProfile
    cost_profile: CostProfile
    policy: AnyPolicyName
    gpu_seconds_weight: float = 0.1
    pull_deadline_s: float = 5.0
    use_peers: bool = True
    calibrate: bool = False
    """Learn the constants from the answers; ``cost_profile`` is then where they start."""
    explore: float = 0.0
    """Of the predicted costs, what trials may lose; none without ``calibrate``."""
    endless_storage: bool = False
    """A disk per worker that never evicts, as vLLM's own ``fs`` tier; ``engine.storage_blocks`` bounds it instead."""
    events_cut_at_s: Mapping[str, float] = field(default_factory=dict)
    """Worker to when its event channel breaks: what it publishes after that never arrives."""
    transport_cut_at_s: Mapping[str, float] = field(default_factory=dict)
    """Worker to when its peers lose it: no pull to or from it ends, no lookup is answered."""
    killed_at_s: Mapping[str, float] = field(default_factory=dict)
    """Worker to when its process dies."""
    restart_after_s: float = 30.0
    """How long a dead worker stays away; it comes back with nothing but its disk."""
    kill_source_of: int = 0
    """Kill the source of that pull, counted from 1, right after the request was sent; 0 for none."""
    noise: float = 0.0
    """Standard deviation of every step's and every transfer's time, over the time."""
    seed: int = 0
    slo_tpot_s: float | None = None
    """Seconds per output token that every request asks for."""
    judge: frozenset[int] = frozenset()
    """Indices of the requests whose decisions are compared with all others, on copies of the fleet."""


class EngineMaker:
    """Makes the engine of a worker, each time it starts: its disk is the same, its memory and its noise are new."""

    def __init__(
        self, setup: VirtualFleetSetup, workers: Sequence[str], evicted: Callable[[bytes], None]
    ) -> None:
        """``evicted``: as ``SimEngine`` has it."""
        self._setup = setup
        self._evicted = evicted
        self._disks = {worker: _disk(setup) for worker in workers}

    def __call__(self, worker: str, starts: int, network: PeerNetwork) -> SimEngine:
        setup, sigma = self._setup, self._setup.noise
        chance = Random(f"{setup.seed}:{worker}:{starts}")
        return SimEngine(
            setup.engine,
            setup.engine_profile,
            self._disks[worker],
            network=network,
            noise=Noise(chance, step_sigma=sigma, transfer_sigma=sigma) if sigma else None,
            evicted=self._evicted,
            every_token=False,
        )


def _disk(setup: VirtualFleetSetup) -> StorageTier | None:
    if setup.endless_storage:
        return StorageTier()
    return StorageTier(setup.engine.storage_blocks) if setup.engine.storage_blocks else None
