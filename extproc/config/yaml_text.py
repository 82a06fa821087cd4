"""YAML text to plain data, for files that operators write: safe, fast, and strict about keys given twice."""

from __future__ import annotations

from typing import Any

import yaml

_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The C loader is ten times as fast, where PyYAML was built with libyaml."""


class BadYaml(Exception):
    """The text is not YAML, or not YAML that means one thing. `line`: where, counted from 1, if that is known."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line


class _Loader(_SafeLoader):  # type: ignore[misc,valid-type] # one of two classes, known only at run time
    """Refuses a mapping with a key given twice: YAML would keep the last and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - PyYAML's
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key in seen:
                line = key_node.start_mark.line + 1
                raise BadYaml(f"line {line}: {key!r} is given twice", line)
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def parse_yaml(text: str) -> Any:  # noqa: ANN401 - YAML can hold anything
    """The document in `text`. Raises BadYaml."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a safe loader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: a date that is none, a number of thousands of digits
        mark = getattr(error, "problem_mark", None)
        raise BadYaml(str(error), None if mark is None else mark.line + 1) from error
