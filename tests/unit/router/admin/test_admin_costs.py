# SPDX-License-Identifier: Apache-2.0
"""What ``GET /admin/api/costs`` is made of, on an app that is started and stopped but has no worker to talk to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from router.app import PointsmanApp
from router.config import load
from router.config_fleet import WorkerEntry
from router.config_sections import PlanConfig
from router.costs.observation import DecodeObservation
from router.errors import ConfigError


def app_of(tmp_path: Path, **overrides: object) -> PointsmanApp:
    settings = {"index.hash_key_file": str(tmp_path / "hash.key"), **overrides}
    worker = WorkerEntry(url="http://127.0.0.1:9", id="a")
    return PointsmanApp(load(None, environ={}, overrides=settings, workers=[worker]))


async def costs(app: PointsmanApp) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(json.dumps(await app.brain.views().costs()))
    return shown


def learn(app: PointsmanApp) -> None:
    assert app.brain.calibration is not None
    for i in range(20):
        seen = DecodeObservation(worker="a", decodes=1.0, output_tokens=101, decode_s=4.0, prefill_s=0.0)
        app.brain.calibration.observe_decode(seen, float(i))


async def test_every_learnt_constant_has_prior_fit_n_and_interval(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    learn(app)
    fleet = (await costs(app))["calibration"]["fleet"]
    assert {"decode_start_s", "decode_s_per_request", "peer_share_exponent"} <= fleet.keys()
    for shown in fleet.values():
        assert shown.keys() == {"prior", "fit", "n", "interval"}
        assert shown["interval"][0] < shown["fit"] < shown["interval"][1]
    assert fleet["decode_start_s"]["n"] == 20
    assert fleet["decode_start_s"]["fit"] == pytest.approx(0.04, rel=0.1)


async def test_what_was_learnt_is_there_after_a_restart(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    await app.start()
    learn(app)
    await app.stop()
    assert (await costs(app))["kept"]["saves"] == 1
    again = app_of(tmp_path)
    await again.start()
    try:
        shown = await costs(again)
    finally:
        await again.stop()
    assert shown["kept"]["loaded"] == "loaded"
    assert shown["kept"]["file"] == str(tmp_path / "calibration.json")
    assert shown["calibration"]["workers"]["a"]["decode_start_s"]["fit"] == pytest.approx(0.04, rel=0.1)


async def test_nothing_is_kept_where_that_is_switched_off(tmp_path: Path) -> None:
    for settings in ({"costs.keep": False}, {"costs.calibrate": False}):
        app = app_of(tmp_path, **settings)
        await app.start()
        await app.stop()
        assert (await costs(app))["kept"] is None
    assert os.listdir(tmp_path) == ["hash.key"]


async def test_trials_are_shown_and_can_be_switched_off(tmp_path: Path) -> None:
    assert (await costs(app_of(tmp_path)))["trials"] == {
        "share": PlanConfig().explore,
        "saved": 1.0,
        "count": 0,
        "lost": 0.0,
    }
    for settings in ({"plan.explore": 0}, {"costs.calibrate": False}, {"plan.policy": "least_load"}):
        assert (await costs(app_of(tmp_path, **settings)))["trials"] is None


async def test_kv_bytes_come_from_the_model_where_one_is_given(tmp_path: Path) -> None:
    model = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(model))
    settings: dict[str, object] = {"costs.model_config": str(tmp_path)}
    assert (await costs(app_of(tmp_path, **settings)))["kv_bytes_per_token"]["profile"] == 512
    assert (await costs(app_of(tmp_path, **settings, **{"costs.kv_dtype": "fp8"})))["constants"][
        "kv_bytes_per_token"
    ] == 256
    one_by_one = {"costs.overrides": {"kv_bytes_per_token": 7.0}}
    assert (await costs(app_of(tmp_path, **settings, **one_by_one)))["constants"]["kv_bytes_per_token"] == 7.0


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"costs.model_config": "/nowhere"}, "costs.model_config"),
        ({"costs.kv_dtype": "fp8"}, "costs.kv_dtype"),
        ({"costs.overrides": {"no_such": 1.0}}, "costs.overrides.no_such"),
    ],
)
def test_bad_cost_settings_are_named(settings: dict[str, object], field: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        app_of(tmp_path, **settings)
    assert caught.value.field == field
