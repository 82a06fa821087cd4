"""What holds for every test of the project."""

from __future__ import annotations

from hypothesis import settings

# hypothesis would fail an example that takes longer than 200 ms: no test of ours asserts on wall time
settings.register_profile("pointsman", deadline=None)
settings.load_profile("pointsman")
