# SPDX-License-Identifier: Apache-2.0
"""Checks that our token ids are the engine's: the same fixed prompts through both tokenisers.

A wrong template or tokenizer file gives ids that match no block, silently: every request would look
cold. So the probes cover what tells templates apart (system text, several turns, tools, empty content,
an answer to be continued) and what tells tokenizers apart (case, blanks, digits, non-Latin scripts,
emoji, special tokens in the text). A prompt that one side refuses proves nothing and is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from router.errors import TokensUnavailable
from router.fleet.worker import Parity
from router.tokens.local import LocalTokenizer
from router.tokens.prompt import ChatPrompt, CompletionPrompt, Prompt, TokenIds
from router.tokens.remote import TokenizeMissing, WorkerRefused, WorkerTokenizer

_UNICODE = (
    "Naïve café \u2013 \u201cquotes\u201d, Straße, привет, 你好,世界, こんにちは, مرحبا, \U0001f469\u200d\U0001f52c \U0001f680 "
    "e\u0301 \ufb01 \u00a0\tTab\r\n\n  two  blanks 12345 6.78"
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather at a place <now> & later",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}
_CALL = {
    "id": "call_00001",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"place": "Zürich", "days": 2}'},
}


def _chat(*turns: tuple[str, str], **options: Any) -> ChatPrompt:
    return ChatPrompt([{"role": role, "content": text} for role, text in turns], **options)


PROBES: tuple[tuple[str, Prompt], ...] = (
    ("plain chat", _chat(("user", "Hello, world! How are you?"))),
    ("unicode chat", _chat(("user", _UNICODE))),
    (
        "system and several turns",
        _chat(("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c")),
    ),
    ("empty content", _chat(("user", ""))),
    ("surrounding blanks", _chat(("user", "  \n padded \n "))),
    (
        "content parts",
        ChatPrompt(
            [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
        ),
    ),
    ("no generation prompt", _chat(("user", "x"), ("assistant", "y"), add_generation_prompt=False)),
    (
        "continued answer",
        _chat(
            ("user", "Count."),
            ("assistant", "One, two"),
            add_generation_prompt=False,
            continue_final_message=True,
        ),
    ),
    ("tools", _chat(("user", "Weather?"), tools=[_TOOL])),
    (
        "tool call and result",
        ChatPrompt(
            [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "call_00001", "content": '{"sky": "clear"}'},
            ],
            tools=[_TOOL],
        ),
    ),
    ("completion", CompletionPrompt(("The quick brown fox jumps over the lazy dog.",))),
    ("unicode completion", CompletionPrompt((_UNICODE,))),
    ("completion without special tokens", CompletionPrompt((" Leading blank.",), add_special_tokens=False)),
)


@dataclass(frozen=True, slots=True)
class ParityReport:
    """What the probes of one worker and model showed."""

    parity: Parity
    compared: int = 0
    differing: str | None = None
    """Name of the first probe that differs."""
    detail: str = ""


async def compare(
    local: LocalTokenizer,
    worker: WorkerTokenizer,
    url: str,
    model: str,
    probes: Sequence[tuple[str, Prompt]] = PROBES,
) -> ParityReport:
    """Send every probe through both; UNKNOWN when the worker could not be asked."""
    compared = 0
    for name, prompt in probes:
        try:
            theirs = await worker.tokenize(url, model, prompt)
        except WorkerRefused:
            continue
        except TokenizeMissing as error:
            return ParityReport(Parity.UNKNOWN, compared, detail=str(error))
        except TokensUnavailable as error:
            return ParityReport(Parity.UNKNOWN, compared, detail=str(error))
        try:
            ours = await asyncio.to_thread(local.tokenize, prompt)
        except TokensUnavailable:
            continue
        if ours != theirs:
            return ParityReport(Parity.DIFFERENT, compared + 1, name, _difference(ours[0], theirs[0]))
        compared += 1
    if not compared:
        return ParityReport(Parity.UNKNOWN, 0, detail="no probe could be compared")
    return ParityReport(Parity.EQUAL, compared)


def _difference(ours: TokenIds[int], theirs: TokenIds[int]) -> str:
    position = next(
        (at for at, (own, their) in enumerate(zip(ours, theirs, strict=False)) if own != their),
        min(len(ours), len(theirs)),
    )
    return f"first differs at token {position}; {len(ours)} tokens here, {len(theirs)} at the worker"
