# SPDX-License-Identifier: Apache-2.0
"""The completion that workers of a benchmark answer with, whatever they are asked."""

from __future__ import annotations

import json


def constant_answer(model: str, prompt_tokens: int, cached_tokens: int) -> str:
    """A body of ``POST /v1/completions`` as JSON: 64 characters in 16 tokens."""
    return json.dumps(
        {
            "id": "cmpl-1",
            "object": "text_completion",
            "model": model,
            "choices": [{"index": 0, "text": "x" * 64, "finish_reason": "length"}],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": 16,
                "total_tokens": prompt_tokens + 16,
                "prompt_tokens_details": {"cached_tokens": cached_tokens},
            },
        }
    )
