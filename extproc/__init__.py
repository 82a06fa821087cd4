"""The front of the house: what Envoy and the operator talk to."""

__version__ = "0.1.0"
