# SPDX-License-Identifier: Apache-2.0
"""OpenAI request bodies to engine requests, with the answers vLLM gives to malformed ones.

Parsing is Python's own ``json``: it takes what vLLM's takes (duplicate keys, big integers, lone surrogates).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeVar

from engine_ext.sim.chat import ChatTemplate, ChatTemplateError
from engine_ext.sim.hashing import token_array
from engine_ext.sim.text import natural_length
from engine_ext.sim.tokenizer import SimTokenizer

DEFAULT_COMPLETION_TOKENS = 16

_T = TypeVar("_T")


class ApiError(Exception):
    """An answer in vLLM's error shape."""

    def __init__(
        self,
        message: str,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        *,
        kind: str = "BadRequestError",
        param: str | None = None,
    ) -> None:
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        super().__init__(message)

    def body(self) -> dict[str, object]:
        """The JSON body."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status.value}
        return {"error": error}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model and adapters one worker serves."""

    name: str
    loras: tuple[str, ...]
    max_model_len: int

    def lora_of(self, document: Mapping[str, object]) -> str | None:
        """Adapter a body asks for; None for the base model.

        Raises:
            ApiError: no such model (404), or a name that is not a string.
        """
        name = _optional(document, "model", str)
        if name is None or name == self.name:
            return None
        if name in self.loras:
            return name
        message = f"The model `{name}` does not exist."
        raise ApiError(message, HTTPStatus.NOT_FOUND, kind="NotFoundError", param="model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One parsed call: the prompts to run and how to answer."""

    is_chat: bool
    model: str
    lora: str | None
    prompts: list[list[int]]
    sequences_each: int
    max_tokens: int | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    cache_salt: str | None
    kv_transfer_params: Mapping[str, object] | None

    def limits(self, prompt: Sequence[int], max_model_len: int) -> tuple[int, int | None]:
        """(most tokens, where the model stops by itself) for one of its prompts."""
        room = max_model_len - len(prompt)
        if self.max_tokens is not None:
            return self.max_tokens, None
        return room, min(room, natural_length(token_array(prompt)))


def parse_document(body: bytes) -> dict[str, object]:
    """The body as a JSON object."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"JSON decode error: {error}", kind="Bad Request") from error
    if not isinstance(document, dict):
        raise ApiError("Input should be a valid dictionary", kind="Bad Request")
    return document


def parse_chat(
    document: Mapping[str, object], model: ServedModel, tokenizer: SimTokenizer, template: ChatTemplate
) -> Call:
    """``/v1/chat/completions``."""
    prompt = chat_prompt(document, tokenizer, template)
    limit = _optional(document, "max_completion_tokens", int)
    if limit is None:
        limit = _optional(document, "max_tokens", int)
    return _call(document, model, [prompt], limit, is_chat=True)


def parse_completion(document: Mapping[str, object], model: ServedModel, tokenizer: SimTokenizer) -> Call:
    """``/v1/completions``: a text, texts, token ids, or lists of token ids."""
    prompts = completion_prompts(document.get("prompt"), tokenizer)
    limit = _optional(document, "max_tokens", int)
    return _call(
        document, model, prompts, DEFAULT_COMPLETION_TOKENS if limit is None else limit, is_chat=False
    )


def chat_prompt(document: Mapping[str, object], tokenizer: SimTokenizer, template: ChatTemplate) -> list[int]:
    """Token ids of a chat."""
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "a non-empty list")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _wrong("messages", "objects with a role")
    generate = _optional(document, "add_generation_prompt", bool)
    special = _optional(document, "add_special_tokens", bool)
    try:
        text = template.render(messages, add_generation_prompt=generate is not False)
    except ChatTemplateError as error:
        raise ApiError(str(error)) from error
    return tokenizer.encode(text, add_special_tokens=bool(special))


def completion_prompts(prompt: object, tokenizer: SimTokenizer) -> list[list[int]]:
    """Token ids of each prompt of a completion call."""
    if isinstance(prompt, str):
        return [_some(tokenizer.encode(prompt, add_special_tokens=True))]
    if not isinstance(prompt, list) or not prompt:
        raise _wrong("prompt", "a string, strings, token ids or lists of token ids; not empty")
    if all(type(item) is int for item in prompt):
        return [_ids(prompt)]
    if all(isinstance(item, str) for item in prompt):
        return [_some(tokenizer.encode(item, add_special_tokens=True)) for item in prompt]
    if all(isinstance(item, list) for item in prompt):
        return [_ids(item) for item in prompt]
    raise _wrong("prompt", "a string, strings, token ids or lists of token ids; not mixed")


def _some(ids: list[int]) -> list[int]:
    if not ids:
        raise _wrong("prompt", "at least one token")
    return ids


def _ids(items: list[object]) -> list[int]:
    ids = [item for item in items if type(item) is int and 0 <= item < 2**31]
    if len(ids) != len(items):
        raise _wrong("prompt", "token ids of at least 0")
    return _some(ids)


def _call(
    document: Mapping[str, object],
    model: ServedModel,
    prompts: list[list[int]],
    limit: int | None,
    *,
    is_chat: bool,
) -> Call:
    lora = model.lora_of(document)
    sequences = _optional(document, "n", int)
    if sequences is not None and sequences < 1:
        raise _wrong("n", "an integer of at least 1")
    if limit is not None and limit < 1:
        raise _wrong("max_tokens", "an integer of at least 1")
    for prompt in prompts:
        _check_length(len(prompt), limit or 1, model.max_model_len)
    options = _optional(document, "stream_options", dict) or {}
    salt = _optional(document, "cache_salt", str)
    if salt == "":
        raise _wrong("cache_salt", "a non-empty string")
    return Call(
        is_chat=is_chat,
        model=lora or model.name,
        lora=lora,
        prompts=prompts,
        sequences_each=sequences or 1,
        max_tokens=limit,
        stream=bool(_optional(document, "stream", bool)),
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        cache_salt=salt,
        kv_transfer_params=_optional(document, "kv_transfer_params", dict),
    )


def _check_length(prompt_tokens: int, output_tokens: int, max_model_len: int) -> None:
    if prompt_tokens + output_tokens > max_model_len:
        raise ApiError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{output_tokens} output tokens and your prompt contains {prompt_tokens} input tokens, "
            f"for a total of {prompt_tokens + output_tokens} tokens. "
            "Please reduce the length of the input prompt or the number of requested output tokens.",
            param="input_tokens",
        )


def _optional(document: Mapping[str, object], key: str, kind: type[_T]) -> _T | None:
    value = document.get(key)
    if value is None:
        return None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _wrong(key, f"a value of type {kind.__name__}")
    return value


def _wrong(param: str, accepted: str) -> ApiError:
    return ApiError(f"{param}: input should be {accepted}", kind="Bad Request", param=param)
