# SPDX-License-Identifier: Apache-2.0
"""Turns the messages and tools of a request into what vLLM hands to the chat template.

The steps are those of vLLM 0.32 (``vllm/renderers/chat_utils.py: parse_chat_messages``,
``vllm/renderers/hf.py: safe_apply_chat_template`` and the request models in front of them): fields the
template is not to see are dropped, the fields of a tool call and of a tool take the order of the
request model (it shows where a template prints one as JSON), arguments of tool calls are parsed,
content becomes text or a list of parts. Pure; the request is not modified.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.tokens.content_format import ContentFormat
from router.tokens.prompt import TEXT_PART_KEYS

Message = dict[str, Any]

_BILLING_HEADER = "x-anthropic-billing-header"
# Fields of the content part types of vLLM's request model; others reach a template that takes parts.
_PART_FIELDS = frozenset(
    {
        "audio_embeds",
        "audio_url",
        "closed",
        "data",
        "file",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "name",
        "prompt_cache_breakpoint",
        "refusal",
        "text",
        "thinking",
        "type",
        "uuid",
        "video_embeds",
        "video_url",
    }
)


class ConversationError(Exception):
    """The worker will refuse these messages."""


def build_conversation(messages: Sequence[Mapping[str, Any]], content_format: ContentFormat) -> list[Message]:
    """The conversation as the template sees it.

    Raises:
        ConversationError: tool calls of a shape that vLLM answers with 400.
    """
    return [_message(message, content_format) for message in messages]


def fold_developer_messages(conversation: list[Message]) -> list[Message]:
    """For templates that know no ``developer``: make them ``system``, and all of those one, in front."""
    if not any(message["role"] == "developer" for message in conversation):
        return conversation
    converted = [
        {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in conversation
    ]
    system = [message for message in converted if message["role"] == "system"]
    if len(system) == 1 and converted[0] is system[0]:
        return converted
    texts = [text for message in system if (text := _plain_text(message.get("content", "")))]
    others = [message for message in converted if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def build_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools as ``ChatCompletionToolsParam.model_dump`` gives them.

    Raises:
        ConversationError: a tool that is no named function.
    """
    return None if tools is None else [_tool(tool) for tool in tools]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConversationError("a tool is a function with a name")
    built: dict[str, Any] = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    deferred = tool.get("defer_loading")
    optional = {
        "strict": function.get("strict"),
        "defer_loading": function.get("defer_loading", deferred),
    }
    built |= {key: value for key, value in optional.items() if value is not None}
    outer: dict[str, Any] = {"type": "function", "function": built}
    if deferred is not None:
        outer["defer_loading"] = deferred
    return outer


def _message(message: Mapping[str, Any], content_format: ContentFormat) -> Message:
    role = message["role"]
    parts = message.get("content")
    if parts is None:
        parts = []
    elif isinstance(parts, str):
        parts = [{"type": "text", "text": parts}]
    if role == "system":
        parts = _without_billing_header(parts)
    result: Message = {"role": role, "content": _content(parts, content_format)}
    if role == "assistant":
        _add_assistant_fields(result, message)
    elif role == "tool":
        if "tool_call_id" in message:
            result["tool_call_id"] = message["tool_call_id"]
        content = result["content"]
        if isinstance(content, list) and all(part["type"] == "text" for part in content):
            result["content"] = "\n".join(part["text"] for part in content)
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            result[key] = message[key]
    if role == "developer":
        result["tools"] = message.get("tools")
    return result


def _content(parts: Sequence[Any], content_format: ContentFormat) -> str | list[dict[str, Any]]:
    kept = [part for part in (_part(part) for part in parts) if part is not None]
    if content_format is ContentFormat.PARTS:
        return kept
    return "\n".join(part.get("text", part.get("name", "")) for part in kept)


def _part(part: Any) -> dict[str, Any] | None:
    """A text part in the form that a template gets; None for a text or refusal that is null."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part["type"]
    if kind == "tool_reference":
        return {"type": kind, "name": part["name"]}
    text = part.get(TEXT_PART_KEYS[kind])
    if text is None:
        if kind in {"text", "refusal"}:
            return None
        raise ConversationError(f"a {kind} part without text")
    extra = {key: value for key, value in part.items() if key not in _PART_FIELDS}
    return {"type": "text", "text": text, **extra}


def _without_billing_header(parts: Sequence[Any]) -> list[Any]:
    """VLLM drops the first line of a system text when it is the header some clients change each time."""
    kept: list[Any] = []
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        text = part if isinstance(part, str) else part.get("text") if is_text else None
        if not isinstance(text, str) or not text.startswith(_BILLING_HEADER):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest if isinstance(part, str) else {**part, "text": rest})
    return kept


def _add_assistant_fields(result: Message, message: Mapping[str, Any]) -> None:
    calls = message.get("tool_calls")
    if calls:
        result["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        result["reasoning"] = reasoning
        result["reasoning_content"] = reasoning


def _tool_call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise ConversationError("a tool call is an object with a function")
    if call.get("type", "function") != "function":
        raise ConversationError("tool calls are of type 'function'")
    ordered = _reordered(function, ("arguments", "name"))
    ordered["arguments"] = _arguments(function.get("arguments"))
    return _reordered({**call, "function": ordered}, ("id", "function", "type"))


def _arguments(arguments: object) -> dict[str, Any]:
    """Arguments as a mapping: parsed when they are JSON text, empty when they are nothing of the kind."""
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _reordered(mapping: Mapping[str, Any], first: Sequence[str]) -> dict[str, Any]:
    known = {key: mapping[key] for key in first if key in mapping}
    return known | {key: value for key, value in mapping.items() if key not in known}


def _plain_text(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if "text" in part)
    return str(content)
