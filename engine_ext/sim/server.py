# SPDX-License-Identifier: Apache-2.0
"""The HTTP side of a simulated worker: a plain ASGI application with vLLM's paths, served by uvicorn."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import msgspec
from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, Scope

from engine_ext.sim import api
from engine_ext.sim.answers import embeddings_body, models_body
from engine_ext.sim.api import ApiError, ServedModel
from engine_ext.sim.chat import ChatTemplate
from engine_ext.sim.connection import Connection, ConnectionGoneError
from engine_ext.sim.exposition import render_metrics
from engine_ext.sim.faults import FaultOrder
from engine_ext.sim.inference import run_call
from engine_ext.sim.state import state_json
from engine_ext.sim.tokenizer import SimTokenizer
from engine_ext.sim.worker import SimWorker

Handler = Callable[[Connection], Awaitable[None]]

_INFERENCE = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})


class SimApp:
    """Paths of one worker."""

    def __init__(
        self, worker: SimWorker, model: ServedModel, tokenizer: SimTokenizer, template: ChatTemplate
    ) -> None:
        self._worker = worker
        self._model = model
        self._tokenizer = tokenizer
        self._template = template
        self._served = 0
        self._frozen_metrics: str | None = None
        self._last: dict[str, object] = {}
        self._unstalled = asyncio.Event()
        self._routes: dict[tuple[str, str], Handler] = {
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._completion,
            ("POST", "/v1/embeddings"): self._embeddings,
            ("GET", "/v1/models"): self._models,
            ("POST", "/tokenize"): self._tokenize,
            ("GET", "/health"): self._health,
            ("GET", "/ping"): self._health,
            ("POST", "/ping"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/kv_event_sources"): self._event_sources,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
            ("POST", "/sleep"): self._sleep,
            ("POST", "/wake_up"): self._wake_up,
            ("GET", "/is_sleeping"): self._is_sleeping,
            ("POST", "/sim/faults"): self._set_faults,
            ("GET", "/sim/faults"): self._get_faults,
            ("GET", "/sim/state"): self._state,
            ("GET", "/sim/last-request"): self._last_request,
        }

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """One exchange."""
        if scope["type"] != "http":
            return
        self._served += 1
        connection = Connection(scope, receive, send, self._served)
        with contextlib.suppress(ConnectionGoneError):
            try:
                await self._serve(connection)
            except ApiError as error:
                await connection.answer(msgspec.json.encode(error.body()), error.status)

    def release_stalled(self) -> None:
        """Let stalled exchanges go on."""
        self._unstalled.set()

    async def _serve(self, connection: Connection) -> None:
        if not connection.path.startswith("/sim/"):
            while self._worker.faults.stall:
                await self._wait_out_stall(connection)
            if self._worker.faults.error500 and connection.path in _INFERENCE:
                raise ApiError(
                    "EngineCore encountered an issue. See stack trace (above) for the root cause.",
                    HTTPStatus.INTERNAL_SERVER_ERROR,
                    kind="InternalServerError",
                )
        handler = self._routes.get((connection.method, connection.path))
        if handler is None:
            known = {path for _, path in self._routes}
            status = HTTPStatus.METHOD_NOT_ALLOWED if connection.path in known else HTTPStatus.NOT_FOUND
            raise ApiError(status.phrase, status, kind=status.phrase)
        await handler(connection)

    async def _wait_out_stall(self, connection: Connection) -> None:
        gone = asyncio.Event()

        def leave() -> None:
            gone.set()
            self._unstalled.set()

        self._unstalled.clear()
        await connection.body()
        with connection.watched(leave):
            await self._unstalled.wait()
        connection.drop()  # a stalled process never answers what it took
        raise ConnectionGoneError

    # OpenAI

    async def _document(self, connection: Connection) -> dict[str, object]:
        body = await connection.body()
        self._last = {
            "path": connection.path,
            "headers": [[k.decode("latin-1"), v.decode("latin-1")] for k, v in connection.headers],
            "body_base64": base64.b64encode(body).decode(),
        }
        return api.parse_document(body)

    async def _chat(self, connection: Connection) -> None:
        document = await self._document(connection)
        call = api.parse_chat(document, self._model, self._tokenizer, self._template)
        await run_call(self._worker, self._tokenizer.decode, call, connection, self._model.loras)

    async def _completion(self, connection: Connection) -> None:
        document = await self._document(connection)
        call = api.parse_completion(document, self._model, self._tokenizer)
        await run_call(self._worker, self._tokenizer.decode, call, connection, self._model.loras)

    async def _embeddings(self, connection: Connection) -> None:
        document = await self._document(connection)
        lora = self._model.lora_of(document)
        prompts = api.completion_prompts(document.get("input"), self._tokenizer)
        await connection.answer(embeddings_body(lora or self._model.name, prompts, int(time.time())))

    async def _models(self, connection: Connection) -> None:
        model = self._model
        await connection.answer(models_body(model.name, model.loras, model.max_model_len, int(time.time())))

    async def _tokenize(self, connection: Connection) -> None:
        document = api.parse_document(await connection.body())
        self._model.lora_of(document)
        if "messages" in document:
            ids = api.chat_prompt(document, self._tokenizer, self._template)
        else:
            prompt = document.get("prompt")
            if not isinstance(prompt, str):
                raise ApiError("prompt: input should be a string", kind="Bad Request", param="prompt")
            special = document.get("add_special_tokens") is not False
            ids = self._tokenizer.encode(prompt, add_special_tokens=special)
        answer = {
            "count": len(ids),
            "max_model_len": self._model.max_model_len,
            "tokens": ids,
            "token_strs": None,
        }
        await connection.answer(msgspec.json.encode(answer))

    # Operations

    async def _health(self, connection: Connection) -> None:
        await connection.answer(b"")

    async def _metrics(self, connection: Connection) -> None:
        worker = self._worker
        if not (worker.faults.frozen_metrics and self._frozen_metrics is not None):
            engine = worker.engine
            self._frozen_metrics = render_metrics(
                engine.metrics(), engine.config, self._model.name, worker.started_at_s
            )
        text = self._frozen_metrics.encode()
        await connection.answer(text, content_type=b"text/plain; version=0.0.4; charset=utf-8")

    async def _event_sources(self, connection: Connection) -> None:
        sources = self._worker.event_sources()
        await connection.answer(msgspec.json.encode(sources))

    async def _reset_prefix_cache(self, connection: Connection) -> None:
        query = connection.query
        self._worker.reset_prefix_cache(reset_external=query.get("reset_external") == "true")
        await connection.answer(b"")

    async def _sleep(self, connection: Connection) -> None:
        self._worker.sleep()
        await connection.answer(b"")

    async def _wake_up(self, connection: Connection) -> None:
        self._worker.wake_up()
        await connection.answer(b"")

    async def _is_sleeping(self, connection: Connection) -> None:
        await connection.answer(msgspec.json.encode({"is_sleeping": self._worker.engine.asleep}))

    # The simulator's own

    async def _set_faults(self, connection: Connection) -> None:
        try:
            order = msgspec.json.decode(await connection.body(), type=FaultOrder)
        except msgspec.DecodeError as error:
            raise ApiError(str(error), kind="Bad Request") from error
        await self._worker.order(order)
        if not self._worker.faults.stall:
            self.release_stalled()
        await self._get_faults(connection)

    async def _get_faults(self, connection: Connection) -> None:
        await connection.answer(msgspec.json.encode(self._worker.faults))

    async def _state(self, connection: Connection) -> None:
        await connection.answer(msgspec.json.encode(state_json(self._worker)))

    async def _last_request(self, connection: Connection) -> None:
        await connection.answer(msgspec.json.encode(self._last))
