# SPDX-License-Identifier: Apache-2.0
"""What of a request has to be tokenised, and how; or the reason why that cannot be known.

Follows the request models of vLLM (``vllm/entrypoints/openai/{chat_completion,completion}/protocol.py``,
0.32): chat adds no special tokens beyond its template unless asked, completions add them unless told
not to; ``prompt`` is a text, a list of texts, a list of ids or a list of such lists. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.errors import FallbackReason, TokensUnavailable
from router.packed_ids import packed_ids
from router.request import InferenceRequest, RequestKind

TokenIds = array  # of 'I'; a name for signatures

# vllm/renderers/chat_utils.py, TEXT_PART_TYPES: parts that are text under another name.
TEXT_PART_KEYS: Mapping[str, str] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_MEDIA_KEYS = frozenset(
    {
        "audio_embeds",
        "audio_url",
        "file",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "input_image",
        "prompt_embeds",
        "video_embeds",
        "video_url",
    }
)
# Arguments of transformers' apply_chat_template: a template variable of that name would collide, and
# the engine refuses or reinterprets it. Such requests are left to the worker's own tokeniser.
_RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "chat_template",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


@dataclass(frozen=True, slots=True)
class Truncation:
    """``truncate_prompt_tokens``: keep this many tokens."""

    keep: int
    """-1: as many as the model's context takes."""
    side: str | None
    """Side that is cut off, ``left`` or ``right``; None: inside the tokeniser, which cuts left."""
    reserve_output: bool
    """Whether -1 leaves room for one token of output."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to be rendered by the model's template, then tokenised."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    """As the client sent them."""
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template, those that vLLM derives from other fields included."""
    worker_only: str | None = None
    """Set when only the worker can render it; says why."""
    chat_template: str | None = None
    """A template of the client's own; workers refuse it unless told to trust it."""
    truncation: Truncation | None = None


@dataclass(frozen=True, slots=True)
class CompletionPrompt:
    """Prompts of a completion: texts to be tokenised, or ids as they are."""

    prompts: tuple[str | TokenIds[int], ...]
    add_special_tokens: bool = True
    truncation: Truncation | None = None


Prompt = ChatPrompt | CompletionPrompt


def extract_prompt(request: InferenceRequest) -> Prompt:
    """What to tokenise.

    Raises:
        TokensUnavailable: the path is not one of OpenAI's completions (``unknown_path``), the body is
            no JSON object (``unparsable_body``), holds images or sound (``multimodal``), or has no
            prompt of a known shape (``no_prompt``; mostly bodies the worker answers with 400).
    """
    if request.kind is RequestKind.OTHER:
        raise TokensUnavailable(FallbackReason.UNKNOWN_PATH, request.path)
    if request.document is None:
        raise TokensUnavailable(FallbackReason.UNPARSABLE_BODY)
    document = request.document
    if request.kind is RequestKind.CHAT:
        return _chat(document)
    return _completion(document)


def _no_prompt(detail: str) -> TokensUnavailable:
    return TokensUnavailable(FallbackReason.NO_PROMPT, detail)


def _chat(document: Mapping[str, Any]) -> Prompt:
    messages = _messages(document.get("messages"))
    given = _forwarded_ids(document)
    if given is not None:
        return CompletionPrompt((given,), add_special_tokens=False)
    continues = _flag(document, "continue_final_message", False)
    generates = _flag(document, "add_generation_prompt", True)
    if continues and generates:
        raise _no_prompt("continue_final_message excludes add_generation_prompt")
    kwargs, reserved = _template_kwargs(document)
    template = document.get("chat_template")
    if template is not None and not isinstance(template, str):
        raise _no_prompt("chat_template is no text")
    own_template = "the request brings its own chat template" if template else None
    return ChatPrompt(
        messages=messages,
        tools=_objects(document, "tools"),
        documents=_objects(document, "documents"),
        add_generation_prompt=generates,
        continue_final_message=continues,
        add_special_tokens=_flag(document, "add_special_tokens", False),
        template_kwargs=kwargs,
        worker_only=reserved or own_template,
        chat_template=template or None,
        truncation=_truncation(document, ("max_completion_tokens", "max_tokens"), None),
    )


def _messages(messages: object) -> list[Mapping[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise _no_prompt("messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _no_prompt("a message without a role")
        _check_content(message.get("content"))
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            raise _no_prompt("tool_calls is no list")
    return messages


def _check_content(content: object) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise _no_prompt("a message's content")
    for part in content:
        if isinstance(part, str):
            continue
        if not isinstance(part, dict):
            raise _no_prompt("a content part")
        kind = part.get("type")
        if kind in _MEDIA_KEYS or not _MEDIA_KEYS.isdisjoint(part):
            raise TokensUnavailable(FallbackReason.MULTIMODAL, str(kind))
        if kind == "tool_reference":
            if not isinstance(part.get("name"), str):
                raise _no_prompt("a tool reference")
        elif not isinstance(kind, str) or kind not in TEXT_PART_KEYS:
            raise _no_prompt(f"content part of type {kind!r}")
        elif not isinstance(part.get(TEXT_PART_KEYS[kind]), str | None):
            raise _no_prompt("a text part without text")


def _forwarded_ids(document: Mapping[str, Any]) -> TokenIds[int] | None:
    """Ids that a prefill stage forwards: vLLM takes them in place of the messages (chat only)."""
    params = document.get("kv_transfer_params")
    ids = params.get("prompt_token_ids") if isinstance(params, dict) else None
    if ids is None or document.get("echo"):
        return None
    if not isinstance(ids, list) or not ids:
        raise _no_prompt("kv_transfer_params.prompt_token_ids")
    return _ids(ids)


def _template_kwargs(document: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Template variables as vLLM merges them (``ChatCompletionRequest.build_chat_params``)."""
    given = document.get("chat_template_kwargs")
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise _no_prompt("chat_template_kwargs is no object")
    # vllm/renderers/params.py, merge_kwargs: null and "auto" leave the default in force.
    kwargs = {key: value for key, value in given.items() if value is not None and value != "auto"}
    effort = document.get("reasoning_effort")
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        if "enable_thinking" not in given:
            kwargs["enable_thinking"] = effort != "none"
    # These two always come from the request's own fields.
    kwargs.pop("add_generation_prompt", None)
    kwargs.pop("continue_final_message", None)
    reserved = sorted(_RESERVED_TEMPLATE_KWARGS.intersection(kwargs))
    return kwargs, f"chat_template_kwargs holds {', '.join(reserved)}" if reserved else None


def _completion(document: Mapping[str, Any]) -> CompletionPrompt:
    if document.get("prompt_embeds") is not None:
        raise TokensUnavailable(FallbackReason.MULTIMODAL, "prompt_embeds")
    if document.get("suffix") is not None:
        raise _no_prompt("suffix: the order of a fill-in-the-middle prompt is the model's own")
    return CompletionPrompt(
        _prompts(document.get("prompt")),
        add_special_tokens=_flag(document, "add_special_tokens", True),
        truncation=_truncation(document, ("max_tokens",), 16),
    )


def _prompts(prompt: object) -> tuple[str | TokenIds[int], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, array):  # parsed and packed
        return (prompt,)
    if not isinstance(prompt, list) or not prompt:
        raise _no_prompt("prompt")
    if all(isinstance(item, str) for item in prompt):
        return tuple(prompt)
    if all(isinstance(item, list) and item for item in prompt):
        return tuple(_ids(item) for item in prompt)
    return (_ids(prompt),)


def _ids(items: Sequence[object]) -> TokenIds[int]:
    ids = packed_ids(items)
    if ids is None:
        raise _no_prompt("a prompt that is neither text nor token ids")
    return ids


def _truncation(
    document: Mapping[str, Any], output_keys: Sequence[str], default_output: int | None
) -> Truncation | None:
    keep = document.get("truncate_prompt_tokens")
    side = document.get("truncation_side")
    if keep is None:
        return None
    if type(keep) is not int or keep < -1 or side not in {None, "left", "right"}:
        raise _no_prompt("truncate_prompt_tokens")
    output = next((document[key] for key in output_keys if document.get(key) is not None), None)
    if output is None and not any(key in document for key in output_keys):
        output = default_output
    return Truncation(keep, side, reserve_output=bool(output))


def _objects(document: Mapping[str, Any], key: str) -> list[Mapping[str, Any]] | None:
    value = document.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise _no_prompt(f"{key} is no list of objects")
    return value


def _flag(document: Mapping[str, Any], key: str, default: bool) -> bool:
    value = document.get(key, default)
    if not isinstance(value, bool):
        raise _no_prompt(f"{key} is neither true nor false")
    return value
