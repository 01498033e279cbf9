# SPDX-License-Identifier: Apache-2.0
"""Bodies and stream chunks of vLLM's OpenAI API. Pure: values in, bytes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine_ext.sim.output import SimUsage

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
Json = dict[str, object]


@dataclass(slots=True)
class Choice:
    """One finished sequence."""

    index: int
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What all parts of one answer share."""

    answer_id: str
    created_s: int
    model: str
    is_chat: bool

    def whole(self, choices: Sequence[Choice], usage: SimUsage) -> bytes:
        """The body of an answer that is not streamed."""
        items = [self._message(choice) if self.is_chat else self._text(choice) for choice in choices]
        body = self._head("chat.completion" if self.is_chat else "text_completion")
        body |= {
            "choices": items,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage_json(usage),
        }
        return _encode(body | {"prompt_logprobs": None, "kv_transfer_params": None})

    def opening(self, index: int) -> bytes:
        """The first chunk of a streamed chat: the role, no text."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk([choice], {"prompt_token_ids": None})

    def piece(self, index: int, text: str, finish_reason: str | None, usage: SimUsage | None) -> bytes:
        """The chunk of one token."""
        choice: Json = {"index": index}
        choice |= {"delta": {"content": text}} if self.is_chat else {"text": text}
        choice |= {"logprobs": None, "finish_reason": finish_reason, "stop_reason": None, "token_ids": None}
        return self._chunk([choice], {"usage": usage_json(usage)} if usage else {})

    def usage_chunk(self, usage: SimUsage) -> bytes:
        """The last chunk where ``stream_options.include_usage`` asks for it."""
        return self._chunk([], {"usage": usage_json(usage)})

    def _chunk(self, choices: Sequence[Json], more: Json) -> bytes:
        head = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        return b"data: " + _encode({**head, "choices": choices, **more}) + b"\n\n"

    def _head(self, kind: str) -> Json:
        return {"id": self.answer_id, "object": kind, "created": self.created_s, "model": self.model}

    def _message(self, choice: Choice) -> Json:
        message = {"role": "assistant", "content": choice.text, "refusal": None, "reasoning": None}
        end = {
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "token_ids": None,
        }
        return {"index": choice.index, "message": message, **end}

    def _text(self, choice: Choice) -> Json:
        end = {
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "token_ids": None,
        }
        return {"index": choice.index, "text": choice.text, **end, "prompt_logprobs": None}


def usage_json(usage: SimUsage) -> Json:
    """``usage`` as vLLM gives it with ``--enable-prompt-tokens-details``."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def error_chunk(message: str) -> bytes:
    """An error in the middle of a stream."""
    error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    return b"data: " + _encode({"error": error}) + b"\n\n"


def models_body(name: str, loras: Sequence[str], max_model_len: int, created_s: int) -> bytes:
    """``/v1/models``: the model, then its adapters."""
    base: Json = {"id": name, "root": name, "parent": None, "max_model_len": max_model_len}
    adapters: list[Json] = [
        {"id": lora, "root": lora, "parent": name, "max_model_len": None} for lora in loras
    ]
    common = {"object": "model", "created": created_s, "owned_by": "vllm", "permission": []}
    return _encode({"object": "list", "data": [{**card, **common} for card in [base, *adapters]]})


def embeddings_body(model: str, prompts: Sequence[Sequence[int]], created_s: int) -> bytes:
    """``/v1/embeddings``: a small vector that depends on the prompt alone."""
    rows = [
        {"index": i, "object": "embedding", "embedding": [(sum(ids) * k % 997) / 997 for k in range(1, 9)]}
        for i, ids in enumerate(prompts)
    ]
    total = sum(len(ids) for ids in prompts)
    usage = {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0}
    head = {"id": f"embd-{created_s}", "object": "list", "created": created_s, "model": model}
    return _encode({**head, "data": rows, "usage": usage})


def merged(usages: Sequence[SimUsage]) -> SimUsage:
    """Usage of a call of several sequences: prompts count once each, as the caller passes them."""
    tiers = {tier: sum(usage.cached_by_tier[tier] for usage in usages) for tier in usages[0].cached_by_tier}
    return SimUsage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        cached_by_tier=tiers,
    )
