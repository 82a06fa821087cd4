"""Late binding: which of those that wait goes, and where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission import binding
from policies.admission.binding import Binder, BindingSpec, Bound, Faulty, WaitingRequest
from policies.admission.queue import ClassSpec, Queue, QueueSpec
from policies.admission.room import RoomSpec
from policies.fleet_state import FleetState
from policies.lifecycle import State
from policies.placement.ledger import Ledger
from policies.placement.marginal_cost import MarginalCost
from policies.placement.marginal_spec import MarginalCostSpec
from policies.placement.placement import Placement, Unplaceable
from policies.placement.policy import Policy
from policies.placement.prefix_index import PrefixIndex
from policies.placement.profiles import Profile
from policies.placement.rotation import RoundRobinSpec
from policies.placement.view import View
from policies.types import Decision, Floats, InferenceRequest, Kind, Ranking, Reservation

PLAIN = Profile(prefill_tokens_per_s=1_000.0, attention_per_token=0.0, request_tokens=0.0, output_tokens=100.0)
CLASSES = (ClassSpec("only", max_wait_s=600.0), ClassSpec("batch", max_wait_s=600.0, endpoint_requests=1))


class Pool:
    """Endpoints of one pool, its queue and its binder, at a time that the test sets."""

    def __init__(self, endpoints: int = 2, policy: Policy | None = None, **spec: Any) -> None:
        self.now_s = 0.0
        self.rng = Random(3)
        self.state = FleetState()
        for number in range(endpoints):
            slot = self.state.add(f"10.0.0.{number}:80")
            self.state.state[slot], self.state.routable[slot] = State.READY, True
            self.state.kv_capacity_tokens[slot] = 100_000
            self.state.set_models(slot, frozenset({"m"}))
        self.placement = Placement("p", policy or MarginalCost(MarginalCostSpec()), PrefixIndex(100_000), Ledger(PLAIN))
        self.placement.set_members(range(endpoints))
        room = RoomSpec(**{"endpoint_requests": 1, **spec.pop("room", {})})
        self.queue = Queue[WaitingRequest](QueueSpec(CLASSES))
        self.binder = Binder(self.placement, self.queue, BindingSpec(room=room, **spec))
        self.running: list[Reservation] = []

    def request(
        self, prefix: int = 0, tokens: int = 1_000, class_name: str = "only", **fields: Any
    ) -> InferenceRequest:
        """One whose prompt begins with that prefix, if any, in two blocks of its half."""
        blocks = (prefix, prefix + 1) if prefix else ()
        sizes = (tokens // 2, tokens // 2) if prefix else ()
        return InferenceRequest(
            Kind.CHAT, "m", "m", tokens, block_hashes=blocks, block_tokens=sizes, class_name=class_name, **fields
        )

    def arrive(self, request: InferenceRequest) -> Decision | Unplaceable | WaitingRequest:
        """It goes at once, or waits."""
        decision = self.binder.at_once(request, self.state, self.now_s, self.rng)
        if decision is None:
            ticket = WaitingRequest(request.class_name or "", "", request.input_tokens, request=request)
            assert self.queue.offer(ticket, self.now_s)
            self.binder.came(ticket, self.state, self.now_s, self.rng)
            return ticket
        if isinstance(decision, Decision):
            self.start(request, decision)
        return decision

    def start(self, request: InferenceRequest, decision: Decision) -> Reservation:
        """Take the place."""
        reservation = self.placement.commit(decision, request, self.state, self.now_s)
        self.running.append(reservation)
        return reservation

    def end(self, reservation: Reservation) -> None:
        """Its answer is whole."""
        self.running.remove(reservation)
        self.state.release(reservation)
        self.placement.ended(reservation, self.now_s)

    def bind(self) -> Bound[WaitingRequest] | None:
        """The next that goes, gone."""
        bound = next(self.binder.bindings(self.state, self.now_s, self.rng), None)
        if bound is not None:
            self.queue.take(bound.ticket, self.now_s)
            self.start(bound.ticket.request, bound.decision)
        return bound


def bound(found: Bound[WaitingRequest] | None) -> Bound[WaitingRequest]:
    """It is one."""
    assert found is not None
    return found


def held_by(pool: Pool, prefix: int) -> tuple[Reservation, int]:
    """A prompt of that prefix runs somewhere; its reservation, and the slot."""
    decision = pool.arrive(pool.request(prefix))
    assert isinstance(decision, Decision)
    return pool.running[-1], decision.order[0]


def test_a_request_goes_at_once_where_its_choice_has_room() -> None:
    """Nothing is held in a fleet at leisure."""
    pool = Pool()
    assert isinstance(pool.arrive(pool.request()), Decision)
    assert isinstance(pool.arrive(pool.request()), Decision)
    assert isinstance(pool.arrive(pool.request()), WaitingRequest)
    assert pool.bind() is None


def test_who_comes_does_not_pass_those_that_wait() -> None:
    """Though there is room by now: the queue says whose turn it is."""
    pool = Pool(endpoints=1)
    pool.arrive(pool.request())
    first = pool.arrive(pool.request())
    pool.end(pool.running[0])
    second = pool.arrive(pool.request())
    assert isinstance(second, WaitingRequest)
    assert bound(pool.bind()).ticket is first


def test_a_request_waits_for_the_endpoint_that_holds_its_prompt_and_no_longer_than_that_saves() -> None:
    """The detour costs its prefill; who has waited long enough pays it."""
    pool = Pool()
    _, holder = held_by(pool, 7)
    pool.now_s = 100.0  # its prompt is long done, its answer not
    follow_up = pool.arrive(pool.request(7))
    assert isinstance(follow_up, WaitingRequest)
    assert pool.bind() is None  # the other endpoint is idle
    pool.now_s = 102.0
    assert pool.bind() is None
    pool.now_s = 104.0
    gone = bound(pool.bind())
    assert gone.decision.order[0] != holder
    assert gone.decision.waited_s == 4.0
    assert gone.decision.detour_s == pytest.approx(1.0, abs=0.01)


def test_its_choice_is_taken_once_that_has_room() -> None:
    """However briefly it has waited."""
    pool = Pool()
    running, holder = held_by(pool, 7)
    pool.arrive(pool.request(7))
    pool.end(running)
    gone = bound(pool.bind())
    assert (gone.decision.order[0], gone.decision.detour_s) == (holder, 0.0)
    assert gone.decision.addresses[0] == f"10.0.0.{holder}:80"
    assert len(gone.decision.addresses) == 2  # the full one follows, for a retry


def test_a_long_wait_does_not_give_up_every_cache() -> None:
    """A detour beyond `longest_detour_s` is never taken."""
    pool = Pool(longest_detour_s=0.5)
    held_by(pool, 7)
    pool.now_s = 100.0
    pool.arrive(pool.request(7))
    pool.now_s = 600.0
    assert pool.bind() is None


def test_without_late_binding_any_room_is_taken() -> None:
    """At once, where the best endpoint has no place."""
    pool = Pool(late=False)
    _, holder = held_by(pool, 7)
    pool.arrive(pool.request(7))
    assert bound(pool.bind()).decision.order[0] != holder


def test_without_late_binding_the_queue_decides_when_and_the_policy_where() -> None:
    """Nobody goes while all are busy; as soon as one is not, the next goes where its prompt is, busy or not."""
    pool = Pool(late=False, room={"endpoint_requests": 3})
    holder = pool.arrive(pool.request(7, tokens=4_000)).order[0]  # type: ignore[union-attr]
    pool.arrive(pool.request(tokens=3_000))
    waiting = [pool.arrive(pool.request(7, tokens=4_000)) for _ in range(3)]
    assert pool.bind() is None
    pool.end(pool.running[1])
    for ticket in waiting[:2]:
        gone = bound(pool.bind())
        assert (gone.ticket, gone.decision.order[0]) == (ticket, holder)
    assert bound(pool.bind()).decision.order[0] != holder  # where all places are taken now


@pytest.mark.parametrize("late", [False, True])
def test_who_comes_while_one_endpoint_has_room_waits_for_another_only_with_late_binding(late: bool) -> None:  # noqa: FBT001 - a case
    """Without, it goes to the busy endpoint that it likes best, as it would without a queue."""
    pool = Pool(late=late, room={"endpoint_requests": 3})
    pool.arrive(pool.request(7, tokens=4_000))
    assert isinstance(pool.arrive(pool.request(7, tokens=4_000)), WaitingRequest) is late


def test_a_policy_without_prices_takes_any_room() -> None:
    """It cannot say what waiting saves."""
    pool = Pool(policy=RoundRobinSpec().build("round_robin"))
    for _ in range(3):
        pool.arrive(pool.request())
    pool.end(pool.running[1])
    assert bound(pool.bind()).decision.detour_s == 0


def test_one_hot_prefix_does_not_block_the_queue() -> None:
    """Those behind who want something else go first."""
    pool = Pool()
    _, holder = held_by(pool, 7)
    pool.now_s = 100.0
    hot = [pool.arrive(pool.request(7)) for _ in range(10)]
    other = pool.arrive(pool.request(100))
    gone = bound(pool.bind())
    assert gone.ticket is other
    assert gone.decision.order[0] != holder
    assert len(pool.queue) == len(hot)


def test_what_one_brings_those_like_it_find() -> None:
    """Of two that begin alike the second wants the first's endpoint as soon as that has gone there."""
    pool = Pool(room={"endpoint_requests": 2}, patience=0.01)
    for _ in range(4):
        assert isinstance(pool.arrive(pool.request(tokens=10)), Decision)
    alike = [pool.arrive(pool.request(7)) for _ in range(2)]
    full = next(one for one in pool.running if one.slot == 0)
    pool.end(full)
    assert bound(pool.bind()).ticket is alike[0]
    for one in [one for one in pool.running if one.slot == 1]:
        pool.end(one)
    pool.now_s = 5.0  # the first one's prompt is done
    assert pool.bind() is None  # though slot 1 is empty
    assert alike[1].prospects.matched_tokens.tolist()[0] == 1_000  # type: ignore[union-attr]


def test_a_class_at_its_limit_lets_others_pass() -> None:
    """Its requests wait, though there is room."""
    pool = Pool(endpoints=1, room={"endpoint_requests": 3})
    assert isinstance(pool.arrive(pool.request(class_name="batch", tokens=10)), Decision)
    second = pool.arrive(pool.request(class_name="batch", tokens=10))
    assert isinstance(second, WaitingRequest)
    third = pool.arrive(pool.request(tokens=10))
    assert bound(pool.bind()).ticket is third
    assert pool.bind() is None
    pool.end(pool.running[0])
    assert bound(pool.bind()).ticket is second


def test_nobody_goes_where_no_endpoint_takes_traffic() -> None:
    """They wait; and who comes then is told, as without a queue."""
    pool = Pool(endpoints=1)
    pool.arrive(pool.request())
    pool.arrive(pool.request())
    pool.end(pool.running[0])
    pool.state.state[0] = State.UNHEALTHY
    assert pool.bind() is None
    assert isinstance(Pool(endpoints=0).arrive(pool.request()), Unplaceable)


def test_an_endpoint_that_joins_is_found() -> None:
    """What was looked up before it came is looked up again."""
    pool = Pool(endpoints=1)
    pool.arrive(pool.request())
    waits = pool.arrive(pool.request())
    assert pool.bind() is None
    slot = pool.state.add("10.0.0.9:80")
    pool.state.state[slot], pool.state.routable[slot] = State.READY, True
    pool.state.kv_capacity_tokens[slot] = 100_000
    pool.state.set_models(slot, frozenset({"m"}))
    pool.placement.set_members([0, slot])
    gone = bound(pool.bind())
    assert (gone.ticket, gone.decision.order[0]) == (waits, slot)


def test_a_request_for_one_address_waits_for_that_one() -> None:
    """A subset is a hard constraint, here too."""
    pool = Pool()
    for _ in range(2):
        pool.arrive(pool.request())
    here = pool.running[0].slot
    bound_to_here = pool.arrive(pool.request(subset=(f"10.0.0.{here}:80",)))
    pool.end(pool.running[1])
    pool.now_s = 100.0
    assert pool.bind() is None
    pool.end(pool.running[0])
    assert bound(pool.bind()).ticket is bound_to_here


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.just("arrive"),
                st.integers(0, 3),
                st.sampled_from([10, 400, 3_000]),
                st.sampled_from(["only", "batch"]),
            ),
            st.tuples(st.just("end"), st.integers(0, 9)),
            st.tuples(st.just("pass"), st.sampled_from([0.05, 1.0, 20.0])),
        ),
        max_size=60,
    ),
    st.booleans(),
)
def test_whatever_happens_nobody_is_lost_and_no_limit_is_broken(events: list[tuple[Any, ...]], late: bool) -> None:  # noqa: FBT001 - generated
    """Everybody is running, waiting or done; no endpoint has more than it may, no class either; in the end all go."""
    pool, arrived, ended = Pool(endpoints=3, late=late, room={"endpoint_requests": 2}), 0, 0

    def bind_all() -> None:
        while pool.bind() is not None:
            pass

    for what, *of in events:
        if what == "arrive":
            arrived += 1
            pool.arrive(pool.request(10 * of[0], of[1], of[2]))
        elif what == "end" and pool.running:
            pool.end(pool.running[of[0] % len(pool.running)])
            ended += 1
        elif what == "pass":
            pool.now_s += of[0]
        bind_all()
        assert arrived == ended + len(pool.running) + len(pool.queue)
        for slot in range(3):
            there = [one for one in pool.running if one.slot == slot]
            assert len(there) <= 2
            assert sum(one.class_name == "batch" for one in there) <= 1
    for _ in range(arrived - ended):
        pool.now_s += 10.0
        bind_all()
        if pool.running:
            pool.end(pool.running[0])
    assert not len(pool.queue)
    assert not pool.state.in_flight.any()


def test_many_are_looked_up_in_several_passes() -> None:
    """A pass stays short though all must be looked up again; it says that it has left some out."""
    pool = Pool(endpoints=8, room={"endpoint_requests": 1})
    for _ in range(8):
        pool.arrive(pool.request())
    waiting = [pool.arrive(pool.request(10 * number)) for number in range(1, 41)]
    pool.now_s = 2.0
    pool.end(pool.running[0])
    assert bound(pool.bind()).ticket is waiting[0]
    assert pool.binder.unfinished
    pool.end(pool.running[0])
    assert bound(pool.bind()).ticket is waiting[1]


def test_one_pass_lets_as_many_go_as_endpoints_have_room() -> None:
    """Each to one of his own, and the first of them first."""
    pool = Pool(endpoints=8, room={"endpoint_requests": 2})
    for _ in range(16):
        assert isinstance(pool.arrive(pool.request(tokens=10)), Decision)
    waiting = [pool.arrive(pool.request(tokens=10)) for _ in range(20)]
    for one in list(pool.running):
        pool.end(one)
    gone, slots = [], []
    for one in pool.binder.bindings(pool.state, pool.now_s, pool.rng):
        pool.queue.take(one.ticket, pool.now_s)
        pool.start(one.ticket.request, one.decision)
        gone.append(one.ticket)
        slots.append(one.decision.order[0])
    assert gone == waiting[:8]
    assert sorted(slots) == list(range(8))
    assert pool.binder.unfinished


def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    """It fits into no gap that they leave; so once it has waited for long, an endpoint is kept free for it."""
    pool = Pool(endpoints=2, room={"endpoint_requests": 1_000, "busy_s": 1e9})
    while isinstance(pool.arrive(pool.request(tokens=9_000)), Decision):
        pass
    long = pool.arrive(pool.request(tokens=60_000))
    assert isinstance(long, WaitingRequest)
    for _ in range(600):
        pool.now_s += 1.0
        pool.arrive(pool.request(tokens=9_000))
        pool.end(pool.running[0])
        while pool.bind() is not None:
            pass
        if not pool.queue.has(long):
            break
    assert not pool.queue.has(long)
    assert pool.now_s < 300  # of the 600 s that it may wait
    for one in list(pool.running):
        pool.end(one)
    while pool.bind() is not None:  # nothing is kept for anybody any more
        pass
    assert {one.slot for one in pool.running} == {0, 1}


def test_who_may_go_nowhere_stands_in_nobodys_way() -> None:
    """Whether it waited before its only endpoint went, or comes now: then it is told at once, as without a queue."""
    pool = Pool(endpoints=3)
    for _ in range(3):
        pool.arrive(pool.request())
    for _ in range(200):
        pool.arrive(pool.request(subset=("10.0.0.2:80",)))
    good = pool.arrive(pool.request())
    pool.state.state[2] = State.UNHEALTHY
    assert isinstance(pool.arrive(pool.request(subset=("10.0.0.2:80",))), Unplaceable)
    pool.now_s = 2.0
    pool.end(next(one for one in pool.running if one.slot == 0))
    for _ in range(100):
        if (one := pool.bind()) is not None:
            break
    assert one is not None
    assert one.ticket is good


class Picky:
    """The default policy, but for what it cannot rank, and what it was asked to price."""

    name = "picky"

    def __init__(self) -> None:
        self._own = MarginalCost()
        self.priced: list[InferenceRequest] = []

    def rank(self, view: View, length: int) -> Ranking:
        """Raise RuntimeError for a bad session."""
        if view.request.session_key == "bad":
            raise RuntimeError("not mine")
        return self._own.rank(view, length)

    def price(self, view: View, requests: Sequence[InferenceRequest], matched_tokens: Floats) -> tuple[Floats, Floats]:
        """The default policy's, and note it."""
        self.priced.extend(requests)
        return self._own.price(view, requests, matched_tokens)

    def committed(self, decision: Decision) -> None:
        """Nothing to remember."""


def test_the_one_that_cannot_be_judged_is_named() -> None:
    """And not the first in the queue."""
    pool = Pool(endpoints=1, policy=Picky())
    pool.arrive(pool.request())
    _first, culprit = pool.arrive(pool.request()), pool.arrive(pool.request(session_key="bad"))
    pool.end(pool.running[0])
    bound(pool.bind())
    pool.end(pool.running[0])
    with pytest.raises(Faulty) as caught:
        pool.bind()
    assert caught.value.ticket is culprit


def test_a_cold_fleet_has_all_its_places_and_a_cold_endpoint_its_share() -> None:
    """What warms up has a share beside others, and all where they are just as cold; with certainty, not by chance."""
    pool = Pool(endpoints=2, room={"endpoint_requests": 10})
    pool.state.state[:2] = State.WARMING
    pool.state.traffic_share[:2] = 0.1
    assert sum(isinstance(pool.arrive(pool.request(tokens=10)), Decision) for _ in range(30)) == 20
    pool = Pool(endpoints=2, room={"endpoint_requests": 10})
    pool.state.state[0] = State.WARMING
    pool.state.traffic_share[0] = 0.1
    for _ in range(30):
        pool.arrive(pool.request(tokens=10))
        pool.now_s += 1.0  # for this that place is worth waiting, but not for long
        while pool.bind() is not None:
            pass
    assert sorted(one.slot for one in pool.running) == [0] + [1] * 10


class Watched(list[int]):
    """A prompt's blocks, none, and whether anybody has looked them up."""

    looked_up = False

    def __iter__(self) -> Iterator[int]:
        self.looked_up = True
        return super().__iter__()


@pytest.mark.parametrize(("endpoints", "window"), [(2, 16), (7, 42), (300, 512)])
def test_no_more_than_a_window_is_looked_up_again(endpoints: int, window: int) -> None:
    """Six requests per endpoint, but no more than 512; those behind go by what was known."""
    pool = Pool(endpoints=endpoints)
    only = ("10.0.0.0:80",)
    assert isinstance(pool.arrive(pool.request(subset=only)), Decision)
    waiting = [pool.request(subset=only) for _ in range(600)]
    assert not any(isinstance(pool.arrive(one), Decision) for one in waiting)
    for one in waiting:
        one.block_hashes = Watched()
    pool.now_s = 10.0
    for _ in range(1_000):
        assert pool.bind() is None
    assert [one.block_hashes.looked_up for one in waiting] == [True] * window + [False] * (600 - window)  # type: ignore[attr-defined]


def test_everybody_is_asked_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a bound, pass by pass, as long as there is a place that nobody wants."""
    monkeypatch.setattr(binding, "_FARTHEST", 500)
    policy = Picky()
    pool = Pool(policy=policy)
    assert isinstance(pool.arrive(pool.request(subset=("10.0.0.0:80",))), Decision)
    waiting = [pool.arrive(pool.request(subset=("10.0.0.0:80",))) for _ in range(600)]
    assert pool.bind() is None
    while pool.binder.unfinished:
        assert pool.bind() is None
    assert [id(one) for one in policy.priced] == [id(one.request) for one in waiting[:500]]  # type: ignore[union-attr]


def passes_until_bound(pool: Pool) -> Bound[WaitingRequest]:
    """Who goes, in as many passes as that takes."""
    while (found := pool.bind()) is None:
        assert pool.binder.unfinished
    return found


@pytest.mark.parametrize(("flood", "tokens"), [({"subset": ("10.0.0.0:80",)}, 1_000), ({"prefix": 7}, 50_000)], ids=str)
@pytest.mark.parametrize("waiting", [10, 100, 900])
def test_a_flood_for_one_endpoint_keeps_nobody_from_another(flood: Any, tokens: int, waiting: int) -> None:
    """However many come first that may go nowhere else, or whose prompts are too long to be prefilled anywhere else."""
    pool = Pool()
    assert pool.arrive(pool.request(tokens=tokens, **flood)).order[0] == 0  # type: ignore[union-attr]
    pool.now_s = 200.0
    first = [pool.arrive(pool.request(tokens=tokens, **flood)) for _ in range(waiting)]
    others = [pool.arrive(pool.request(100)) for _ in range(2)]
    gone = passes_until_bound(pool)
    assert (gone.ticket, gone.decision.order[0]) == (others[0], 1)
    pool.end(pool.running[0])
    assert passes_until_bound(pool).ticket is first[0]


def test_a_place_that_comes_free_meanwhile_is_the_fronts() -> None:
    """Those far behind are offered only what the ones before them have left."""
    pool = Pool(endpoints=3)
    for endpoint in range(2):
        assert isinstance(pool.arrive(pool.request(subset=(f"10.0.0.{endpoint}:80",))), Decision)
    front = [pool.arrive(pool.request(subset=("10.0.0.0:80",))) for _ in range(100)]
    pool.arrive(pool.request(subset=("10.0.0.0:80", "10.0.0.1:80")))
    assert pool.bind() is None
    assert pool.binder.unfinished  # the third endpoint is free; those behind the window are still to be asked
    pool.end(pool.running[0])
    assert bound(pool.bind()).ticket is front[0]


def test_a_window_too_large_for_one_pass_is_looked_at_in_several() -> None:
    """A pass says that it has left some out; the next goes on there, and begins anew when one went."""
    pool = Pool(endpoints=400)
    holders = [held_by(pool, 10 * number) for number in range(1, 401)]
    pool.now_s = 100.0  # nobody has anything left to prefill, and each holds one prompt
    order = [pool.arrive(pool.request(10 * (number % 399 + 1))) for number in range(80)]
    last = pool.arrive(pool.request(10 * 400))
    assert pool.bind() is None
    assert not pool.binder.unfinished  # no endpoint has room
    pool.end(holders[399][0])
    passes = 0
    while (found := pool.bind()) is None:
        assert pool.binder.unfinished
        passes += 1
    assert (found.ticket, found.decision.order[0]) == (last, holders[399][1])
    assert passes >= 2
    pool.end(holders[0][0])
    assert bound(pool.bind()).ticket is order[0]
