"""Comparisons that need more than the package: real engines, minutes of time. `make bench-...` runs them."""
