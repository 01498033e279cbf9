# SPDX-License-Identifier: Apache-2.0
"""Tokenises on this host with the model's own files, to the token as vLLM does.

Thread-safe: the ``tokenizers`` library encodes without touching shared state, and nothing here is
changed after construction. Texts go through ``encode_batch_fast``, one at a time: ``encode`` holds the
GIL throughout (measured with tokenizers 0.23: a 1.8 MB text stops every other thread for 4.3 s, against
0.16 s) and keeps offsets nobody asks for (4.3 s against 1.4 s for that text).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from router.errors import FallbackReason, TokensUnavailable
from router.tokens.conversation import (
    ConversationError,
    build_conversation,
    build_tools,
    fold_developer_messages,
)
from router.tokens.prompt import ChatPrompt, CompletionPrompt, Prompt, TokenIds, Truncation
from router.tokens.template import ChatTemplate, TemplateRenderError
from router.tokens.tokenizer_files import TokenizerFiles, TokenizerFilesError, read_tokenizer_files


class LocalTokenizer:
    """The tokenizer and templates of one model."""

    def __init__(self, files: TokenizerFiles, now: Callable[[], datetime]) -> None:
        """Compile the templates.

        Raises:
            TokenizerFilesError: a template does not compile.
        """
        self._tokenizer: Tokenizer = files.tokenizer
        self._special_tokens = files.special_tokens
        try:
            self._templates = {name: ChatTemplate(source, now) for name, source in files.templates.items()}
        except TemplateRenderError as error:
            raise TokenizerFilesError(str(error)) from error

    @classmethod
    def load(
        cls, directory: Path, chat_template: Path | None = None, now: Callable[[], datetime] = datetime.now
    ) -> LocalTokenizer:
        """Read a tokenizer directory.

        Raises:
            TokenizerFilesError: a file is missing or does not parse.
        """
        return cls(read_tokenizer_files(directory, chat_template), now)

    def tokenize(self, prompt: Prompt, max_model_len: int | None = None) -> tuple[TokenIds[int], ...]:
        """Token ids of each prompt; O(length of the text).

        Raises:
            TokensUnavailable: the template refuses the conversation, or only the worker can tell.
        """
        if isinstance(prompt, ChatPrompt):
            text = self.render(prompt)
            return (self._encode(text, prompt.add_special_tokens, prompt.truncation, max_model_len),)
        return tuple(self._completion(prompt, item, max_model_len) for item in prompt.prompts)

    def render(self, prompt: ChatPrompt) -> str:
        """The text of a conversation.

        Raises:
            TokensUnavailable: as ``tokenize``.
        """
        if prompt.worker_only is not None:
            raise _unavailable(prompt.worker_only)
        template = self._template(has_tools=prompt.tools is not None)
        try:
            conversation = build_conversation(prompt.messages, template.content_format)
            if not template.knows_developer_role:
                conversation = fold_developer_messages(conversation)
            return template.render(
                conversation,
                tools=build_tools(prompt.tools),
                documents=prompt.documents or prompt.template_kwargs.get("documents"),
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                variables={**self._special_tokens, **prompt.template_kwargs},
            )
        except (ConversationError, TemplateRenderError) as error:
            raise _unavailable(str(error)) from error

    def _template(self, *, has_tools: bool) -> ChatTemplate:
        """``get_chat_template``: of several templates, ``tool_use`` for requests with tools."""
        names = ("tool_use", "default") if has_tools else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise _unavailable("the tokenizer has no chat template")

    def _completion(
        self, prompt: CompletionPrompt, item: str | TokenIds[int], max_model_len: int | None
    ) -> TokenIds[int]:
        if isinstance(item, str):
            return self._encode(item, prompt.add_special_tokens, prompt.truncation, max_model_len)
        return truncate_ids(item, prompt.truncation, max_model_len)

    def _encode(
        self, text: str, add_special_tokens: bool, truncation: Truncation | None, max_model_len: int | None
    ) -> TokenIds[int]:
        try:
            if truncation is None or truncation.side is not None or not add_special_tokens:
                encoding = self._encoding(text, add_special_tokens)
                return truncate_ids(array("I", encoding.ids), truncation, max_model_len)
            encoding = self._encode_truncated(text, kept_tokens(truncation, max_model_len))
            return truncate_ids(array("I", encoding.ids), truncation, max_model_len)
        except (TypeError, UnicodeEncodeError) as error:  # the binding's answer to a lone surrogate
            raise _unavailable("the text holds a lone surrogate") from error

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def _encode_truncated(self, text: str, keep: int) -> Encoding:
        """Truncation inside the tokeniser: the text is cut left so that special tokens still fit."""
        encoding = self._encoding(text, add_special_tokens=False)
        room = keep - self._tokenizer.num_special_tokens_to_add(is_pair=False)
        encoding.truncate(max(0, room), direction="left")
        return self._tokenizer.post_process(encoding, None, True)


def kept_tokens(truncation: Truncation, max_model_len: int | None) -> int:
    """Tokens that ``truncate_prompt_tokens`` keeps (``TokenizeParams.max_truncation_tokens``).

    Raises:
        TokensUnavailable: -1, and the length of the model's context is not known.
    """
    if truncation.keep >= 0:
        return truncation.keep
    if max_model_len is None:
        raise _unavailable("truncation to the model's context, whose length is not known")
    return max(0, max_model_len - 1) if truncation.reserve_output else max_model_len


def truncate_ids(
    ids: TokenIds[int], truncation: Truncation | None, max_model_len: int | None
) -> TokenIds[int]:
    """``TokenizeParams._truncation_slice``: a slice of finished ids, from the left unless told otherwise.

    Raises:
        TokensUnavailable: as ``kept_tokens``.
    """
    if truncation is None:
        return ids
    keep = kept_tokens(truncation, max_model_len)
    if keep >= len(ids):
        return ids
    return ids[:keep] if truncation.side == "right" else ids[len(ids) - keep :]


def _unavailable(detail: str) -> TokensUnavailable:
    return TokensUnavailable(FallbackReason.TOKENIZER_ERROR, detail)
