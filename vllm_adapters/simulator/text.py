"""The toy tokenizer and the toy language: what a request's text is, its blocks' hashes, and what is answered.

Four bytes of UTF-8 are one token, whatever they say. A chat is rendered to text as a chat template would, so that
the next turn of a conversation starts with the very bytes of this prompt and this answer, and a prefix cache hits
on both. Not a model of any real tokenizer's counts: a router that estimates tokens must not be tuned on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128_digest

TOKEN_BYTES = 4
IMAGE_TOKENS = 256  # any image, about what a vision model makes of a 448 x 448 one

_DIGEST_BYTES = 16  # of xxh3_128
_CONSONANTS = "bdfgklmn"
_WORDS = tuple(f"{a}{b}{c} ".encode() for a in _CONSONANTS for b in "aeio" for c in _CONSONANTS)  # one per byte value


class Function(msgspec.Struct):
    """Name and arguments (JSON in a string) of a tool call."""

    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct):
    """A tool call in an assistant's message."""

    function: Function


class Message(msgspec.Struct):
    """The parts of a chat message that make it to the prompt."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[ToolCall] | None = None


def render_chat(messages: Iterable[Message], tools_json: bytes = b"") -> bytes:
    """The prompt: raw tools first, then role and content of each message, then the assistant's header."""
    parts = [tools_json]
    for message in messages:
        parts.append(_header(message.role))
        parts.extend(_content(message))
    parts.append(_header("assistant"))
    return b"".join(parts)


def _header(role: str) -> bytes:
    return f"<|{role}|>".encode()


def _content(message: Message) -> Iterator[bytes]:
    if isinstance(message.content, str):
        yield message.content.encode()
    for part in message.content if isinstance(message.content, list) else ():
        yield _part(part)
    for call in message.tool_calls or ():
        yield render_call(call.function.name, call.function.arguments)


def _part(part: dict[str, Any]) -> bytes:
    if part.get("type") == "text":
        return str(part.get("text", "")).encode()
    digest = bytes(xxh3_128_digest(msgspec.json.encode(part)))
    return digest * (IMAGE_TOKENS * TOKEN_BYTES // _DIGEST_BYTES)


def render_call(name: str, arguments: str) -> bytes:
    """A tool call as the text a model generates for it, and finds in the prompt of the next turn."""
    return f"{name}{arguments}".encode()


def render_token_ids(token_ids: Iterable[int]) -> bytes:
    """A prompt given as token ids: each takes the four bytes of a token."""
    return b"".join((token_id & 0xFFFFFFFF).to_bytes(TOKEN_BYTES, "little") for token_id in token_ids)


def count_tokens(text: bytes) -> int:
    """Tokens of `text`; the last one may be short."""
    return -(-len(text) // TOKEN_BYTES)


def chain_seed(model: str, cache_salt: str | None) -> int:
    """Where the chain of block hashes starts: other models and other salts share nothing."""
    return int(xxh3_64_intdigest(f"{model}\0{cache_salt or ''}".encode()))


def block_hashes(text: bytes, seed: int, block_size_tokens: int) -> list[int]:
    """One hash per full block; each covers the text from the start to the end of its block."""
    size_bytes = block_size_tokens * TOKEN_BYTES
    hashes: list[int] = []
    for start in range(0, len(text) - size_bytes + 1, size_bytes):
        seed = xxh3_64_intdigest(text[start : start + size_bytes], seed=seed)
        hashes.append(seed)
    return hashes


def answer(prompt: bytes, seed: int, tokens: int) -> bytes:
    """The answer to `prompt`: `tokens` ASCII words of four bytes, the same whenever and wherever it is asked."""
    start = xxh3_64_intdigest(prompt, seed=seed)
    indices = b"".join(
        xxh3_128_digest(position.to_bytes(4, "little"), seed=start) for position in range(-(-tokens // _DIGEST_BYTES))
    )
    return b"".join([_WORDS[index] for index in indices[:tokens]])
