# SPDX-License-Identifier: Apache-2.0
"""Texts and ids against those of real vLLM and transformers (tests/golden/chat_templates/record.py)."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from router.errors import RouterError
from router.request import InferenceRequest, RequestKind
from router.tokens.local import LocalTokenizer
from router.tokens.prompt import ChatPrompt, CompletionPrompt, extract_prompt
from router.tokens.template import ChatTemplate
from router.tokens.tokenizer_files import TokenizerFiles, read_tokenizer_files

GOLDEN = Path(__file__).parents[3] / "golden" / "chat_templates"
DOCUMENT = json.loads((GOLDEN / "chat_templates.json").read_text())
NOW = datetime.fromisoformat(DOCUMENT["now"])


def tokenizer_with(template):
    files = read_tokenizer_files(GOLDEN / "tokenizer")
    return LocalTokenizer(
        TokenizerFiles(files.tokenizer, files.special_tokens, {"default": template}), lambda: NOW
    )


def request_of(kind, body):
    return InferenceRequest(
        request_id="r",
        method="POST",
        path="/v1/chat/completions",
        kind=kind,
        body=json.dumps(body).encode(),
        document=body,
        model="m",
        stream=False,
        sequences=1,
        max_tokens=None,
        cache_salt=None,
    )


@pytest.mark.parametrize("name", list(DOCUMENT["templates"]))
def test_every_request_renders_and_tokenises_as_in_the_engine(name):
    tokenizer = tokenizer_with(DOCUMENT["templates"][name])
    vectors = [vector for vector in DOCUMENT["vectors"] if vector["template"] == name]
    assert len(vectors) == len(DOCUMENT["requests"])
    for vector in vectors:
        request = request_of(RequestKind.CHAT, DOCUMENT["requests"][vector["request"]])
        if "refused" in vector:
            with pytest.raises(RouterError):
                tokenizer.tokenize(extract_prompt(request))
            continue
        prompt = extract_prompt(request)
        assert isinstance(prompt, ChatPrompt)
        assert tokenizer.render(prompt) == vector["text"], vector["request"]
        assert [list(ids) for ids in tokenizer.tokenize(prompt)] == [vector["ids"]], vector["request"]


def test_content_format_is_the_one_the_engine_detects():
    expected = {v["template"]: v["format"] for v in DOCUMENT["vectors"] if "format" in v}
    detected = {
        name: ChatTemplate(source, lambda: NOW).content_format.value
        for name, source in DOCUMENT["templates"].items()
    }
    assert detected == expected
    assert set(expected.values()) == {"string", "openai"}


def test_completions_tokenise_and_truncate_as_in_the_engine():
    tokenizer = tokenizer_with("{{ messages }}")
    for row in DOCUMENT["completions"]:
        body = {"prompt": row["text"], "add_special_tokens": row["add_special_tokens"]}
        if row["keep"] is not None:
            body["truncate_prompt_tokens"] = row["keep"]
        prompt = extract_prompt(request_of(RequestKind.COMPLETION, body))
        assert isinstance(prompt, CompletionPrompt)
        assert [list(ids) for ids in tokenizer.tokenize(prompt)] == [row["ids"]], row
