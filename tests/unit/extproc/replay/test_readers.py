"""Traces from files: what is taken from each form, how it is recognised, and what is said of lines that are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from extproc.replay.formats import conversations, servegen
from extproc.replay.formats.lines import BadTrace
from extproc.replay.readers import FORMS, read, recognise
from extproc.request.apis import by_path
from extproc.request.parsing import Parsed, parse_body, to_request
from extproc.request.tokens import TokenRates


def _lines(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def _mooncake(tmp_path: Path) -> Path:
    return _lines(
        tmp_path / "talk.jsonl",
        [
            {"timestamp": 0, "input_length": 1024, "output_length": 600, "hash_ids": [1, 2]},
            {"timestamp": 500, "input_length": 513, "output_length": 10, "hash_ids": [1, 9]},
            {"timestamp": 3000, "input_length": 2600, "output_length": 10, "hash_ids": [1, 2, 3, 4, 5, 6]},
        ],
    )


def _weka(tmp_path: Path) -> Path:
    folder = tmp_path / "agent"
    folder.mkdir()
    for number in (1, 2):
        asked = [
            {"in": 768, "out": 20, "hash_ids": list(range(12)), "think_time": 0.0},
            {"in": 1024, "out": 20, "hash_ids": list(range(16)), "think_time": 999.0},
        ]
        session = {"block_size": 64, "tool_tokens": 200, "system_tokens": 56, "requests": asked}
        (folder / f"trace_{number}.json").write_text(json.dumps(session), encoding="utf-8")
    return folder


def _azure(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n",
        encoding="utf-8",
    )
    return path


def _servegen(tmp_path: Path) -> Path:
    folder = tmp_path / "clients"
    folder.mkdir()
    (folder / "chunk-0-trace.csv").write_text(
        "0,0,0,,0,0\n600,2.0,1.5,Gamma,0.5,1.0\n1200,1.0,2.0,Weibull,0.6,1.0\n", encoding="utf-8"
    )
    lengths = {"0": {"input_tokens": "{100: 0.5, 200: 0.5}", "output_tokens": "{7: 1.0}"}}
    (folder / "chunk-0-dataset.json").write_text(json.dumps(lengths), encoding="utf-8")
    return folder


def _openai(tmp_path: Path) -> Path:
    system = {"role": "system", "content": "You are a patient assistant. " * 20}
    return _lines(
        tmp_path / "log.jsonl",
        [
            {"timestamp": 5000, "model": "m", "messages": [system, {"role": "user", "content": "hello"}]},
            {
                "timestamp": 2000,
                "session_id": "s1",
                "output_length": 33,
                "body": {"model": "m", "max_tokens": 5, "messages": [system, {"role": "user", "content": "again"}]},
            },
        ],
    )


def _profile(tmp_path: Path, *, turns: bool = False) -> Path:
    path = tmp_path / "profile.yaml.in"
    path.write_text(
        "load: {type: poisson}\nserver: {model_name: REPLACE_ENV_MODEL}\n"
        "data:\n  type: shared_prefix\n  shared_prefix:\n    num_groups: 3\n    num_prompts_per_group: 2\n"
        "    system_prompt_len: 1280\n    question_len: 200\n    output_len: 50\n"
        f"    enable_multi_turn_chat: {'true' if turns else 'false'}\n",
        encoding="utf-8",
    )
    return path


_EXAMPLES: dict[str, Callable[[Path], Path]] = {
    "mooncake": _mooncake,
    "weka": _weka,
    "azure": _azure,
    "servegen": _servegen,
    "openai": _openai,
    "shared-prefix": _profile,
}


def test_every_form_has_an_example_here() -> None:
    """So that the tests below are of all of them."""
    assert {*_EXAMPLES, "generated"} == set(FORMS)


@pytest.mark.parametrize("form", _EXAMPLES)
def test_a_form_is_recognised_by_what_is_in_it(form: str, tmp_path: Path) -> None:
    """And reads the same when it is named; twice the same in either case."""
    path = _EXAMPLES[form](tmp_path)
    assert recognise(path) == form
    assert read(str(path)).digest == read(str(path), form).digest


@pytest.mark.parametrize("form", _EXAMPLES)
def test_every_request_can_run(form: str, tmp_path: Path) -> None:
    """Blocks are those of prompt and answer, whole ones only, and follow what they claim to follow."""
    trace = read(str(_EXAMPLES[form](tmp_path)))
    assert trace.requests
    for number, request in enumerate(trace.requests):
        assert request.prompt_tokens >= 1 <= request.output_tokens
        assert request.prompt_blocks <= request.prompt_tokens // trace.block_tokens
        assert len(request.blocks) == (request.prompt_tokens + request.output_tokens) // trace.block_tokens
        assert request.after is None or request.after < number


def test_mooncake_conversations_are_found_again(tmp_path: Path) -> None:
    """The third request continues the first: one session, and its third block was the first one's answer."""
    first, other, third = read(str(_mooncake(tmp_path))).requests
    assert first.session == third.session
    assert first.session != other.session
    assert first.blocks[:3] == third.blocks[:3]
    assert first.blocks[0] == other.blocks[0]
    assert other.prompt_blocks == 1
    assert third.arrives_s == 3.0


def test_weka_sessions_wait_for_their_answers(tmp_path: Path) -> None:
    """Think times are capped; sessions share the tools' and system prompt and nothing else."""
    trace = read(str(_weka(tmp_path)))
    assert trace.closed
    assert trace.block_tokens == 256
    assert [request.after for request in trace.requests] == [None, 0, None, 2]
    assert trace.requests[1].think_s == 300.0
    one, two = trace.requests[0].blocks, trace.requests[2].blocks
    assert one[0] == two[0]
    assert one[1] != two[1]
    assert trace.requests[1].blocks[:3] == one[:3]


def test_azure_rows_share_nothing(tmp_path: Path) -> None:
    """The trace tells lengths and times only."""
    trace = read(str(_azure(tmp_path)))
    assert [(r.prompt_tokens, r.output_tokens) for r in trace.requests] == [(374, 44), (396, 109)]
    assert trace.requests[1].arrives_s == pytest.approx(4.314579)
    assert trace.ideal_hit_rate() == 0.0


def test_servegen_clients_arrive_at_their_rate(tmp_path: Path) -> None:
    """From the busiest window on: two per second until it ends, one per second in the next."""
    folder = _servegen(tmp_path)
    trace = servegen.read(folder, 10_000)
    busiest = [request for request in trace.requests if request.arrives_s < 600]
    assert 900 < len(busiest) < 1500
    assert {request.output_tokens for request in trace.requests} == {7}
    assert {request.prompt_tokens for request in trace.requests} == {100, 200}


def test_a_recorded_body_is_seen_as_the_router_would_see_it(tmp_path: Path) -> None:
    """The same blocks and token counts as the request path makes of the bytes; the engine's blocks are its own."""
    path = _openai(tmp_path)
    earlier, later = read(str(path)).requests
    line = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    api = by_path("/v1/chat/completions")
    assert api is not None
    parsed = parse_body(api, json.dumps(line).encode())
    assert isinstance(parsed, Parsed)
    asked = to_request(parsed, "m", TokenRates())
    assert (later.asked_blocks, later.prompt_tokens) == (asked.block_hashes, asked.input_tokens)
    assert (earlier.arrives_s, earlier.output_tokens, earlier.session) == (0.0, 33, "s1")
    assert (later.arrives_s, later.output_tokens) == (3.0, 256)
    shared = sum(a == b for a, b in zip(earlier.blocks, later.blocks, strict=False))
    assert shared >= 500 // 64


def test_a_profile_makes_users_who_share_their_groups_prefix(tmp_path: Path) -> None:
    """As many prefixes as groups; the number of requests is the caller's choice."""
    trace = read(str(_profile(tmp_path)), requests=200)
    assert len(trace.requests) == 200
    assert len({tuple(request.blocks[:10]) for request in trace.requests}) == 3
    assert {request.prompt_tokens for request in trace.requests} == {1480}


def test_a_profile_of_several_turns_lets_contexts_grow(tmp_path: Path) -> None:
    """Each question of a user comes after what was said before."""
    trace = read(str(_profile(tmp_path, turns=True)), requests=60)
    last = {request.session: request for request in trace.requests}
    assert all(request.prompt_tokens > 1480 for request in last.values())
    assert trace.ideal_hit_rate() > 0.8


def test_the_generated_trace_is_the_same_everywhere() -> None:
    """Seeded, sorted; sessions that grow, system prompts that many share, some long documents."""
    trace = read("generated", requests=400)
    assert trace.digest == conversations.generate(400).digest != conversations.generate(400, seed=2).digest
    arrivals = [request.arrives_s for request in trace.requests]
    assert arrivals == sorted(arrivals)
    assert 0.6 < trace.ideal_hit_rate() < 0.95
    assert max(request.prompt_tokens for request in trace.requests) > 20_000


@pytest.mark.parametrize(
    ("form", "line", "says"),
    [
        ("mooncake", '{"timestamp": 1}', "line 2: input_length is missing, not a number"),
        ("mooncake", '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": "x"}', "line 2: hash_ids is"),
        ("mooncake", '{"timestamp": -1, "input_length": 5, "output_length": 1, "hash_ids": []}', "timestamp is -1"),
        ("mooncake", "{", "line 2: not JSON"),
        ("mooncake", "[]", "line 2: expected an object, found list"),
        ("openai", '{"timestamp": 1, "messages": []', "line 2"),
        ("openai", '{"timestamp": 1, "body": {"model": "m"}}', "line 2: you must provide messages"),
        ("openai", '{"messages": [1]}', "line 2: timestamp is missing"),
    ],
)
def test_a_bad_line_is_named_by_its_number(form: str, line: str, says: str, tmp_path: Path) -> None:
    """With what is wrong with it."""
    path = _EXAMPLES[form](tmp_path)
    first = path.read_text(encoding="utf-8").splitlines()[0]
    path.write_text(f"{first}\n{line}\n", encoding="utf-8")
    with pytest.raises(BadTrace, match=says):
        read(str(path))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnever,1,1\n", "line 2: TIMESTAMP is 'never'"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,1\n", "line 2: ContextTokens is 'x'"),
        ("a.csv", "TIME,ContextTokens\n", "line 1: expected the columns"),
        ("a.yaml", "data: {type: other}\n", "no section data.shared_prefix"),
        ("a.yaml", "a: [", "a.yaml"),
        ("a.txt", "hello\n", "not recognised; name it with --format"),
        ("a.jsonl", '{"question": 1}\n', "not recognised"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
    ],
)
def test_what_is_no_trace_is_refused(name: str, text: str, says: str, tmp_path: Path) -> None:
    """Naming the file, and the way out where there is one."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadTrace, match=says):
        read(str(path))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("trace_1.json", "{", "not JSON"),
        ("trace_1.json", '{"requests": 1}', "no list of requests"),
        ("trace_1.json", '{"block_size": 64, "tool_tokens": 0, "system_tokens": 0, "requests": [1]}', "request 1: not"),
        ("chunk-0-trace.csv", "0,1\n", "line 1: expected start, rate"),
        ("chunk-0-trace.csv", "0,1,1,Gamma,1,1\n", "chunk-0-dataset.json"),
        ("other.txt", "", "not recognised"),
    ],
)
def test_what_is_no_folder_of_traces_is_refused(name: str, text: str, says: str, tmp_path: Path) -> None:
    """Naming the file in it."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(BadTrace, match=says):
        read(str(tmp_path))


def test_unknown_names_are_answered_with_the_known_ones(tmp_path: Path) -> None:
    """Of files, and of forms."""
    with pytest.raises(BadTrace, match="no such file or folder; the trace that comes with Pointsman is `generated`"):
        read("nowhere.jsonl")
    with pytest.raises(BadTrace, match="no form 'x'; there are: mooncake"):
        read(str(_azure(tmp_path)), "x")
