"""The front of the house: what Envoy and the operator talk to."""

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec

__version__ = "0.1.0"


def is_compiled() -> bool:
    """Whether the modules that every request passes are compiled (hatch_build.py); imports none of them."""
    spec = find_spec("policies.types")
    return spec is not None and str(spec.origin).endswith(tuple(EXTENSION_SUFFIXES))
