"""What holds for every test of the project."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

# hypothesis would fail an example that takes longer than 200 ms: no test of ours asserts on wall time
settings.register_profile("pointsman", deadline=None)
settings.load_profile("pointsman")

TOGETHER = (
    ("tests/engine/",),  # real engines need both cores
    ("tests/envoy/test_demo.py", "tests/envoy/test_replay.py"),  # both look for free ports from the same one on
)
"""What one worker runs, one after the other."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """With `-n`: a file's tests share what they start, so they stay in one worker.

    Not xdist's own `--dist loadgroup`, which needs a mark on every test and puts it into every name shown.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((files[0] for files in TOGETHER if file.startswith(files)), file)

    return ByFile(config, log)


@pytest.fixture(autouse=True)
def _the_collector_as_it_was() -> Iterator[None]:
    """An App has it wait, for as long as the process lives; here that would be for thousands of tests."""
    before = gc.get_threshold()
    yield
    if gc.get_threshold() != before:
        gc.set_threshold(*before)
        gc.unfreeze()
