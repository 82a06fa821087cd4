"""How to install what a command needs beyond the bare package: pyproject's extras.

From a clone only: the package is on no index.
"""

from __future__ import annotations


def how_to_install(*extras: str) -> str:
    """The command, for a message that says what is missing."""
    return f"pip install '.[{','.join(extras)}]' in a clone"
