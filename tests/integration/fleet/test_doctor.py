# SPDX-License-Identifier: Apache-2.0
import asyncio

import pytest
import zmq
import zmq.asyncio

from router.config import Config
from router.config_fleet import FleetConfig
from router.config_sections import LocalTokenizer as LocalEntry
from router.config_sections import TokensConfig
from router.doctor import Check, examine, render_table
from router.fleet.worker import WorkerSpec

QUICK = Config(fleet=FleetConfig(poll_timeout_s=5.0))
IMPATIENT = Config(fleet=FleetConfig(poll_timeout_s=1.0))
END = b"\xff" * 8


class FakePublisher:
    """A PUB socket and a replay ROUTER as vLLM has them."""

    def __init__(self, answer):
        self._context = zmq.asyncio.Context()
        self.pub = self._context.socket(zmq.PUB)
        self.router = self._context.socket(zmq.ROUTER)
        self.events = f"tcp://127.0.0.1:{self.pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"
        self._answer = answer
        self._task = asyncio.create_task(self._serve())

    async def _serve(self):
        while True:
            client, *_ = await self.router.recv_multipart()
            if self._answer is not None:
                await self.router.send_multipart([client, *self._answer])

    async def close(self):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)


@pytest.fixture
async def publisher():
    opened = []

    def make(answer=(b"", b"", END, b"")):
        opened.append(FakePublisher(answer))
        return opened[-1]

    yield make
    for one in opened:
        await one.close()


@pytest.fixture
async def open_port():
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


def by_name(checks, worker=None):
    return {check.name: check for check in checks if worker is None or check.worker == worker}


async def test_a_well_set_up_worker_passes_every_check(
    fake_worker, publisher, open_port, tokenizer_dir, engine_tokenize
):
    directory, zmq_sockets = tokenizer_dir(), publisher()
    worker = await fake_worker(
        tokenize=engine_tokenize(directory),
        sources={"0": {"endpoint": zmq_sockets.events, "replay_endpoint": zmq_sockets.replay}},
        completion={"usage": {"prompt_tokens": 65, "prompt_tokens_details": {"cached_tokens": 64}}},
    )
    spec = worker.spec(
        id="w", events=zmq_sockets.events, replay=zmq_sockets.replay, p2p=f"127.0.0.1:{open_port}"
    )
    config = Config(
        fleet=QUICK.fleet, tokens=TokensConfig(local=(LocalEntry(model="m", path=str(directory)),))
    )
    checks = await examine([spec], config, send_requests=True)
    assert [check for check in checks if check.ok is not True] == []
    assert list(by_name(checks)) == [
        "health",
        "models",
        "metrics",
        "block size",
        "event sources",
        "tokenizer",
        "cached tokens",
        "events",
        "replay",
        "p2p",
        "p2p addresses unique",
        "p2p block sizes equal",
    ]
    assert "64 of 65" in by_name(checks)["cached tokens"].detail
    assert len(worker.seen("/v1/completions")) == 2
    assert "0 failed" in render_table(checks)


async def test_nothing_is_sent_to_the_engine_unless_asked(fake_worker):
    worker = await fake_worker()
    checks = by_name(await examine([worker.spec()], QUICK))
    assert checks["cached tokens"].ok is None
    assert worker.seen("/v1/completions") == []


async def test_what_is_missing_fails_by_name_with_a_hint(fake_worker):
    worker = await fake_worker(metrics="", models=[])
    checks = by_name(await examine([worker.spec()], QUICK, send_requests=True))
    for name in ("models", "metrics", "block size", "events"):
        assert checks[name].ok is False, name
        assert checks[name].hint, name
    assert checks["event sources"].ok is None


async def test_a_dead_worker_fails_and_the_others_are_examined(fake_worker):
    worker = await fake_worker()
    dead = WorkerSpec(id="dead", url="http://127.0.0.1:1", events="tcp://127.0.0.1:1")
    checks = await examine([dead, worker.spec(id="alive")], IMPATIENT)
    assert by_name(checks, "dead")["health"].ok is False
    assert by_name(checks, "dead")["events"].ok is False
    assert by_name(checks, "alive")["health"].ok is True


async def test_cached_tokens_that_are_not_reported_fail(fake_worker):
    worker = await fake_worker()
    checks = by_name(await examine([worker.spec()], QUICK, send_requests=True))
    assert checks["cached tokens"].ok is False
    assert "--enable-prompt-tokens-details" in checks["cached tokens"].hint


@pytest.mark.parametrize("answer", [None, (b"what?",), (b"", b"x", b"short", b"")])
async def test_a_replay_socket_that_speaks_something_else_fails(fake_worker, publisher, answer):
    worker, sockets = await fake_worker(), publisher(answer)
    spec = worker.spec(events=sockets.events, replay=sockets.replay)
    config = IMPATIENT if answer is None else QUICK
    assert by_name(await examine([spec], config))["replay"].ok is False


@pytest.mark.parametrize("answer", [(b"", END, b""), (b"", b"topic", bytes(8), b"payload")])
async def test_replay_of_older_engines_and_with_batches_passes(fake_worker, publisher, answer):
    worker, sockets = await fake_worker(), publisher(answer)
    spec = worker.spec(events=sockets.events, replay=sockets.replay)
    assert by_name(await examine([spec], QUICK))["replay"].ok is True


async def test_publishers_that_differ_from_the_configuration_show(fake_worker, publisher):
    sockets = publisher()
    worker = await fake_worker(
        sources={"0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}, "1": {}}
    )
    check = by_name(await examine([worker.spec(events=sockets.events)], QUICK))["event sources"]
    assert check.ok is False
    for problem in ("2 ranks publish, 1 configured", "events published at tcp://*:5557", "none configured"):
        assert problem in check.detail


async def test_every_rank_has_its_own_sockets(fake_worker, publisher):
    sockets = publisher()
    worker = await fake_worker()
    checks = by_name(await examine([worker.spec(events=sockets.events, ranks=2)], IMPATIENT))
    assert checks["events rank 0"].ok is True
    assert checks["events rank 1"].ok is False


async def test_a_wrong_local_template_fails_and_names_the_probe(fake_worker, tokenizer_dir, engine_tokenize):
    worker = await fake_worker(tokenize=engine_tokenize(tokenizer_dir("{{ messages|tojson }}", "other")))
    local = TokensConfig(local=(LocalEntry(model="m", path=str(tokenizer_dir())),))
    check = by_name(await examine([worker.spec()], Config(fleet=QUICK.fleet, tokens=local)))["tokenizer"]
    assert check.ok is False
    assert "plain chat" in check.detail


async def test_peers_with_loopback_addresses_on_several_hosts_and_shared_ports_fail(fake_worker):
    worker = await fake_worker(metrics='vllm:cache_config_info{block_size="16"} 1\n')
    other = WorkerSpec(id="b", url="http://localhost:1", p2p="127.0.0.1:5710", ranks=2, block_size_tokens=32)
    same = worker.spec(id="a", p2p="127.0.0.1:5711")
    checks = await examine([same, other], IMPATIENT)
    assert by_name(checks, "a")["p2p address"].ok is False
    unique = by_name(checks)["p2p addresses unique"]
    assert unique.ok is False
    assert "127.0.0.1:5711 is a and b" in unique.detail


async def test_block_sizes_of_peers_must_be_equal(fake_worker):
    a = await fake_worker(metrics='vllm:cache_config_info{block_size="16"} 1\n')
    b = await fake_worker()
    specs = [a.spec(p2p="127.0.0.1:1"), b.spec(p2p="127.0.0.1:2")]
    check = by_name(await examine(specs, QUICK))["p2p block sizes equal"]
    assert check.ok is False
    assert check.detail == "16 tokens times 1, 32 tokens times 1"


async def test_block_size_that_differs_from_the_configured_one_fails(fake_worker):
    worker = await fake_worker()
    check = by_name(await examine([worker.spec(block_size_tokens=16)], QUICK))["block size"]
    assert check.ok is False
    assert check.detail == "32 by /metrics, 16 configured"


async def test_no_workers_is_a_failed_check():
    assert [check.ok for check in await examine([], QUICK)] == [False]


def test_table_shows_hints_under_failed_checks():
    table = render_table(
        [Check("w1", "health", True, "answers"), Check("w2", "events", False, "none", "do x")]
    )
    assert table.splitlines() == [
        "ok   w1  health  answers",
        "FAIL w2  events  none",
        "                 -> do x",
        "2 checks, 1 failed",
    ]


async def test_the_channel_of_the_extension_is_looked_for_where_it_should_be(fake_worker, open_port):
    worker = await fake_worker()
    there = worker.spec(id="there", extension=f"127.0.0.1:{open_port}")
    away = worker.spec(id="away", extension="127.0.0.1:1")
    checks = await examine([there, away, worker.spec(id="stock")], IMPATIENT)
    assert by_name(checks, "there")["extension"].ok is True
    assert by_name(checks, "away")["extension"].ok is False
    assert "PointsmanTier" in by_name(checks, "away")["extension"].hint
    assert "extension" not in by_name(checks, "stock")
