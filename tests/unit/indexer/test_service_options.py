# SPDX-License-Identifier: Apache-2.0
"""Options of ``pointsman indexer`` that bound the index: what they become."""

from __future__ import annotations

from pathlib import Path

import kv_batches as kv
import pytest

from indexer.identity import WorkerId, WorkerRank
from indexer.service import command
from indexer.service.app import IndexerApp
from indexer.service.requests import Register
from router.cli import run


async def serve_nothing(app: IndexerApp, _host: str, _port: int) -> None:
    SERVED.append(app)


SERVED: list[IndexerApp] = []


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The service that the command would serve with these options."""
    monkeypatch.setattr(command, "serve_indexer", serve_nothing)

    def make(*arguments: str) -> IndexerApp:
        SERVED.clear()
        assert run(["indexer", *arguments, "--hash-key-file", str(tmp_path / "key")]) == 0
        return SERVED.pop()

    return make


def test_the_index_holds_no_more_than_max_blocks(made) -> None:
    holders = made("--max-blocks", "1024").holders
    holders.register(WorkerId("w"), "m", 1)
    for first in range(1, 3001, 100):
        holders.apply(WorkerRank(WorkerId("w")), 0, kv.batch(kv.stored(list(range(first, first + 100)))))
    assert holders.index.distinct_blocks == 1024
    assert holders.workers()[WorkerId("w")].ranks[0].totals["evicted"] == 3000 - 1024


@pytest.mark.parametrize(("arguments", "demoting"), [((), 0), (("--offload-grace-s", "60"), 1)])
def test_what_leaves_hbm_is_demoting_for_the_grace_that_is_given(made, arguments, demoting) -> None:
    app = made(*arguments)
    app.subscriber.add = lambda _: None  # nothing is to be connected to
    app.registry.register(
        Register(instance_id=1, endpoint="tcp://127.0.0.1:1", model_name="m", block_size=kv.BLOCK)
    )
    (worker,) = app.holders.workers()
    app.holders.apply(WorkerRank(worker), 0, kv.batch(kv.stored([1, 2]), kv.removed([2])))
    assert app.holders.index.counts(app.holders.workers()[worker].ranks[0].slot).demoting == demoting
