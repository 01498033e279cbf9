# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from random import Random

from router.costs.calibration import Calibration
from router.costs.model import CostChanges, CostModel, Link
from router.costs.observation import Observation
from router.costs.profile import load_profile

PROFILE = load_profile("llama-3.1-8b-h100")
WORKERS = ["a", "b", "c"]


class Copy:
    """Constants kept elsewhere, asked for again only where the watch says so."""

    def __init__(self, costs: Calibration) -> None:
        self.costs = costs
        self.changes: CostChanges = costs.watch()
        self.models: dict[str, CostModel] = {}
        self.usual: Link
        self.links: dict[tuple[str, str], Link] = {}

    def refresh(self) -> int:
        """How many were asked for again."""
        changes, asked = self.changes, 0
        if changes.everything:
            changes.everything = False
            changes.workers.update(WORKERS)
            self.usual = self.costs.link("", "")
            self.links.clear()
        for name in changes.workers & {*WORKERS}:
            self.models[name] = self.costs.model_for(name)
            asked += 1
        for pair in changes.links:
            self.links[pair] = self.costs.link(*pair)
            asked += 1
        changes.workers.clear()
        changes.links.clear()
        return asked

    def check(self) -> None:
        for name in WORKERS:
            assert self.models[name] is self.costs.model_for(name)
            for other in WORKERS:
                kept = self.links.get((other, name), self.usual)
                assert kept == self.costs.link(other, name)


def observation(random: Random, slow: str) -> Observation:
    worker, source = random.sample(WORKERS, 2)
    pulled = random.choice([0, 3000])
    return Observation(
        worker=worker,
        source=source if pulled else None,
        prompt_tokens=8000,
        ram_tokens=1000,
        peer_tokens=pulled,
        storage_tokens=0,
        planned_cached_tokens=1000 + pulled,
        cached_tokens=0 if pulled and random.random() < 0.1 else 1000 + pulled,
        decodes=random.randrange(3),
        other_pulls=0,
        connected=True,
        queue_s=random.choice([0.0, 0.0, 5.0]),
        ttft_s=0.4 * (4 if slow in {worker, source} else 1) * random.uniform(0.9, 1.1),
    )


def test_whoever_follows_the_watch_has_the_constants_of_the_calibration() -> None:
    random, calibration, now_s = Random(1), Calibration(PROFILE), 0.0
    copy, late = Copy(calibration), None
    asked = []
    for number in range(600):
        now_s += random.expovariate(1.0) * (400 if number == 500 else 1)
        calibration.observe(observation(random, "b"), now_s)
        if number == 300:
            late = Copy(calibration)
        if number % 97 == 96:
            calibration.forget("c")
        asked.append(copy.refresh())
        copy.check()
        if late is not None:
            late.refresh()
            late.check()
    # Mostly nothing has changed: otherwise nothing is won.
    assert asked.count(0) > len(asked) / 4


def test_state_that_is_loaded_reaches_whoever_watches() -> None:
    random, learnt = Random(2), Calibration(PROFILE)
    for number in range(50):
        learnt.observe(observation(random, "a"), float(number))
    calibration = Calibration(PROFILE)
    copy = Copy(calibration)
    copy.refresh()
    calibration.load(learnt.dump(50.0), 50.0)
    copy.refresh()
    copy.check()


def test_constants_that_nobody_learns_never_change() -> None:
    costs = CostModel(PROFILE)
    changes = costs.watch()
    assert changes.everything
    assert not changes.workers
    assert not changes.links
