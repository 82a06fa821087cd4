"""Token ids as vLLM makes them. That they are the same as a real engine's is shown in tests/engine."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from vllm_adapters.tokens import (
    CHAT_PATH,
    COMPLETION_PATH,
    ChatTemplate,
    LocalTokenizer,
    NotInstalled,
    NoTokenizer,
    NoTokens,
    Untokenizable,
    answered_tokens,
    questions,
    ready_tokens,
)

WORDS = ["<s>", "a", "b", "c", "user", "system", "assistant", "[", "]", "?"]
TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}[ {{ m.role }} {{ m.content }} ] {% endfor %}"
    "{% if add_generation_prompt %}?{% endif %}"
)


DEEP = [{"function": {"name": "f", "arguments": '{"a":' * 100_000}}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer that knows ten words, and puts <s> before a text where special tokens are asked for."""
    numbers = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="?"))  # noqa: S106 - not that kind of token
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>"}, "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def _words(tokens: bytes) -> str:
    return " ".join(WORDS[int.from_bytes(tokens[at : at + 4], "little")] for at in range(0, len(tokens), 4))


def _chat(folder: Path, content: Any = "a b", **fields: Any) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
    return _words(LocalTokenizer(folder).tokens_of(CHAT_PATH, json.dumps(body).encode()))


def _completion(folder: Path, prompt: Any, **fields: Any) -> str:
    return _words(LocalTokenizer(folder).tokens_of(COMPLETION_PATH, json.dumps({"prompt": prompt, **fields}).encode()))


def _rendered(template: str, *messages: dict[str, Any], **fields: Any) -> str:
    return ChatTemplate(template, {"eos_token": "</s>"}).render({"messages": list(messages), **fields})


def _reason_of(path: str, body: dict[str, Any], folder: Path) -> NoTokens:
    with pytest.raises(Untokenizable) as raised:
        LocalTokenizer(folder).tokens_of(path, json.dumps(body).encode())
    return raised.value.reason


# -- which tokens


def test_a_chat_is_rendered_and_gets_no_special_tokens_beside_the_templates(folder: Path) -> None:
    """The template puts <s> there itself; the tokenizer's own comes on top only if the request says so."""
    assert _chat(folder) == "<s> [ user a b ] ?"
    assert _chat(folder, add_special_tokens=True) == "<s> <s> [ user a b ] ?"


def test_a_completion_gets_special_tokens_unless_it_declines(folder: Path) -> None:
    """The other way round than a chat."""
    assert _completion(folder, "a b") == "<s> a b"
    assert _completion(folder, "a b", add_special_tokens=False) == "a b"


def test_token_ids_are_taken_as_they_are(folder: Path) -> None:
    """Of several prompts the first counts."""
    assert _completion(folder, [1, 2]) == "a b"
    assert _completion(folder, [[3], [1]]) == "c"
    assert _completion(folder, ["c", "a"]) == "<s> c"


def test_the_same_text_is_encoded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with special tokens once more."""
    tokenizer = LocalTokenizer(folder)
    bodies = [json.dumps({"prompt": "a", "add_special_tokens": special}).encode() for special in (True, False)]
    for body in bodies * 2:
        first = tokenizer.tokens_of(COMPLETION_PATH, body)
    monkeypatch.setattr(tokenizer, "_tokenizer", None)
    assert tokenizer.tokens_of(COMPLETION_PATH, bodies[1]) == first
    assert _words(tokenizer.tokens_of(COMPLETION_PATH, bodies[0])) == "<s> a"


def test_what_is_remembered_is_bounded_in_bytes(folder: Path) -> None:
    """The least recently used goes; a text that is larger than all is encoded each time."""
    tokenizer = LocalTokenizer(folder, cached_bytes=1_000)
    for word, words in (("a", 50), ("b", 50), ("c", 5_000), ("?", 50)):
        body = json.dumps({"prompt": f"{word} " * words, "add_special_tokens": False}).encode()
        assert len(tokenizer.tokens_of(COMPLETION_PATH, body)) == 4 * words
    kept = [_words(tokens)[0] for tokens in tokenizer._cache.values()]
    assert kept == ["b", "?"]
    tokenizer.remember(10_000)
    assert len(tokenizer._cache) == 0


@pytest.mark.parametrize(
    "fields",
    [{"add_generation_prompt": None}, {"messages": [{"role": "user", "content": [{"type": []}]}]}],
)
def test_what_vllm_would_refuse_is_not_asked_for(fields: dict[str, Any]) -> None:
    """With a reason, where an engine is asked for the tokens."""
    body = json.dumps({"messages": []} | fields).encode()
    with pytest.raises(Untokenizable) as raised:
        list(questions(CHAT_PATH, body))
    assert raised.value.reason is NoTokens.UNREADABLE


# -- what a template gets


def test_parts_of_a_message_are_joined_for_templates_that_want_a_text() -> None:
    """By line breaks, refusals and thoughts included; a part without text is left out."""
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}, "c", {"type": "text", "text": None}]
    assert _rendered("{{ messages[0].content }}", {"role": "user", "content": parts}) == "a\nb\nc"
    assert _rendered("{{ messages[0].content }}", {"role": "user", "content": None}) == ""


def test_parts_stay_parts_for_templates_that_loop_over_them() -> None:
    """Even a plain text becomes one then; fields that vLLM does not know come along."""
    loop = "{% for m in messages %}{% for p in m['content'] %}{{ p | tojson }}{% endfor %}{% endfor %}"
    assert _rendered(loop, {"role": "user", "content": "a"}) == '{"type": "text", "text": "a"}'
    part = {"type": "input_text", "text": "a", "cache_control": 1}
    assert _rendered(loop, {"role": "user", "content": [part]}) == '{"type": "text", "text": "a", "cache_control": 1}'


def test_arguments_of_tool_calls_become_objects() -> None:
    """Which templates expect; what is no object counts as an empty one, and no calls at all as none said."""
    show = (
        "{% set calls = messages[0].tool_calls %}"
        "{{ calls | map(attribute='function.arguments') | list | tojson if calls is defined }}"
    )
    calls = [
        {"type": "function", "function": {"name": "f", "arguments": said}} for said in ('{"x": "é"}', "[1]", "{", None)
    ]
    assert _rendered(show, {"role": "assistant", "content": None, "tool_calls": calls}) == '[{"x": "é"}, {}, {}, {}]'
    assert _rendered(show, {"role": "assistant", "tool_calls": []}) == ""


def test_tools_are_shown_with_the_fields_vllm_knows() -> None:
    """In its order, given or not; others are dropped."""
    tool = {"function": {"parameters": {"b": 1, "a": 2}, "name": "f", "x": 1}, "type": "function", "y": 1}
    shown = '[{"type": "function", "function": {"name": "f", "description": null, "parameters": {"b": 1, "a": 2}}}]'
    assert _rendered("{{ tools | tojson }}", {"role": "user", "content": "a"}, tools=[tool]) == shown
    assert _rendered("{{ tools is none }}", {"role": "user", "content": "a"}) == "True"


def test_other_arguments_reach_the_template() -> None:
    """Its own, documents, the effort of reasoning and what follows from that; not what is None or auto."""
    show = (
        "{{ documents | tojson }} {{ x }} {{ reasoning_effort }} {{ enable_thinking }} {{ add_generation_prompt }} "
        "{{ eos_token }}"
    )
    user = {"role": "user", "content": "a"}
    said = {"documents": [{"text": "d"}], "chat_template_kwargs": {"x": 1}, "reasoning_effort": "low"}
    assert _rendered(show, user, **said) == '[{"text": "d"}] 1 low True True </s>'
    said = {"chat_template_kwargs": {"x": 1, "enable_thinking": False}, "reasoning_effort": "low"}
    assert _rendered(show, user, **said, add_generation_prompt=False) == "null 1 low False False </s>"


def test_the_last_message_can_be_gone_on_with() -> None:
    """The prompt ends where it does, whatever the template would put behind it."""
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]
    assert _rendered(template, *messages, continue_final_message=True, add_generation_prompt=False) == "[a][b "
    trims = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    assert _rendered(trims, *messages, continue_final_message=True, add_generation_prompt=False) == "[a][b"


def test_developers_speak_as_the_system_where_the_template_does_not_know_them() -> None:
    """And all that the system says comes first, in one message."""
    show = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "developer")]
    assert _rendered(show, *messages) == "system:s\n\nd;user:u;"
    assert _rendered(show + "{# 'developer' #}", *messages) == "system:s;user:u;developer:d;"


def test_a_line_that_changes_every_time_is_taken_out_of_the_system_message() -> None:
    """As vLLM does, for it would make every prompt a new one."""
    show = "{{ messages[0].content }}"
    told = "x-anthropic-billing-header: cch=1\nbe kind"
    assert _rendered(show, {"role": "system", "content": told}) == "be kind"
    assert _rendered(show, {"role": "user", "content": told}) == told


def test_the_template_may_use_what_transformers_offers() -> None:
    """Loop controls, marks of what an assistant wrote, blocks that eat their line break, JSON without escapes."""
    template = (
        "{% for m in messages %}\n{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ {'a': '<é>'} | tojson }}{% endgeneration %}{% endfor %}"
    )
    user = {"role": "user", "content": "a"}
    assert _rendered(template, user, user) == '{"a": "<é>"}'


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ nothing.at.all }}",
    ],
)
def test_a_template_that_fails_is_no_accident(template: str) -> None:
    """It refuses the request, or would do what a template may not: there are no tokens, for a reason."""
    with pytest.raises(Untokenizable) as raised:
        _rendered(template, {"role": "user", "content": "a"})
    assert raised.value.reason is NoTokens.UNREADABLE


def test_a_template_in_a_file_of_its_own_counts_for_more(folder: Path) -> None:
    """As transformers has it; of named ones `tool_use` is for requests with tools."""
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert _chat(folder) == "a"
    assert _chat(folder, tools=[{"function": {"name": "f"}}]) == "b"
    (folder / "chat_template.jinja").write_text("c")
    assert _chat(folder) == "c"


# -- what cannot be told


UNIQUE = [{"type": "text", "text": "a", "uuid": "1"}]
IMAGE = [{"type": "image_url", "image_url": {"url": "data:"}}]


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (CHAT_PATH, {"messages": [{"role": "user", "content": IMAGE}]}, NoTokens.NOT_TEXT),
        (CHAT_PATH, {"messages": [{"role": "user", "content": UNIQUE}]}, NoTokens.NOT_TEXT),
        (COMPLETION_PATH, {"prompt": "a", "prompt_embeds": "x"}, NoTokens.NOT_TEXT),
        (CHAT_PATH, {"messages": [], "chat_template": "x"}, NoTokens.OWN_TEMPLATE),
        (CHAT_PATH, {"messages": [], "truncate_prompt_tokens": 5}, NoTokens.TRUNCATED),
        (CHAT_PATH, {"messages": [], "kv_transfer_params": {"prompt_token_ids": [1]}}, NoTokens.OTHER_API),
        ("/v1/responses", {"input": "a"}, NoTokens.OTHER_API),
        (CHAT_PATH, {"messages": "a"}, NoTokens.UNREADABLE),
        (CHAT_PATH, {"messages": [{"role": "user", "content": 5}]}, NoTokens.UNREADABLE),
        (CHAT_PATH, {"messages": [], "chat_template_kwargs": {"tokenize": True}}, NoTokens.UNREADABLE),
        (CHAT_PATH, {"messages": [], "tools": [{}]}, NoTokens.UNREADABLE),
        (COMPLETION_PATH, {"prompt": []}, NoTokens.UNREADABLE),
        (COMPLETION_PATH, {"prompt": [-1]}, NoTokens.UNREADABLE),
        (COMPLETION_PATH, {"prompt": "\ud800"}, NoTokens.UNREADABLE),
        (COMPLETION_PATH, {}, NoTokens.UNREADABLE),
        (CHAT_PATH, {"messages": [], "add_generation_prompt": None}, NoTokens.UNREADABLE),
        (CHAT_PATH, {"messages": [], "continue_final_message": "no"}, NoTokens.UNREADABLE),
        (CHAT_PATH, {"messages": [{"role": "user", "content": [{"type": []}]}]}, NoTokens.UNREADABLE),
        (CHAT_PATH, {"messages": [{"role": "assistant", "tool_calls": 5}]}, NoTokens.UNREADABLE),
        (CHAT_PATH, {"messages": [{"role": "assistant", "tool_calls": DEEP}]}, NoTokens.UNREADABLE),
    ],
)  # fmt: skip
def test_what_has_no_tokens_has_a_reason(path: str, body: dict[str, Any], reason: NoTokens, folder: Path) -> None:
    """Which can be counted."""
    assert _reason_of(path, body, folder) is reason


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "function"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["messages", "tools", "prompt", "documents", "chat_template_kwargs", "tool_calls"]), _JSON
    )
)
def test_no_request_raises_anything_else(fields: dict[str, Any]) -> None:
    """Whatever stands in its fields."""
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}{% endfor %}{{ tools }}", {}
    )
    body = json.dumps(fields).encode()
    for attempt in (
        lambda: template.render(fields),
        lambda: list(questions(CHAT_PATH, body)),
        lambda: list(questions(COMPLETION_PATH, body)),
        lambda: ready_tokens(COMPLETION_PATH, body),
    ):
        try:
            attempt()
        except Untokenizable:
            continue


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    """By name of the file."""
    with pytest.raises(NoTokenizer, match=r"tokenizer\.json"):
        LocalTokenizer(tmp_path)


def test_a_missing_library_is_named_with_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come with the extra `vllm`."""
    real = builtins.__import__

    def without_jinja(name: str, *rest: Any) -> Any:
        if name == "jinja2":
            raise ImportError(name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_jinja)
    with pytest.raises(NotInstalled, match=r"jinja2 is missing: pip install '.\[vllm\]' in a clone"):
        LocalTokenizer(folder)


# -- asking the engine


def test_an_engine_is_asked_to_render_and_else_to_tokenize() -> None:
    """The second way takes a template's arguments by their general name."""
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "documents": [{}], "max_tokens": 5}
    (render, as_sent), (tokenize, asked) = questions(CHAT_PATH, json.dumps(body).encode())
    assert (render, json.loads(as_sent)) == ("/v1/chat/completions/render", body)
    assert tokenize == "/tokenize"
    assert json.loads(asked) == {
        "model": "m", "messages": body["messages"], "add_generation_prompt": True, "continue_final_message": False,
        "chat_template_kwargs": {"documents": [{}]},
    }  # fmt: skip


def test_a_completion_is_tokenized_by_its_first_prompt() -> None:
    """Token ids need no asking."""
    body = json.dumps({"model": "m", "prompt": ["a", "b"], "add_special_tokens": False}).encode()
    ((path, asked),) = questions(COMPLETION_PATH, body)
    assert (path, json.loads(asked)) == ("/tokenize", {"model": "m", "prompt": "a", "add_special_tokens": False})
    assert ready_tokens(COMPLETION_PATH, body) is None
    assert ready_tokens(COMPLETION_PATH, b'{"prompt": [1, 2]}') == b"\1\0\0\0\2\0\0\0"


def test_an_image_is_no_question_to_an_engine() -> None:
    """Its placeholders would look like those of any other image."""
    with pytest.raises(Untokenizable):
        list(questions(CHAT_PATH, json.dumps({"messages": [{"role": "user", "content": IMAGE}]}).encode()))


def test_an_engines_answer_is_read_either_way() -> None:
    """`token_ids` of what it renders, `tokens` of what it tokenizes; anything else is none."""
    assert answered_tokens(b'{"token_ids": [1], "x": 1}') == answered_tokens(b'{"tokens": [1], "count": 1}')
    for bad in (b"", b"{}", b'{"tokens": [-1]}', b'{"tokens": ["a"]}'):
        with pytest.raises(Untokenizable):
            answered_tokens(bad)


def test_a_template_that_has_no_end_of_text_is_ended() -> None:
    """Before it fills the memory."""
    long = "{% for number in range(40_000) %}" + "x" * 1_000 + "{% endfor %}"
    with pytest.raises(Untokenizable, match="does not end"):
        ChatTemplate(long, {}).render({"messages": []})
