# SPDX-License-Identifier: Apache-2.0
"""Checks, worker by worker, what routing by cache content needs, and says what to do where it fails.

Every check has a name that stays the same from release to release; ``ok`` is None where a check does
not apply or could not be made. Nothing is sent to an engine but reads, unless ``send_requests`` allows
one completion of one token twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from router.config import Config
from router.config_addresses import split_host_port
from router.doctor_peers import peer_checks
from router.doctor_sockets import events_connect, replay_answers, with_port_offset
from router.errors import ConfigError
from router.fleet.bounded_body import read_bounded
from router.fleet.metrics_text import MAX_METRICS_BYTES, parse_worker_metrics
from router.fleet.poller import parse_models
from router.fleet.worker import ModelInfo, Parity, WorkerSpec
from router.tokens.parity import compare
from router.tokens.remote import WorkerTokenizer
from router.tokens.service import load_local_tokenizers

_PLAUSIBLE_BLOCK_TOKENS = range(8, 65537)


@dataclass(frozen=True, slots=True)
class Check:
    """One precondition at one worker (``-`` for the fleet as a whole)."""

    worker: str
    name: str
    ok: bool | None
    detail: str
    hint: str = ""
    """What to do; empty when all is well."""


async def examine(specs: Sequence[WorkerSpec], config: Config, *, send_requests: bool = False) -> list[Check]:
    """All checks of all workers, in their order; the workers are examined at the same time."""
    if not specs:
        return [
            Check("-", "workers", False, "no worker is configured", "name one with --worker or fleet.workers")
        ]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        examinations = [_Examination(spec, config, session, send_requests=send_requests) for spec in specs]
        per_worker = await asyncio.gather(*(examination.run() for examination in examinations))
    sizes = {e.spec.id: e.block_size_tokens for e in examinations if e.block_size_tokens is not None}
    fleet = [Check(*finding) for finding in peer_checks(specs, sizes)]
    return [check for checks in per_worker for check in checks] + fleet


def render_table(checks: Sequence[Check]) -> str:
    """The checks as text in columns; hints stand under the checks that failed."""
    marks = {True: "ok", False: "FAIL", None: "-"}
    wide = max((len(check.worker) for check in checks), default=0)
    names = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        lines.append(
            f"{marks[check.ok]:<5}{check.worker:<{wide}}  {check.name:<{names}}  {check.detail}".rstrip()
        )
        if check.ok is False and check.hint:
            lines.append(f"{'':<5}{'':<{wide}}  {'':<{names}}  -> {check.hint}")
    failed = sum(check.ok is False for check in checks)
    lines.append(f"{len(checks)} checks, {failed} failed")
    return "\n".join(lines) + "\n"


class _Examination:
    """The checks of one worker."""

    def __init__(
        self, spec: WorkerSpec, config: Config, session: aiohttp.ClientSession, *, send_requests: bool
    ) -> None:
        self.spec = spec
        self.block_size_tokens: int | None = None
        self._config = config
        self._session = session
        self._send_requests = send_requests
        self._timeout_s = config.fleet.poll_timeout_s
        self._ranks = spec.ranks
        self._models: Mapping[str, ModelInfo] = {}
        self._checks: list[Check] = []

    async def run(self) -> list[Check]:
        if await self._health():
            await self._models_listed()
            await self._metrics()
            await self._event_sources()
            await self._parity()
            await self._cached_tokens()
        await self._events()
        await self._replay()
        await self._p2p()
        await self._extension()
        return self._checks

    def _add(self, name: str, ok: bool | None, detail: str, hint: str = "") -> None:
        self._checks.append(Check(self.spec.id, name, ok, detail, "" if ok else hint))

    def _ranked(self, name: str, rank: int) -> str:
        return name if self._ranks == 1 else f"{name} rank {rank}"

    async def _health(self) -> bool:
        status, _ = await self._get("/health", 4096)
        ok = status is not None and 200 <= status < 300
        detail = "answers" if ok else "no answer" if status is None else f"answers {status}"
        self._add("health", ok, detail, f"is a vLLM server listening at {self.spec.url}?")
        return ok

    async def _models_listed(self) -> None:
        _, body = await self._get("/v1/models", 2**20)
        self._models = (parse_models(body) if body is not None else None) or {}
        detail = ", ".join(self._models) or "none listed"
        self._add("models", bool(self._models), detail, "/v1/models must list what the worker serves")

    async def _metrics(self) -> None:
        _, body = await self._get("/metrics", MAX_METRICS_BYTES)
        metrics = None if body is None else parse_worker_metrics(body)
        readable = metrics is not None and metrics.running is not None and metrics.waiting is not None
        detail = (
            f"{metrics.running} running, {metrics.waiting} waiting" if readable and metrics else "no gauges"
        )
        self._add("metrics", readable, detail, "do not start vLLM with --disable-log-stats")
        size = metrics.block_size_tokens if metrics else None
        stated = self.spec.block_size_tokens
        self.block_size_tokens = size or stated
        if self.block_size_tokens is None:
            hint = "set block_size_tokens of the worker to vLLM's --block-size"
            self._add("block size", False, "not told by /metrics", hint)
        elif size is not None and stated is not None and size != stated:
            hint = "remove block_size_tokens of the worker, or correct it"
            self._add("block size", False, f"{size} by /metrics, {stated} configured", hint)
        else:
            plausible = self.block_size_tokens in _PLAUSIBLE_BLOCK_TOKENS
            hint = "blocks of 8 to 65,536 tokens are supported"
            self._add("block size", plausible, f"{self.block_size_tokens} tokens", hint)

    async def _event_sources(self) -> None:
        """``/kv_event_sources`` (vLLM from 0.26 on) against what is configured here."""
        status, body = await self._get("/kv_event_sources", 2**20)
        sources = _json_object(body)
        if sources is None:
            self._add("event sources", None, f"not offered ({status})")
            return
        enabled = {rank: s for rank, s in sources.items() if isinstance(s, dict) and rank.isdigit()}
        if not self.spec.ranks_given:
            self._ranks = len(enabled) or 1
        problems = _source_problems(self.spec, enabled)
        detail = "; ".join(problems) or f"{len(enabled)} ranks publish, as configured"
        hint = "compare --kv-events-config of the worker with events, replay and ranks here"
        self._add("event sources", not problems, detail, hint)

    async def _events(self) -> None:
        if self.spec.events is None:
            hint = "start vLLM with --kv-events-config and name the endpoint with events="
            self._add("events", False, "no events endpoint configured: routed by load only", hint)
            return
        for rank in range(self._ranks):
            endpoint = with_port_offset(self.spec.events, rank)
            ok, detail = await events_connect(endpoint, self._timeout_s)
            self._add(self._ranked("events", rank), ok, detail, f"is {endpoint} open and bound by vLLM?")

    async def _replay(self) -> None:
        if self.spec.replay is None:
            hint = "set replay_endpoint in --kv-events-config and replay= here: gaps cannot be filled without"
            self._add("replay", False if self.spec.events else None, "no replay endpoint configured", hint)
            return
        for rank in range(self._ranks):
            endpoint = with_port_offset(self.spec.replay, rank)
            ok, detail = await replay_answers(endpoint, self._timeout_s)
            hint = f"{endpoint} must be the replay_endpoint of a vLLM event publisher"
            self._add(self._ranked("replay", rank), ok, detail, hint)

    async def _parity(self) -> None:
        try:
            local = await asyncio.to_thread(load_local_tokenizers, self._config.tokens)
        except ConfigError as error:
            self._add("tokenizer", False, str(error), "correct tokens.local")
            return
        worker = WorkerTokenizer(self._session, self._config.tokens.worker_timeout_s)
        names = [name for name, info in self._models.items() if {name, info.base, info.root} & local.keys()]
        if not names:
            self._add(
                "tokenizer", None, "no local tokenizer: /tokenize of the worker is used for every request"
            )
            return
        name = names[0]
        info = self._models[name]
        key = next(key for key in (info.base, name, info.root) if key in local)
        report = await compare(local[key], worker, self.spec.url, name)
        good = report.parity is Parity.EQUAL
        detail = (
            f"{report.compared} probes equal"
            if good
            else f"{report.differing or 'not compared'}: {report.detail}"
        )
        hint = "tokens.local must name the tokenizer and the chat template the worker runs with"
        self._add("tokenizer", good if report.parity is not Parity.UNKNOWN else None, detail, hint)

    async def _cached_tokens(self) -> None:
        """Two equal completions of one token: does the second report its cached tokens?"""
        if not self._send_requests or not self._models:
            self._add("cached tokens", None, "not asked (no requests are sent)")
            return
        size = self.block_size_tokens or 16
        model = next(iter(self._models))
        # Ids every vocabulary has; two whole blocks and one token, so that a repeat can hit.
        body = {"model": model, "prompt": [11] * (2 * size + 1), "max_tokens": 1, "temperature": 0}
        usage: Mapping[str, Any] = {}
        for _ in range(2):
            answer = await self._post("/v1/completions", body)
            if answer is None:
                self._add("cached tokens", False, "a completion failed", "does the worker serve completions?")
                return
            usage = answer.get("usage") or {}
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        hint = "start vLLM with --enable-prompt-tokens-details"
        self._add(
            "cached tokens", cached is not None, f"{cached} of {usage.get('prompt_tokens')} reported", hint
        )

    async def _p2p(self) -> None:
        if self.spec.p2p is None:
            self._add("p2p", None, "no P2P address configured: never a source of pulls")
            return
        host, port = split_host_port(self.spec.p2p)
        for rank in range(self._ranks):
            ok, detail = await _port_open(host, port + rank, self._timeout_s)
            hint = "is the P2P tier configured, and its port open to this host and to the peers?"
            self._add(self._ranked("p2p", rank), ok, f"{host}:{port + rank} {detail}", hint)

    async def _extension(self) -> None:
        """Whether the peers' channel of our engine extension is there, at every rank, where it should be."""
        if self.spec.extension is None:
            return
        host, port = split_host_port(self.spec.extension)
        for rank in range(self._ranks):
            ok, detail = await _port_open(host, port + rank, self._timeout_s)
            hint = "does vLLM run PointsmanOffloadingSpec with PointsmanTier, and is this its control port?"
            self._add(self._ranked("extension", rank), ok, f"{host}:{port + rank} {detail}", hint)

    async def _get(self, path: str, limit_bytes: int) -> tuple[int | None, bytes | None]:
        """Status (None: no answer) and body (None unless 200 and within the limit)."""
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        try:
            async with self._session.get(self.spec.url + path, timeout=timeout) as answer:
                body = await read_bounded(answer, limit_bytes, cut=True) if answer.status == 200 else None
                return answer.status, body
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None, None

    async def _post(self, path: str, body: object) -> dict[str, Any] | None:
        timeout = aiohttp.ClientTimeout(total=30)
        try:
            async with self._session.post(self.spec.url + path, json=body, timeout=timeout) as answer:
                if answer.status != 200:
                    return None
                return _json_object(await read_bounded(answer, 2**20, cut=False))
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None


def _source_problems(spec: WorkerSpec, sources: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Where the publishers a worker reports differ from the configured endpoints."""
    problems = []
    if not sources:
        return ["the worker publishes no events"] if spec.events else []
    if spec.ranks_given and len(sources) != spec.ranks:
        problems.append(f"{len(sources)} ranks publish, {spec.ranks} configured")
    source = sources.get("0") or next(iter(sources.values()))
    for name, theirs, ours in (
        ("events", source.get("endpoint"), spec.events),
        ("replay", source.get("replay_endpoint"), spec.replay),
    ):
        if theirs is None and ours is not None:
            problems.append(f"{name}={ours} configured, none published")
        elif theirs is not None and ours is None:
            problems.append(f"{name} published at {theirs}, none configured")
        elif isinstance(theirs, str) and ours is not None and _port(theirs) != _port(ours):
            problems.append(f"{name} published at {theirs}, {ours} configured")
    return problems


def _port(endpoint: str) -> str:
    """What can be compared of a bound and a connected endpoint: the port, or the whole of an ipc path."""
    return endpoint.rpartition(":")[2] if endpoint.startswith("tcp://") else endpoint


def _json_object(body: bytes | None) -> dict[str, Any] | None:
    try:
        document = msgspec.json.decode(body or b"")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


async def _port_open(host: str, port: int, timeout_s: float) -> tuple[bool, str]:
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return False, f"no connection in {timeout_s} s"
    except OSError as error:
        return False, error.strerror or str(error)
    writer.close()
    return True, "accepts connections"
