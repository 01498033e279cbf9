# SPDX-License-Identifier: Apache-2.0
"""How long an answer will be, by the mean of those before and what the client allows. Pure."""

from __future__ import annotations

from router.plan.candidate import EXPECTED_OUTPUT_TOKENS

_MEMORY = 0.02
_MOST_MODELS = 1024


class AnswerLengths:
    """Mean answer by model, over some fifty of them. O(1)."""

    def __init__(self) -> None:
        self._means: dict[str | None, float] = {}

    def note(self, model: str | None, output_tokens: int) -> None:
        """An answer of one sequence was that long."""
        mean = self._means.get(model)
        if mean is None and len(self._means) >= _MOST_MODELS:
            return
        before = EXPECTED_OUTPUT_TOKENS if mean is None else mean
        self._means[model] = before + _MEMORY * (output_tokens - before)

    def expect(self, model: str | None, max_tokens: int | None) -> int:
        """Tokens of the next answer, at least 1."""
        mean = round(self._means.get(model, EXPECTED_OUTPUT_TOKENS))
        return max(mean if max_tokens is None else min(mean, max_tokens), 1)
