# SPDX-License-Identifier: Apache-2.0
"""Reads struct annotations: the type at a dotted key, msgspec's errors as ours, the reference table.

Knows msgspec structs whose fields are plain types, ``Annotated`` with :class:`msgspec.Meta`, optional
types, literals, mappings, nested structs and tuples of structs. Pure.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from router.config_tenants import shown
from router.errors import ConfigError


class ReferenceRow(typing.NamedTuple):
    """One line of the configuration reference."""

    key: str
    type: str
    default: str
    doc: str


def reference_table(root: type[Struct]) -> list[ReferenceRow]:
    """Every key, in the order of the structs; entries of a list appear as ``section.key[].field``."""
    return list(_reference(root, ""))


def render_reference(rows: Sequence[ReferenceRow]) -> str:
    """The reference as a Markdown table."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{r.key}` | {r.type} | `{r.default}` | {r.doc} |".replace("| `` |", "| |") for r in rows]
    return "\n".join(lines) + "\n"


def annotation_at(root: type[Struct], path: Sequence[str]) -> Any:
    """The annotation of a dotted key; None when there is none."""
    annotation: Any = root
    for key in path:
        plain = _strip(annotation)
        if isinstance(plain, type) and issubclass(plain, Struct):
            annotation = _hints(plain).get(key)
            if annotation is None:
                return None
        elif typing.get_origin(plain) is dict:
            annotation = typing.get_args(plain)[1]
        else:
            return None
    return annotation


def _hints(struct: type[Struct]) -> dict[str, Any]:
    return typing.get_type_hints(struct, include_extras=True)


def _strip(annotation: Any) -> Any:
    while typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    return annotation


def plain_types(annotation: Any) -> set[Any]:
    plain = _strip(annotation)
    if typing.get_origin(plain) in {typing.Union, types.UnionType}:
        return {kind for part in typing.get_args(plain) for kind in plain_types(part)}
    return {plain}


_ERROR_PATH = re.compile(r"(?s)^(?P<text>.*?)(?: - at `(?P<path>\$[^`]*)`)?$")
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")


def config_error(
    error: msgspec.ValidationError, root: type[Struct], values: Mapping[str, Any], prefix: str = ""
) -> ConfigError:
    """The message of msgspec with its ``$.a.b[0]`` path as our error."""
    match = _ERROR_PATH.match(str(error))
    text = match["text"] if match else str(error)
    path = (match["path"] if match else None) or "$"
    keys: list[str | int] = [
        int(index) if index else name for name, index in re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", path)
    ]
    accepted = text[0].lower() + text[1:] if text else "another value"
    if unknown := _UNKNOWN.search(text):
        accepted = f"one of {', '.join(_fields_at(root, keys))}"
        keys.append(unknown["name"])
    elif missing := _MISSING.search(text):
        accepted = "a value; the field is required"
        keys.append(missing["name"])
    elif text.startswith("Invalid enum value") and (words := _words_at(root, keys)):
        accepted = f"one of {', '.join(words)}"
    dotted = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    value = shown(keys, _value_at(values, keys))
    return ConfigError((prefix + dotted).lstrip(".") or "(file)", value, accepted)


def _value_at(values: object, keys: Sequence[str | int]) -> object:
    for key in keys:
        if isinstance(key, int) and isinstance(values, (list, tuple)) and key < len(values):
            values = values[key]
        elif isinstance(values, Mapping):
            values = values.get(key)
        else:
            return None
    return values


def _fields_at(struct: type[Struct], keys: Sequence[str | int]) -> Sequence[str]:
    for key in keys:
        if isinstance(key, str):
            child = _struct_of(_hints(struct).get(key))
            if child is not None:
                struct = child
    return struct.__struct_fields__


def _words_at(struct: type[Struct], keys: Sequence[str | int]) -> Sequence[str]:
    """The closed set of words that the field at ``keys`` takes; empty if it is of another kind."""
    names = [key for key in keys if isinstance(key, str)]
    for name in names[:-1]:
        struct = _struct_of(_hints(struct).get(name)) or struct
    annotation = _strip(_hints(struct).get(names[-1])) if names else None
    return typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()


def _struct_of(annotation: Any) -> type[Struct] | None:
    plain = _strip(annotation)
    if typing.get_origin(plain) is tuple:
        plain = _strip(typing.get_args(plain)[0])
    return plain if isinstance(plain, type) and issubclass(plain, Struct) else None


def _reference(struct: type[Struct], prefix: str) -> Iterator[ReferenceRow]:
    hints = _hints(struct)
    for field in msgspec.structs.fields(struct):
        annotation = hints[field.name]
        key = prefix + field.name
        child = _struct_of(annotation)
        is_list = typing.get_origin(_strip(annotation)) is tuple
        if child is not None and not is_list:
            yield from _reference(child, f"{key}.")
            continue
        default_value = "" if field.required else _default_text(field)
        yield ReferenceRow(key, _type_text(annotation), default_value, _doc(annotation))
        if child is not None:
            yield from _reference(child, f"{key}[].")


def _default_text(field: msgspec.structs.FieldInfo) -> str:
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return msgspec.json.encode(value).decode()


def _doc(annotation: Any) -> str:
    for extra in reversed(getattr(annotation, "__metadata__", ())):
        if isinstance(extra, Meta) and extra.description:
            return extra.description
    return ""


def _type_text(annotation: Any) -> str:
    plain = _strip(annotation)
    origin = typing.get_origin(plain)
    arguments = typing.get_args(plain)
    if origin in {typing.Union, types.UnionType}:
        return " or ".join(_type_text(part) for part in arguments if part is not type(None))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return "list"
    if origin is dict:
        return f"mapping to {_type_text(arguments[1])}"
    return {str: "text", int: "integer", float: "number", bool: "true or false"}.get(plain, str(plain))
