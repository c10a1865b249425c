"""Plain YAML: recipes are read and written with two rules that PyYAML lacks: `1e-4` is a number, a key comes once.

Owns the loader and the dumper; promises that what the dumper writes the loader reads back as the same.
`train.recipe` reads with it, `train.schema` writes.
"""

from __future__ import annotations

import re
from typing import Any

import yaml


class PlainLoader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, except that `1e-4` is a number and a key may not come twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(None, None, f"key {key.value!r} appears twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class PlainDumper(yaml.SafeDumper):
    """Quotes every string that `PlainLoader` would read as something else."""


for _yaml in (PlainLoader, PlainDumper):
    _yaml.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )
