# SPDX-License-Identifier: Apache-2.0
"""Through the whole service: what reaches the worker and the client is what the other side sent, byte for byte."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import pytest
from recorder import Recorder
from service import BLOCK, MODEL, entry, service, sim_workers

from router.config_fleet import WorkerEntry

StartRecorder = Callable[[], Awaitable[Recorder]]

_INSERTED = re.compile(rb',?"kv_transfer_params":(\{"remote_kv_source":\{[^{}]*\}\})')

# %m stands for the model, %p for the prompt's beginning.
BODIES = {
    "unknown fields and key order": b'{"zeta":1,"model":"%m","x":{"b":[1,{"a":null}],"a":2},"prompt":"%p","alpha":[]}',
    "white space": b' \n{ "model" :\t"%m" , "prompt" : "%p" , "max_tokens" : 7 }\r\n ',
    "big integers and odd floats": b'{"model":"%m","prompt":"%p","seed":123456789012345678901234567890,"x":1E+2,"y":0.10}',
    "lone surrogates and escapes": b'{"model":"%m","prompt":"%p \\u0041\\/ \\ud83d\\ude00","user":"\\udc00 \\ud83d"}',
    "duplicate keys": b'{"model":"other","model":"%m","prompt":"first","prompt":"%p","n":1,"n":1}',
    "raw UTF-8": '{"model":"%m","prompt":"%p\u00e4\u4e16\U0001f600","m\u00f6re":1}'.encode(),
    "5 MB of prompt": b'{"model":"%m","prompt":"%p' + b"abcdefgh" * 655_360 + b'","tail":true}',
    "5 MB of something else": b'{"model":"%m","pad":"' + b"abcdefgh" * 655_360 + b'","prompt":"%p"}',
}


def body_of(name: str, prompt: str = "p") -> bytes:
    return BODIES[name].replace(b"%m", MODEL.encode()).replace(b"%p", prompt.encode())


@pytest.mark.parametrize("name", BODIES)
async def test_a_body_that_needs_nothing_reaches_the_worker_as_it_was_sent(
    tmp_path: Path, recorder: StartRecorder, name: str
) -> None:
    worker = await recorder()
    async with service([WorkerEntry(url=worker.url, id=worker.id)], tmp_path) as one:
        for path in ("/v1/completions", "/v1/other/path?a=%20b&c"):
            assert (await one.post(path, body_of(name))).status == 200
        assert worker.bodies == [body_of(name)] * 2
        assert worker.targets == ["/v1/completions", "/v1/other/path?a=%20b&c"]
        assert all(sent["content-length"] == str(len(body_of(name))) for sent in worker.headers)


async def test_a_prompt_that_no_json_writer_can_repeat_is_served_all_the_same(
    tmp_path: Path, recorder: StartRecorder
) -> None:
    worker = await recorder()
    body = b'{"model":"sim-model","prompt":"alone \\ud83d"}'
    async with service([WorkerEntry(url=worker.url, id=worker.id)], tmp_path) as one:
        reply = await one.post("/v1/completions", body)
        assert (reply.status, worker.bodies) == (200, [body])


async def test_a_body_with_a_source_inserted_is_otherwise_as_it_was_sent(
    tmp_path: Path, recorder: StartRecorder
) -> None:
    random = Random(1)
    prompt = "".join(random.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(300 * BLOCK))
    worker = await recorder()
    puller = WorkerEntry(url=worker.url, id=worker.id, p2p="127.0.0.1:9")
    # The puller has no events: our own decisions would say that it holds the prompt from the second body on.
    by_events = {"index.approximate": False}
    async with sim_workers(1) as (holder,), service([entry(holder), puller], tmp_path, by_events) as one:
        holder_id = holder.url.removeprefix("http://")
        async with one.session.post(
            holder.url + "/tokenize", json={"model": MODEL, "prompt": prompt}
        ) as answer:
            worker.tokens = (await answer.json())["tokens"]
        await one.drain(worker.id)
        assert (await one.complete(prompt)).status == 200
        await one.index_equals_truth(holder.url)
        await one.drain(holder_id)
        await one.drain(worker.id, draining=False)
        for name in BODIES:
            reply = await one.post("/v1/completions", body_of(name, prompt))
            assert reply.status == 200
            record = await one.decision(reply)
            assert record["source"] == holder_id, name
            sent = worker.bodies[-1]
            [found] = _INSERTED.finditer(sent)
            assert sent[: found.start()] + sent[found.end() :] == body_of(name, prompt), name
            assert json.loads(found[1]) == record["transfer_params"]
            assert worker.headers[-1]["content-length"] == str(len(sent))
            # A parser that reads the whole body sees one source, and everything the client said.
            assert json.loads(sent)["kv_transfer_params"] == record["transfer_params"]


async def test_streamed_bytes_reach_the_client_as_the_worker_sent_them(
    tmp_path: Path, recorder: StartRecorder
) -> None:
    worker = await recorder()
    worker.content_type = "text/event-stream; charset=utf-8"
    text = (
        b': hello\n\ndata: {"choices":[{"index":0,"text":"\\u00e9\\ud83d"}],"x":12345678901234567890123}\r\n\r\n'
        b'event: odd\nid: 7\ndata:{"choices":[]}\n\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":null}}\n\n'
        b"data: [DONE]\n\n"
    )
    random = Random(3)
    async with service([WorkerEntry(url=worker.url, id=worker.id)], tmp_path) as one:
        for _ in range(10):
            cuts = sorted({0, len(text), *(random.randrange(len(text)) for _ in range(9))})
            worker.pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
            body = {"model": MODEL, "prompt": "p", "stream": True}
            reply = await one.post("/v1/completions", body)
            assert reply.body == text
            assert reply.headers["content-type"] == worker.content_type
            observed = (await one.decision(reply))["observed"]
            assert (observed["prompt_tokens"], observed["completion_tokens"]) == (5, 2)
            assert observed["outcome"] == "ok"


async def test_answers_that_are_not_text_reach_the_client_whole(
    tmp_path: Path, recorder: StartRecorder
) -> None:
    worker = await recorder()
    worker.content_type = "audio/mpeg"
    worker.pieces = [Random(4).randbytes(100_000) for _ in range(10)]
    async with service([WorkerEntry(url=worker.url, id=worker.id)], tmp_path) as one:
        reply = await one.post("/v1/audio/speech", {"model": MODEL, "input": "x"})
        assert reply.body == b"".join(worker.pieces)
        assert reply.headers["content-type"] == "audio/mpeg"
        assert reply.headers["x-pointsman-fallback"] == "unknown_path"
        assert await one.metric("pointsman_fallbacks_total", reason="unknown_path") == 1


async def test_malformed_bodies_get_the_worker_s_own_answer(tmp_path: Path) -> None:
    malformed = [
        b"",
        b"{",
        b"null",
        b"[1,2]",
        b'{"prompt": "no end',
        b'{"model": "sim-model", "prompt": "\xff\xfe"}',
        b'{"model": "sim-model"}',
        b'{"model": "sim-model", "prompt": {"a": 1}}',
        b'{"model": "sim-model", "prompt": [[1], "x"]}',
        b'{"model": "sim-model", "prompt": []}',
        b'{"model": "sim-model", "prompt": "x", "max_tokens": -1}',
        b'{"model": 7, "prompt": "x"}',
        b'{"model": "nobody", "prompt": "x"}',
        b'{"model": "sim-model", "messages": "x"}',
    ]
    async with sim_workers(1) as (worker,), service([entry(worker)], tmp_path) as one:
        for path in ("/v1/completions", "/v1/chat/completions"):
            for body in malformed:
                sent = {"content-type": "application/json"}
                async with one.session.post(worker.url + path, data=body, headers=sent) as answer:
                    own = (answer.status, await answer.read())
                reply = await one.post(path, body)
                assert 400 <= own[0] < 500, (path, body)
                assert (reply.status, reply.body) == own, (path, body)
                assert reply.headers["x-pointsman-worker"] == worker.url.removeprefix("http://")
        await one.idle()


async def test_an_unreachable_fleet_is_503_with_a_reason(tmp_path: Path, unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    async with service([WorkerEntry(url=url, id="only")], tmp_path) as one:
        for path, body in (
            ("/v1/completions", {"model": MODEL, "prompt": "x"}),
            ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}),
            ("/v1/embeddings", {"model": MODEL, "input": "x"}),
        ):
            reply = await one.post(path, body)
            assert reply.status == 503
            assert reply.json["error"]["code"] == "all_unhealthy"
            assert "all_unhealthy" in reply.json["error"]["message"]
            assert reply.headers["x-request-id"]
        assert await one.metric("pointsman_refused_total", reason="all_unhealthy") == 3
        async with one.session.get(one.url + "/ready") as answer:
            assert answer.status == 503
        async with one.session.get(one.url + "/health") as answer:
            assert answer.status == 200


async def test_a_fleet_that_is_drained_says_so(tmp_path: Path) -> None:
    async with sim_workers(1) as (worker,), service([entry(worker)], tmp_path) as one:
        await one.drain(worker.url.removeprefix("http://"))
        reply = await one.complete("x")
        assert (reply.status, reply.json["error"]["code"]) == (503, "all_draining")


@pytest.mark.parametrize("trusted", [False, True])
async def test_a_client_may_name_a_source_only_where_it_is_trusted(
    tmp_path: Path, recorder: StartRecorder, trusted: bool
) -> None:
    worker = await recorder()
    settings = {"gateway.trust_transfer_params": trusted}
    source = {"remote_kv_source": {"remote_host": "10.0.0.1", "remote_port": 1, "kv_request_id": "mine"}}
    body = json.dumps({"model": MODEL, "prompt": "p", "kv_transfer_params": source}).encode()
    async with service([WorkerEntry(url=worker.url, id=worker.id)], tmp_path, settings) as one:
        reply = await one.post("/v1/completions", body)
        if trusted:
            assert reply.status == 200
            assert worker.bodies == [body]
        else:
            assert reply.status == 400
            assert "kv_transfer_params" in reply.json["error"]["message"]
            assert worker.bodies == []
            explained = await one.post("/admin/api/explain", body)
            assert explained.status == 400


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32-le"])
async def test_a_source_cannot_be_named_in_an_encoding_that_only_the_worker_reads(
    tmp_path: Path, recorder: StartRecorder, encoding: str
) -> None:
    worker = await recorder()
    source = {"remote_kv_source": {"remote_host": "10.0.0.1", "remote_port": 1, "kv_request_id": "mine"}}
    text = json.dumps({"model": MODEL, "prompt": "p", "kv_transfer_params": source})
    assert json.loads(text.encode(encoding))["kv_transfer_params"] == source
    async with service([WorkerEntry(url=worker.url, id=worker.id)], tmp_path) as one:
        for path in ("/v1/completions", "/v1/rerank"):
            reply = await one.post(path, text.encode(encoding))
            assert (reply.status, worker.bodies) == (400, [])


async def test_models_are_the_union_of_what_workers_serve(tmp_path: Path) -> None:
    async with (
        sim_workers(1, loras=("a",)) as (first,),
        sim_workers(1, model="other") as (second,),
        service([entry(first), entry(second)], tmp_path) as one,
    ):
        names = {row["id"]: row["parent"] for row in (await one.get("/v1/models"))["data"]}
        assert names == {MODEL: None, "a": MODEL, "other": None}
        for model, worker in ((MODEL, first), ("other", second)):
            for _ in range(3):
                reply = await one.complete("x", model=model)
                assert reply.worker == worker.url.removeprefix("http://")
