"""YAML that operators write: what means nothing, or two things, is refused in words."""

from __future__ import annotations

import pytest

from extproc.config.yaml_text import BadYaml, parse_yaml


def test_a_document_is_plain_data() -> None:
    """Mappings, lists, numbers, text."""
    assert parse_yaml("a: [1, x]\nb: {c: 2.5}") == {"a": [1, "x"], "b": {"c": 2.5}}


def test_a_key_given_twice_is_refused_with_its_line() -> None:
    """YAML would keep the last one and say nothing."""
    with pytest.raises(BadYaml, match="line 2: 'pools' is given twice"):
        parse_yaml("pools: [1]\npools: [2]\n")


@pytest.mark.parametrize("text", ["a: 2024-99-99", "[" * 3_000, "a: " + "9" * 5_000, "a: [", "!!python/object:os.x {}"])
def test_whatever_cannot_be_read_is_bad_yaml(text: str) -> None:
    """A date that is none, endless nesting, a number of thousands of digits, a cut list, a foreign tag."""
    with pytest.raises(BadYaml):
        parse_yaml(text)
