# SPDX-License-Identifier: Apache-2.0
"""Whether a chat template wants a message's content as text or as a list of parts.

vLLM decides it from the template (``--chat-template-content-format auto``,
``vllm/renderers/hf.py: _detect_content_format``): a template that loops over the content of a message
gets the list of parts, every other one gets their texts joined by line breaks. The same decision is
made here from the same syntax tree. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from jinja2 import nodes


class ContentFormat(enum.Enum):
    """How the content of a message reaches the template."""

    STRING = "string"
    PARTS = "openai"


def detect_content_format(template: nodes.Template) -> ContentFormat:
    """The format a parsed template asks for. O(nodes times loops)."""
    messages = _message_names(template)
    if _loops_over_content(template, messages):
        return ContentFormat.PARTS
    return ContentFormat.STRING


def _refers_to(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether ``node`` is ``name`` (or ``name.key``), perhaps sliced, filtered or tested."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is None:
        return _is_variable(node, name)
    if isinstance(node, nodes.Getitem):
        constant = isinstance(node.arg, nodes.Const) and node.arg.value == key
        return constant and _is_variable(node.node, name)
    return isinstance(node, nodes.Getattr) and node.attr == key and _is_variable(node.node, name)


def _is_variable(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _target(node: nodes.Node) -> str | None:
    return node.name if isinstance(node, nodes.Name) else None


def _aliases(root: nodes.Template, name: str) -> list[str]:
    """``name`` and every variable that is set to it or to a part of it, in order of discovery."""
    names = [name]
    for known in names:
        for assignment in root.find_all(nodes.Assign):
            target = _target(assignment.target)
            if target is not None and target not in names and _refers_to(assignment.node, known):
                names.append(target)
    return names


def _message_names(root: nodes.Template) -> list[str]:
    """Loop variables that stand for one message."""
    lists = _aliases(root, "messages")
    return [
        target
        for loop in root.find_all(nodes.For)
        if any(_refers_to(loop.iter, name) for name in lists) and (target := _target(loop.target)) is not None
    ]


def _loops_over_content(root: nodes.Template, messages: list[str]) -> bool:
    macro_loops: set[int] = set()
    content_parameters: dict[int, set[str]] = {}
    for macro in root.find_all(nodes.Macro):
        parameters = _content_parameters(root, macro, messages)
        for loop in macro.find_all(nodes.For):
            macro_loops.add(id(loop))
            if parameters:
                content_parameters[id(loop)] = parameters
    for loop in root.find_all(nodes.For):
        if any(_refers_to(loop.iter, name, "content") for name in messages):
            return True
        name = loop.iter.name if isinstance(loop.iter, nodes.Name) else None
        if name is not None and name in content_parameters.get(id(loop), ()):
            return True
        if name == "content" and id(loop) not in macro_loops:
            return True
    return False


def _content_parameters(root: nodes.Template, macro: nodes.Macro, messages: list[str]) -> set[str]:
    """Parameters of a macro that some call binds to the content of a message."""
    names = [argument.name for argument in macro.args]
    bound: set[str] = set()
    for call in root.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            for name, value in _arguments(names, call):
                if any(_refers_to(value, message, "content") for message in messages):
                    bound.add(name)
    return bound


def _arguments(names: list[str], call: nodes.Call) -> Iterator[tuple[str, nodes.Node]]:
    yield from zip(names, call.args, strict=False)
    for keyword in call.kwargs:
        if isinstance(keyword, nodes.Keyword) and keyword.key in names:
            yield keyword.key, keyword.value
