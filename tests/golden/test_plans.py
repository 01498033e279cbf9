# SPDX-License-Identifier: Apache-2.0
"""Plans as the router writes them and our engine extension reads them: both sides against the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_ext.vllm.plan import Plan as ReadPlan
from engine_ext.vllm.plan import read_plan
from router.fleet.worker import Transfer
from router.plan.candidate import NOTHING, Plan, Pull, Source, Terms
from router.plan.extension_plan import BlockWorth, ExtensionTerms
from router.plan.handover import Handover
from router.plan.transfer_params import prefill_params, transfer_params

FOLDER = Path(__file__).parent / "plans"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
TERMS = ExtensionTerms(5.0, "blue", BlockWorth(0.41, 3.5, 2048, 6144, 1))


def source(name: str, host: str, port: int, *, extension: str = "") -> Source:
    return Source(name, 0, host, port, NOTHING, 0, 1.0, "", bool(host), bool(extension), extension)


OURS = source("a", "", 0, extension="10.0.0.7:5720")
OTHER = source("b", "10.0.0.8", 5710, extension="[fd00::8]:5720")
STOCK = source("c", "fd00::9", 5710)


def plan(*pulls: Pull, **fields: Any) -> Plan:
    return Plan(
        "w",
        0,
        16,
        512,
        {"peer": sum(pull.blocks for pull in pulls)},
        0,
        fields.pop("terms", Terms(admit_s=0.02)),
        0.0,
        source=pulls[0].source if pulls else None,
        pulls=pulls,
        extension=True,
        **fields,
    )


SPLIT = plan(
    Pull(OURS, 0, 256, 256, 0.1, 0, True),
    Pull(OTHER, 256, 400, 144, 0.03, 2, False),
    Pull(STOCK, 400, 512, 112, 3.0, 0, False),
)
WRITTEN: dict[str, dict[str, object] | None] = {
    "three_sources": transfer_params(SPLIT, "pm-1", terms=TERMS),
    "one_source": transfer_params(plan(Pull(OURS, 64, 512, 448, 0.1, 0, True)), "pm-2"),
    "no_pull": transfer_params(plan(max_load_tokens=0), "pm-3", 2048, TERMS),
    "long_queue": transfer_params(
        plan(Pull(OURS, 0, 512, 512, 0.1, 0, True), terms=Terms(admit_s=1e4)), "pm-4"
    ),
    "prefill_leg": prefill_params(Handover(SPLIT, Transfer.P2P, "10.0.0.1", 5710), "pm-5", "pm-6", TERMS),
    "decode_leg": transfer_params(
        plan(handover=Handover(SPLIT, Transfer.P2P, "10.0.0.1", 5710)), "pm-5", terms=TERMS
    ),
}


def kept(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return document


def test_every_file_is_written_by_somebody() -> None:
    assert sorted(WRITTEN) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_router_writes_what_is_in_the_file(name: str) -> None:
    assert json.loads(msgspec.json.encode(WRITTEN[name])) == kept(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_extension_reads_all_that_is_in_the_file(name: str) -> None:
    written = kept(name)["pointsman"]
    read = read_plan(kept(name))
    assert isinstance(read, ReadPlan)
    again = msgspec.to_builtins(read)
    assert {key: again[key] for key in written if key not in {"pulls", "evict"}} == {
        key: value for key, value in written.items() if key not in {"pulls", "evict"}
    }
    assert list(again["pulls"]) == written.get("pulls", [])
    for key, value in written.get("evict", {}).items():
        assert again["evict"][key] == value, key


def test_pulls_are_under_one_key_and_stock_ones_name_nobody() -> None:
    for name in NAMES:
        assert "remote_kv_source" not in kept(name), name
    read = read_plan(kept("three_sources"))
    assert read is not None
    assert [(one.source, one.kind) for one in read.pulls] == [
        ("10.0.0.7:5720", "pointsman"),
        ("[fd00::8]:5720", "pointsman"),
        ("[fd00::9]:5710", "p2p"),
    ]
    assert (read.tenant, read.plan_id) == ("blue", "pm-1")


def test_a_source_gets_some_times_what_was_planned_and_never_more_than_the_longest_pull() -> None:
    read = read_plan(kept("three_sources"))
    assert read is not None
    # 4 * 20 ms until it is looked at, then 4 * 100 ms, at least 250 ms, at most 5 s.
    assert [one.deadline_ms for one in read.pulls] == [480, 330, 5080]
    waiting = read_plan(kept("long_queue"))
    assert waiting is not None
    assert waiting.pulls[0].deadline_ms == 600_000


def test_legs_of_a_split_request_keep_their_keys() -> None:
    decode, prefill = kept("decode_leg"), kept("prefill_leg")
    assert decode["remote_prefiller"]["kv_request_id"] == prefill["remote_decoder"]["kv_request_id"] == "pm-5"
    assert "pulls" not in decode["pointsman"]
    assert prefill["pointsman"]["plan_id"] == "pm-6"
    assert len(prefill["pointsman"]["pulls"]) == 3
