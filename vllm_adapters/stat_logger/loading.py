"""Says that a server loads, long before it answers: a `vllm.general_plugins` entry point.

vLLM's API port listens only once everything is ready, so whoever knew the server before it was started anew hears here
that it is on its way. vLLM calls this in every process; only an API server that is alone is meant. Where it cannot be
told that it is one, nothing is lost but the word "loading".
"""

from __future__ import annotations

import multiprocessing
import sys

from .publisher import running_publisher
from .settings import log

_SERVERS = ("vllm.entrypoints.launchers.api_server", "vllm.entrypoints.openai.api_server")
_SEVERAL = ("--api-server-count", "-asc", "--data-parallel", "-dp", "--headless")
"""With these the first process may serve nothing itself."""
DEFAULT_SERVER_PORT = 8000


def announce() -> None:
    """Publish from now on, if this process is a server."""
    try:
        if is_only_server(sys.argv) and (publisher := running_publisher()) is not None:
            publisher.accumulator.server_port = server_port(sys.argv)
    except Exception:  # noqa: BLE001 - whatever it is, a server goes before its figures
        log.warning("no stats are pushed while loading", exc_info=True)


def is_only_server(arguments: list[str]) -> bool:
    """This process is an API server, and the only one of its engines."""
    if multiprocessing.current_process().name != "MainProcess":
        return False
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    serves = "serve" in arguments[1:2] or (spec is not None and spec.name.startswith(_SERVERS))
    return serves and not any(argument.startswith(_SEVERAL) for argument in arguments)


def server_port(arguments: list[str]) -> int:
    """Where the API listens, by its command line."""
    for position, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        text = value or "".join(arguments[position + 1 : position + 2])
        if name == "--port" and text.isdigit():
            return int(text)
    return DEFAULT_SERVER_PORT
