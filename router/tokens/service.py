# SPDX-License-Identifier: Apache-2.0
"""Token ids of a request: ids it brings itself, the local tokenizer of its model, a worker's ``/tokenize``.

A model's local tokenizer is used for its aliases and adapters too, and is off while any worker that
serves the model tokenises differently (:mod:`router.tokens.parity`). When nothing can tell the ids the
request is still routed, by load, and the reason is named.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import aiohttp

from router.config_sections import TokensConfig
from router.errors import ConfigError, FallbackReason, TokensUnavailable
from router.fleet.worker import Health, ModelInfo, Parity, WorkerStatus
from router.request import InferenceRequest
from router.tokens.local import LocalTokenizer, truncate_ids
from router.tokens.parity import ParityReport, compare
from router.tokens.prompt import CompletionPrompt, Prompt, TokenIds, extract_prompt
from router.tokens.remote import TokenizeMissing, WorkerRefused, WorkerTokenizer
from router.tokens.tokenizer_files import TokenizerFilesError

_log = logging.getLogger(__name__)

INLINE_BODY_BYTES = 8192
"""Longer bodies are tokenised in a thread: at 2 MB/s this is 4 ms of the event loop."""
_WORKERS_TRIED = 2


class TokenSource(enum.StrEnum):
    """Who made the ids."""

    LOCAL = "local"
    WORKER = "worker"
    GIVEN = "given"


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Ids of every prompt of a request, as the engine will see them."""

    prompts: tuple[TokenIds[int], ...]
    source: TokenSource

    @property
    def total(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt) for prompt in self.prompts)


def load_local_tokenizers(
    config: TokensConfig, now: Callable[[], datetime] = datetime.now
) -> dict[str, LocalTokenizer]:
    """The configured tokenizers by model name.

    Raises:
        ConfigError: a directory holds no tokenizer that can be read.
    """
    loaded = {}
    for position, entry in enumerate(config.local):
        template = Path(entry.chat_template) if entry.chat_template else None
        try:
            loaded[entry.model] = LocalTokenizer.load(Path(entry.path), template, now)
        except TokenizerFilesError as error:
            raise ConfigError(
                f"tokens.local[{position}].path", entry.path, f"a tokenizer directory ({error})"
            ) from error
    return loaded


class TokenService:
    """Tokenises requests. One event loop owns it."""

    def __init__(
        self,
        config: TokensConfig,
        local: Mapping[str, LocalTokenizer],
        statuses: Callable[[], Sequence[WorkerStatus]],
    ) -> None:
        """``statuses`` gives the fleet as last seen; its ``parity`` fields are set here."""
        self._config = config
        self._local = dict(local)
        self._statuses = statuses
        self._session: aiohttp.ClientSession | None = None
        self._differing: dict[str, dict[str, ParityReport]] = {}
        self._without_tokenize: set[str] = set()

    async def start(self) -> None:
        """Open the connections to the workers."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers={"Accept-Encoding": "identity"}
        )

    async def stop(self) -> None:
        """Close them."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def tokenize_now(self, request: InferenceRequest) -> PromptTokens | None:
        """The ids of ``request`` where nothing has to be waited for, else None: ids that it brings, a short text.

        Raises:
            TokensUnavailable: they cannot be known.
        """
        prompt = extract_prompt(request)
        if isinstance(prompt, CompletionPrompt) and not any(isinstance(p, str) for p in prompt.prompts):
            max_model_len = self._max_model_len(request.model)
            given = tuple(
                truncate_ids(ids, prompt.truncation, max_model_len)
                for ids in prompt.prompts
                if not isinstance(ids, str)
            )
            return PromptTokens(given, TokenSource.GIVEN)
        if len(request.body) > INLINE_BODY_BYTES:
            return None
        local = self.local_tokenizer(request.model)
        if local is None:
            return None
        try:
            ids = local.tokenize(prompt, self._max_model_len(request.model))
        except TokensUnavailable:
            return None  # a worker may be able to
        return PromptTokens(ids, TokenSource.LOCAL)

    async def tokenize(self, request: InferenceRequest) -> PromptTokens:
        """The ids of ``request``.

        Raises:
            TokensUnavailable: they cannot be known; the reason is for header, metric and record.
        """
        tokens = self.tokenize_now(request)
        if tokens is not None:
            return tokens
        prompt = extract_prompt(request)
        max_model_len = self._max_model_len(request.model)
        local = self.local_tokenizer(request.model)
        refusal: TokensUnavailable | None = None
        if local is not None:
            try:
                return await self._locally(local, prompt, max_model_len, len(request.body))
            except TokensUnavailable as error:
                refusal = error
        try:
            return await self._by_a_worker(request.model, prompt, max_model_len)
        except TokensUnavailable as error:
            raise refusal or error from error

    def local_tokenizer(self, model: str | None) -> LocalTokenizer | None:
        """The tokenizer on this host for a served name, unless the probe turned it off."""
        name = self._local_name(model)
        return None if name is None or self._differing.get(name) else self._local[name]

    def turned_off(self) -> dict[str, dict[str, ParityReport]]:
        """Models whose local tokenizer is off: per worker, what differs."""
        return {model: dict(reports) for model, reports in self._differing.items() if reports}

    async def probe(self, worker_id: str) -> Parity:
        """Compare with a worker that has joined; sets its ``parity`` and turns tokenizers off or on."""
        status = next((s for s in self._statuses() if s.spec.id == worker_id), None)
        if status is None:
            return Parity.UNKNOWN
        self._without_tokenize.discard(status.spec.url)
        parity = Parity.REMOTE if status.models else Parity.UNKNOWN
        for name in {self._local_name(info.base) for info in status.models.values()}:
            if name is None:
                continue
            report = await self._compare(name, status)
            reports = self._differing.setdefault(name, {})
            reports.pop(worker_id, None)
            if report.parity is Parity.DIFFERENT:
                reports[worker_id] = report
                _log.warning(
                    "local tokenizer of %s is off: probe %r differs at %s (%s)",
                    name,
                    report.differing,
                    worker_id,
                    report.detail,
                )
            parity = report.parity if parity is not Parity.DIFFERENT else parity
        status.parity = parity
        return parity

    def forget(self, worker_id: str) -> None:
        """A worker has left the fleet: what it said no longer counts."""
        for reports in self._differing.values():
            reports.pop(worker_id, None)

    async def _compare(self, name: str, status: WorkerStatus) -> ParityReport:
        if not self._config.probe or self._session is None:
            return ParityReport(Parity.UNKNOWN, detail="the probe is switched off")
        served = next(n for n, info in status.models.items() if self._local_name(info.base) == name)
        worker = WorkerTokenizer(self._session, self._config.worker_timeout_s)
        return await compare(self._local[name], worker, status.spec.url, served)

    async def _locally(
        self, local: LocalTokenizer, prompt: Prompt, max_model_len: int | None, size_bytes: int
    ) -> PromptTokens:
        if size_bytes <= INLINE_BODY_BYTES:
            ids = local.tokenize(prompt, max_model_len)
        else:
            ids = await asyncio.to_thread(local.tokenize, prompt, max_model_len)
        return PromptTokens(ids, TokenSource.LOCAL)

    async def _by_a_worker(
        self, model: str | None, prompt: Prompt, max_model_len: int | None
    ) -> PromptTokens:
        """Ask the least loaded workers that serve the model, one after the other."""
        last = TokensUnavailable(FallbackReason.TOKENIZER_ERROR, "no worker offers /tokenize")
        if self._session is None:
            raise last
        client = WorkerTokenizer(self._session, self._config.worker_timeout_s)
        for status in self._tokenizing_workers(model)[:_WORKERS_TRIED]:
            url = status.spec.url
            try:
                ids = await client.tokenize(url, model, prompt, max_model_len)
            except WorkerRefused:
                raise
            except TokenizeMissing as error:
                self._without_tokenize.add(url)
                last = error
            except TokensUnavailable as error:
                last = error
            else:
                return PromptTokens(ids, TokenSource.WORKER)
        raise last

    def _tokenizing_workers(self, model: str | None) -> list[WorkerStatus]:
        able = [
            status
            for status in self._statuses()
            if status.health in {Health.HEALTHY, Health.BACKOFF, Health.DRAINING}
            and status.spec.url not in self._without_tokenize
            and (model is None or model in status.models)
        ]
        return sorted(able, key=lambda status: status.running + status.waiting)

    def _max_model_len(self, model: str | None) -> int | None:
        info = self._model_info(model)
        return None if info is None else info.max_model_len

    def _model_info(self, model: str | None) -> ModelInfo | None:
        """What the fleet says of a name; without a name, of its only base model. O(workers)."""
        if model is not None:
            infos = (status.models.get(model) for status in self._statuses())
            return next((info for info in infos if info is not None), None)
        listed = [info for status in self._statuses() for info in status.models.values()]
        bases = {info.base for info in listed}
        if len(bases) != 1:
            return None
        return next((info for info in listed if info.name in bases), None)

    def _local_name(self, model: str | None) -> str | None:
        """Name under which a tokenizer is configured: the served name, its base or the base's root."""
        if not self._local:
            return None
        info = self._model_info(model)
        if info is None:
            return model if model in self._local else None
        if info.base in self._local:
            return info.base
        names = [model, self._root(info.base), *self._aliases(info.base)]
        return next((name for name in names if name is not None and name in self._local), None)

    def _root(self, base: str) -> str | None:
        info = self._model_info(base)
        return None if info is None else info.root

    def _aliases(self, base: str) -> list[str]:
        """Other served names of a base model, adapters excluded."""
        return [
            info.name
            for status in self._statuses()
            for info in status.models.values()
            if info.base == base and info.lora is None
        ]
