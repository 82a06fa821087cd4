"""A vLLM plugin that pushes the engine's load, as it changes, to any number of subscribers.

Installed alone into vLLM's environment as `pointsman_stat_logger`, so it imports nothing of ours. Inside, and in the
simulator, it is this package. `plugin.py`, `loading.py` and `shutdown.py` know vLLM; the others do not.

    vLLM's main thread: record() -> Accumulator        its own thread: Accumulator -> Publisher -> ZMQ PUB socket

The socket binds and subscribers connect, so that each replica of a router hears everything, and an engine needs not
know who they are. Rejected: pushing to a router's address. It takes a list of all replicas in every engine, kept up to
date, and a dead replica in that list is somebody's buffer that grows.
"""
