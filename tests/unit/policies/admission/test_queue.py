"""The queue: who goes next, under a virtual clock."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.admission.queue import ClassSpec, Queue, QueueSpec, Ticket

REAL_TIME = ClassSpec("real-time", weight=7, places=200, max_wait_s=10.0, overflow="batch")
BATCH = ClassSpec("batch", weight=3, places=1_000, max_wait_s=600.0)
TWO = QueueSpec((REAL_TIME, BATCH))


def ticket(class_name: str = "real-time", tenant: str = "a", tokens: float = 100.0, **fields: object) -> Ticket:
    """A request."""
    return Ticket(class_name, tenant, tokens, **fields)  # type: ignore[arg-type]


def queue_of(*tickets: Ticket, spec: QueueSpec = TWO, now_s: float = 0.0) -> Queue:
    """A queue in which these wait."""
    queue = Queue(spec)
    for one in tickets:
        assert queue.offer(one, now_s)
    return queue


def served(queue: Queue, turns: int, now_s: float = 0.0) -> list[Ticket]:
    """Who goes, one after the other."""
    gone = []
    for _ in range(turns):
        [first] = queue.window(1)
        queue.take(first, now_s)
        gone.append(first)
    return gone


@pytest.mark.parametrize(
    ("weights", "shares"), [((7, 3), (0.7, 0.3)), ((99, 1), (0.8, 0.2)), ((1, 1), (0.5, 0.5))], ids=str
)
def test_classes_that_wait_share_the_turns_by_weight(weights: tuple[int, int], shares: tuple[float, float]) -> None:
    """Exactly, from the first turns on; but none gets less than a fifth."""
    high, low = (ClassSpec(name, weight=weight) for name, weight in zip(("high", "low"), weights, strict=True))
    both = [ticket(name) for name in ("high", "low") for _ in range(100)]
    turns = Counter(one.class_name for one in served(queue_of(*both, spec=QueueSpec((high, low))), 100))
    assert turns["high"] == pytest.approx(100 * shares[0], abs=1)
    assert turns["low"] == pytest.approx(100 * shares[1], abs=1)


def test_the_least_share_never_asks_for_more_than_there_is() -> None:
    """Six classes cannot have a fifth each."""
    shares = QueueSpec(tuple(ClassSpec(str(n), weight=10.0**n) for n in range(6))).shares()
    assert sum(shares.values()) == pytest.approx(1.0)
    assert min(shares.values()) == pytest.approx(1 / 6)


def test_a_class_that_is_passed_over_too_often_goes() -> None:
    """After twenty turns of others, whatever the weights say."""
    spec = QueueSpec((ClassSpec("high", weight=1e6), ClassSpec("low")), min_share=0.0)
    queue = queue_of(*(ticket("high") for _ in range(100)), ticket("low"), ticket("low"), spec=spec)
    gone = [one.class_name for one in served(queue, 60)]
    assert [position for position, name in enumerate(gone) if name == "low"][1:] == [22]


def test_a_class_that_idled_has_saved_nothing_up() -> None:
    """Having let others go alone it does not go alone afterwards."""
    queue = queue_of(*(ticket("batch") for _ in range(100)))
    served(queue, 50)
    for _ in range(50):
        queue.offer(ticket("real-time"), 0.0)
    turns = Counter(one.class_name for one in served(queue, 20))
    assert turns["real-time"] == pytest.approx(14, abs=1)


def test_tenants_of_a_class_are_served_by_tokens() -> None:
    """One with small requests gets more of them, and a flood of them does not crowd another out."""
    flood = [ticket(tenant="flood", tokens=100.0) for _ in range(150)]
    other = [ticket(tenant="other", tokens=1_000.0) for _ in range(10)]
    gone = served(queue_of(*flood, *other), 55)
    assert Counter(one.tenant for one in gone)["other"] == 5


def test_a_tenant_cannot_shed_its_debt_by_leaving() -> None:
    """It has had a large request; while that is not made up for, others go first."""
    queue = queue_of(ticket(tenant="large", tokens=1_000.0), *(ticket(tenant="small") for _ in range(10)))
    served(queue, 2)  # one each, and `large` waits for nothing now
    queue.offer(ticket(tenant="large", tokens=1.0), 0.0)
    assert [one.tenant for one in served(queue, 9)] == ["small"] * 9


def test_a_request_goes_by_arrival_and_a_step_of_priority_is_worth_some_waiting() -> None:
    """A sooner one goes first; one that has waited for longer than the step is worth goes before it."""
    queue = Queue(TWO)
    early, sooner, late = ticket(), ticket(priority=-1), ticket(priority=-1)
    queue.offer(early, 0.0)
    queue.offer(sooner, 4.0)
    queue.offer(late, 6.0)
    assert served(queue, 3) == [sooner, early, late]


def test_a_request_goes_by_deadline_if_so_configured() -> None:
    """The earliest first; who has none is due when he would be turned away."""
    queue = Queue(QueueSpec((REAL_TIME, BATCH), order="deadline"))
    patient, urgent, none = ticket(deadline_s=9.0), ticket(deadline_s=3.0), ticket()
    for one in (patient, urgent, none):
        queue.offer(one, 0.0)
    assert served(queue, 3) == [urgent, patient, none]


def test_what_finds_no_place_overflows_and_then_is_refused() -> None:
    """Into the class that is named; the lower class waits for its own turn there."""
    small = QueueSpec((ClassSpec("high", places=1, overflow="low"), ClassSpec("low", places=1, max_wait_s=60.0)))
    queue = Queue(small)
    first, second = ticket("high"), ticket("high")
    assert queue.offer(first, 0.0)
    assert queue.offer(second, 0.0)
    assert (second.class_name, second.expires_s) == ("low", 60.0)
    assert not queue.offer(ticket("high"), 0.0)
    assert not queue.offer(ticket("low"), 0.0)
    assert len(queue) == 2


def test_bodies_count_against_the_queues_bytes() -> None:
    """Beyond them nothing more is held, until something has gone."""
    queue = Queue(QueueSpec((REAL_TIME, BATCH), max_bytes=100))
    large = ticket(held_bytes=80)
    assert queue.offer(large, 0.0)
    assert not queue.offer(ticket(held_bytes=30), 0.0)
    queue.drop(large)
    assert queue.offer(ticket(held_bytes=30), 0.0)
    assert queue.held_bytes == 30


def test_who_has_waited_for_too_long_is_returned_once() -> None:
    """At its time, not before; the others go on waiting."""
    queue = queue_of(early := ticket(), low := ticket("batch"))
    queue.offer(ticket(), 5.0)
    assert queue.expire(9.9) == []
    assert queue.expire(10.0) == [early]
    assert queue.expire(10.0) == []
    assert len(queue) == 2
    assert queue.expire(700.0)[-1] is low


def test_whose_gateway_waits_less_leaves_sooner() -> None:
    """Whatever came before it."""
    patient, hasty = ticket(), ticket(most_wait_s=2.0)
    queue = queue_of(patient, hasty)
    assert queue.expire(1.9) == []
    assert queue.expire(2.0) == [hasty]
    assert queue.expire(10.0) == [patient]


def test_who_waits_again_keeps_its_time() -> None:
    """It comes before those that came after it, and has waited for as long as it has."""
    queue = queue_of(later := ticket(), now_s=5.0)
    again = ticket()
    assert queue.offer(again, 8.0, since_s=1.0)
    assert queue.window(2) == [again, later]
    assert queue.expire(11.0) == [again]


def test_new_limits_keep_those_that_wait() -> None:
    """In their classes, with what each class is owed; those of a class that is gone are in the first from now on."""
    queue = queue_of(*(ticket(name) for name in ("real-time", "batch", "batch")))
    queue.configure(QueueSpec((ClassSpec("urgent"), ClassSpec("batch", places=1))))
    assert (queue.waiting("urgent"), queue.waiting("batch"), len(queue)) == (1, 2, 3)
    assert not queue.offer(ticket("batch"), 0.0)
    assert queue.class_of("real-time").name == queue.class_of(None).name == "urgent"
    assert {one.class_name for one in queue.window(3)} == {"urgent", "batch"}
    assert len(queue.clear()) == 3
    assert (len(queue), queue.held_bytes) == (0, 0)


def test_who_waits_again_keeps_a_place() -> None:
    """Also where there are fewer by now, or fewer bytes: it was let in, and its turn has come."""
    queue = queue_of(ticket(), ticket())
    queue.configure(QueueSpec((ClassSpec("real-time", places=1),), max_bytes=1))
    assert not queue.offer(ticket(), 1.0)
    assert queue.offer(ticket(held_bytes=50), 1.0, since_s=0.0)


def test_those_of_a_class_that_is_gone_are_not_forgotten_behind_younger_ones() -> None:
    """Each is returned when it has waited for as long as it may, whatever class it has come to."""
    queue = queue_of(old := ticket("batch"), spec=QueueSpec((ClassSpec("real-time"), ClassSpec("batch"))))
    assert queue.offer(young := ticket(), 20.0)
    queue.configure(QueueSpec((ClassSpec("real-time"),)))
    assert queue.expire(30.0) == [old]
    assert queue.expire(50.0) == [young]


def test_classes_that_are_new_share_the_turns_as_if_they_had_always_been_there() -> None:
    """By weight, however many classes there were when the queue was made."""
    queue = Queue(QueueSpec((ClassSpec("a"),)))
    queue.configure(QueueSpec(tuple(ClassSpec(name, weight=weight) for name, weight in (("a", 4), ("b", 3), ("c", 3)))))
    for name in ("a", "b", "c"):
        for _ in range(100):
            assert queue.offer(ticket(name), 0.0)
    turns = Counter(one.class_name for one in served(queue, 100))
    assert turns == {"a": 40, "b": 30, "c": 30}


def test_the_wait_is_predicted_by_the_pace_of_departures() -> None:
    """Ten a second, of which the class gets its share while the other one waits too."""
    both = [ticket(name) for name in ("real-time", "batch") for _ in range(150)]
    queue = queue_of(*both)
    assert queue.predicted_wait_s("batch", 0.0) == BATCH.max_wait_s  # nothing has gone yet
    for turn in range(200):
        queue.take(queue.window(1)[0], turn / 10)
    left = queue.waiting("batch")
    assert queue.predicted_wait_s("batch", 20.0) == pytest.approx((left + 1) / 10, rel=0.25)
    assert queue.predicted_wait_s("real-time", 20.0) <= REAL_TIME.max_wait_s


def test_idle_tenants_are_remembered_up_to_a_bound() -> None:
    """The smallest debts are forgotten first, and not all of them."""
    queue, most = Queue(QueueSpec((REAL_TIME, BATCH), most_idle_tenants=10)), 0
    for number in range(1_000):
        assert queue.offer(ticket(tenant=f"t{number}", tokens=float(number + 1)), 0.0)
        if number % 5:
            served(queue, 1)
        most = max(most, len(queue._lines["real-time"].clocks._at))
    assert 5 <= most <= 10


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("offer"), st.sampled_from(["real-time", "batch"]), st.sampled_from("abc"), st.integers(1, 500)
        ),
        st.tuples(st.just("take"), st.integers(0, 5)),
        st.tuples(st.just("drop"), st.integers(0, 30)),
        st.tuples(st.just("wait"), st.integers(1, 8)),
    ),
    max_size=80,
)


@given(OPERATIONS)
def test_the_window_is_the_order_in_which_they_go(operations: list[tuple]) -> None:  # type: ignore[type-arg]
    """Whatever has happened before: taking from the front gives exactly the window; and nothing is lost or doubled."""
    queue, now_s, waiting = Queue(TWO), 0.0, set[Ticket]()
    for what, *of in operations:
        if what == "offer":
            one = ticket(of[0], of[1], float(of[2]), held_bytes=of[2])
            if queue.offer(one, now_s):
                waiting.add(one)
        elif what == "wait":
            now_s += of[0]
            waiting -= set(queue.expire(now_s))
        elif window := queue.window(6 if what == "take" else 31):
            one = window[min(of[0], len(window) - 1)]
            waiting.discard(one)
            if what == "take":
                queue.take(one, now_s)
            else:
                queue.drop(one)
    assert queue.held_bytes == sum(one.held_bytes for one in waiting)
    window = queue.window(len(waiting) + 1)
    assert set(window) == waiting
    assert len(window) == len(waiting) == len(queue)
    assert served(queue, len(window)) == window


@given(st.lists(st.sampled_from(["high", "mid", "low"]), min_size=3, max_size=200), st.integers(1, 10))
def test_no_class_waits_in_vain(arrivals: list[str], guard: int) -> None:
    """Whatever arrives: a class that waits is passed over at most as often as allowed, times the others like it."""
    classes = tuple(ClassSpec(name, weight=weight) for name, weight in (("high", 1e6), ("mid", 1e3), ("low", 1.0)))
    queue = Queue(QueueSpec(classes, min_share=0.0, most_passed_over=guard))
    for name in arrivals:
        queue.offer(ticket(name), 0.0)
    longest, since = Counter[str](), Counter[str]()
    for _ in arrivals:
        [gone] = served(queue, 1)
        for name in ("high", "mid", "low"):
            since[name] = since[name] + 1 if queue.waiting(name) and name != gone.class_name else 0
            longest[name] = max(longest[name], since[name])
    assert max(longest.values()) <= guard + 2


@given(st.lists(st.floats(0.1, 20.0), min_size=2, max_size=4), st.integers(1, 60))
def test_turns_are_shared_by_weight_from_the_first_on(weights: list[float], turns: int) -> None:
    """Whatever the weights: at any time each class that waits has had its share, within a turn of each other class."""
    classes = tuple(ClassSpec(f"c{number}", weight=weight) for number, weight in enumerate(weights))
    spec = QueueSpec(classes, most_passed_over=1_000)
    queue = queue_of(*(ticket(one.name) for one in classes for _ in range(turns)), spec=spec)
    had = Counter(one.class_name for one in served(queue, turns))
    for name, share in spec.shares().items():
        assert abs(had[name] - turns * share) <= len(classes)


@given(
    st.lists(st.floats(1.0, 1_000.0), min_size=30, max_size=30),
    st.lists(st.floats(1.0, 1_000.0), min_size=30, max_size=30),
)
def test_tenants_that_wait_have_equally_many_tokens(first: list[float], second: list[float]) -> None:
    """However large their requests: while both wait neither is ahead by more than the largest of each."""
    tickets = [ticket(tenant=who, tokens=one) for who, all_of in (("a", first), ("b", second)) for one in all_of]
    queue, had = queue_of(*tickets), Counter[str]()
    while {one.tenant for one in queue.in_order()} == {"a", "b"}:
        [gone] = served(queue, 1)
        had[gone.tenant] += gone.tokens  # type: ignore[assignment]
        assert abs(had["a"] - had["b"]) <= max(first) + max(second) + 1e-6


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.1, 50.0)), min_size=1, max_size=40))
def test_deadlines_are_kept_in_their_order(arrivals: list[tuple[float, float]]) -> None:
    """Whoever is due first goes first, whenever he came; nobody is due later than he would be turned away."""
    queue, now_s = Queue(QueueSpec((REAL_TIME, BATCH), order="deadline")), 0.0
    for pause_s, within_s in arrivals:
        now_s += pause_s
        assert queue.offer(ticket(deadline_s=now_s + within_s), now_s)
    due = [min(one.deadline_s, one.expires_s) for one in served(queue, len(arrivals), now_s)]
    assert due == sorted(due)


@given(OPERATIONS, st.integers(0, 4), st.integers(1, 800))
def test_places_and_bytes_are_never_exceeded(operations: list[tuple], places: int, most: int) -> None:  # type: ignore[type-arg]
    """Whatever happens; and nobody waits longer than he may."""
    spec = QueueSpec(
        (ClassSpec("real-time", places=places, max_wait_s=10.0, overflow="batch"), ClassSpec("batch", places=3)),
        max_bytes=most,
    )
    queue, now_s = Queue(spec), 0.0
    for what, *of in operations:
        if what == "offer":
            queue.offer(ticket(of[0], of[1], float(of[2]), held_bytes=of[2]), now_s)
        elif what == "wait":
            now_s += of[0]
            queue.expire(now_s)
        elif window := queue.window(1):
            queue.take(window[0], now_s)
        assert queue.held_bytes <= most
        assert queue.waiting("real-time") <= places
        assert queue.waiting("batch") <= 3
        assert all(one.expires_s > now_s for one in queue.in_order())
