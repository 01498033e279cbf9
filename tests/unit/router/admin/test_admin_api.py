# SPDX-License-Identifier: Apache-2.0
"""The admin app called as an ASGI app: what it answers, to whom."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kv_batches import batch, stored

from indexer.identity import WorkerId, WorkerRank
from router.app import PointsmanApp
from router.config import load
from router.config_fleet import WorkerEntry

TOKEN = "sesame"  # noqa: S105


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def ask(
    app: PointsmanApp,
    method: str,
    target: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> Answer:
    path, _, query = target.partition("?")
    sent: list[dict[str, Any]] = []
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(dict(message))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    await app(scope, receive, send)
    head = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
    return Answer(sent[0]["status"], head, b"".join(m.get("body", b"") for m in sent[1:]))


def app_of(tmp_path: Path, **overrides: object) -> PointsmanApp:
    """An app that was not started: its workers were never asked."""
    settings = {"index.hash_key_file": str(tmp_path / "key"), **overrides}
    workers = [
        WorkerEntry(url="http://127.0.0.1:9", id="a", events="tcp://127.0.0.1:1"),
        WorkerEntry(url="http://127.0.0.1:9/prefix", id="127.0.0.1:9/prefix"),
    ]
    app = PointsmanApp(load(None, environ={}, overrides=settings, workers=workers))
    app.brain.holders.register(WorkerId("a"), "m", 1)
    app.brain.holders.apply(WorkerRank(WorkerId("a")), 4, batch(stored([1, 2, 3])))
    return app


async def test_health_answers_whatever_the_fleet_and_ready_only_with_a_worker(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    assert (await ask(app, "GET", "/health")).json == {"status": "ok"}
    ready = await ask(app, "GET", "/ready")
    assert ready.status == 503
    assert ready.json["ready"] is False
    assert ready.json["degraded"]["unhealthy_workers"] == ["a", "127.0.0.1:9/prefix"]


async def test_workers_and_index_show_what_is_known(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    rows = (await ask(app, "GET", "/admin/api/workers")).json["workers"]
    first = rows[0]
    assert (first["id"], first["health"], first["incarnation"], first["in_flight"]) == ("a", "unknown", 1, 0)
    assert first["streams"][0]["seq"] == 4
    assert first["streams"][0]["events"]["stored"] == 3
    assert rows[1]["streams"] == []
    index = (await ask(app, "GET", "/admin/api/index")).json
    assert index["distinct_blocks"] == index["workers"]["a"]["hbm_blocks"] == 3
    assert len(index["hash_key_id"]) == 16
    secret = (tmp_path / "key").read_text().strip()
    assert secret not in json.dumps(index)


async def test_clearing_forgets_one_worker(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    assert (await ask(app, "POST", "/admin/api/index/a/clear")).json == {"cleared": "a"}
    row = (await ask(app, "GET", "/admin/api/workers")).json["workers"][0]
    assert row["incarnation"] == 2
    assert row["streams"][0]["partial"] == "cleared by an operator"
    assert (await ask(app, "GET", "/admin/api/index")).json["workers"]["a"]["hbm_blocks"] == 0
    missing = await ask(app, "POST", "/admin/api/index/nobody/clear")
    assert (missing.status, missing.json["error"]["code"]) == (404, 404)


@pytest.mark.parametrize("worker", ["a", "127.0.0.1:9/prefix"])
async def test_a_worker_is_drained_and_taken_back(tmp_path: Path, worker: str) -> None:
    app = app_of(tmp_path)

    async def health() -> str:
        rows = (await ask(app, "GET", "/admin/api/workers")).json["workers"]
        return str(next(row["health"] for row in rows if row["id"] == worker))

    for body, draining in (
        (b"", True),
        (b'{"draining": false}', False),
        (b"true", True),
        (b"false", False),
        (b"{}", True),
    ):
        answer = await ask(app, "PUT", f"/admin/api/workers/{worker}/drain", body)
        assert answer.json == {"worker": worker, "draining": draining}
        assert (await health() == "draining") == draining
    for body in (b"{", b"7", b'{"draining": "yes"}', b"[]"):
        answer = await ask(app, "PUT", f"/admin/api/workers/{worker}/drain", body)
        assert answer.status == 400
        assert answer.json["error"]["message"]
    assert (await ask(app, "PUT", "/admin/api/workers/nobody/drain")).status == 404


async def test_decisions_that_are_not_there_are_404_and_bad_questions_4xx(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    assert (await ask(app, "GET", "/admin/api/decisions")).json == {"decisions": []}
    assert (await ask(app, "GET", "/admin/api/decisions/nothing")).status == 404
    for query in ("limit=0", "limit=x", "limit=100000000"):
        assert (await ask(app, "GET", f"/admin/api/decisions?{query}")).status == 422
    # Nothing can take it: the fleet was never asked.
    explained = await ask(app, "POST", "/admin/api/explain", b'{"prompt": [1, 2, 3]}')
    assert explained.status == 503


async def test_costs_name_their_profile(tmp_path: Path) -> None:
    app = app_of(tmp_path, **{"costs.overrides": {"admit_s": 0.5}})
    costs = (await ask(app, "GET", "/admin/api/costs")).json
    assert costs["profile"] == "default"
    assert costs["constants"]["admit_s"] == 0.5


async def test_costs_show_prior_fit_count_and_interval(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    learnt = (await ask(app, "GET", "/admin/api/costs")).json["calibration"]
    assert learnt["observations"] == 0
    rate = learnt["fleet"]["prefill_s_per_token"]
    assert set(rate) == {"prior", "fit", "n", "interval"}
    assert (rate["fit"], rate["n"]) == (rate["prior"], 0)
    assert rate["interval"][0] < rate["fit"] < rate["interval"][1]


async def test_calibration_can_be_switched_off(tmp_path: Path) -> None:
    app = app_of(tmp_path, **{"costs.calibrate": False})
    assert (await ask(app, "GET", "/admin/api/costs")).json["calibration"] is None


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (None, 401),
        ("", 401),
        (TOKEN, 401),
        (f"Bearer {TOKEN}x", 401),
        ("Bearer caf\u00e9", 401),
        (f"Bearer {TOKEN}", 200),
    ],
)
async def test_a_token_guards_the_admin_api_and_nothing_else(
    tmp_path: Path, authorization: str | None, status: int
) -> None:
    app = app_of(tmp_path, **{"admin.token": TOKEN})
    headers = {} if authorization is None else {"authorization": authorization}
    for method, path in (
        ("GET", "/admin/api/workers"),
        ("GET", "/admin/api/decisions"),
        ("POST", "/admin/api/index/a/clear"),
        ("PUT", "/admin/api/workers/a/drain"),
    ):
        assert (await ask(app, method, path, headers=headers)).status == status, path
    assert (await ask(app, "GET", "/health")).status == 200
    assert (await ask(app, "GET", "/metrics")).status == 200


async def test_an_admin_api_that_is_off_is_not_there(tmp_path: Path) -> None:
    app = app_of(tmp_path, **{"admin.enabled": False})
    for path in ("/admin/api/workers", "/admin/api/index"):
        assert (await ask(app, "GET", path)).status == 404
    assert (await ask(app, "GET", "/health")).status == 200


async def test_metrics_tell_the_state_of_every_worker(tmp_path: Path) -> None:
    text = (await ask(app_of(tmp_path), "GET", "/metrics")).body.decode()
    for line in (
        'pointsman_worker_health{state="unknown",worker="a"} 1.0',
        'pointsman_index_blocks{tier="hbm",worker="a"} 3.0',
        'pointsman_kv_events_total{effect="stored",worker="a"} 3.0',
        'pointsman_in_flight_requests{worker="a"} 0.0',
        'pointsman_worker_event_silent{worker="a"} 0.0',
    ):
        assert line in text.splitlines()
