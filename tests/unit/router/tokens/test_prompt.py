# SPDX-License-Identifier: Apache-2.0
import json
from array import array

import pytest

from router.errors import FallbackReason, TokensUnavailable
from router.request import InferenceRequest, RequestKind
from router.tokens.prompt import Truncation, extract_prompt

USER = {"role": "user", "content": "hi"}


def extract(document, kind=RequestKind.CHAT):
    return extract_prompt(
        InferenceRequest(
            request_id="r",
            method="POST",
            path="/v1/x",
            kind=kind,
            body=json.dumps(document).encode(),
            document=document,
            model="m",
            stream=False,
            sequences=1,
            max_tokens=None,
            cache_salt=None,
        )
    )


def reason(document, kind=RequestKind.CHAT):
    with pytest.raises(TokensUnavailable) as caught:
        extract(document, kind)
    return caught.value.reason


def completion(**document):
    return extract(document, RequestKind.COMPLETION)


def test_chat_defaults_are_those_of_the_engine():
    prompt = extract({"messages": [USER]})
    assert prompt.add_generation_prompt
    assert not prompt.continue_final_message
    assert not prompt.add_special_tokens
    assert prompt.worker_only is None
    assert completion(prompt="x").add_special_tokens


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], (array("I", [1, 2]),)),
        ([[1], [2, 3]], (array("I", [1]), array("I", [2, 3]))),
        ([4294967295], (array("I", [4294967295]),)),
    ],
)
def test_completion_prompts_of_all_shapes(prompt, expected):
    assert completion(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    "prompt",
    [None, [], {}, 1, [[]], ["a", 1], [[1], "a"], [1, [2]], [1.5], [True], [-1], [2**32], [[[1]]], [None]],
)
def test_prompts_of_no_known_shape(prompt):
    assert reason({"prompt": prompt}, RequestKind.COMPLETION) is FallbackReason.NO_PROMPT


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"messages": []},
        {"messages": "hi"},
        {"messages": ["hi"]},
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": [3]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
        {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
        {"messages": [{"role": "user", "content": [{"text": "no type"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": {}}]},
        {"messages": [USER], "tools": {}},
        {"messages": [USER], "tools": ["x"]},
        {"messages": [USER], "chat_template_kwargs": []},
        {"messages": [USER], "add_generation_prompt": "yes"},
        {"messages": [USER], "continue_final_message": True},
        {"messages": [USER], "truncate_prompt_tokens": -2},
        {"messages": [USER], "kv_transfer_params": {"prompt_token_ids": ["x"]}},
    ],
)
def test_chats_the_worker_will_refuse_are_named_and_never_crash(document):
    assert reason(document) is FallbackReason.NO_PROMPT


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "video_url", "video_url": {}},
        {"image_url": "http://x/y.png"},
        {"type": "text", "text": "x", "image_url": "y"},
        {"type": "prompt_embeds", "data": "x"},
    ],
)
def test_parts_that_are_no_text_are_multimodal(part):
    content = [{"type": "text", "text": "what is it?"}, part]
    assert reason({"messages": [{"role": "user", "content": content}]}) is FallbackReason.MULTIMODAL


def test_prompt_embeddings_are_multimodal_and_infilling_is_left_alone():
    assert reason({"prompt_embeds": "x", "prompt": "a"}, RequestKind.COMPLETION) is FallbackReason.MULTIMODAL
    assert reason({"prompt": "a", "suffix": "b"}, RequestKind.COMPLETION) is FallbackReason.NO_PROMPT


def test_template_variables_are_merged_as_in_the_engine():
    body = {
        "messages": [USER],
        "chat_template_kwargs": {"a": None, "b": "auto", "c": 0, "add_generation_prompt": False},
        "reasoning_effort": "high",
    }
    prompt = extract(body)
    assert prompt.template_kwargs == {"c": 0, "reasoning_effort": "high", "enable_thinking": True}
    assert prompt.add_generation_prompt


def test_what_only_the_worker_can_render_is_marked():
    assert extract({"messages": [USER], "chat_template": "{{ x }}"}).worker_only
    assert extract({"messages": [USER], "chat_template_kwargs": {"tools": [1]}}).worker_only


def test_forwarded_ids_replace_the_messages_unless_the_prompt_is_echoed():
    body = {"messages": [USER], "kv_transfer_params": {"prompt_token_ids": [5, 6]}}
    assert extract(body).prompts == (array("I", [5, 6]),)
    assert extract({**body, "echo": True}).messages == [USER]


def test_truncation_is_read_with_the_room_it_leaves():
    assert completion(prompt="x", truncate_prompt_tokens=5).truncation == Truncation(5, None, True)
    assert completion(prompt="x", truncate_prompt_tokens=-1, max_tokens=0).truncation == Truncation(
        -1, None, False
    )
    chat = extract({"messages": [USER], "truncate_prompt_tokens": -1, "truncation_side": "right"})
    assert chat.truncation == Truncation(-1, "right", False)
