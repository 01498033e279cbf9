# SPDX-License-Identifier: Apache-2.0
"""YAML as configuration files mean it: ``1e9`` is a number, a key that stands twice is an error.

PyYAML follows YAML 1.1, where ``1e9`` is text and the last of two equal keys wins silently.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from router.errors import ConfigError


def load_yaml(text: str) -> Any:
    """The document as plain values.

    Raises:
        yaml.YAMLError: no YAML, or a key that stands twice.
    """
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - the loader is a safe one


def check_keys(node: object, path: str) -> None:
    """YAML allows keys that are numbers or lists; a configuration has names.

    Raises:
        ConfigError: names the mapping with such a key.
    """
    if isinstance(node, dict):
        for key, child in node.items():
            if not isinstance(key, str):
                raise ConfigError(path or "(file)", key, "keys that are names")
            check_keys(child, f"{path}.{key}" if path else key)
    elif isinstance(node, list):
        for position, child in enumerate(node):
            check_keys(child, f"{path}[{position}]")


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise yaml.constructor.ConstructorError(problem=f"{repeated} stands there twice")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)
