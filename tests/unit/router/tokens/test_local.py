# SPDX-License-Identifier: Apache-2.0
import json
import threading
from datetime import datetime
from pathlib import Path

import pytest

from router.errors import TokensUnavailable
from router.tokens.local import LocalTokenizer
from router.tokens.prompt import ChatPrompt, CompletionPrompt, Truncation
from router.tokens.tokenizer_files import TokenizerFilesError, read_tokenizer_files

GOLDEN = Path(__file__).parents[3] / "golden" / "chat_templates" / "tokenizer"
NOW = datetime(2026, 3, 4)  # noqa: DTZ001 - templates see local time
CHAT = ChatPrompt([{"role": "user", "content": "hi"}])


@pytest.fixture
def directory(tmp_path):
    def make(config=None, template="{{ bos_token }}{{ messages[0].content }}", **extra_files):
        for file in GOLDEN.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template)
        for name, text in extra_files.items():
            file = tmp_path / name.replace("__", "/").replace("_jinja", ".jinja")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        return tmp_path

    return make


def local(directory, **options):
    return LocalTokenizer.load(directory, now=lambda: NOW, **options)


def ids(tokenizer, text, **options):
    return list(tokenizer.tokenize(CompletionPrompt((text,), **options))[0])


def test_template_sees_special_tokens_and_the_given_time(directory):
    path = directory(template="{{ bos_token }}{{ strftime_now('%Y-%m-%d') }}{{ mask_token is defined }}")
    assert local(path).render(CHAT) == "<s>2026-03-04False"


def test_templates_come_from_the_file_then_the_configuration_then_the_override(directory, tmp_path):
    config = {"chat_template": "from config"}
    assert local(directory(config, template=None)).render(CHAT) == "from config"
    assert local(directory(config, template="from file")).render(CHAT) == "from file"
    override = tmp_path / "override.jinja"
    override.write_text("from override")
    assert local(directory(config), chat_template=override).render(CHAT) == "from override"


def test_requests_with_tools_take_the_tool_use_template(directory):
    path = directory(template="plain", additional_chat_templates__tool_use_jinja="with tools")
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    tokenizer = local(path)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert tokenizer.render(CHAT) == "plain"
    assert tokenizer.render(ChatPrompt(CHAT.messages, tools=tools)) == "with tools"


def test_named_templates_of_the_configuration_are_read(directory):
    rows = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    assert local(directory({"chat_template": rows}, template=None)).render(CHAT) == "d"


def test_flags_of_the_configuration_decide_on_begin_and_end_tokens(directory):
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    plain = ids(local(directory(named)), "ab", add_special_tokens=False)
    assert ids(local(directory(named)), "ab") == [1, *plain], "the post-processor of tokenizer.json"
    flags = {"add_bos_token": False, "add_eos_token": True}
    assert ids(local(directory(named | flags)), "ab") == [*plain, 2]


def test_added_tokens_of_the_configuration_are_known(directory):
    entry = {"420": {"content": "<extra>", "special": True, "lstrip": False, "normalized": False}}
    tokenizer = local(directory({"added_tokens_decoder": entry}))
    assert ids(tokenizer, "<extra>", add_special_tokens=False) == [420]


@pytest.mark.parametrize(
    ("truncation", "length", "expected"),
    [
        (Truncation(2, "left", False), None, slice(-2, None)),
        (Truncation(2, "right", False), None, slice(0, 2)),
        (Truncation(-1, "left", True), 4, slice(-3, None)),
        (Truncation(-1, "left", False), 4, slice(-4, None)),
        (Truncation(0, "left", False), None, slice(0, 0)),
        (Truncation(99, "left", False), None, slice(None)),
    ],
)
def test_truncation_of_finished_ids(directory, truncation, length, expected):
    tokenizer = local(directory())
    prompt = CompletionPrompt(("some more words",), truncation=truncation)
    whole = ids(tokenizer, "some more words")
    assert list(tokenizer.tokenize(prompt, length)[0]) == whole[expected]


def test_truncation_to_an_unknown_context_is_unavailable(directory):
    prompt = CompletionPrompt(("x",), truncation=Truncation(-1, None, True))
    with pytest.raises(TokensUnavailable):
        local(directory()).tokenize(prompt)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    ],
)
def test_a_template_that_fails_makes_the_ids_unavailable(directory, template):
    with pytest.raises(TokensUnavailable):
        local(directory(template=template)).tokenize(CHAT)


def test_a_missing_template_a_lone_surrogate_and_the_workers_own_matters_are_unavailable(directory):
    with pytest.raises(TokensUnavailable, match="no chat template"):
        local(directory(template=None)).tokenize(CHAT)
    with pytest.raises(TokensUnavailable, match="surrogate"):
        local(directory()).tokenize(CompletionPrompt(("\ud800",)))
    with pytest.raises(TokensUnavailable, match="own"):
        local(directory()).tokenize(ChatPrompt(CHAT.messages, worker_only="its own"))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "{"),
        ("chat_template.jinja", "{% if %}"),
    ],
)
def test_files_that_cannot_be_read_are_named(directory, file, text):
    path = directory()
    (path / file).write_text(text)
    with pytest.raises(TokenizerFilesError):
        local(path)


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(TokenizerFilesError, match=r"tokenizer\.json"):
        read_tokenizer_files(tmp_path / "nowhere")


def test_the_request_is_not_modified_by_rendering(directory):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": "b",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
    ]
    before = json.dumps(messages)
    prompt = ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True)
    template = "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
    assert local(directory(template=template)).render(prompt).endswith("c")
    assert json.dumps(messages) == before


def test_renders_of_several_threads_do_not_mix(directory):
    template = "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ m.content }}{% endfor %}{{ ns.n }}"
    tokenizer, wrong = local(directory(template=template)), []

    def render(letter):
        for _ in range(200):
            text = tokenizer.render(ChatPrompt([{"role": "user", "content": letter}] * 20))
            if text != letter * 20 + "20":
                wrong.append(text)

    threads = [threading.Thread(target=render, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
