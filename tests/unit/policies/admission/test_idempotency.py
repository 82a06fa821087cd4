"""Idempotency keys, under a virtual clock: never twice, and always again after a failure."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policies.admission.idempotency import IdempotencyKeys, KeyHold, Standing, Taken

NAME = ("acme", "k1")


def held(keys: IdempotencyKeys, now_s: float = 0.0, request_id: str = "first", body: bytes = b"a") -> KeyHold:
    """The key, which must be free."""
    hold = keys.take(NAME, body, request_id, now_s)
    assert isinstance(hold, KeyHold)
    return hold


def test_a_key_is_held_while_its_request_is_under_way() -> None:
    """However long that takes; who comes second learns whose it is."""
    keys = IdempotencyKeys(10.0, 5)
    held(keys)
    assert keys.take(NAME, b"a", "second", 10_000.0) == Taken(Standing.UNDER_WAY, "first")


def test_an_answered_key_is_taken_for_the_window() -> None:
    """From the answer on, not from the request."""
    keys = IdempotencyKeys(10.0, 5)
    hold = held(keys)
    hold.ended(100.0)
    hold.answered(100.0)
    assert keys.take(NAME, b"a", "second", 109.9) == Taken(Standing.ANSWERED, "first")
    held(keys, 110.1, "second")
    assert len(keys) == 1


def test_what_came_to_nothing_may_be_tried_again_at_once() -> None:
    """In whichever order its end and its outcome are told."""
    keys = IdempotencyKeys(10.0, 5)
    first = held(keys)
    first.free()
    second = held(keys, request_id="second")
    first.ended(0.0)
    first.free()
    assert keys.take(NAME, b"a", "third", 0.0) == Taken(Standing.UNDER_WAY, "second")
    second.ended(0.0)
    second.free()
    assert len(keys) == 0


def test_another_body_is_told_apart_whatever_became_of_the_first() -> None:
    """Under way or answered; once it came to nothing the key may be used for anything."""
    keys = IdempotencyKeys(10.0, 5)
    first = held(keys)
    assert keys.take(NAME, b"b", "second", 0.0) == Taken(Standing.OTHER_BODY, "first")
    first.answered(0.0)
    assert keys.take(NAME, b"b", "second", 0.0) == Taken(Standing.OTHER_BODY, "first")
    other = IdempotencyKeys(10.0, 5)
    held(other).free()
    held(other, body=b"b")


def test_tenants_have_their_own_keys() -> None:
    """And learn nothing of each other's."""
    keys = IdempotencyKeys(10.0, 5)
    held(keys)
    assert isinstance(keys.take(("other", "k1"), b"b", "second", 0.0), KeyHold)
    assert isinstance(keys.take((None, "k1"), b"c", "third", 0.0), KeyHold)


def test_of_an_end_nobody_tells_of_the_key_is_free_after_a_second() -> None:
    """Until then it may have been answered; what is told later of the first does not touch the second."""
    keys = IdempotencyKeys(10.0, 5)
    first = held(keys)
    first.ended(100.0)
    assert keys.take(NAME, b"a", "second", 100.9) == Taken(Standing.UNDER_WAY, "first")
    held(keys, 101.1, "second")
    first.answered(101.2)
    assert keys.take(NAME, b"a", "third", 101.3) == Taken(Standing.UNDER_WAY, "second")


def test_an_outcome_told_late_still_counts_if_nobody_came_meanwhile() -> None:
    """The access log may be seconds late on a busy machine."""
    keys = IdempotencyKeys(10.0, 5)
    hold = held(keys)
    hold.ended(100.0)
    hold.answered(105.0)
    assert keys.take(NAME, b"a", "second", 114.9) == Taken(Standing.ANSWERED, "first")


def test_the_longest_unused_are_forgotten_at_the_bound() -> None:
    """Answered ones alone: who is under way keeps its key."""
    keys = IdempotencyKeys(1_000.0, 2)
    running = keys.take((None, "running"), b"a", "r", 0.0)
    for number in range(4):
        hold = keys.take((None, str(number)), b"a", str(number), float(number))
        assert isinstance(hold, KeyHold)
        hold.answered(float(number))
    assert len(keys) == 3
    assert isinstance(running, KeyHold)
    assert keys.take((None, "running"), b"a", "x", 5.0) == Taken(Standing.UNDER_WAY, "r")
    assert keys.take((None, "3"), b"a", "x", 5.0) == Taken(Standing.ANSWERED, "3")
    assert isinstance(keys.take((None, "0"), b"a", "x", 5.0), KeyHold)


class KeyMachine(RuleBasedStateMachine):
    """Requests with few keys that come, end and are told of in any order, and twice."""

    window_s, most = 5.0, 3

    def __init__(self) -> None:
        super().__init__()
        self.keys = IdempotencyKeys(self.window_s, self.most)
        self.now_s = 0.0
        self.holds: list[KeyHold] = []
        self.untold: dict[str, KeyHold] = {}  # by request: held, and neither freed nor answered
        self.answered_at_s: dict[tuple[str, bytes], float] = {}

    @rule(seconds=st.floats(0, 4))
    def time_passes(self, seconds: float) -> None:
        """On."""
        self.now_s += seconds

    @rule(key=st.sampled_from("abcd"), body=st.sampled_from([b"1", b"2"]))
    def a_request_comes(self, key: str, body: bytes) -> None:
        """It gets the key if nobody has it, and only then."""
        request_id = str(len(self.holds))
        holder = next((hold for hold in self.untold.values() if hold.name[1] == key), None)
        got = self.keys.take((None, key), body, request_id, self.now_s)
        if isinstance(got, Taken):
            assert (got.standing is Standing.OTHER_BODY) == (got.request_id not in self._having(key, body))
            return
        if holder is not None:
            assert self.now_s - holder.ended_at_s > 1.0
            del self.untold[holder.request_id]
        self.holds.append(got)
        self.untold[request_id] = got

    def _having(self, key: str, body: bytes) -> set[str]:
        return {hold.request_id for hold in self.holds if hold.name[1] == key and hold.fingerprint == body}

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def it_ends(self, data: st.DataObject) -> None:
        """The stream."""
        hold = data.draw(st.sampled_from(self.holds))
        if hold.ended_at_s > self.now_s:
            hold.ended(self.now_s)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), good=st.booleans())
    def its_outcome_is_told(self, data: st.DataObject, *, good: bool) -> None:
        """Only the first time counts, and only while it holds its key."""
        hold = data.draw(st.sampled_from(self.holds))
        hold.answered(self.now_s) if good else hold.free()
        if self.untold.pop(hold.request_id, None) is None:
            return
        again = self.keys.take(hold.name, hold.fingerprint, "again", self.now_s)
        if good:
            assert again == Taken(Standing.ANSWERED, hold.request_id)
        else:
            assert isinstance(again, KeyHold)
            again.free()

    @invariant()
    def what_is_kept_is_bounded(self) -> None:
        """Those under way, and so many answered."""
        assert len(self.keys) <= len(self.untold) + self.most


KeyMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_any_order_of_anything = KeyMachine.TestCase
