"""The one YAML file an operator writes, and the immutable generations made from it."""
