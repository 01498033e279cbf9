# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server that answers like a vLLM worker, as told."""

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web

from router.fleet.worker import WorkerSpec
from router.request import InferenceRequest, RequestKind
from router.tokens.local import LocalTokenizer
from router.tokens.prompt import extract_prompt

GOLDEN = Path(__file__).parents[2] / "golden" / "chat_templates"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def metrics_page(running=0, waiting=0, block_size=32, awake=1, started=1000.0):
    return (
        f'vllm:num_requests_running{{engine="0"}} {running}\nvllm:num_requests_waiting{{engine="0"}} {waiting}\n'
        f'vllm:kv_cache_usage_perc{{engine="0"}} 0.5\nvllm:cache_config_info{{block_size="{block_size}"}} 1\n'
        f'vllm:engine_sleep_state{{sleep_state="awake"}} {awake}\nprocess_start_time_seconds {started}\n'
    )


def model_row(name, root=None, parent=None, length=1024):
    return {"id": name, "object": "model", "root": root or name, "parent": parent, "max_model_len": length}


class FakeWorker:
    def __init__(self):
        self.health = 200
        self.metrics = metrics_page()
        self.models = [model_row("m")]
        self.sources = None
        self.tokenize = None
        self.completion = {"usage": {"prompt_tokens": 65}}
        self.requests = []
        self.hang = set()
        self.endless = set()
        self.streamed_bytes = 0
        self.open_requests = 0
        self.most_open_requests = 0
        self.port = 0
        self._runner = None
        self._release = asyncio.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def spec(self, **fields):
        return WorkerSpec(**{"id": f"127.0.0.1:{self.port}", "url": self.url, **fields})

    def seen(self, path):
        return [body for seen, body in self.requests if seen == path]

    async def start(self):
        self._release = asyncio.Event()
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        return self

    async def stop(self):
        self._release.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request):
        body = await request.read()
        self.requests.append((request.path, body))
        self.open_requests += 1
        self.most_open_requests = max(self.most_open_requests, self.open_requests)
        try:
            if request.path in self.hang:
                await self._release.wait()
            if request.path in self.endless:
                return await self._stream_forever(request)
            return self._respond(request.path, body)
        finally:
            self.open_requests -= 1

    async def _stream_forever(self, request):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(self.metrics.encode())
        chunk = b'filler{x="y"} 1\n' * 4096
        while True:
            await response.write(chunk)
            self.streamed_bytes += len(chunk)

    def _respond(self, path, body):
        if path == "/health":
            return web.Response(status=self.health)
        if path == "/metrics":
            return web.Response(text=self.metrics)
        if path == "/v1/models":
            return web.json_response({"object": "list", "data": self.models})
        if path == "/kv_event_sources" and self.sources is not None:
            return web.json_response(self.sources)
        if path == "/tokenize" and self.tokenize is not None:
            result = self.tokenize(json.loads(body))
            if isinstance(result, int):
                return web.Response(status=result)
            return web.json_response({"count": len(result), "max_model_len": 1024, "tokens": result})
        if path == "/v1/completions" and self.completion is not None:
            return web.json_response(self.completion)
        return web.Response(status=404)


@pytest.fixture
async def fake_worker():
    workers = []

    async def start(**fields):
        worker = FakeWorker()
        for name, value in fields.items():
            setattr(worker, name, value)
        workers.append(await worker.start())
        return worker

    yield start
    for worker in workers:
        await worker.stop()


@pytest.fixture
def tokenizer_dir(tmp_path):
    """A tokenizer directory with a ChatML template."""

    def make(template=CHATML, name="tokenizer"):
        directory = tmp_path / name
        directory.mkdir()
        for file in (GOLDEN / "tokenizer").iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        (directory / "chat_template.jinja").write_text(template)
        return directory

    return make


def request_of(body, path="/v1/chat/completions"):
    kinds = {"/v1/chat/completions": RequestKind.CHAT, "/v1/completions": RequestKind.COMPLETION}
    return InferenceRequest(
        request_id="r",
        method="POST",
        path=path,
        kind=kinds.get(path, RequestKind.OTHER),
        body=json.dumps(body).encode(),
        document=body if isinstance(body, dict) else None,
        model=body.get("model") if isinstance(body, dict) else None,
        stream=False,
        sequences=1,
        max_tokens=None,
        cache_salt=None,
    )


@pytest.fixture
def make_request():
    return request_of


@pytest.fixture
def engine_tokenize():
    """``/tokenize`` of an engine that runs with this tokenizer directory."""

    def make(directory):
        tokenizer = LocalTokenizer.load(directory)

        def tokenize(body):
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            return list(tokenizer.tokenize(extract_prompt(request_of(body, path)))[0])

        return tokenize

    return make
