"""What every gateway can rely on, over every transport: the table of cases.py, and how streams end.

Stated as on the wire, not as in the code: a transport of another make passes the same table or is not one.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from callers import Caller, Ended, Stream
from cases import CASES, EQUAL, RESPONSES, THREE, Case, Refused, Routed, chat, cut, get, post
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from gateways import DESTINATION, GATEWAYS, ISTIO, MODE, OWN, Answered, Asked, Gateway, answer, body_of, empty, rest
from house import House, P, address
from transports import TRANSPORTS

Serve: TypeAlias = Callable[..., Any]

_OURS = {"content-length", "x-gateway-destination-endpoint"}
_OUR_PREFIXES = ("x-pointsman-", "x-envoy-")


@pytest.fixture(params=list(TRANSPORTS))
async def serve(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Serve]:
    """Starts a router over a fleet and connects to it by one of the transports."""
    async with AsyncExitStack() as open_now:

        async def start(fleet: tuple[P, ...] = EQUAL, config: dict[str, Any] | None = None) -> tuple[House, Caller]:
            house = House(fleet, config or {})
            caller = await open_now.enter_async_context(TRANSPORTS[request.param](house, tmp_path))
            return house, caller

        yield start


def _id(value: object) -> str | None:
    return getattr(value, "name", None)


def gateways(*needs: str) -> pytest.MarkDecorator:
    """Every gateway that has these."""
    return pytest.mark.parametrize("gateway", [g for g in GATEWAYS if g.can(needs)], ids=_id)


# -- reading answers


def _kinds(answers: list[ext_proc.ProcessingResponse]) -> list[str | None]:
    return [reply.WhichOneof("response") for reply in answers]


def _headers(reply: ext_proc.ProcessingResponse) -> dict[str, str]:
    """What the answer sets; nothing is set twice."""
    common = (reply.request_body if reply.HasField("request_body") else reply.request_headers).response
    pairs = [(option.header.key, option.header.raw_value.decode()) for option in common.header_mutation.set_headers]
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


def _error(reply: ext_proc.ProcessingResponse) -> tuple[int, dict[str, Any]]:
    """Status and error object of an answer of ours, which is whole: type, request id, details."""
    immediate = reply.immediate_response
    headers = {option.header.key: option.header.raw_value.decode() for option in immediate.headers.set_headers}
    assert headers["content-type"] == "application/json"
    assert headers["x-pointsman-request-id"]
    error: dict[str, Any] = json.loads(immediate.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert immediate.details.startswith("pointsman_")
    if immediate.status.code in {429, 503}:
        assert int(headers["retry-after"]) > 0
    return immediate.status.code, error


def _check_refusal(answers: list[ext_proc.ProcessingResponse], want: Refused) -> None:
    status, error = _error(answers[-1])
    assert (status, error["type"], error["code"]) == (want.status, want.type, want.code)
    assert _kinds(answers[:-1]) in ([], ["request_headers"])
    assert all(DESTINATION not in _headers(reply) for reply in answers[:-1])


def _check_route(answers: list[ext_proc.ProcessingResponse], gateway: Gateway, asked: Asked, want: Routed) -> str:
    """The decision, once and where this gateway looks, and the body that the engine gets. Returns the endpoint."""
    decision = gateway.decision(answers)
    assert [reply for reply in answers if DESTINATION in _headers(reply)] == [decision]
    headers = _headers(decision)
    first, *others = headers[DESTINATION].split(",")
    assert decision.dynamic_metadata["envoy.lb"][DESTINATION] == headers[DESTINATION]
    assert first in {address(index) for index in want.to}
    assert gateway.takes_list or not others
    assert len({first, *others}) == 1 + len(others)
    common = (decision.request_body if decision.HasField("request_body") else decision.request_headers).response
    assert common.clear_route_cache
    assert headers["x-pointsman-cluster"] == "pool_chat"
    assert set(common.header_mutation.remove_headers) == set(want.removed)
    assert all(name in _OURS or name.startswith(_OUR_PREFIXES) for name in headers)
    _check_body(answers, headers, gateway, asked, want)
    return first


def _check_body(
    answers: list[ext_proc.ProcessingResponse], headers: dict[str, str], gateway: Gateway, asked: Asked, want: Routed
) -> None:
    sent = b"".join(asked.body)
    body = gateway.sent_on(answers, asked)
    assert body == (sent if want.body is None or not gateway.edits else want.body)
    # Gateways that stream drop the length themselves; to others it must be told, and only if it changed
    edited = body != sent and not gateway.streams
    assert headers.get("content-length") == (str(len(body)) if edited else None)


def _expected_kinds(gateway: Gateway, asked: Asked, pieces: int) -> list[str]:
    """Kinds of answers to a request that is routed, in order."""
    if gateway.half_closes:
        return ["request_headers"]
    body = ["request_body"] * (pieces if gateway.streams else bool(asked.body))
    trailers = ["request_trailers"] if asked.trailers and gateway.sends_trailers else []
    return ["request_headers", *body, *trailers]


# -- the table

TABLE = [
    pytest.param(gateway, case, id=f"{gateway.name}-{case.name}")
    for gateway in GATEWAYS
    for case in CASES
    if gateway.can(case.needs)
]


@pytest.mark.parametrize(("gateway", "case"), TABLE)
async def test_the_table(serve: Serve, gateway: Gateway, case: Case) -> None:
    """Every case for every gateway that can state it: the answers, nothing after them, and nothing kept."""
    house, caller = await serve(case.fleet, case.config)
    stream = caller.open()
    answers = await gateway.ask(stream, case.asked)
    if isinstance(case.want, Refused):
        _check_refusal(answers, case.want)
        assert house.in_flight() == {}
        assert house.count("refusals", reason=_reason(case.want), status=str(case.want.status)) == 1
    else:
        endpoint = _check_route(answers, gateway, case.asked, case.want)
        pieces = _kinds(answers).count("request_body")
        assert _kinds(answers) == _expected_kinds(gateway, case.asked, pieces)
        assert gateway.half_closes or house.in_flight() == {endpoint: 1}
    if not gateway.half_closes:
        await stream.half_close()
        assert await rest(stream) == ([], Ended("OK"))
    await house.is_empty()
    assert house.count("malformed_messages", service="ext_proc") == 0


def _reason(want: Refused) -> str:
    return {"model_not_found": "unknown_model"}.get(want.code, want.code)


@gateways("shows_path")
async def test_the_models_are_answered_here(serve: Serve, gateway: Gateway) -> None:
    """At the headers, with every name a client may use; nothing is booked."""
    _, caller = await serve()
    (reply,) = await gateway.ask(caller.open(), get("/v1/models"))
    assert reply.immediate_response.status.code == 200
    names = [entry["id"] for entry in json.loads(reply.immediate_response.body)["data"]]
    assert names == ["base", "sql-lora", "tweet-lora", "gpt-4o"]


@gateways()
async def test_the_list_is_as_long_as_the_gateway_understands(serve: Serve, gateway: Gateway) -> None:
    """Three addresses, best first, where a list is understood; else the first alone."""
    _, caller = await serve((P(0, 9), P(1, 0), P(2, 4)))
    destination = _headers(gateway.decision(await gateway.ask(caller.open(), post(chat()))))[DESTINATION]
    best_first = [address(1), address(2), address(0)]
    assert destination.split(",") == (best_first if gateway.takes_list else best_first[:1])


@pytest.mark.parametrize(("setting", "length"), [("list", 3), ("single", 1)])
@gateways()
async def test_the_operator_has_the_last_word_on_lists(
    serve: Serve, gateway: Gateway, setting: str, length: int
) -> None:
    """`wire.endpoint_list` holds for every gateway."""
    _, caller = await serve(EQUAL, {"wire": {"endpoint_list": setting}})
    answers = await gateway.ask(caller.open(), post(chat()))
    assert len(_headers(gateway.decision(answers))[DESTINATION].split(",")) == length


async def test_a_gateway_that_buffers_answers_is_asked_not_to(serve: Serve) -> None:
    """Of nobody else anything of the kind is asked: a mode that cannot be changed may not be named."""
    for gateway in GATEWAYS:
        _, caller = await serve()
        first, *_ = await gateway.ask(caller.open(), post(chat()))
        if gateway.response_mode != "BUFFERED":
            assert not first.HasField("mode_override")
            continue
        mode = first.mode_override
        assert (mode.request_body_mode, mode.response_body_mode) == (MODE.BUFFERED, MODE.NONE)
        assert (mode.response_header_mode, mode.response_trailer_mode) == (MODE.SKIP, MODE.SEND)


# -- responses


def _check_echo(sent: list[ext_proc.ProcessingRequest], answers: list[ext_proc.ProcessingResponse]) -> None:
    for message, reply in zip(sent, answers, strict=True):
        assert message.WhichOneof("request") == reply.WhichOneof("response")
        if message.HasField("response_body"):
            piece = reply.response_body.response.body_mutation.streamed_response
            assert (piece.body, piece.end_of_stream) == (
                message.response_body.body,
                message.response_body.end_of_stream,
            )


def _unchanged(sent: list[ext_proc.ProcessingRequest], answers: list[ext_proc.ProcessingResponse]) -> None:
    for message, reply in zip(sent, answers, strict=True):
        kind = message.WhichOneof("request")
        assert kind == reply.WhichOneof("response")
        assert getattr(reply, str(kind)).SerializeToString() == b""


@pytest.mark.parametrize("name", RESPONSES)
@gateways("response_phases")
async def test_a_response_passes_untouched(serve: Serve, gateway: Gateway, name: str) -> None:
    """One answer per message, in order: pieces come back byte for byte where they are wanted back, all else goes on."""
    house, caller = await serve()
    stream = caller.open()
    await gateway.ask(stream, post(chat()))
    sent = gateway.response(RESPONSES[name])
    for message in sent:
        await stream.send(message)
    answers = [await answer(stream) for _ in sent]
    (_check_echo if gateway.echoes else _unchanged)(sent, answers)
    assert sum(house.in_flight().values()) == 1
    await stream.half_close()
    assert await rest(stream) == ([], Ended("OK"))
    await house.is_empty()


@gateways("tells_served")
async def test_the_word_of_who_serves_moves_the_reservation(serve: Serve, gateway: Gateway) -> None:
    """The gateway went down the list: the load is counted where it is."""
    house, caller = await serve(THREE)
    stream = caller.open()
    await gateway.ask(stream, post(chat()))
    assert house.in_flight() == {address(1): 1}
    for message in gateway.response(Answered((b"{}",)), served=address(2)):
        await stream.send(message)
        await answer(stream)
    assert house.in_flight() == {address(2): 1}
    stream.cancel()
    await house.is_empty()


@pytest.mark.parametrize("served", [address(9), "", "nonsense", address(1)])
@gateways("tells_served")
async def test_a_word_that_means_nothing_moves_nothing(serve: Serve, gateway: Gateway, served: str) -> None:
    """An address we do not know, or the one we chose: the count stays, and comes back."""
    house, caller = await serve(THREE)
    stream = caller.open()
    await gateway.ask(stream, post(chat()))
    message = empty("response_headers")
    message.metadata_context.filter_metadata["envoy.lb"].update({f"{DESTINATION}-served": served})
    await stream.send(message)
    await answer(stream)
    assert house.in_flight() == {address(1): 1}
    stream.cancel()
    await house.is_empty()


@gateways("response_phases")
async def test_a_response_without_a_request_passes_too(serve: Serve, gateway: Gateway) -> None:
    """Another filter answered before we were asked: the stream begins with the response, and the client must get it."""
    house, caller = await serve()
    stream = caller.open()
    sent = gateway.response(Answered((b"denied", b""), trailers=True))
    gateway.state_modes(sent[0])
    for message in sent:
        await stream.send(message)
    (_check_echo if gateway.echoes else _unchanged)(sent, [await answer(stream) for _ in sent])
    await stream.half_close()
    assert await rest(stream) == ([], Ended("OK"))
    await house.is_empty()


@gateways("response_phases")
async def test_a_response_before_the_body_has_come_passes_too(serve: Serve, gateway: Gateway) -> None:
    """Envoy refuses a body that is too large for it while we still wait for the rest."""
    house, caller = await serve()
    stream = caller.open()
    await stream.send(gateway.headers(post(chat())))
    if not gateway.streams:
        await answer(stream)
    sent = gateway.response(Answered((b"too large",), trailers=True))
    for message in sent:
        await stream.send(message)
    (_check_echo if gateway.echoes else _unchanged)(sent, [await answer(stream) for _ in sent])
    await stream.half_close()
    assert await rest(stream) == ([], Ended("OK"))
    await house.is_empty()


@pytest.mark.parametrize(("asked", "answered"), [("BUFFERED", "FULL_DUPLEX_STREAMED"), ("FULL_DUPLEX_STREAMED", "NONE"),
                                                 ("FULL_DUPLEX_STREAMED", "STREAMED"),
                                                 ("FULL_DUPLEX_STREAMED", "BUFFERED")])  # fmt: skip
async def test_the_two_modes_need_not_be_the_same(serve: Serve, asked: str, answered: str) -> None:
    """Each direction is answered in its own mode: a piece back where pieces are wanted, else a plain go on."""
    phases = ("response_headers",) if answered == "NONE" else ("response_headers", "response_body")
    gateway = Gateway("mixed", asked, answered, phases)
    house, caller = await serve()
    stream = caller.open()
    _check_route(await gateway.ask(stream, post(chat())), gateway, post(chat()), Routed())
    sent = gateway.response(Answered((b"data: 1\n\n", b"")))
    for message in sent:
        await stream.send(message)
    (_check_echo if gateway.echoes else _unchanged)(sent, [await answer(stream) for _ in sent])
    stream.cancel()
    await house.is_empty()


# -- answers of ours, at every phase

_PHASES: dict[str, tuple[Asked, dict[str, Any], tuple[str, ...]]] = {
    "headers": (post(chat(), path="/nothing"), {}, ("shows_path",)),
    "headers without a body": (get("/nothing"), {}, ("shows_path",)),
    "the middle of a body": (
        post(*cut(chat(content="x" * 9_000), 1_000)),
        {"limits": {"request_body_bytes": 2_000}},
        ("streams",),
    ),
    "the end of a body": (post(chat("nobody")), {}, ()),
    "trailers": (post(b"{", trailers=True), {}, ("sends_trailers",)),
}


@pytest.mark.parametrize(
    ("gateway", "phase"),
    [(gateway, phase) for gateway in GATEWAYS for phase in _PHASES if gateway.can(_PHASES[phase][2])],
    ids=_id,
)
async def test_an_answer_of_ours_is_the_last_word(serve: Serve, gateway: Gateway, phase: str) -> None:
    """Given once; what the gateway had under way by then is passed over, and the stream ends well."""
    asked, config, _ = _PHASES[phase]
    house, caller = await serve(EQUAL, config)
    stream = caller.open()
    answers = await gateway.ask(stream, asked)
    assert _kinds(answers).count("immediate_response") == 1
    if not gateway.half_closes:
        for message in (body_of("request_body", b"{}", True), empty("request_trailers"), empty("response_headers")):
            await stream.send(message)
        await stream.half_close()
        assert await rest(stream) == ([], Ended("OK"))
    await house.is_empty()


@gateways("streams")
async def test_a_body_without_end_is_refused_at_the_limit(serve: Serve, gateway: Gateway) -> None:
    """Nobody makes us hold more than one body: the answer comes while the body still does."""
    _, caller = await serve(EQUAL, {"limits": {"request_body_bytes": 2_000}})
    stream = caller.open()
    for message in gateway.request(post(*cut(chat(content="x" * 9_000), 1_000)))[:-1]:
        await stream.send(message)
    _check_refusal([await answer(stream)], Refused(413, "invalid_request_error", "body_too_large"))


@gateways()
async def test_too_many_requests_are_429_until_one_ends(serve: Serve, gateway: Gateway) -> None:
    """`limits.open_requests`, whoever holds them."""
    house, caller = await serve(EQUAL, {"limits": {"open_requests": 1}})
    held, refused = caller.open(), caller.open()
    await OWN.ask(held, post(chat()))
    _check_refusal(await gateway.ask(refused, post(chat())), Refused(429, "rate_limit_error", "too_many_requests"))
    held.cancel()
    refused.cancel()
    await house.is_empty()
    _check_route(await gateway.ask(caller.open(), post(chat())), gateway, post(chat()), Routed())


@gateways()
async def test_nothing_new_is_taken_while_we_stop(serve: Serve, gateway: Gateway) -> None:
    """Another router will answer a second from now."""
    house, caller = await serve()
    house.pipeline.draining = True
    answers = await gateway.ask(caller.open(), post(chat()))
    _check_refusal(answers, Refused(503, "server_error", "shutting_down"))


@pytest.mark.parametrize("mode", ["NONE", "STREAMED", "BUFFERED_PARTIAL", 5, 77])
async def test_a_mode_that_cannot_be_served_is_refused_in_words(serve: Serve, mode: str | int) -> None:
    """It names the mode, if it has a name to us, and the setting that mends it; requests without a body are served."""
    house, caller = await serve(EQUAL, {"routing": {"paths": [{"prefix": "/custom", "pool": "chat"}]}})
    number = mode if isinstance(mode, int) else MODE.BodySendMode.Value(mode)
    for asked, served in ((post(chat()), False), (get("/custom/a"), True)):
        message = OWN.headers(asked)
        message.protocol_config.request_body_mode = number
        stream = caller.open()
        await stream.send(message)
        reply = await answer(stream)
        if served:
            assert DESTINATION in _headers(reply)
            continue
        status, error = _error(reply)
        assert (status, error["code"]) == (501, "unsupported_body_mode")
        assert "request_body_mode: BUFFERED" in error["message"]
        assert str(mode) in error["message"] or isinstance(mode, int)
    assert house.count("refusals", reason="unsupported_body_mode", status="501") == 1


# -- how streams end


def _stages(gateway: Gateway) -> dict[str, tuple[list[ext_proc.ProcessingRequest], int]]:
    """How far a request may have come: the messages sent by then, and how many answers there were to them."""
    messages = gateway.request(post(*cut(chat(), 20)))
    response = gateway.response(Answered((b"data: 1\n\n", b"data: 2\n\n")))[:2]
    at_once = not gateway.streams and not gateway.half_closes
    decided = 2  # the route, and with it the whole body or the answer to it
    stages = {
        "nothing sent": ([], 0),
        "headers sent": (messages[:1], int(at_once)),
        "body sent": (messages, 1 if gateway.half_closes else decided),
    }
    if gateway.streams:
        stages["half the body sent"] = (messages[:2], 0)
    if response:
        stages["response begun"] = ([*messages, *response], decided + len(response))
    return stages


STAGES = [
    pytest.param(gateway, stage, id=f"{gateway.name}-{stage}") for gateway in GATEWAYS for stage in _stages(gateway)
]


async def _bring_to(stage: str, gateway: Gateway, house: House, stream: Stream) -> None:
    messages, answers = _stages(gateway)[stage]
    for message in messages:
        await stream.send(message)
    await house.has_read(len(messages))
    for _ in range(answers):
        await answer(stream)
    assert sum(house.in_flight().values()) == (stage in {"body sent", "response begun"})


@pytest.mark.parametrize(("gateway", "stage"), STAGES)
async def test_a_reset_gives_everything_back(serve: Serve, gateway: Gateway, stage: str) -> None:
    """At every stage, and no error is counted: it is how most streams end."""
    house, caller = await serve()
    stream = caller.open()
    await _bring_to(stage, gateway, house, stream)
    stream.cancel()
    assert isinstance(await stream.receive(), Ended)
    await house.is_empty()
    assert house.count("malformed_messages", service="ext_proc") == 0


@pytest.mark.parametrize(("gateway", "stage"), STAGES)
async def test_a_half_close_ends_the_stream_well(serve: Serve, gateway: Gateway, stage: str) -> None:
    """At every stage: nothing more is said, the status is OK, everything is given back."""
    house, caller = await serve()
    stream = caller.open()
    await _bring_to(stage, gateway, house, stream)
    await stream.half_close()
    assert await rest(stream) == ([], Ended("OK"))
    await house.is_empty()


@gateways()
async def test_a_lost_connection_gives_everything_back(serve: Serve, gateway: Gateway) -> None:
    """Of every stream on it, at whatever stage each was."""
    house, caller = await serve()
    streams = [caller.open() for _ in range(5)]
    for stream in streams[:3]:
        for message in gateway.request(post(chat())):
            await stream.send(message)
        await answer(stream)
    for stream in streams[3:]:
        await stream.send(gateway.headers(post(chat())))
    await house.has_open(5)
    await caller.close()
    await house.is_empty()


async def test_a_reset_while_a_body_is_inflated_gives_everything_back(serve: Serve) -> None:
    """The decision is under way beside the loop; it must not book a place that nobody gives back."""
    (case,) = (case for case in CASES if case.name == "compressed with an alias, sent on plain")
    house, caller = await serve()
    for _ in range(5):
        stream = caller.open()
        for message in ISTIO.request(case.asked):
            await stream.send(message)
        await house.has_open(1)
        stream.cancel()
        await house.is_empty()


UPGRADES = Gateway("upgrades", "NONE")
_NOT_A_MESSAGE = b"\xff\xff"
_NEWER = b"\x92\x03\x00"  # field 50: a kind of message that there is not yet
_TURNS: dict[str, tuple[list[ext_proc.ProcessingRequest | bytes], str, str]] = {
    "no message": ([_NOT_A_MESSAGE], "INVALID_ARGUMENT", "not a ProcessingRequest"),
    "no message after the headers": (
        [OWN.headers(post(chat())), _NOT_A_MESSAGE], "INVALID_ARGUMENT", "not a ProcessingRequest"
    ),
    "a message without a kind": ([b""], "UNIMPLEMENTED", "kind"),
    "a message of a later version": ([OWN.headers(post(chat())), _NEWER], "UNIMPLEMENTED", "kind"),
    "a body first": ([body_of("request_body", chat(), True)], "INVALID_ARGUMENT", "before the headers"),
    "trailers first": ([empty("request_trailers")], "INVALID_ARGUMENT", "before the headers"),
    "headers twice": ([OWN.headers(post(chat()))] * 2, "INVALID_ARGUMENT", "twice"),
    "headers after the decision": (
        [*OWN.request(post(chat())), OWN.headers(post(chat()))], "INVALID_ARGUMENT", "twice"
    ),
    "a body after the decision": (
        [*OWN.request(post(chat())), body_of("request_body", b"{}", True)], "INVALID_ARGUMENT", "after the decision"
    ),
    "a body piece after the end": (
        [*ISTIO.request(post(chat())), body_of("request_body", b"", True)], "INVALID_ARGUMENT", "after the decision"
    ),
    "a body in a mode without bodies": (
        [UPGRADES.headers(Asked((b"x",), "/v1/realtime?model=base", "GET")), body_of("request_body", b"{}", True)],
        "INVALID_ARGUMENT", "after the decision",
    ),
    "a body after a request without one": (
        [OWN.headers(get("/custom/a")), body_of("request_body", b"{}", True)], "INVALID_ARGUMENT", "after the decision"
    ),
}  # fmt: skip


@pytest.mark.parametrize("turn", _TURNS)
async def test_a_message_out_of_turn_ends_the_stream_in_words(serve: Serve, turn: str) -> None:
    """With a status, a reason and a count; never by silence, and nothing stays booked."""
    house, caller = await serve(EQUAL, {"routing": {"paths": [{"prefix": "/custom", "pool": "chat"}]}})
    messages, code, words = _TURNS[turn]
    stream = caller.open()
    for message in messages:
        await stream.send(message)
    _, end = await rest(stream)
    assert end.code == code
    assert words in end.details
    assert house.count("malformed_messages", service="ext_proc") == 1
    await house.is_empty()


async def test_a_message_beyond_every_bound_ends_the_stream(serve: Serve) -> None:
    """A gateway that buffers more than we read: a status, and nothing stays booked."""
    house, caller = await serve(EQUAL, {"limits": {"request_body_bytes": 100_000}})
    stream = caller.open()
    await stream.send(OWN.headers(post(chat())))
    await answer(stream)
    await stream.send(body_of("request_body", b"x" * 4_000_000, True))
    answers, end = await rest(stream)
    assert (answers, end.code) == ([], "RESOURCE_EXHAUSTED")
    await house.is_empty()
