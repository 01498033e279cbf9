# SPDX-License-Identifier: Apache-2.0
"""PointsmanOffloadingSpec in a real engine: what HBM lost comes back from RAM through our worker, byte for byte.

The model's greedy text depends on every byte of its KV cache, so equal text and the engine's own count of cached
tokens together say that the right pages were moved to the right places.
"""

from __future__ import annotations

import http.server
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from router.costs.kv_bytes import kv_bytes_per_token

from .asking import B, Workers, assert_heads, cached, complete, forget_hbm, heads, offload, text
from .engine import RealWorker, WorkerConfig
from .imports import Version
from .launch import Extension
from .prompts import token_ids

HBM_BLOCKS = 39


class Router:
    """Takes reports and keeps them; what a router answers with is not looked at."""

    def __init__(self) -> None:
        self._reports: list[dict[str, Any]] = []
        takes = self._reports

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                takes.extend(body["reports"])
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def report_of(self, plan_id: str) -> dict[str, Any]:
        def found() -> list[dict[str, Any]]:
            return [one for one in self._reports if one["plan_id"] == plan_id]

        wait_until(lambda: bool(found()), f"a report of plan {plan_id}")
        (report,) = found()
        return report


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    one = Router()
    thread = threading.Thread(target=one.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield one
    one.server.shutdown()
    thread.join()
    one.server.server_close()


@pytest.fixture
def worker(real_workers: Workers, vllm_version: Version, router: Router) -> RealWorker:
    """One worker with chunks of two blocks, and HBM for little more than one long prompt."""
    config = WorkerConfig(
        extension=Extension(blocks_per_chunk=2, extra={"report_urls": [router.url]}),
        gpu_blocks=HBM_BLOCKS + 1,
        max_model_len_tokens=1024,
        vllm=vllm_version,
    )
    (one,) = real_workers(config)
    assert one.get("/version")["version"].startswith(vllm_version)
    return one


def test_a_prompt_that_hbm_evicted_is_loaded_from_ram_and_continues_as_when_cold(worker: RealWorker) -> None:
    prompt = token_ids(20 * B + 5)
    cold = offload(worker, prompt)
    goes_on = heads(worker, prompt)
    complete(worker, token_ids(31 * B))
    assert HBM_BLOCKS - 31 < 20, "the second prompt cannot have left the first one in HBM"
    before = worker.tokens_by_source()
    again = complete(worker, prompt)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 20 * B
    assert text(again) == cold
    worker.wait_for_source("host", before.get("host", 0) + 12 * B)
    assert_heads(worker, prompt, goes_on)


@pytest.mark.parametrize(
    ("tokens", "from_ram"), [(63, 0), (64, 64), (65, 64), (96, 64), (97, 64), (128, 128), (129, 128)]
)
def test_ram_gives_whole_chunks_of_two_blocks(worker: RealWorker, tokens: int, from_ram: int) -> None:
    prompt = token_ids(tokens)
    cold = offload(worker, prompt)
    forget_hbm(worker)
    again = complete(worker, prompt)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == from_ram
    assert text(again) == cold


def test_a_load_begins_in_the_middle_of_a_chunk_where_hbm_has_its_first_block(worker: RealWorker) -> None:
    prompt = token_ids(6 * B + 1)
    cold = offload(worker, prompt)
    forget_hbm(worker)
    # Three blocks come back to HBM by being computed, so the load starts behind the first block of the second chunk.
    complete(worker, prompt[: 3 * B] + token_ids(3), kv_transfer_params={"max_load_tokens": 0})
    before = worker.tokens_by_source()
    again = complete(worker, prompt)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 6 * B
    assert text(again) == cold
    worker.wait_for_source("host", before.get("host", 0) + 3 * B)


def test_the_engine_counts_as_many_loaded_bytes_as_the_blocks_have(worker: RealWorker) -> None:
    prompt = token_ids(10 * B + 1)
    offload(worker, prompt)
    forget_hbm(worker)
    before = loaded_bytes(worker)
    assert cached(worker, prompt) == 10 * B
    expected = 10 * B * kv_bytes_per_token(json.loads((worker.model_dir / "config.json").read_text()))
    wait_until(lambda: loaded_bytes(worker) - before >= expected, "the counter follows the answer")
    assert loaded_bytes(worker) - before == expected


def test_a_planned_requests_report_says_what_ram_held_and_what_was_promoted(
    worker: RealWorker, router: Router
) -> None:
    prompt = token_ids(6 * B + 1)
    offload(worker, prompt[: 4 * B + 1])
    forget_hbm(worker)
    plan = {"plan_id": uuid.uuid4().hex}
    assert cached(worker, prompt, kv_transfer_params={"pointsman": plan}) == 4 * B
    report = router.report_of(plan["plan_id"])
    (ram,) = report["sources"]
    assert (ram["source"], ram["kind"], ram["hit_blocks"], ram["missed_blocks"]) == ("ram", "ram", 2, 1)
    block_bytes = B * kv_bytes_per_token(json.loads((worker.model_dir / "config.json").read_text()))
    assert (report["promoted_blocks"], report["promotion_bytes"]) == (2, 2 * 2 * block_bytes)
    assert 0 < report["promotion_s"] < 5
    assert report["evicted_before_reuse_blocks"] == 0


def loaded_bytes(worker: RealWorker) -> float:
    """There is no such series before the first load."""
    family = "vllm:kv_offload_load_bytes_total{"
    return sum(value for name, value in worker.metrics().items() if name.startswith(family))


def wait_until(done: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)
