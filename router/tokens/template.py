# SPDX-License-Identifier: Apache-2.0
"""Renders chat templates to the character as transformers does inside the engine.

The environment is that of ``transformers/utils/chat_template_utils.py`` (5.x): sandboxed and
immutable, blocks trimmed, ``break`` and ``continue``, ``tojson`` that escapes no HTML and keeps
non-ASCII text, ``raise_exception``, ``strftime_now``, and ``{% generation %}`` blocks, which only mark
text. Templates come from model authors: they run in the sandbox and can raise anything, so every
failure is a :class:`TemplateRenderError`. Pure but for ``now``, which is passed in.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.tokens.content_format import ContentFormat, detect_content_format

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class TemplateRenderError(Exception):
    """The template cannot be compiled, or refuses the conversation."""


class _GenerationBlock(Extension):
    """``{% generation %}``: transformers marks what the assistant said; the text is unchanged."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it this way

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Macro) -> str:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002, RUF100 - templates pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002, RUF100
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


class ChatTemplate:
    """One compiled template. Rendering is thread-safe: a render keeps its state to itself."""

    def __init__(self, source: str, now: Callable[[], datetime]) -> None:
        """Compile; costs milliseconds.

        Raises:
            TemplateRenderError: a syntax error.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        self.source = source
        try:
            self._template = environment.from_string(source)
            self.content_format: ContentFormat = detect_content_format(environment.parse(source))
        except Exception as error:
            raise TemplateRenderError(f"the chat template does not compile: {error}") from error

    @property
    def knows_developer_role(self) -> bool:
        """Whether the template names the role; vLLM turns it into ``system`` for one that does not."""
        return '"developer"' in self.source or "'developer'" in self.source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. ``variables`` are the special tokens and the client's own variables.

        Raises:
            TemplateRenderError: the template raised, or the final message cannot be continued.
        """
        final: str | None = None
        if continue_final_message:
            messages, final = _tag_final_message(messages, self.source)
        try:
            text = self._template.render(
                **{
                    **(variables or {}),
                    "messages": messages,
                    "tools": tools,
                    "documents": documents,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:
            raise TemplateRenderError(f"{type(error).__name__}: {error}") from error
        return text if final is None else _cut_at_tag(text, final)


def _tag_final_message(
    messages: Sequence[Mapping[str, Any]], source: str
) -> tuple[Sequence[Mapping[str, Any]], str]:
    """A copy whose last content ends in a tag that is easy to find in the rendered text."""
    tagged = copy.deepcopy(list(messages))
    content = tagged[-1].get("content")
    if content is None or "content" not in source:
        raise TemplateRenderError("the final message has no content to continue")
    last = dict(tagged[-1])
    tagged[-1] = last
    if isinstance(content, str):
        last["content"] = content + _CONTINUE_TAG
        return tagged, content
    for part in reversed(content):
        if "text" in part:
            text: str = part["text"]
            part["text"] = text + _CONTINUE_TAG
            return tagged, text
    raise TemplateRenderError("the final message has no text to continue")


def _cut_at_tag(text: str, final: str) -> str:
    """Everything before the tag; if the template trimmed the tag's blank, its own end is trimmed too."""
    tag = _CONTINUE_TAG.strip()
    if final.strip() not in text or tag not in text:
        raise TemplateRenderError("the template drops parts of the final message")
    start = text.rindex(tag)
    kept = text[:start]
    return kept if text[start:].startswith(_CONTINUE_TAG) else kept.rstrip()
