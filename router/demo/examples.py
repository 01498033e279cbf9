# SPDX-License-Identifier: Apache-2.0
"""Commands to try while the demo keeps serving. Pure."""

from __future__ import annotations

import json
import shlex

_OWN_CHARS = 400


def render_examples(url: str, model: str, document: str) -> str:
    """Shell commands against the gateway; the prompt is the beginning of a document."""
    messages = [
        {"role": "system", "content": document[:_OWN_CHARS]},
        {"role": "user", "content": "Which section speaks of signals?"},
    ]
    body = shlex.quote(json.dumps({"model": model, "messages": messages, "max_tokens": 32}))
    json_type = "-H 'content-type: application/json'"
    return "\n".join(
        [
            "\nThe fleet keeps serving, with gentle traffic, until Ctrl-C. Try:\n",
            f"  curl -si {url}/v1/chat/completions {json_type} -d {body}\n",
            f"  curl -s '{url}/admin/api/decisions?limit=3'\n",
            f"  curl -s {url}/admin/api/explain {json_type} -d {body}\n",
            f"  curl -s {url}/admin/api/workers\n",
            f"  curl -s {url}/metrics\n",
        ]
    )
