"""The one shape of errors, whoever makes them: us for clients, Envoy by our rules, the admin API.

Not here: Anthropic's shape (reply.py).
"""

from __future__ import annotations


def error_object(kind: str, code: str, message: str, param: str | None = None) -> dict[str, dict[str, str | None]]:
    """An error as OpenAI clients parse it; `kind` is its `type`."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
