"""The demo's pure parts: its conversations, its arithmetic, its words. Running it: tests/envoy/test_demo.py."""

from __future__ import annotations

import asyncio
import io
import json
import math
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("openai")

from rich.console import Console

from extproc.demo.clients import play
from extproc.demo.figures import LoadSamples, Outcome, Report, hit_rate, percentile, report, times_faster
from extproc.demo.processes import DidNotComeUp, _Process
from extproc.demo.run import Demo, describe, exit_code
from extproc.demo.screen import DEFAULT_PLACE, Place, commands, progress, show_next_steps, show_reports
from extproc.demo.workload import Session, Shape, Turn, ideal_hit_rate, plan
from vllm_adapters.simulator.engine import Engine
from vllm_adapters.simulator.faults import Faults
from vllm_adapters.simulator.options import SimOptions
from vllm_adapters.simulator.server import SimulatedServer
from vllm_adapters.simulator.text import Message, answer, block_hashes, chain_seed, count_tokens, render_chat

SMALL = Shape(sessions=6, turns=3, apps=2, system_tokens=50, document_tokens=200, question_tokens=10, answer_tokens=8)
BLOCK = 16


def _prompt(session: Session) -> bytes:
    return render_chat([Message("system", session.system), Message("user", session.turns[0].question)])


# -- conversations


def test_the_same_seed_gives_the_same_conversations() -> None:
    """Both policies must be asked the same; another seed asks something else."""
    assert plan(SMALL, seed=7) == plan(SMALL, seed=7)
    assert plan(SMALL, seed=7) != plan(SMALL, seed=8)


def test_there_are_as_many_sessions_and_turns_as_asked_for() -> None:
    """`sessions` conversations of `turns` questions each."""
    sessions = plan(SMALL, seed=1)
    assert [len(session.turns) for session in sessions] == [3] * 6


def test_sessions_of_one_app_share_the_system_prompt_and_nothing_else() -> None:
    """Two apps: two system prompts; every document is its session's own."""
    sessions = plan(SMALL, seed=1)
    assert len({session.system for session in sessions}) == 2
    assert len({session.turns[0].question for session in sessions}) == 6


def test_texts_have_the_tokens_the_shape_says() -> None:
    """In tokens of the simulated engines; the document comes with the first question."""
    session = plan(SMALL, seed=1)[0]
    assert count_tokens(session.system.encode()) == 50
    assert count_tokens(session.turns[0].question.encode()) in {210, 211}
    assert count_tokens(session.turns[1].question.encode()) == 10


def test_sessions_arrive_one_after_another_and_pause_between_turns() -> None:
    """Starts are spread over `arrivals_s`; every later question waits for somebody to read the answer."""
    sessions = plan(SMALL, seed=1)
    starts = [session.turns[0].after_s for session in sessions]
    assert starts == sorted(starts)
    assert max(starts) < SMALL.arrivals_s
    assert all(turn.after_s > 0 for session in sessions for turn in session.turns[1:])


def test_the_cache_holds_a_share_of_the_sessions_but_not_all() -> None:
    """What makes placement matter: room for a fair share of the conversations, not for every one."""
    shape = Shape()
    capacity = shape.kv_capacity_tokens(engines=4)
    everything = shape.sessions * shape.longest_tokens
    assert everything / 4 < capacity < everything


def test_any_conversation_fits_the_cache_however_few_there_are() -> None:
    """One session over many engines would leave a share smaller than itself."""
    shape = Shape(sessions=1)
    assert shape.kv_capacity_tokens(engines=64) >= 2 * shape.longest_tokens


@pytest.mark.parametrize("turns", [1, 2, 9])
def test_no_conversation_is_longer_than_its_bound(turns: int) -> None:
    """Chat headers and the last answer included, or engines would refuse the last turn."""
    shape = Shape(sessions=2, turns=turns, system_tokens=20, document_tokens=20)
    for session in plan(shape, seed=1):
        messages = [Message("system", session.system)]
        for turn in session.turns:
            messages += [Message("user", turn.question), Message("assistant", "x" * 4 * shape.answer_tokens)]
        assert count_tokens(render_chat(messages)) <= shape.longest_tokens


def test_ideal_hit_rate_is_what_one_engine_with_endless_cache_reports() -> None:
    """Held against the engine model itself, request by request."""
    sessions, seed = plan(SMALL, seed=3), chain_seed("sim", None)
    engine = Engine(kv_capacity_tokens=1_000_000, block_size_tokens=BLOCK)
    for session in sessions:
        messages = [Message("system", session.system)]
        for turn in session.turns:
            messages.append(Message("user", turn.question))
            prompt = render_chat(messages)
            text = answer(prompt, seed, SMALL.answer_tokens)
            messages.append(Message("assistant", text.decode()))
            hashes = block_hashes(prompt + text, seed, BLOCK)
            engine.submit(prompt, hashes, count_tokens(prompt), SMALL.answer_tokens)
            while engine.start_step() is not None:
                engine.end_step()
    measured = engine.prefix_hits_tokens_total / engine.prefix_queries_tokens_total
    # the last token of an answer is not in the engine's cache, so that one block may be missing there
    assert ideal_hit_rate(sessions, "sim", SMALL.answer_tokens, BLOCK) == pytest.approx(measured, abs=0.02)


def test_ideal_hit_rate_of_strangers_is_zero() -> None:
    """Nothing in common, one turn each: nothing to find."""
    sessions = [Session(f"{n}" * 200, (Turn(0, "hello"),)) for n in range(3)]
    assert ideal_hit_rate(sessions, "sim", 4, BLOCK) == 0


def test_a_repeated_prompt_is_a_hit_but_for_its_last_token() -> None:
    """As in an engine, which always computes the last token to have something to go on from."""
    session = Session("s" * 400, (Turn(0, "hello"),))
    tokens = count_tokens(_prompt(session))
    expected = (tokens - 1) // BLOCK * BLOCK / (2 * tokens)
    assert ideal_hit_rate([session, session], "sim", 4, BLOCK) == pytest.approx(expected)


# -- figures


def test_percentiles_are_values_that_occurred() -> None:
    """Nearest rank: p50 of four is the second, p99 of a hundred the 99th."""
    assert percentile([4, 1, 3, 2], 0.5) == 2
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile([5], 0.99) == 5
    assert math.isnan(percentile([], 0.5))


def test_hit_rate_weighs_engines_by_what_they_were_asked() -> None:
    """Sums first, then divides; no queries, no rate."""
    assert hit_rate([(90, 100), (0, 300)]) == pytest.approx(0.225)
    assert math.isnan(hit_rate([(0, 0)]))


def test_imbalance_is_the_busiest_over_the_mean_in_time() -> None:
    """A sample counts for as long as it held: 3 s of 1 and 0, then 1 s of 1 and 4."""
    samples = LoadSamples()
    samples.add(10.0, {"a": 1, "b": 0})
    samples.add(13.0, {"a": 1, "b": 4})
    samples.add(14.0, {"a": 0, "b": 0})
    assert samples.imbalance() == pytest.approx(1.0)
    skewed = LoadSamples()
    skewed.add(0.0, {"a": 3, "b": 1})
    skewed.add(1.0, {"a": 0, "b": 0})
    assert skewed.imbalance() == pytest.approx(1.5)


def test_imbalance_of_an_idle_fleet_is_no_number() -> None:
    """Nothing in flight at all: neither even nor uneven."""
    assert math.isnan(LoadSamples().imbalance())


def test_a_report_counts_errors_and_leaves_them_out_of_the_times() -> None:
    """A failed request has no time to first token; the first error is kept to be shown."""
    outcomes = [Outcome(ttft_s=0.2), Outcome(error="boom"), Outcome(ttft_s=0.4), Outcome(error="later")]
    made = report("default", outcomes, 0.5, 1.1)
    assert made == Report("default", 4, 2, 0.5, 0.2, 0.4, 1.1, "boom")


def test_a_difference_is_told_by_the_medians() -> None:
    """Slow over fast."""
    slow, fast = (report("p", [Outcome(ttft_s=t)], 0, 1) for t in (0.6, 0.2))
    assert times_faster(slow, fast) == pytest.approx(3)


def test_one_failed_request_of_any_policy_is_a_failure() -> None:
    """The exit code is for scripts: 0 only if everything was answered."""
    good, bad = (report("p", [Outcome(ttft_s=0.1), last], 0, 1) for last in (Outcome(ttft_s=1), Outcome(error="x")))
    assert exit_code([good, good]) == 0
    assert exit_code([good, bad]) == exit_code([bad, good]) == exit_code([report("p", [], 0, 1)]) == 1


# -- clients, against a simulated engine in this process


@pytest.fixture
async def engine() -> AsyncIterator[SimulatedServer]:
    """A fast one, on a free port."""
    server = SimulatedServer(SimOptions(port=0, speed=1000.0, record=10))
    await server.start()
    yield server
    await server.stop()


async def _play(engine: SimulatedServer) -> list[Outcome]:
    outcomes: list[Outcome] = []
    session = Session("be brief", (Turn(0, "one"), Turn(0, "two")))
    await play([session], f"{engine.url}/v1", "sim", 5, outcomes.append)
    return outcomes


async def test_a_conversation_carries_its_answers_on(engine: SimulatedServer) -> None:
    """The second question comes with the first answer before it, word for word; each answer was timed."""
    outcomes = await _play(engine)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert all(outcome.ttft_s is not None for outcome in outcomes)
    bodies = [json.loads(record.body) for record in engine.books.records]
    prompt = render_chat([Message("system", "be brief"), Message("user", "one")])
    text = answer(prompt, chain_seed("sim", None), 5).decode()
    assert [message["content"] for message in bodies[1]["messages"]] == ["be brief", "one", text, "two"]


@pytest.mark.parametrize("fault", [Faults(status=503), Faults(cut_after_tokens=2), Faults(reset_before_headers=True)])
async def test_whatever_goes_wrong_is_an_error_and_the_conversation_goes_on(
    engine: SimulatedServer, fault: Faults
) -> None:
    """A refusal, an answer that breaks off, a connection that does: counted, told, and the next turn is tried."""
    engine.set_faults(fault)
    outcomes = await _play(engine)
    assert len(outcomes) == 2
    assert all(outcome.error and outcome.ttft_s is None for outcome in outcomes)


# -- words


def _console(width: int = 110) -> tuple[Console, io.StringIO]:
    page = io.StringIO()
    return Console(file=page, width=width, highlight=False), page


def test_the_table_has_a_row_per_policy_and_the_first_error() -> None:
    """Rates in percent, times in milliseconds, errors in full even if they look like markup."""
    console, page = _console()
    rows = [
        Report("round-robin", 10, 0, 0.404, 0.6821, 2.45, 1.234),
        Report("default", 10, 1, 0.81, 0.079, 0.83, 1.1, "[/oops] 503"),
    ]
    show_reports(console, rows, ideal=0.83)
    text = page.getvalue()
    for part in ("40%", "83%", "682 ms", "2450 ms", "1.23", "8.6 times", "default: first error: [/oops] 503"):
        assert part in text


def test_progress_without_a_terminal_is_a_line_per_quarter() -> None:
    """Logs of a CI job stay short, and say how far it came."""
    console, page = _console()
    with progress(console, "default", 8) as count:
        for _ in range(8):
            count(Outcome(ttft_s=0.1))
    assert page.getvalue().splitlines() == [f"default: {n} of 8 answers" for n in (2, 4, 6, 8)]


def test_commands_survive_a_narrow_terminal() -> None:
    """Each stays on a line of its own, whole, so that it can be copied."""
    console, page = _console(width=40)
    place = Place("127.0.0.1:1234", "127.0.0.1:4321", "127.0.0.1:8003")
    show_next_steps(console, place, running=True)
    lines = page.getvalue().splitlines()
    assert all(command in lines for _, command in commands(place))
    assert "pointsman up" not in page.getvalue()


def test_a_stopped_demo_says_how_to_start_a_playground() -> None:
    """Engines, then Pointsman, then what to try at the usual ports."""
    console, page = _console()
    show_next_steps(console, DEFAULT_PLACE, running=False)
    text = page.getvalue()
    assert text.index("pointsman sim") < text.index("pointsman up") < text.index("curl")


@pytest.mark.parametrize(("on_path", "typed"), [(True, "pointsman"), (False, ".venv/bin/pointsman")])
def test_the_command_shown_is_one_that_the_shell_finds(
    on_path: bool,  # noqa: FBT001 - a test parameter
    typed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By name where it is on PATH, else with the way to it, as after `make demo` in a fresh clone."""
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "pointsman").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(binaries / "python"))
    monkeypatch.setenv("PATH", str(binaries) if on_path else "")
    console, page = _console()
    show_next_steps(console, DEFAULT_PLACE, running=False)
    assert f"{typed} sim --count 4" in page.getvalue().splitlines()


def test_what_runs_is_said_honestly() -> None:
    """Simulated engines, their speed, and how many requests, sessions and turns there are."""
    text = describe(Demo(Shape(sessions=6, turns=3), engines=4, speed=2.5, seed=1, keep=False))
    for part in ("4 simulated engines", "at 2.5 times", "6 sessions of 3 turns", "18 requests"):
        assert part in text


@pytest.mark.parametrize("missing", ["openai", "rich"])
def test_a_missing_extra_is_said_with_what_to_install(missing: str) -> None:
    """Without a traceback: the package, and the extra that brings it."""
    script = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv[1:] = ['demo']; from extproc.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == (
        f"the demo needs {missing}, which is not installed: pip install '.[demo,embedded]' in a clone"
    )


async def test_a_process_that_ends_is_named_as_its_command(tmp_path: Path) -> None:
    """As the user would type it, with what it said last."""
    process = _Process(tmp_path / "log", "sim", "--count", "0")
    await process.start()
    said = "`pointsman sim` ended:\n(?s:.*)--count"
    with pytest.raises(DidNotComeUp, match=said):
        await _until_ended(process)


async def _until_ended(process: _Process) -> None:
    async with asyncio.timeout(60):
        while True:
            process.check()
            await asyncio.sleep(0.02)
