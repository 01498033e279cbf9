# SPDX-License-Identifier: Apache-2.0
"""Writes a small Llama with random weights that vLLM serves on a CPU: `make_model.py OUT`.

It has what a router has to get right about a real model: a byte-level BPE tokenizer with special tokens, a
post-processor that puts <s> before a plain prompt, and a ChatML template that places <s> itself. The weights
say nothing, but greedy decoding from them is deterministic and depends on every token of the prompt.

Needs torch, transformers and tokenizers, all present in the venv that setup.sh makes. Takes about five seconds.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 1024
MAX_POSITIONS = 4096
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

VOWELS = "aeiou"
CONSONANTS = "bcdfghklmnprstvw"
SYLLABLES = [c + v for c in CONSONANTS for v in VOWELS]


def corpus(rng: random.Random) -> list[str]:
    """Invented sentences: enough repetition for BPE merges, no text that belongs to anybody."""
    words = sorted({"".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(900)})
    lines = []
    for _ in range(2500):
        line = rng.choices(words, k=rng.randint(5, 30))
        line.insert(rng.randrange(len(line)), str(rng.randrange(100_000)))
        lines.append(" ".join(line).capitalize() + rng.choice([".", "?", ",", "!\n", ":\n\n"]))
    return lines


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(random.Random(20)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",  # noqa: S106
        bos_token="<s>",  # noqa: S106
        eos_token="</s>",  # noqa: S106
        pad_token="</s>",  # noqa: S106
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        initializer_range=0.2,  # wide enough that the best two logits are seldom within bf16's rounding
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    if len(tokenizer) != VOCABULARY:
        raise SystemExit(f"the tokenizer has {len(tokenizer)} tokens, the model expects {VOCABULARY}")
    tokenizer.save_pretrained(out)
    make_model(tokenizer).save_pretrained(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
