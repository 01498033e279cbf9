# SPDX-License-Identifier: Apache-2.0
"""Tokenises with a worker's own ``POST /tokenize`` (``vllm/entrypoints/serve/tokenize/protocol.py``).

The call has two bodies: ``{model, prompt, add_special_tokens}``, one text each, and ``{model, messages,
tools, add_generation_prompt, ...}``. It knows neither ``documents`` nor ``reasoning_effort``, which are
template variables in the end and are sent as such, nor truncation, which is applied to its answer.
"""

from __future__ import annotations

import io
from array import array
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from router.errors import FallbackReason, TokensUnavailable
from router.fleet.bounded_body import read_bounded
from router.tokens.local import truncate_ids
from router.tokens.prompt import ChatPrompt, Prompt, TokenIds, Truncation

MAX_ANSWER_BYTES = 64 * 2**20
"""Some 8 million ids."""


class WorkerRefused(TokensUnavailable):
    """The worker answered and will not tokenise it; another one would say the same."""


class TokenizeMissing(TokensUnavailable):
    """The worker has no such call, or not for this model."""


class WorkerTokenizer:
    """Asks workers over a shared session."""

    def __init__(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def tokenize(
        self, url: str, model: str | None, prompt: Prompt, max_model_len: int | None = None
    ) -> tuple[TokenIds[int], ...]:
        """Token ids of each prompt, by the worker at ``url``; one call per text.

        Raises:
            TokensUnavailable: the worker does not answer, has no such call, or refuses the prompt.
        """
        if isinstance(prompt, ChatPrompt):
            ids = await self._ask(url, chat_body(model, prompt))
            return (self._truncate(ids, prompt.add_special_tokens, prompt.truncation, max_model_len),)
        results = []
        for item in prompt.prompts:
            if isinstance(item, str):
                body = {"prompt": item, "add_special_tokens": prompt.add_special_tokens}
                ids = await self._ask(url, _with_model(model, body))
                results.append(
                    self._truncate(ids, prompt.add_special_tokens, prompt.truncation, max_model_len)
                )
            else:
                results.append(truncate_ids(item, prompt.truncation, max_model_len))
        return tuple(results)

    def _truncate(
        self, ids: TokenIds[int], specials: bool, truncation: Truncation | None, max_model_len: int | None
    ) -> TokenIds[int]:
        if truncation is not None and truncation.side is None and specials:
            raise _unavailable("the worker's tokeniser truncates around special tokens")
        return truncate_ids(ids, truncation, max_model_len)

    async def _ask(self, url: str, body: Mapping[str, Any]) -> TokenIds[int]:
        try:
            data = msgspec.json.encode(body)
        except (UnicodeEncodeError, msgspec.EncodeError, RecursionError) as error:
            raise _unavailable(f"the prompt cannot be passed on: {error}") from error
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(
                url + "/tokenize", data=io.BytesIO(data), headers=headers, timeout=self._timeout
            ) as answer:
                if answer.status != 200:
                    raise _refusal(url, answer.status)
                content = await read_bounded(answer, MAX_ANSWER_BYTES, cut=False)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise _unavailable(f"{url}/tokenize: {type(error).__name__}") from error
        return _ids_of(url, content)


def _refusal(url: str, status: int) -> TokensUnavailable:
    detail = f"{url}/tokenize answers {status}"
    if status in {404, 405, 501}:
        return TokenizeMissing(FallbackReason.TOKENIZER_ERROR, detail)
    if 400 <= status < 500 and status not in {408, 429}:
        return WorkerRefused(FallbackReason.TOKENIZER_ERROR, detail)
    return _unavailable(detail)


class _Answer(msgspec.Struct):
    tokens: list[int]


_ANSWER = msgspec.json.Decoder(_Answer)


def _ids_of(url: str, content: bytes | None) -> TokenIds[int]:
    try:
        return array("I", _ANSWER.decode(content or b"").tokens)
    except (msgspec.DecodeError, OverflowError) as error:
        raise _unavailable(f"{url}/tokenize: not a list of token ids") from error


def chat_body(model: str | None, prompt: ChatPrompt) -> dict[str, Any]:
    """The chat form of the call, with everything that decides the ids."""
    body: dict[str, Any] = {
        "messages": prompt.messages,
        "add_generation_prompt": prompt.add_generation_prompt,
        "continue_final_message": prompt.continue_final_message,
        "add_special_tokens": prompt.add_special_tokens,
    }
    kwargs = dict(prompt.template_kwargs)
    if prompt.documents is not None:
        kwargs["documents"] = prompt.documents
    if kwargs:
        body["chat_template_kwargs"] = kwargs
    if prompt.tools is not None:
        body["tools"] = prompt.tools
    if prompt.chat_template is not None:
        body["chat_template"] = prompt.chat_template
    return _with_model(model, body)


def _with_model(model: str | None, body: dict[str, Any]) -> dict[str, Any]:
    return body if model is None else {"model": model, **body}


def _unavailable(detail: str) -> TokensUnavailable:
    return TokensUnavailable(FallbackReason.TOKENIZER_ERROR, detail)
