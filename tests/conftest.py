"""What holds for every test of the project."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# hypothesis would fail an example that takes longer than 200 ms: no test of ours asserts on wall time
settings.register_profile("pointsman", deadline=None)
settings.load_profile("pointsman")


def pytest_itemcollected(item: pytest.Item) -> None:
    """With workers beside each other (`-n`): a file's tests stay together, and so do all over real engines.

    They share what is slow to start. Said as each is collected: once all are, xdist has read its marks.
    """
    of_engines = Path(__file__).with_name("engine") in item.path.parents
    item.add_marker(pytest.mark.xdist_group("engine" if of_engines else str(item.path)))
