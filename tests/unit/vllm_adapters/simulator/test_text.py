from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_adapters.simulator.text import (
    IMAGE_TOKENS,
    Function,
    Message,
    ToolCall,
    answer,
    block_hashes,
    chain_seed,
    count_tokens,
    render_call,
    render_chat,
    render_token_ids,
)


def user(text: str) -> Message:
    """A user's message."""
    return Message("user", text)


@given(st.text(max_size=200), st.text(max_size=200), st.integers(1, 60))
def test_the_next_turn_starts_with_this_prompt_and_its_answer(first: str, second: str, tokens: int) -> None:
    """Rendered text only grows in a conversation, so prompt and generated blocks are hits in the next turn."""
    prompt = render_chat([user(first)])
    said = answer(prompt, 1, tokens)
    following = render_chat([user(first), Message("assistant", said.decode()), user(second)])
    assert following.startswith(prompt + said)


def test_a_tool_call_is_found_again_in_the_next_turn() -> None:
    """The text of a generated call is the text of the same call in the history."""
    prompt = render_chat([user("weather?")], b'[{"x":1}]')
    history = [user("weather?"), Message("assistant", None, [ToolCall(Function("get", '{"a":1}'))]), user("ok")]
    assert render_chat(history, b'[{"x":1}]').startswith(prompt + render_call("get", '{"a":1}'))


@given(st.binary(max_size=64), st.integers(1, 100))
def test_answers_are_deterministic_ascii_words_of_one_token(prompt: bytes, tokens: int) -> None:
    """Four bytes per token: three letters and a space; a longer answer starts with the shorter one."""
    text = answer(prompt, 7, tokens)
    assert len(text) == 4 * tokens
    assert all(len(word) == 3 and word.isalpha() for word in text.decode("ascii").split())
    assert answer(prompt, 7, tokens + 40).startswith(text)


def test_answers_differ_with_the_prompt() -> None:
    """Another prompt, another answer."""
    assert answer(b"a", 0, 20) != answer(b"b", 0, 20)


def test_a_block_is_named_by_everything_before_it() -> None:
    """Equal starts have equal hashes; after a difference no hash is equal, whatever follows."""
    one, other = b"a" * 64 + b"b" * 64 + b"c" * 64, b"a" * 64 + b"X" * 64 + b"c" * 64
    first, second = block_hashes(one, 0, 16), block_hashes(other, 0, 16)
    assert len(first) == 3
    assert first[0] == second[0]
    assert not set(first[1:]) & set(second[1:])


def test_only_full_blocks_have_a_hash() -> None:
    """The rest of a text that fills no block has none."""
    assert len(block_hashes(b"a" * 127, 0, 16)) == 1
    assert block_hashes(b"a" * 63, 0, 16) == []


def test_models_and_salts_share_nothing() -> None:
    """The seed of a chain differs with the model and with the salt."""
    seeds = {chain_seed(model, salt) for model in ("a", "b") for salt in (None, "x", "y")}
    assert len(seeds) == 6


def test_four_bytes_are_a_token() -> None:
    """Bytes of UTF-8 count, and a short rest is a token."""
    assert [count_tokens(text.encode()) for text in ("", "a", "abcd", "abcde", "äöü")] == [0, 1, 1, 2, 2]
    assert count_tokens(render_token_ids([1, 2, 70_000])) == 3


def test_an_image_costs_a_fixed_number_of_tokens_and_is_known_by_its_content() -> None:
    """A data URL is not a million tokens; the same image gives the same text."""

    def render(url: str) -> bytes:
        part = {"type": "image_url", "image_url": {"url": url}}
        return render_chat([Message("user", [{"type": "text", "text": "what?"}, part])])

    short, long = render("http://a/x.png"), render("data:image/png;base64," + "A" * 10_000)
    assert len(short) == len(long) == len(render_chat([user("what?")])) + 4 * IMAGE_TOKENS
    assert short != long
    assert short == render("http://a/x.png")


def test_text_parts_are_the_same_as_a_string() -> None:
    """A list of text parts renders to their concatenation."""
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    assert render_chat([Message("user", parts)]) == render_chat([user("abcd")])
