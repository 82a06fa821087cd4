"""The token ids that vLLM makes of a request, as exactly as they can be had outside of it.

Two ways. `LocalTokenizer` does what vLLM does for models of Hugging Face's kind: the chat template is rendered as
transformers renders it, and the tokenizer's own file is used. `questions` are what to ask an engine instead, which
knows best but takes a round trip. What cannot be had either way (images, audio, embeddings) raises Untokenizable, with
a reason that can be counted.

Checked against vLLM 0.32. Not here: engines started with another chat template than the model's (put it into the folder
as chat_template.jinja) and models whose prompts are not made by a template (gpt-oss, Mistral's own tokenizer).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash
from cachetools import LRUCache

from vllm_adapters.kv_events import token_bytes

if TYPE_CHECKING:
    from jinja2 import Environment, Template, nodes
    from tokenizers import Tokenizer

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
TOKENIZE_PATH, RENDER_SUFFIX = "/tokenize", "/render"


class NoTokens(StrEnum):
    """Why a request's tokens are not known."""

    OTHER_API = "other_api"
    """Its prompt is made in a way we do not follow."""
    NOT_TEXT = "not_text"
    """It has images, audio, or embeddings."""
    OWN_TEMPLATE = "own_template"
    """It brings a chat template of its own."""
    TRUNCATED = "truncated"
    """It lets the engine cut its prompt short."""
    UNREADABLE = "unreadable"
    """Its fields, or the template, are not what vLLM would take."""
    NOT_READY = "not_ready"
    """The tokenizer is not loaded, or no engine answers."""
    FAILED = "failed"
    """A fault of ours."""


class Untokenizable(Exception):
    """The tokens cannot be told."""

    def __init__(self, reason: NoTokens, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class NotInstalled(Exception):
    """A library that this needs is missing."""


class NoTokenizer(Exception):
    """The folder has no tokenizer that can be used."""


_decode = msgspec.json.Decoder(dict[str, Any]).decode


def _fields(body: bytes) -> dict[str, Any]:
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Untokenizable(NoTokens.UNREADABLE, str(error)) from error


# -- what a request asks for, whoever tokenizes it


def first_prompt(fields: Mapping[str, Any]) -> str | list[int]:
    """The prompt of a completion; of several the first, which is the one that decides what is cached."""
    if fields.get("prompt_embeds") is not None:
        raise Untokenizable(NoTokens.NOT_TEXT, "prompt_embeds")
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(type(one) is int for one in prompt)):
        return prompt
    raise Untokenizable(NoTokens.UNREADABLE, "prompt")


def _refuse_special(fields: Mapping[str, Any]) -> None:
    if fields.get("truncate_prompt_tokens") is not None:
        raise Untokenizable(NoTokens.TRUNCATED)
    if fields.get("chat_template") is not None:
        raise Untokenizable(NoTokens.OWN_TEMPLATE)
    transfer = fields.get("kv_transfer_params")
    if isinstance(transfer, dict) and "prompt_token_ids" in transfer:
        raise Untokenizable(NoTokens.OTHER_API, "tokens handed over by another engine")


def _template_arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the chat template gets beside messages and tools; None and "auto" count as not said."""
    own = fields.get("chat_template_kwargs") or {}
    if not isinstance(own, dict) or own.keys() & {"chat_template", "tokenize"}:
        raise Untokenizable(NoTokens.UNREADABLE, "chat_template_kwargs")
    said: dict[str, Any] = {
        "add_generation_prompt": _flag(fields, "add_generation_prompt", default=True),
        "continue_final_message": _flag(fields, "continue_final_message", default=False),
        "documents": fields.get("documents"),
        "reasoning_effort": fields.get("reasoning_effort"),
    }
    if said["reasoning_effort"] is not None and "enable_thinking" not in own:
        said["enable_thinking"] = said["reasoning_effort"] != "none"
    return own | {name: value for name, value in said.items() if value not in (None, "auto")}


def _flag(fields: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise Untokenizable(NoTokens.UNREADABLE, name)
    return value


# -- asking the engine


def questions(path: str, body: bytes) -> Iterator[tuple[str, bytes]]:
    """What to ask an engine for the tokens of a request that has none ready, path and body, best first.

    Raises Untokenizable. The first answers exactly, where it is enabled; the second takes no `documents` but among the
    template's own arguments, which comes to the same.
    """
    fields = _fields(body)
    _refuse_special(fields)
    if path == CHAT_PATH:
        _parts_are_text(fields.get("messages"))
        yield path + RENDER_SUFFIX, body
        yield TOKENIZE_PATH, msgspec.json.encode(_tokenize_chat(fields))
    elif path == COMPLETION_PATH:
        yield TOKENIZE_PATH, msgspec.json.encode(_tokenize_text(fields))
    else:
        raise Untokenizable(NoTokens.OTHER_API, path)


def _tokenize_chat(fields: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: fields[name] for name in ("model", "messages", "tools", "add_special_tokens") if name in fields}
    arguments = _template_arguments(fields)
    flags = {name: arguments.pop(name) for name in ("add_generation_prompt", "continue_final_message")}
    return kept | flags | {"chat_template_kwargs": arguments}


def _tokenize_text(fields: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: fields[name] for name in ("model", "add_special_tokens") if name in fields}
    return kept | {"prompt": first_prompt(fields)}


def ready_tokens(path: str, body: bytes) -> bytes | None:
    """The tokens of a request that gives them itself; else None. Raises Untokenizable."""
    if path != COMPLETION_PATH:
        return None
    fields = _fields(body)
    _refuse_special(fields)
    prompt = first_prompt(fields)
    return None if isinstance(prompt, str) else _packed(prompt)


class _Answer(msgspec.Struct):
    tokens: list[int] | None = None
    token_ids: list[int] | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


def answered_tokens(body: bytes) -> bytes:
    """The tokens in an engine's answer to one of the questions. Raises Untokenizable."""
    try:
        answer = _decode_answer(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Untokenizable(NoTokens.UNREADABLE, str(error)) from error
    tokens = answer.tokens if answer.token_ids is None else answer.token_ids
    if tokens is None:
        raise Untokenizable(NoTokens.UNREADABLE, "the engine's answer has no tokens")
    return _packed(tokens)


def _packed(tokens: Iterable[int]) -> bytes:
    try:
        return token_bytes(list(tokens))
    except (OverflowError, TypeError) as error:
        raise Untokenizable(NoTokens.UNREADABLE, str(error)) from error


# -- messages as a template gets them


_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Parts of a message that are text, and the field it is in."""
_PART_FIELDS = frozenset({"type", "text", "refusal", "thinking", "closed", "name", "uuid", "detail"})
"""Fields of parts that vLLM knows; templates get to see others."""
_BILLING = "x-anthropic-billing-header"
"""How a line begins that some clients put first and change every time; vLLM takes it out."""


def _parts_are_text(messages: object) -> list[dict[str, Any]]:
    """The messages, if they are that and have nothing but text in them."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise Untokenizable(NoTokens.UNREADABLE, "messages")
    for message in messages:
        for part in _parts(message):
            if isinstance(part, dict):
                _part_is_text(part)
    return messages


def _part_is_text(part: Mapping[str, Any]) -> None:
    kind = part.get("type")
    if kind is not None and not isinstance(kind, str):
        raise Untokenizable(NoTokens.UNREADABLE, "the type of a part")
    if kind not in _TEXTS or part.get("uuid") is not None:
        raise Untokenizable(NoTokens.NOT_TEXT, str(kind)[:40])


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    if content is None:
        return []
    return content if isinstance(content, list) else [content]


def conversation(messages: object, *, as_parts: bool) -> list[dict[str, Any]]:
    """Messages as vLLM hands them to a chat template. `as_parts`: the template takes content apart itself."""
    made = [_message(message, as_parts=as_parts) for message in _parts_are_text(messages)]
    for message in made:
        if message.get("tool_calls") is not None:
            message["tool_calls"] = _tool_calls(message["tool_calls"])
        if not message.get("tool_calls"):
            message.pop("tool_calls", None)
    return made


def _message(message: Mapping[str, Any], *, as_parts: bool) -> dict[str, Any]:
    role = message.get("role")
    parts = [part for part in _parts(message) if _text_of(part) is not None]
    if role == "system":
        parts = [part for part in map(_without_billing, parts) if part is not None]
    made: dict[str, Any] = {"role": role}
    if as_parts and role != "tool":
        made["content"] = [_part(part) for part in parts]
    else:
        made["content"] = "\n".join(str(_text_of(part)) for part in parts)
    return made | _extras(role, message)


def _extras(role: object, message: Mapping[str, Any]) -> dict[str, Any]:
    """What else of a message templates see, which depends on its role."""
    said: dict[str, Any] = {}
    if role == "assistant":
        said["tool_calls"] = message.get("tool_calls")
        if (reasoning := message.get("reasoning")) is not None:
            said |= {"reasoning": reasoning, "reasoning_content": reasoning}
    elif role == "tool" and "tool_call_id" in message:
        said["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        said["tools"] = message.get("tools")
    return said | {name: message[name] for name in ("name", "task") if isinstance(message.get(name), str)}


def _text_of(part: object) -> str | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise Untokenizable(NoTokens.UNREADABLE, "content")
    text = part.get(_TEXTS[part["type"]])
    if text is None or isinstance(text, str):
        return text
    raise Untokenizable(NoTokens.UNREADABLE, "content")


def _part(part: str | dict[str, Any]) -> dict[str, Any]:
    made = {"type": "text", "text": _text_of(part)}
    return made if isinstance(part, str) else made | {k: v for k, v in part.items() if k not in _PART_FIELDS}


def _without_billing(part: str | dict[str, Any]) -> str | dict[str, Any] | None:
    text = _text_of(part)
    if text is None or not text.startswith(_BILLING):
        return part
    rest = text.partition("\n")[2]
    if not rest:
        return None
    return rest if isinstance(part, str) else part | {"text": rest}


def _tool_calls(calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise Untokenizable(NoTokens.UNREADABLE, "tool_calls")
    return [_tool_call(call) for call in calls]


def _tool_call(call: object) -> dict[str, Any]:
    """Templates want the arguments as an object, where the API has a string; what is none counts as empty."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise Untokenizable(NoTokens.UNREADABLE, "tool_calls")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
        except RecursionError as error:
            raise Untokenizable(NoTokens.UNREADABLE, "tool_calls are nested too deep") from error
    return call | {"function": function | {"arguments": arguments if isinstance(arguments, dict) else {}}}


def tool_schemas(tools: object) -> list[dict[str, Any]] | None:
    """Tools as vLLM hands them to a template: the fields it knows, in its order, whether given or not."""
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise Untokenizable(NoTokens.UNREADABLE, "tools")
    return [_tool(tool) for tool in tools]


def _tool(tool: object) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict) or "name" not in function:
        raise Untokenizable(NoTokens.UNREADABLE, "tools")
    made = {name: function.get(name) for name in ("name", "description", "parameters")}
    made |= {name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None}
    described = {"type": tool.get("type", "function"), "function": made}
    return described | {name: tool[name] for name in ("defer_loading",) if tool.get(name) is not None}


def _developers_as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that do not know developers: theirs are system messages, and all of those are one, the first."""
    if not any(message["role"] == "developer" for message in messages):
        return messages
    made = [_renamed(message) for message in messages]
    system = [message for message in made if message["role"] == "system"]
    if len(system) == 1 and made[0] is system[0]:
        return made
    texts = [text for text in (_joined(message["content"]) for message in system) if text]
    rest = [message for message in made if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest]


def _renamed(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "developer":
        return message
    return {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}


def _joined(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


# -- the template


def _environment() -> Environment:
    """Jinja as transformers sets it up: sandboxed, since a template is somebody else's program."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class _Generation(Extension):
        """`{% generation %}` marks what an assistant wrote; it changes nothing in the text."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> nodes.Node:  # noqa: ANN401 - jinja2's parser
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def to_json(
        value: object,
        ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - as templates give it
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,  # noqa: FBT001, FBT002 - same
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)  # noqa: DTZ005 - local time, as the engine has it

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = to_json
    made.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return made


def _takes_parts(environment: Environment, source: str) -> bool:
    """Whether a template loops over a message's content, and so wants it as parts and not as one text."""
    import jinja2

    def is_content(node: nodes.Node | None) -> bool:
        while isinstance(node, jinja2.nodes.Filter | jinja2.nodes.Test) or (
            isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Slice)
        ):
            node = node.node
        if isinstance(node, jinja2.nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, jinja2.nodes.Getitem):
            return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
        return isinstance(node, jinja2.nodes.Name) and node.name == "content"

    return any(is_content(loop.iter) for loop in environment.parse(source).find_all(jinja2.nodes.For))


_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """One chat template. `special`: the tokenizer's special tokens by name, which templates use. Thread-safe."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Raise NoTokenizer for a template that cannot be read."""
        import jinja2

        environment = _environment()
        try:
            self._template: Template = environment.from_string(source)
            self.takes_parts = _takes_parts(environment, source)
        except jinja2.TemplateError as error:
            raise NoTokenizer(f"the chat template cannot be read: {error}") from error
        self._special = dict(special)
        self._knows_developers = '"developer"' in source or "'developer'" in source

    def render(self, fields: Mapping[str, Any]) -> str:
        """The text that the engine tokenizes for this chat request. Raises Untokenizable."""
        messages = conversation(fields.get("messages"), as_parts=self.takes_parts)
        if not self._knows_developers:
            messages = _developers_as_system(messages)
        arguments = self._special | {"documents": None, "tools": None} | _template_arguments(fields)
        arguments["tools"] = tool_schemas(fields.get("tools")) or arguments["tools"]
        goes_on = arguments.pop("continue_final_message", False)
        if goes_on:
            arguments["add_generation_prompt"] = False
            _mark(messages)
        try:
            text = _bounded(self._template.generate(messages=messages, **arguments))
        except Exception as error:
            # a template is a program: it may raise anything, and what it raises the client hears from the engine
            raise Untokenizable(NoTokens.UNREADABLE, str(error)[:200]) from error
        return _up_to_mark(text) if goes_on else text


_LONGEST_TEXT = 32 * 1024 * 1024
"""Characters: more than any model's context holds."""


def _bounded(pieces: Iterable[str]) -> str:
    """All of a text; a template may have no end of it."""
    made, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > _LONGEST_TEXT:
            raise Untokenizable(NoTokens.UNREADABLE, "the chat template does not end")
        made.append(piece)
    return "".join(made)


def _mark(messages: list[dict[str, Any]]) -> None:
    content = messages[-1]["content"] if messages else []
    if isinstance(content, str):
        messages[-1]["content"] = content + _MARK
    elif content:
        content[-1]["text"] += _MARK
    else:
        raise Untokenizable(NoTokens.UNREADABLE, "continue_final_message without a message")


def _up_to_mark(text: str) -> str:
    """The text as far as the last message goes; a template that trims messages has trimmed the mark's space too."""
    at = text.rfind(_MARK.strip())
    if at < 0:
        raise Untokenizable(NoTokens.UNREADABLE, "the template drops the last message")
    return text[:at] if text[at:].startswith(_MARK) else text[:at].rstrip()


# -- a tokenizer of our own

_ENTRY_BYTES = 300
"""What an entry of the cache takes beside the tokens: its key, its place in the order, and so on."""


class LocalTokenizer:
    """A model's tokenizer, from the folder that vLLM would load it from. Thread-safe; encoding holds no lock.

    `cached_bytes`: what the tokens of texts that were seen may take.
    """

    def __init__(self, folder: Path, *, cached_bytes: int = 64 * 1024 * 1024) -> None:
        """Raise NotInstalled or NoTokenizer."""
        try:
            import jinja2  # noqa: F401
            from tokenizers import Tokenizer
        except ImportError as error:
            raise NotInstalled(f"{error.name} is missing: pip install '.[vllm]' in a clone") from error
        settings = _json_of(folder / "tokenizer_config.json")
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exceptions
            raise NoTokenizer(f"{folder / 'tokenizer.json'} cannot be used: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        special = _special_tokens(_json_of(folder / "special_tokens_map.json") | settings)
        self._templates = {name: ChatTemplate(text, special) for name, text in _templates(folder, settings).items()}
        self._lock = Lock()
        self.remember(cached_bytes)

    def remember(self, cached_bytes: int) -> None:
        """Begin to remember anew, up to so many bytes."""
        with self._lock:
            self._cache: LRUCache[int, bytes] = LRUCache(cached_bytes, getsizeof=_cached_size)

    def tokens_of(self, path: str, body: bytes) -> bytes:
        """The tokens of a request's prompt. Raises Untokenizable."""
        fields = _fields(body)
        _refuse_special(fields)
        if path == CHAT_PATH:
            text = self._template(fields).render(fields)
            return self._encode(text, special=fields.get("add_special_tokens", False) is True)
        if path != COMPLETION_PATH:
            raise Untokenizable(NoTokens.OTHER_API, path)
        prompt = first_prompt(fields)
        if isinstance(prompt, str):
            return self._encode(prompt, special=fields.get("add_special_tokens", True) is not False)
        return _packed(prompt)

    def _template(self, fields: Mapping[str, Any]) -> ChatTemplate:
        named = "tool_use" if fields.get("tools") is not None and "tool_use" in self._templates else "default"
        template = self._templates.get(named)
        if template is None:
            raise Untokenizable(NoTokens.OTHER_API, "the tokenizer has no chat template")
        return template

    def _encode(self, text: str, *, special: bool) -> bytes:
        try:
            key = xxhash.xxh3_128_intdigest(text.encode()) << 1 | special
        except UnicodeEncodeError as error:
            raise Untokenizable(NoTokens.UNREADABLE, str(error)) from error
        with self._lock:
            known = self._cache.get(key)
        if known is None:
            (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
            known = _packed(encoded.ids)
            with self._lock, suppress(ValueError):  # more than all that may be remembered
                self._cache[key] = known
        return known


def _cached_size(tokens: bytes) -> int:
    return len(tokens) + _ENTRY_BYTES


def _json_of(file: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file. Raises NoTokenizer."""
    if not file.exists():
        return {}
    try:
        return _decode(file.read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NoTokenizer(f"{file} cannot be read: {error}") from error


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by the names that templates use: a text each, or an object that has it as `content`."""
    made = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            made[name] = text
    return made


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. A file of its own counts for more than one in the tokenizer's settings."""
    own = folder / "chat_template.jinja"
    if own.exists():
        return {"default": own.read_text()}
    given = _json_of(folder / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):
        return {
            one["name"]: one["template"]
            for one in given
            if isinstance(one, dict) and {"name", "template"} <= one.keys()
        }
    return {}


__all__ = ["ChatTemplate", "LocalTokenizer", "NoTokenizer", "NoTokens", "NotInstalled", "Untokenizable", "questions"]
