# SPDX-License-Identifier: Apache-2.0
"""Messages to prompt text with a jinja2 chat template, in the environment Hugging Face templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgspec

from engine_ext.sim.errors import SimConfigError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ChatTemplateError(ValueError):
    """The messages cannot be rendered (400)."""


class ChatTemplate:
    """A compiled template and the special tokens it may name."""

    def __init__(self, source: str = CHATML, special_tokens: Mapping[str, str] | None = None) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens or {})

    def render(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True) -> str:
        """Prompt text of a chat.

        Raises:
            ChatTemplateError: content of an unknown kind, or the template refuses the messages.
        """
        flat = [_flat(message) for message in messages]
        try:
            return self._template.render(
                messages=flat, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ChatTemplateError(str(error)) from error


def load_template(folder: str | None) -> ChatTemplate:
    """The template of a model folder (``chat_template.jinja``, or the one in ``tokenizer_config.json``)."""
    if folder is None:
        return ChatTemplate()
    path = Path(folder)
    config: dict[str, object] = {}
    if (path / "tokenizer_config.json").is_file():
        config = msgspec.json.decode((path / "tokenizer_config.json").read_bytes(), type=dict[str, object])
    special = {name: _token_text(config[name]) for name in ("bos_token", "eos_token") if config.get(name)}
    if (path / "chat_template.jinja").is_file():
        return ChatTemplate((path / "chat_template.jinja").read_text(), special)
    template = config.get("chat_template")
    if template is None:
        return ChatTemplate(special_tokens=special)
    if not isinstance(template, str):
        raise SimConfigError("tokenizer", folder, "a folder with one chat template in tokenizer_config.json")
    return ChatTemplate(template, special)


def _flat(message: Mapping[str, object]) -> dict[str, object]:
    """Text parts become one string, joined as vLLM joins them for templates of string content."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        if not isinstance(text, str):
            raise ChatTemplateError("this model takes text only")
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


def _token_text(token: object) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
