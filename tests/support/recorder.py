# SPDX-License-Identifier: Apache-2.0
"""A worker that writes down what reaches it and answers byte for byte what a test says."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from aiohttp import web
from service import BLOCK, MODEL

_METRICS = f"""vllm:num_requests_running{{model_name="{MODEL}"}} 0.0
vllm:num_requests_waiting{{model_name="{MODEL}"}} 0.0
vllm:cache_config_info{{block_size="{BLOCK}",model_name="{MODEL}"}} 1.0
"""
_MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "root": MODEL, "parent": None}]}


@dataclass
class Recorder:
    """What a recording worker got, and what it answers."""

    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=lambda: [1, 2, 3])
    """What ``/tokenize`` says, whatever it is asked."""
    content_type: str = "application/json"
    pieces: list[bytes] = field(default_factory=lambda: [b"{}"])

    @property
    def id(self) -> str:
        return self.url.removeprefix("http://")

    async def infer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        self.targets.append(request.raw_path)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        response = web.StreamResponse(headers={"content-type": self.content_type})
        await response.prepare(request)
        for piece in self.pieces:
            await response.write(piece)
        await response.write_eof()
        return response

    async def look(self, request: web.Request) -> web.Response:
        if request.path == "/metrics":
            return web.Response(text=_METRICS)
        if request.path == "/v1/models":
            return web.json_response(_MODELS)
        if request.path == "/tokenize":
            await request.read()
            answer = {"count": len(self.tokens), "max_model_len": 131072, "tokens": self.tokens}
            return web.Response(body=json.dumps(answer).encode(), content_type="application/json")
        return web.Response()
