# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back: a built-in byte tokenizer, or a Hugging Face ``tokenizers`` file.

Both split off their special tokens wherever they stand in a text, as vLLM does with a rendered chat.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from engine_ext.sim.errors import SimConfigError
from engine_ext.sim.text import LETTERS


class SimTokenizer(Protocol):
    """What the server needs of a tokenizer."""

    @property
    def output_vocabulary(self) -> Sequence[int]:
        """Ids the simulated model may say; each decodes by itself."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""

    def decode(self, token_id: int) -> str:
        """Text of one output token."""


IM_START = 256
IM_END = 257
_SPECIAL = {"<|im_start|>": IM_START, "<|im_end|>": IM_END}
_SPLIT = re.compile("(" + "|".join(re.escape(text) for text in _SPECIAL) + ")")


class ByteTokenizer:
    """One id per UTF-8 byte, 256 and 257 for the two ChatML marks. Exact in both directions."""

    output_vocabulary: Sequence[int] = LETTERS

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; lone surrogates keep three bytes of their own."""
        ids: list[int] = []
        for part in _SPLIT.split(text):
            if part in _SPECIAL:
                ids.append(_SPECIAL[part])
            else:
                ids.extend(part.encode("utf-8", "surrogatepass"))
        return ids

    def decode(self, token_id: int) -> str:
        """Text of one output token, all of which are ASCII."""
        return chr(token_id)


class FileTokenizer:
    """``tokenizer.json`` of a model folder."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise SimConfigError("tokenizer", str(folder), "a folder with tokenizer.json in it")
        self._tokenizer = Tokenizer.from_file(str(path))
        self.output_vocabulary: Sequence[int] = self._sayable()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_id: int) -> str:
        """Text of one output token, with the space before it."""
        return str(self._tokenizer.decode([token_id]))

    def _sayable(self) -> list[int]:
        """Whole lower-case words and syllables that come back as one token when encoded alone."""
        ids: list[int] = []
        for token_id in sorted(self._tokenizer.get_vocab().values()):
            text = self.decode(token_id)
            if text.strip().isascii() and text.strip().isalpha() and text.islower():
                if self.encode(text, add_special_tokens=False) == [token_id]:
                    ids.append(token_id)
                if len(ids) == 512:
                    break
        if not ids:
            raise SimConfigError("tokenizer", "its vocabulary", "at least one lower-case ASCII word")
        return ids


def make_tokenizer(folder: str | None) -> SimTokenizer:
    """The tokenizer of a model folder, or the built-in one."""
    return ByteTokenizer() if folder is None else FileTokenizer(Path(folder))
