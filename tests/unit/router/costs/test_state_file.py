# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path

import msgspec
import pytest
from eventually import eventually

from router.costs.calibration import Calibration
from router.costs.model import CostModel
from router.costs.observation import Observation
from router.costs.profile import CostProfile, load_profile
from router.costs.state_file import Loaded, StateFile

PROFILE = load_profile("default")


class Clock:
    """A monotonic clock and a calendar that go together, from starts of their own."""

    def __init__(self, monotonic_s: float, unix_s: float) -> None:
        self.now_s = 0.0
        self._starts = monotonic_s, unix_s

    def monotonic_s(self) -> float:
        return self._starts[0] + self.now_s

    def unix_s(self) -> float:
        return self._starts[1] + self.now_s


def learn(calibration: Calibration, clock: Clock, times_slower: float = 3.0, count: int = 50) -> None:
    truth = CostModel(calibration.profile)
    for i in range(count):
        clock.now_s += 1.0
        tokens = 1000 + 300 * i
        ttft_s = times_slower * (calibration.profile.admit_s + truth.prefill_s(0, tokens, 0))
        seen = Observation(
            worker="w",
            source=None,
            prompt_tokens=tokens,
            ram_tokens=0,
            peer_tokens=0,
            storage_tokens=0,
            planned_cached_tokens=0,
            cached_tokens=0,
            decodes=0,
            other_pulls=0,
            connected=True,
            queue_s=0.0,
            ttft_s=ttft_s,
        )
        calibration.observe(seen, clock.monotonic_s())


def state_file(
    path: Path, calibration: Calibration, clock: Clock | None = None, interval_s: float = 3600.0
) -> StateFile:
    clock = clock or Clock(50.0, 2e9)
    return StateFile(path, calibration, clock.monotonic_s, clock.unix_s, interval_s)


async def kept(path: Path, clock: Clock, profile: CostProfile = PROFILE) -> Calibration:
    """What a router learnt that was stopped in good order."""
    calibration = Calibration(profile)
    file = state_file(path, calibration, clock)
    await file.start()
    learn(calibration, clock)
    await file.stop()
    return calibration


def prefill_s(calibration: Calibration, worker: str = "w") -> float:
    return calibration.model_for(worker).prefill_s(0, 8000, 0)


async def test_what_was_learnt_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state" / "calibration.json"
    clock = Clock(1e6, 1.7e9)
    before = await kept(path, clock)
    # Another process, another monotonic clock, a minute later.
    again, later = Calibration(PROFILE), Clock(10.0, clock.unix_s() + 60)
    file = state_file(path, again, later)
    await file.load()
    assert file.loaded is Loaded.LOADED
    assert again.observations == 50
    assert prefill_s(again) == pytest.approx(prefill_s(before), rel=0.03)
    assert prefill_s(again) > 2 * prefill_s(Calibration(PROFILE))
    assert file.view()["saved_age_s"] == pytest.approx(60)


async def test_what_was_learnt_of_a_worker_ages_while_no_router_runs(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    clock = Clock(0.0, 1.7e9)
    calibration = Calibration(PROFILE)
    file = state_file(path, calibration, clock)
    learn(calibration, clock, 1.0)
    worker_apart = {"w": 4.0}
    for _ in range(40):
        learn(calibration, clock, worker_apart["w"], count=1)
    await file.save()
    again, next_day = Calibration(PROFILE), Clock(0.0, clock.unix_s() + 86_400)
    await state_file(path, again, next_day).load()
    shown = again.snapshot()["workers"]["w"]["prefill_s_per_token"]
    learn(again, next_day, 1.0, count=1)
    aged = again.snapshot()["workers"]["w"]["prefill_s_per_token"]
    fleet = again.snapshot()["fleet"]["prefill_s_per_token"]
    assert shown["fit"] > 1.05 * fleet["fit"]
    assert aged["fit"] == pytest.approx(fleet["fit"], rel=0.1), "a day later it is like the fleet again"


async def test_saves_as_it_learns_and_only_then(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    clock = Clock(0.0, 1.7e9)
    calibration = Calibration(PROFILE)
    file = state_file(path, calibration, clock, interval_s=0.001)

    async def saved() -> int:
        return file.saves

    await file.start()
    try:
        learn(calibration, clock, count=1)
        await eventually(saved, "a save")
        saves = file.saves
        await file.save()
        assert file.saves == saves, "nothing was learnt since"
    finally:
        await file.stop()
    document = json.loads(path.read_bytes())
    assert document["version"] == 1
    assert document["calibration"]["observations"] == 1
    assert os.listdir(tmp_path) == ["calibration.json"], "no temporary file is left"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", Loaded.UNREADABLE),
        (b"\x00\xff", Loaded.UNREADABLE),
        (b"[]", Loaded.UNREADABLE),
        (b'{"version": 1, "saved_unix_s": 0, "calibration": {"profile": 3}}', Loaded.UNREADABLE),
        (b'{"version": 99, "saved_unix_s": 0, "calibration": {}}', Loaded.OTHER_VERSION),
    ],
)
async def test_a_file_that_cannot_be_used_is_said_and_replaced(
    content: bytes, expected: Loaded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(content)
    calibration, clock = Calibration(PROFILE), Clock(0.0, 1.7e9)
    file = state_file(path, calibration, clock)
    with caplog.at_level(logging.WARNING):
        await file.start()
    assert file.loaded is expected
    assert expected.value in caplog.text
    assert calibration.model_for("w").profile == PROFILE
    learn(calibration, clock)
    await file.stop()
    assert json.loads(path.read_bytes())["calibration"]["observations"] == 50


async def test_a_half_written_file_is_never_read(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    await kept(path, Clock(0.0, 1.7e9))
    whole = path.read_bytes()
    for cut in (1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        file = state_file(path, Calibration(PROFILE))
        await file.load()
        assert file.loaded is Loaded.UNREADABLE


async def test_other_constants_start_anew_and_another_sentence_does_not(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    await kept(path, Clock(0.0, 1.7e9))
    other = Calibration(msgspec.structs.replace(PROFILE, admit_s=1.0))
    file = state_file(path, other)
    await file.load()
    assert file.loaded is Loaded.OTHER_PROFILE
    assert other.observations == 0
    reworded = Calibration(msgspec.structs.replace(PROFILE, source="the same, told otherwise"))
    file = state_file(path, reworded)
    await file.load()
    assert file.loaded is Loaded.LOADED


async def test_no_file_is_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = state_file(tmp_path / "none.json", Calibration(PROFILE))
    with caplog.at_level(logging.WARNING):
        await file.load()
    assert file.loaded is Loaded.ABSENT
    assert not caplog.records


async def test_a_place_that_cannot_be_written_is_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "blocked").write_text("a file where a directory should be")
    calibration, clock = Calibration(PROFILE), Clock(0.0, 1.7e9)
    file = state_file(tmp_path / "blocked" / "calibration.json", calibration, clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            learn(calibration, clock, count=1)
            await file.save()
    assert (file.saves, file.failures) == (0, 3)
    assert file.view()["last_error"]
    assert len(caplog.records) == 1


async def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    await kept(path, Clock(0.0, 1.7e9))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
