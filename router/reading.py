# SPDX-License-Identifier: Apache-2.0
"""What can be learnt of a request before a worker is chosen: its prompts as token ids, and what to expect of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from indexer.identity import Namespace
from router.errors import EncodingRefused, FallbackReason, TokensUnavailable, TransferParamsRefused
from router.fleet.fleet import Fleet
from router.gateway.parse import is_wide_json
from router.metrics import RouterMetrics
from router.plan.answers import AnswerLengths
from router.plan.decider import Prompts
from router.request import InferenceRequest, RequestKind
from router.tokens.service import PromptTokens, TokenService

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reading:
    """What could be learnt of the prompts of a request."""

    prompts: Prompts | None
    tokens_from: str | None
    fallback: FallbackReason | None

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts; 0 where they are unknown."""
        return self.prompts.tokens if self.prompts is not None else 0


class RequestReader:
    """Reads requests for the dispatcher. The only awaits are tokenisation."""

    def __init__(
        self,
        tokens: TokenService,
        fleet: Fleet,
        metrics: RouterMetrics,
        monotonic_s: Callable[[], float],
        *,
        needs_tokens: bool,
        trust_transfer_params: bool,
    ) -> None:
        """``needs_tokens`` False: the policy does not look at the index."""
        self._tokens = tokens
        self._fleet = fleet
        self._metrics = metrics
        self._monotonic_s = monotonic_s
        self._needs_tokens = needs_tokens
        self._trust_transfer_params = trust_transfer_params
        self.answers = AnswerLengths()

    def gives_params(self, request: InferenceRequest) -> bool:
        """Whether the client brings ``kv_transfer_params`` of its own.

        Raises:
            RequestError: it does and may not, or its body cannot be looked into.
        """
        if request.document is None and is_wide_json(request.body):
            raise EncodingRefused("a JSON body must be UTF-8 (RFC 8259)")
        given = request.document is not None and request.document.get("kv_transfer_params") is not None
        if given and not self._trust_transfer_params:
            raise TransferParamsRefused(
                "kv_transfer_params can point a worker at any host; "
                "they are taken only where gateway.trust_transfer_params is set"
            )
        return given

    def read_now(self, request: InferenceRequest) -> Reading | None:
        """Token ids of the prompts, or why there are none; None where that has to be waited for."""
        if request.kind is RequestKind.OTHER:
            return Reading(None, None, FallbackReason.UNKNOWN_PATH)
        if not self._needs_tokens:
            return Reading(None, None, FallbackReason.POLICY)
        if request.document is None:
            return Reading(None, None, FallbackReason.UNPARSABLE_BODY)
        started_s = self._monotonic_s()
        try:
            tokens = self._tokens.tokenize_now(request)
        except Exception as error:
            return self._without_tokens(request, error)
        return None if tokens is None else self._with_tokens(request, tokens, started_s)

    async def read(self, request: InferenceRequest) -> Reading:
        """The same, waited for."""
        reading = self.read_now(request)
        if reading is not None:
            return reading
        started_s = self._monotonic_s()
        try:
            tokens = await self._tokens.tokenize(request)
        except Exception as error:
            return self._without_tokens(request, error)
        return self._with_tokens(request, tokens, started_s)

    def _without_tokens(self, request: InferenceRequest, error: Exception) -> Reading:
        if isinstance(error, TokensUnavailable):
            return Reading(None, None, error.reason)
        # A request that we cannot read may well be one that the engine can.
        _log.error("request %s could not be tokenised", request.request_id, exc_info=error)
        return Reading(None, None, FallbackReason.TOKENIZER_ERROR)

    def _with_tokens(self, request: InferenceRequest, tokens: PromptTokens, started_s: float) -> Reading:
        self._metrics.tokenize_s.observe(self._monotonic_s() - started_s)
        prompts = Prompts(
            token_ids=tokens.prompts,
            namespace=self.namespace(request.model),
            cache_salt=request.cache_salt,
            single_sequence=request.sequences == 1 and len(tokens.prompts) == 1,
            output_tokens=self.answers.expect(request.model, request.max_tokens),
            slo_tpot_s=request.slo_tpot_s,
        )
        return Reading(prompts, tokens.source.value, None)

    def namespace(self, model: str | None) -> Namespace:
        """Base model and adapter that a served name stands for."""
        if model is None:  # vLLM serves its first model then
            models = (info for status in self._fleet.statuses() for info in status.models.values())
            info = next(models, None)
        else:
            info = self._fleet.model_info(model)
        return Namespace(info.base, info.lora) if info is not None else Namespace(model or "")
