"""Our HTTP/2 against python-h2 as the client, and against clients that break the rules: bytes in, bytes out."""

from __future__ import annotations

import gc
import os
import random
import struct
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import pytest
from broken_frames import BROKEN, HELLO, OPEN, frame, grpc

from extproc.wire.http2 import Connection, ErrorCode, Frame, GrpcStatus, Limits, Message, Stream

HEADERS = [
    (":method", "POST"), (":scheme", "http"), (":path", "/a.B/C"), (":authority", "x"),
    ("te", "trailers"), ("content-type", "application/grpc"),
]  # fmt: skip
SESSIONS = int(os.environ.get("FUZZ_SESSIONS", "100"))


class Echo:
    """A call that answers each message with what `answer` makes of it, and ends when the client does."""

    def __init__(self, stream: Stream, server: Server) -> None:
        self.stream, self.server = stream, server
        self.messages: list[bytes] = []
        self.has_ended = self.times_closed = 0
        server.calls.append(self)

    def message(self, raw: Message) -> None:
        """One more."""
        assert not self.times_closed
        raw = raw if isinstance(raw, bytes) else b"".join(raw)
        self.messages.append(raw)
        for answer in self.server.answer(raw):
            self.stream.send(answer)

    def ended(self) -> None:
        """The client has said it all."""
        self.has_ended += 1
        self.stream.finish(*self.server.end)

    def closed(self) -> None:
        """Over."""
        self.times_closed += 1


class Server:
    """One connection, and all that it has written."""

    def __init__(
        self, limits: Limits | None = None, answer: Callable[[bytes], list[bytes]] = lambda raw: [raw]
    ) -> None:
        self.calls: list[Echo] = []
        self.answer = answer
        self.end: tuple[Any, ...] = ()
        self.written = bytearray()
        self.writes = 0
        self.connection = Connection(lambda stream: Echo(stream, self), self._write, limits or Limits(1_000_000))

    def _write(self, data: bytes) -> None:
        self.written += data
        self.writes += 1

    def take(self) -> bytes:
        """What was written since the last look, with what is owed by then."""
        self.connection.pay()
        data = bytes(self.written)
        self.written.clear()
        return data

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """The same as frames: type, flags, stream, payload."""
        return frames_of(self.take())


def frames_of(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """Bytes as frames."""
    found, at = [], 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 3], "big")
        stream = int.from_bytes(data[at + 5 : at + 9], "big")
        found.append((data[at + 3], data[at + 4], stream, data[at + 9 : at + 9 + length]))
        at += 9 + length
    return found


class Client:
    """python-h2, fed by and feeding a server in pieces of any size."""

    def __init__(self, server: Server, rng: random.Random | None = None, **settings: int) -> None:
        self.server, self.rng = server, rng
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.answers: dict[int, bytearray] = {}
        self.trailers: dict[int, dict[str, str]] = {}
        self.resets: dict[int, int] = {}
        self.updates = True
        codes = {getattr(h2.settings.SettingCodes, name): value for name, value in settings.items()}
        self.h2.local_settings = h2.settings.Settings(client=True, initial_values=codes)
        self.h2.max_inbound_frame_size = self.h2.local_settings.max_frame_size
        self.h2.initiate_connection()
        self.exchange()

    def pieces(self, data: bytes) -> list[bytes]:
        """The data cut at random, or in one."""
        if self.rng is None:
            return [data] if data else []
        cut, at = [], 0
        while at < len(data):
            size = self.rng.choice([1, 3, 9, 100, 16_393, 70_000])
            cut.append(data[at : at + size])
            at += size
        return cut

    def exchange(self) -> None:
        """Carry bytes both ways until nobody has anything to say."""
        while True:
            going = self.h2.data_to_send()
            for piece in self.pieces(going):
                self.server.connection.receive(piece)
            coming = self.server.take()
            for piece in self.pieces(coming):
                self._hear(self.h2.receive_data(piece))
            if not going and not coming:
                return

    def _hear(self, events: list[h2.events.Event]) -> None:
        for event in events:
            if isinstance(event, h2.events.DataReceived):
                self.answers.setdefault(event.stream_id, bytearray()).extend(event.data)
                if self.updates and event.flow_controlled_length:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
                if "grpc-status" in (told := dict(event.headers)):
                    self.trailers[event.stream_id] = told
            elif isinstance(event, h2.events.StreamReset):
                self.resets[event.stream_id] = int(event.error_code)

    def call(self, *messages: bytes, end: bool = True) -> int:
        """Open a stream and send these, as far as windows allow, in one go."""
        stream = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, HEADERS)
        self.send(stream, b"".join(map(grpc, messages)))
        if end:
            self.h2.end_stream(stream)
        return stream

    def send(self, stream: int, data: bytes) -> None:
        """All of the data, by frames of what size is allowed."""
        view = memoryview(data)
        while view:
            most = min(self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size, len(view))
            if not most:
                self.exchange()
                continue
            size = most if self.rng is None else self.rng.randint(1, most)
            self.h2.send_data(stream, view[:size])
            view = view[size:]

    def widen(self, streams: Iterable[int]) -> None:
        """Let all of these send the rest, however many bytes python-h2 believes to have been given room for."""
        self.h2.increment_flow_control_window(2**29)
        for stream in streams:
            if stream not in self.trailers and stream in self.h2.streams and not self.h2.streams[stream].closed:
                self.h2.increment_flow_control_window(2**29, stream)
        self.exchange()

    def messages(self, stream: int) -> list[bytes]:
        """The answer's messages."""
        data, found = bytes(self.answers.get(stream, b"")), []
        while data:
            size = int.from_bytes(data[1:5], "big")
            assert data[0] == 0
            found.append(data[5 : 5 + size])
            data = data[5 + size :]
        return found


# -- as it should be


def test_a_call_is_answered_and_ends_with_a_status() -> None:
    """Headers, each message, trailers; nothing is left open."""
    server = Server()
    client = Client(server)
    stream = client.call(b"one", b"", b"three" * 1_000)
    client.exchange()
    assert client.messages(stream) == [b"one", b"", b"three" * 1_000]
    assert client.trailers[stream]["grpc-status"] == "0"
    [call] = server.calls
    assert (call.has_ended, call.times_closed, server.connection.open_streams) == (1, 1, 0)


def test_all_answers_to_one_read_leave_in_one_write() -> None:
    """However many calls it brought."""
    server = Server()
    client = Client(server)
    for _ in range(20):
        client.call(b"hello", end=False)
    before = server.writes
    server.connection.receive(client.h2.data_to_send())
    assert server.writes == before + 1


def test_an_end_that_nobody_waits_for_goes_with_the_next_write() -> None:
    """Until then it is owed; the stream is over all the same."""
    server = Server()
    client = Client(server)
    stream, other = client.call(b"one", end=False), client.call(b"two", end=False)
    client.exchange()
    before = server.writes
    client.h2.end_stream(stream)
    server.connection.receive(client.h2.data_to_send())
    assert (server.writes, server.connection.owes_ends, server.connection.open_streams) == (before, True, 1)
    client.send(other, grpc(b"more"))
    server.connection.receive(client.h2.data_to_send())
    assert (server.writes, server.connection.owes_ends) == (before + 1, False)
    assert [kind for kind, *_ in server.frames()][-2:] == [Frame.HEADERS, Frame.DATA]


@pytest.mark.parametrize("why", ["unanswered", "another status", "going away"])
def test_an_end_that_somebody_may_wait_for_is_written_at_once(why: str) -> None:
    """A client that has no answer yet, one that is told of a fault, and ourselves when we stop."""
    server = Server()
    if why == "another status":
        server.end = (GrpcStatus.INTERNAL, "internal error")
    client = Client(server)
    messages = [] if why == "unanswered" else [b"one"]
    stream = client.call(*messages, end=False)
    client.exchange()
    if why == "going away":
        server.connection.go_away()
    before = server.writes
    client.h2.end_stream(stream)
    server.connection.receive(client.h2.data_to_send())
    assert (server.writes, server.connection.owes_ends) == (before + 1, False)


def test_the_end_of_a_call_that_was_decided_later_is_written_at_once() -> None:
    """Not by the read that somebody looks after: between two of them."""
    server = Server()
    client = Client(server)
    stream = client.call(b"one", end=False)
    client.exchange()
    call = server.calls[0]
    call.ended = lambda: None  # type: ignore[method-assign] # its decision is pending
    client.h2.end_stream(stream)
    server.connection.receive(client.h2.data_to_send())
    assert server.connection.open_streams == 1
    before = server.writes
    call.stream.finish()
    assert (server.writes, server.connection.owes_ends) == (before + 1, False)
    assert server.connection.open_streams == 0


@pytest.mark.parametrize("how", ["reset", "lost", "finished"])
def test_what_a_stream_held_goes_with_it(how: str) -> None:
    """Half a message and its call, without the collector: else whoever leaves in time fills our memory."""
    server = Server(Limits(30_000_000))
    client = Client(server)
    stream = client.call(b"one", end=False)
    client.exchange()
    client.send(stream, b"\0" + (20_000_000).to_bytes(4, "big") + b"x" * 60_000)
    client.exchange()
    call = server.calls.pop()
    seen = weakref.ref(call)
    gc.collect()
    gc.disable()
    try:
        if how == "reset":
            client.h2.reset_stream(stream)
            client.exchange()
        elif how == "lost":
            server.connection.lost()
        else:
            call.stream.finish()
        del call
        assert seen() is None
        assert not [one for one in gc.get_objects() if isinstance(one, Stream)]
    finally:
        gc.enable()


def test_many_messages_in_one_frame_take_time_in_proportion() -> None:
    """Four times as many: about four times the CPU, and not sixteen. The first is cut, the others come in one piece."""
    assert _cost_of_messages(8_000) / _cost_of_messages(2_000) < 9


def _cost_of_messages(count: int) -> float:
    """Of reading so many in one frame; the least of three."""
    costs = []
    for _ in range(3):
        server = Server(Limits(10_000_000), answer=lambda _: [])
        client = Client(server)
        stream = client.call(end=False)
        client.exchange()
        messages = [bytes([number % 256]) * 500 for number in range(count)]
        data = b"".join(map(grpc, messages))
        server.connection.receive(frame(Frame.DATA, 0, stream, data[:300]))
        rest = frame(Frame.DATA, 0, stream, data[300:])
        began = time.thread_time()
        server.connection.receive(rest)
        costs.append(time.thread_time() - began)
        assert server.calls[0].messages == messages
    return min(costs)


@pytest.mark.parametrize("begins", [b"\0\xff\xff\xff\xff", b"\x01\0\0\0\x09"])
def test_a_call_that_is_refused_and_cannot_be_told_yet_gathers_nothing(begins: bytes) -> None:
    """A client that opens no window for the answer may go on sending; it is passed over, and no window is opened."""
    server = Server()
    client = Client(server, INITIAL_WINDOW_SIZE=0)
    stream = client.call(b"one", end=False)
    client.exchange()
    for piece in (begins + b"rest", *[b"y" * 16_000] * 3):
        server.connection.receive(frame(Frame.DATA, 0, stream, piece))
    assert server.calls[0].messages == [b"one"]
    assert sum(map(len, server.calls[0].stream._pieces.so_far)) < 100
    assert server.connection.failed is None


def _message_begun(length: int) -> tuple[Server, Client, int]:
    """A message of which only the prefix has come, and its stream."""
    server = Server(answer=lambda _: [])
    client = Client(server)
    stream = client.call(end=False)
    client.exchange()
    server.connection.receive(frame(Frame.DATA, 0, stream, struct.pack(">BI", 0, length)))
    return server, client, stream


def test_what_came_with_the_pieces_of_a_message_is_let_go() -> None:
    """A message in pieces of 4 KB, each read with 250 KB of another stream: those must not wait until it is whole."""
    server, client, slow = _message_begun(900_000)
    quick = client.call(end=False)
    client.exchange()
    for _ in range(50):
        of_others = frame(Frame.DATA, 0, quick, grpc(bytes(250_000)))
        server.connection.receive(frame(Frame.DATA, 0, slow, bytes(4_096)) + of_others)
    kept = server.calls[0].stream._pieces.so_far
    reads = {id(piece.obj): len(piece.obj) for piece in kept if isinstance(piece, memoryview)}
    assert sum(map(len, kept)) == 50 * 4_096
    assert sum(reads.values()) <= 4 * 50 * 4_096


def test_a_piece_that_is_most_of_a_read_is_not_copied() -> None:
    """As those of a large body are, whatever the frames in which they come."""
    server, _, stream = _message_begun(900_000)
    server.connection.receive(frame(Frame.DATA, 0, stream, bytes(16_000)) * 16)
    kept = server.calls[0].stream._pieces.so_far
    assert sum(isinstance(piece, memoryview) for piece in kept) >= 10


def test_a_call_that_ends_early_keeps_nothing_of_what_was_coming() -> None:
    """Its answer may wait long for the client's window."""
    server, _, stream = _message_begun(900_000)
    server.connection.receive(frame(Frame.DATA, 0, stream, bytes(16_000)))
    call = server.calls[0].stream
    call.send_window = 0
    call.send(b"what the client has no room for")
    call.finish(GrpcStatus.RESOURCE_EXHAUSTED, "no more")
    assert not call.over
    assert call._pieces.so_far == []


@pytest.mark.parametrize("seed", range(SESSIONS))
def test_any_cut_and_any_order_come_out_whole(seed: int) -> None:
    """Thirty streams each: messages split and coalesced, windows large and small, resets, pings and new settings."""
    rng = random.Random(seed)
    server = Server(answer=lambda raw: [raw, raw[::-1]] if len(raw) % 2 else [raw])
    client = Client(
        server,
        rng,
        INITIAL_WINDOW_SIZE=rng.choice([1_000, 65_535, 1_000_000]),
        MAX_FRAME_SIZE=rng.choice([16_384, 100_000]),
    )
    sent: dict[int, list[bytes]] = {}
    dropped = set()
    for _ in range(30):
        messages = [rng.randbytes(rng.choice([0, 1, 50, 3_000, 40_000, 200_000])) for _ in range(rng.randint(1, 3))]
        stream = client.call(*messages, end=rng.random() < 0.8)
        sent[stream] = messages
        if rng.random() < 0.15:
            client.h2.reset_stream(stream) if stream in client.h2.streams and client.h2.streams[stream].open else None
            dropped.add(stream)
        if rng.random() < 0.2:
            client.h2.ping(rng.randbytes(8))
        if rng.random() < 0.1:
            client.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: rng.choice([500, 70_000])})
        if rng.random() < 0.5:
            client.exchange()
    client.exchange()
    client.widen(sent)
    for stream, messages in sent.items():
        if stream in dropped:
            continue
        expected = [one for raw in messages for one in server.answer(raw)]
        assert client.messages(stream) == expected, stream
    assert server.connection.failed is None
    server.connection.lost()
    assert all(call.times_closed == 1 for call in server.calls)
    assert len(server.calls) == 30
    assert server.connection.open_streams == 0


def test_a_client_that_does_not_read_gets_no_more_than_its_windows() -> None:
    """And the rest in order once they open, end and all."""
    server = Server(answer=lambda _raw: [b"x" * 300_000])
    client = Client(server, INITIAL_WINDOW_SIZE=10_000)
    client.updates = False
    stream = client.call(b"please")
    client.exchange()
    assert len(client.answers[stream]) == 10_000
    assert stream not in client.trailers
    client.h2.increment_flow_control_window(400_000)
    client.h2.increment_flow_control_window(400_000, stream)
    client.exchange()
    assert client.messages(stream) == [b"x" * 300_000]
    assert client.trailers[stream]["grpc-status"] == "0"


def test_a_window_made_smaller_afterwards_is_kept_to() -> None:
    """It may be below nothing for a while."""
    server = Server(answer=lambda _raw: [b"x" * 50_000])
    client = Client(server, INITIAL_WINDOW_SIZE=40_000)
    client.updates = False
    stream = client.call(b"please")
    client.exchange()
    client.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 10_000})
    client.exchange()
    client.h2.increment_flow_control_window(20_000, stream)
    client.exchange()
    assert len(client.answers[stream]) == 40_000  # 40,000 sent, then 30,000 less and 20,000 more: none left
    client.h2.increment_flow_control_window(30_000, stream)
    client.exchange()
    assert client.messages(stream) == [b"x" * 50_000]


def test_a_status_has_its_words() -> None:
    """As gRPC spells them, with what HTTP cannot carry left out."""
    server = Server()
    server.end = (GrpcStatus.INVALID_ARGUMENT, "100% wrong\n" + "é" * 300)
    client = Client(server)
    stream = client.call()
    client.exchange()
    told = client.trailers[stream]
    assert told["grpc-status"] == "3"
    assert told["grpc-message"].startswith("100? wrong?")
    assert len(told["grpc-message"]) == 100


def test_who_is_finished_early_is_told_to_stop() -> None:
    """A stream that ends before the client has said all is reset without an error; what is under way is passed over."""
    server = Server(Limits(1_000))
    client = Client(server)
    stream = client.call(b"x" * 5_000, end=False)
    client.exchange()
    assert client.trailers[stream]["grpc-status"] == "8"
    assert client.resets[stream] == 0
    server.connection.receive(frame(Frame.DATA, 0, stream, b"late") + frame(Frame.RST_STREAM, 0, stream, b"\0\0\0\x08"))
    assert server.connection.failed is None


def test_a_compressed_message_is_not_understood() -> None:
    """12, as gRPC has it."""
    server = Server()
    client = Client(server)
    stream = client.call(end=False)
    client.send(stream, b"\x01\0\0\0\x02xx")
    client.exchange()
    assert client.trailers[stream]["grpc-status"] == "12"
    assert server.calls[0].messages == []


def test_when_we_go_away_open_streams_go_on_and_new_ones_are_refused() -> None:
    """GOAWAY names the last stream; what comes later is refused, so that it may be tried elsewhere."""
    server = Server()
    client = Client(server)
    old = client.call(b"old", end=False)
    client.exchange()
    server.connection.go_away()
    goaway = next(payload for kind, _, _, payload in frames_of(bytes(server.written)) if kind == Frame.GOAWAY)
    assert struct.unpack(">II", goaway) == (old, 0)
    server.connection.receive(frame(Frame.HEADERS, 0x4, old + 2, b"\x82"))
    assert (Frame.RST_STREAM, 0, old + 2, b"\0\0\0\x07") in frames_of(bytes(server.written))
    server.connection.receive(frame(Frame.DATA, 0x1, old, grpc(b"more")))
    assert server.calls[0].messages == [b"old", b"more"]
    assert server.connection.open_streams == 0


def test_no_more_streams_than_allowed() -> None:
    """The next is refused; after one has ended there is room again."""
    server = Server(Limits(1_000, streams=2))
    server.connection.receive(HELLO + b"".join(frame(Frame.HEADERS, 0x4, number, b"\x82") for number in (1, 3, 5)))
    assert server.connection.open_streams == 2
    assert (Frame.RST_STREAM, 0, 5, b"\0\0\0\x07") in server.frames()
    server.connection.receive(frame(Frame.RST_STREAM, 0, 1, b"\0\0\0\x08") + frame(Frame.HEADERS, 0x4, 7, b"\x82"))
    assert server.connection.open_streams == 2


def test_a_long_stream_has_its_windows_opened_again() -> None:
    """Access logs come on one stream for weeks."""
    server = Server(Limits(100_000), answer=lambda _raw: [])
    client = Client(server)
    stream = client.call(end=False)
    for _ in range(400):
        client.send(stream, grpc(b"x" * 90_000))
        client.exchange()
    assert len(server.calls[0].messages) == 400


def test_padding_priorities_and_continuations_are_read() -> None:
    """Envoy sends none of them; others may."""
    server = Server()
    padded = bytes([4]) + grpc(b"hello") + b"\0\0\0\0"
    server.connection.receive(
        HELLO
        + frame(Frame.HEADERS, 0x20, 1, b"\0\0\0\0\x10\x82")
        + frame(Frame.CONTINUATION, 0, 1, b"")
        + frame(Frame.CONTINUATION, 0x4, 1, b"\x86")
        + frame(Frame.PRIORITY, 0, 1, b"\0\0\0\0\x10")
        + frame(0x77, 0, 1, b"who knows")
        + frame(Frame.DATA, 0x8 | 0x1, 1, padded)
    )
    assert server.calls[0].messages == [b"hello"]
    assert server.connection.failed is None
    assert server.connection.open_streams == 0


def test_trailers_of_the_client_end_its_stream() -> None:
    """GRPC clients send none, but they may."""
    server = Server()
    server.connection.receive(HELLO + OPEN + frame(Frame.HEADERS, 0x5, 1, b"\x82"))
    assert server.calls[0].has_ended == 1


def test_pings_and_settings_are_answered() -> None:
    """With what they brought."""
    server = Server()
    server.take()
    server.connection.receive(HELLO + frame(Frame.PING, 0, 0, b"12345678") + frame(Frame.PING, 0x1, 0, b"87654321"))
    assert server.frames() == [(Frame.SETTINGS, 0x1, 0, b""), (Frame.PING, 0x1, 0, b"12345678")]


# -- as it should not be


@pytest.mark.parametrize("in_pieces", [False, True], ids=["at once", "byte by byte"])
@pytest.mark.parametrize("name", BROKEN)
def test_who_breaks_the_rules_is_told_which_and_cut_off(name: str, in_pieces: bool) -> None:  # noqa: FBT001 - a case
    """With the code that the RFC names; every call is closed, once, and nothing more is heard."""
    data, code = BROKEN[name]
    server = Server()
    if in_pieces and len(data) < 100_000:
        for position in range(len(data)):
            server.connection.receive(data[position : position + 1])
    else:
        server.connection.receive(data)
    if not in_pieces or code is not ErrorCode.ENHANCE_YOUR_CALM or "pings" not in name:
        assert server.connection.failed is code, server.connection.why
        kind, _, stream, payload = server.frames()[-1]
        assert (kind, stream, struct.unpack(">I", payload[4:8])[0]) == (Frame.GOAWAY, 0, code)
        assert server.connection.open_streams == 0
    before = len(server.calls)
    server.connection.receive(HELLO + OPEN)
    assert len(server.calls) == before or server.connection.failed is None
    server.connection.lost()
    assert all(call.times_closed == 1 for call in server.calls)


def test_more_than_a_streams_window_is_an_error() -> None:
    """It was told what fits."""
    server = Server(Limits(30_000), answer=lambda _raw: [])
    server.connection.receive(HELLO + OPEN + frame(Frame.DATA, 0, 1, b"\0\0\0\x75\x30" + b"x" * 16_000))
    server.connection._streams[1].receive_window = 10
    server.connection.receive(frame(Frame.DATA, 0, 1, b"x" * 11))
    assert server.connection.failed is ErrorCode.FLOW_CONTROL_ERROR


@pytest.mark.parametrize("seed", range(60))
def test_noise_never_raises_and_never_leaks(seed: int) -> None:
    """A good beginning with bytes changed, left out or added: an error or none, but each call is closed once."""
    rng = random.Random(seed)
    server = Server(Limits(50_000, streams=50))
    client = Client(Server(), rng)
    for _ in range(5):
        client.call(rng.randbytes(rng.choice([0, 10, 5_000])), end=rng.random() < 0.5)
    good = bytearray(HELLO + OPEN + client.h2.data_to_send())
    for _ in range(rng.randint(1, 12)):
        at = rng.randrange(len(good))
        match rng.randrange(3):
            case 0:
                good[at] ^= 1 << rng.randrange(8)
            case 1:
                del good[at : at + rng.randint(1, 9)]
            case _:
                good[at:at] = rng.randbytes(rng.randint(1, 9))
    for piece in client.pieces(bytes(good)):
        server.connection.receive(piece)
    server.connection.lost()
    assert all(call.times_closed == 1 for call in server.calls)
    assert server.connection.open_streams == 0
