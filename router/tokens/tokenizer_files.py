# SPDX-License-Identifier: Apache-2.0
"""Reads a tokenizer directory as transformers does: ``tokenizer.json``, its configuration, its templates.

What counts (transformers 5.x, ``tokenization_utils_base.py`` and ``tokenization_utils_tokenizers.py``):
named special tokens of ``tokenizer_config.json`` (or ``special_tokens_map.json``) are variables of the
template; ``chat_template.jinja`` and ``additional_chat_templates/*.jinja`` win over the ``chat_template``
key; an explicit ``add_bos_token`` or ``add_eos_token`` replaces the post-processor; tokens of
``added_tokens_decoder`` that ``tokenizer.json`` lacks are added.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerFilesError(Exception):
    """The directory holds no tokenizer that can be read; the message names the file."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer ready for use, and what its templates need."""

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    templates: Mapping[str, str]
    """By name; the usual one is ``default``."""
    truncation_side: str = "left"
    """vLLM sets it for generation (``vllm/tokenizers/registry.py``), whatever the file says."""


def read_tokenizer_files(directory: Path, chat_template: Path | None = None) -> TokenizerFiles:
    """Read a directory; ``chat_template`` replaces the tokenizer's own templates.

    Raises:
        TokenizerFilesError: a file is missing or cannot be parsed.
    """
    file = directory / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the binding raises bare Exception
        raise TokenizerFilesError(f"{file}: {error}") from error
    config = _json_object(directory / "tokenizer_config.json")
    special_tokens = _special_tokens(_json_object(directory / "special_tokens_map.json") | config)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = config.get("split_special_tokens", False) is True
    _add_tokens(tokenizer, config.get("added_tokens_decoder"))
    if "add_bos_token" in config or "add_eos_token" in config:
        _set_post_processor(tokenizer, config, special_tokens)
    templates = {"default": _text(chat_template)} if chat_template else _templates(directory, config)
    return TokenizerFiles(tokenizer, special_tokens, templates)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerFilesError(f"{file}: {error}") from error


def _json_object(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        document = json.loads(_text(file))
    except ValueError as error:
        raise TokenizerFilesError(f"{file}: {error}") from error
    return document if isinstance(document, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):  # an AddedToken written out
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _add_tokens(tokenizer: Tokenizer, decoder: object) -> None:
    if not isinstance(decoder, dict):
        return
    for _, entry in sorted(decoder.items(), key=lambda item: int(item[0])):
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or tokenizer.token_to_id(content) is not None:
            continue
        flags = {
            key: bool(entry[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in entry
        }
        token = AddedToken(content, special=bool(entry.get("special")), **flags)
        if entry.get("special"):
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])


def _set_post_processor(
    tokenizer: Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """``TokenizersBackend.update_post_processor``: begin and end tokens as the flags say."""
    pieces, used = ["$A:0"], []
    bos, eos = special_tokens.get("bos_token"), special_tokens.get("eos_token")
    if config.get("add_bos_token") and bos is not None:
        pieces.insert(0, f"{bos}:0")
        used.append(bos)
    if config.get("add_eos_token") and eos is not None:
        pieces.append(f"{eos}:0")
        used.append(eos)
    pairs = [
        (token, identifier) for token in used if (identifier := tokenizer.token_to_id(token)) is not None
    ]
    if len(pairs) != len(used):
        raise TokenizerFilesError(f"{used} are not in the vocabulary")
    tokenizer.post_processor = TemplateProcessing(single=" ".join(pieces), special_tokens=pairs)


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    files = {"default": directory / "chat_template.jinja"}
    for extra in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        files[extra.stem] = extra
    found = {name: _text(file) for name, file in files.items() if file.exists()}
    if found:
        return found
    given = config.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):  # several templates, each with its name
        rows = [row for row in given if isinstance(row, dict)]
        return {row["name"]: row["template"] for row in rows if "name" in row and "template" in row}
    return {}
