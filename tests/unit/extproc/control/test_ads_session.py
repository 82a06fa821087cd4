"""The xDS protocol without a wire: what an Envoy is sent, and what it has acknowledged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.control.ads_session import CDS, EDS, Addresses, AdsSession, Request, Response, Snapshot

A, B, C, D = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.4:8000"
LDS = "type.googleapis.com/envoy.config.listener.v3.Listener"


def snapshot(version: int, **assignments: set[str]) -> Snapshot:
    """Clusters with a configuration that never changes, and these addresses."""
    clusters = {name: name.encode() for name in assignments}
    return Snapshot(str(version), clusters, {name: frozenset(found) for name, found in assignments.items()})


class Envoy:
    """The other end of a session: subscribes as Envoy does and answers when told to."""

    def __init__(self, session: AdsSession, *, eds: set[str] | None = None) -> None:
        self.session = session
        self.names = frozenset(eds or ())
        self.inbox: list[Response] = []
        self.known: dict[str, Addresses] = {}
        self.clusters: set[str] = set()
        self.nonce = ""

    def connect(self, *, version: str = "") -> None:
        """Subscribe to the clusters, of which it may hold a version, and to the addresses it knew before."""
        self.take(self.session.receive(Request(CDS, version=version)))
        if self.names:
            self.take(self.session.receive(Request(EDS, self.names)))

    def take(self, responses: list[Response]) -> None:
        """Receive."""
        self.inbox += responses

    def ask_for(self, *names: str, nonce: str) -> None:
        """Change the subscription to addresses."""
        self.names = frozenset(names)
        self.take(self.session.receive(Request(EDS, self.names, nonce)))

    def ack(self) -> Response:
        """Take over the oldest response."""
        response = self.inbox.pop(0)
        names = frozenset[str]()
        if response.type_url == CDS:
            self.clusters = set(response.resources)
        else:
            names, self.nonce = self.names, response.nonce
            self.known.update({k: v for k, v in response.resources.items() if isinstance(v, frozenset) and k in names})
        self.take(self.session.receive(Request(response.type_url, names, response.nonce)))
        return response

    def follow(self) -> None:
        """As `ack`, and then ask for the addresses of exactly the clusters it has now, as a real Envoy does."""
        if self.ack().type_url == CDS and self.names != self.clusters:
            self.known = {name: addresses for name, addresses in self.known.items() if name in self.clusters}
            self.ask_for(*self.clusters, nonce=self.nonce)

    def nack(self) -> Response:
        """Refuse the oldest response."""
        response = self.inbox.pop(0)
        names = self.names if response.type_url == EDS else frozenset()
        self.nonce = response.nonce if response.type_url == EDS else self.nonce
        self.take(self.session.receive(Request(response.type_url, names, response.nonce, "no")))
        return response


def connected(offered: Snapshot, *eds: str) -> Envoy:
    """An Envoy that has taken over a snapshot."""
    session = AdsSession()
    session.offer(offered)
    envoy = Envoy(session, eds=set(eds))
    envoy.connect()
    while envoy.inbox:
        envoy.ack()
    return envoy


def test_nothing_is_said_before_the_first_snapshot() -> None:
    """An Envoy that asks before anything is published gets no answer, and both answers once something is."""
    session = AdsSession()
    envoy = Envoy(session, eds={"chat"})
    envoy.connect()
    assert envoy.inbox == []
    assert [one.type_url for one in session.offer(snapshot(1, chat={A}))] == [CDS, EDS]


def test_an_empty_snapshot_is_an_answer_too() -> None:
    """The first CDS response is sent even if there are no clusters, else Envoy would wait with its listener."""
    session = AdsSession()
    session.offer(snapshot(1))
    [response] = session.receive(Request(CDS))
    assert response.resources == {}


def test_a_new_address_counts_once_acknowledged() -> None:
    """After a publish the session vouches for the old addresses until Envoy has acknowledged the new ones."""
    envoy = connected(snapshot(1, chat={A}), "chat")
    envoy.take(envoy.session.offer(snapshot(2, chat={A, B})))
    assert envoy.session.vouched("chat") == {A}
    envoy.ack()
    assert envoy.session.vouched("chat") == {A, B}


def test_an_arriving_envoy_vouches_for_what_it_was_sent_first() -> None:
    """Before its first acknowledgement an Envoy takes nothing away from the fleet."""
    session = AdsSession()
    session.offer(snapshot(1, chat={A}))
    assert session.vouched("chat") is None
    session.receive(Request(EDS, frozenset({"chat"})))
    assert session.vouched("chat") == {A}


def test_a_refused_update_leaves_the_old_addresses_acknowledged() -> None:
    """A NACK keeps what was held, and the refused content is not offered again until it changes."""
    envoy = connected(snapshot(1, chat={A}), "chat")
    envoy.take(envoy.session.offer(snapshot(2, chat={B})))
    envoy.nack()
    assert envoy.session.vouched("chat") == {A}
    assert envoy.inbox == []
    assert envoy.session.offer(snapshot(3, chat={B})) == []
    [again] = envoy.session.offer(snapshot(4, chat={B, C}))
    assert again.resources == {"chat": {B, C}}


def test_an_envoy_that_refused_its_first_addresses_has_no_say() -> None:
    """One Envoy that accepts nothing does not empty the fleet for the others."""
    session = AdsSession()
    envoy = Envoy(session, eds={"chat"})
    session.offer(snapshot(1, chat={A}))
    envoy.take(session.receive(Request(EDS, frozenset({"chat"}))))
    envoy.nack()
    assert session.vouched("chat") is None


def test_a_refused_cluster_list_is_offered_again_once_it_changes() -> None:
    """CDS behaves as EDS does: refused content waits for a change."""
    envoy = connected(snapshot(1, chat={A}), "chat")
    envoy.take(envoy.session.offer(snapshot(2, chat={A}, code={B})))
    assert envoy.nack().type_url == CDS
    assert envoy.inbox == []
    assert envoy.session.offer(snapshot(3, chat={A}, code={B})) == []
    [clusters] = envoy.session.offer(snapshot(4, chat={A}, search={B}))
    assert set(clusters.resources) == {"chat", "search"}


def test_only_the_newest_snapshot_is_sent_to_a_slow_envoy() -> None:
    """While a response waits for its answer nothing more is sent; then the newest content goes out at once."""
    envoy = connected(snapshot(1, chat={A}), "chat")
    envoy.take(envoy.session.offer(snapshot(2, chat={A, B})))
    envoy.take(envoy.session.offer(snapshot(3, chat={B})))
    envoy.take(envoy.session.offer(snapshot(4, chat={B, C})))
    assert len(envoy.inbox) == 1
    envoy.ack()
    [newest] = envoy.inbox
    assert (newest.version, newest.resources) == ("4", {"chat": {B, C}})


def test_only_changed_clusters_are_sent() -> None:
    """An address of one pool does not resend another's."""
    envoy = connected(snapshot(1, chat={A}, code={B}), "chat", "code")
    [response] = envoy.session.offer(snapshot(2, chat={A, C}, code={B}))
    assert response.resources == {"chat": {A, C}}


def test_an_unchanged_snapshot_is_not_sent_again() -> None:
    """A new version with the same content is no news."""
    envoy = connected(snapshot(1, chat={A}), "chat")
    assert envoy.session.offer(snapshot(2, chat={A})) == []


def test_a_new_cluster_comes_before_its_addresses() -> None:
    """Make before break: the cluster is announced, then its addresses follow when Envoy asks for them."""
    envoy = connected(snapshot(1, chat={A}), "chat")
    envoy.take(envoy.session.offer(snapshot(2, chat={A}, code={B})))
    [clusters] = envoy.inbox
    assert set(clusters.resources) == {"chat", "code"}
    envoy.ack()
    envoy.ask_for("chat", "code", nonce=last_eds_nonce(envoy))
    [addresses] = envoy.inbox
    assert addresses.resources == {"code": {B}}


def test_a_removed_cluster_leaves_without_a_word_on_its_addresses() -> None:
    """On removal CDS says so and EDS stays quiet; afterwards the session vouches for nothing there."""
    envoy = connected(snapshot(1, chat={A}, code={B}), "chat", "code")
    envoy.take(envoy.session.offer(snapshot(2, chat={A})))
    [clusters] = envoy.inbox
    assert (clusters.type_url, set(clusters.resources)) == (CDS, {"chat"})
    envoy.ack()
    envoy.ask_for("chat", nonce=last_eds_nonce(envoy))
    assert envoy.inbox == []
    assert envoy.session.vouched("code") == frozenset()
    assert envoy.session.vouched("chat") == {A}


def test_a_new_cluster_counts_once_it_and_its_addresses_are_acknowledged() -> None:
    """Before that an Envoy answers requests for it with an error, so nobody may be sent there."""
    envoy = connected(snapshot(1, chat={A}), "chat")
    vouched = [envoy.session.vouched("code")]
    envoy.take(envoy.session.offer(snapshot(2, chat={A}, code={B})))
    vouched.append(envoy.session.vouched("code"))
    envoy.follow()
    vouched.append(envoy.session.vouched("code"))
    assert vouched == [frozenset()] * 3
    envoy.follow()
    assert envoy.session.vouched("code") == {B}
    assert envoy.session.vouched("chat") == {A}


def test_a_refused_new_cluster_never_counts() -> None:
    """An Envoy that serves and refuses a cluster list holds the new cluster up, and nothing else."""
    envoy = connected(snapshot(1, chat={A}), "chat")
    envoy.take(envoy.session.offer(snapshot(2, chat={A}, code={B})))
    envoy.nack()
    assert envoy.session.vouched("code") == frozenset()
    assert envoy.session.vouched("chat") == {A}


def test_an_envoy_that_accepts_no_cluster_at_all_has_no_say() -> None:
    """It serves nobody, so it holds nobody up."""
    session = AdsSession()
    session.offer(snapshot(1, chat={A}))
    envoy = Envoy(session)
    envoy.connect()
    envoy.nack()
    assert session.vouched("chat") is None


def test_a_new_envoy_holds_nothing_up_while_it_fetches_its_first_clusters() -> None:
    """It listens only when it has their addresses; a cluster that comes later is not believed there."""
    session = AdsSession()
    session.offer(snapshot(1, chat={A}))
    envoy = Envoy(session)
    envoy.connect()
    envoy.follow()
    envoy.take(session.offer(snapshot(2, chat={A}, code={B})))
    assert session.vouched("chat") == {A}
    assert session.vouched("code") == frozenset()


def test_a_returning_envoy_is_believed_to_have_what_it_asks_addresses_for() -> None:
    """It has been serving all along: the clusters it had count at once, one added meanwhile only when acknowledged."""
    session = AdsSession()
    session.offer(snapshot(1, chat={A}, code={B}))
    envoy = Envoy(session, eds={"chat"})
    envoy.connect(version="7")
    assert session.vouched("chat") == {A}
    envoy.follow()
    assert session.vouched("chat") == {A}
    assert session.vouched("code") == frozenset()
    while envoy.inbox:
        envoy.follow()
    assert session.vouched("code") == {B}


def test_a_returning_envoy_that_refuses_the_clusters_keeps_the_old_ones() -> None:
    """As one that stayed connected would."""
    session = AdsSession()
    session.offer(snapshot(1, chat={A}, code={B}))
    envoy = Envoy(session, eds={"chat"})
    envoy.connect(version="7")
    envoy.nack()
    assert session.vouched("chat") == {A}
    assert session.vouched("code") == frozenset()


def test_a_cluster_that_comes_back_starts_anew() -> None:
    """From the moment its removal is under way; what was acknowledged before says nothing of the new one."""
    envoy = connected(snapshot(1, chat={A}, code={B}), "chat", "code")
    envoy.take(envoy.session.offer(snapshot(2, chat={A})))
    envoy.take(envoy.session.offer(snapshot(3, chat={A}, code={B})))
    assert envoy.session.vouched("code") == frozenset()
    envoy.ack()  # and its wish for fewer addresses is still under way
    assert envoy.session.vouched("code") == frozenset()
    envoy.ack()
    assert envoy.session.vouched("code") == frozenset()
    [addresses] = envoy.inbox
    assert addresses.resources == {"code": {B}}
    envoy.ack()
    assert envoy.session.vouched("code") == {B}


def test_a_changed_cluster_gets_its_addresses_again() -> None:
    """Envoy warms a changed cluster anew and waits for addresses, though it holds them already."""
    envoy = connected(snapshot(1, chat={A}, code={B}), "chat", "code")
    changed = Snapshot("2", {"chat": b"other", "code": b"code"}, snapshot(1, chat={A}, code={B}).assignments)
    clusters, addresses = envoy.session.offer(changed)
    assert (clusters.type_url, addresses.resources) == (CDS, {"chat": {A}})


def test_the_same_question_again_is_answered_again() -> None:
    """A request that repeats an answered one asks for the addresses once more."""
    envoy = connected(snapshot(1, chat={A}), "chat")
    envoy.ask_for("chat", nonce=last_eds_nonce(envoy))
    [response] = envoy.inbox
    assert response.resources == {"chat": {A}}
    envoy.ack()
    assert envoy.inbox == []


def test_an_overtaken_answer_changes_nothing() -> None:
    """An answer to an older response acknowledges nothing."""
    envoy = connected(snapshot(1, chat={A}), "chat")
    old = last_eds_nonce(envoy)
    envoy.take(envoy.session.offer(snapshot(2, chat={B})))
    assert envoy.session.receive(Request(EDS, frozenset({"chat"}), old)) == []
    assert envoy.session.vouched("chat") == {A}


def test_nothing_is_said_of_a_cluster_whose_discovery_has_not_reported() -> None:
    """An Envoy that knew its addresses before we restarted keeps them; an empty list is sent once it is known."""
    session = AdsSession()
    session.offer(Snapshot("1", {"chat": b"chat"}, {}))
    assert session.receive(Request(EDS, frozenset({"chat"}))) == []
    [response] = session.offer(Snapshot("2", {"chat": b"chat"}, {"chat": frozenset()}))
    assert response.resources == {"chat": frozenset()}


UNREAD = Snapshot("1", {"chat": b"chat", "code": b"code"}, {"chat": frozenset({A})}, frozenset({"code"}))


def test_a_new_envoy_is_not_kept_waiting_for_a_cluster_that_cannot_be_read() -> None:
    """It would keep every other from serving; the addresses are sent once there are any, and count as acknowledged."""
    session = AdsSession()
    session.offer(Snapshot("0", UNREAD.clusters, UNREAD.assignments))
    envoy = Envoy(session)
    envoy.connect()
    envoy.ack()
    envoy.ask_for("chat", "code", nonce="")
    assert envoy.ack().resources == {"chat": {A}}
    envoy.take(session.offer(UNREAD))
    assert envoy.ack().resources == {"code": frozenset()}
    assert envoy.inbox == []
    envoy.take(session.offer(snapshot(2, chat={A}, code={B})))
    assert session.vouched("code") == frozenset()
    while envoy.inbox:
        envoy.ack()
    assert envoy.known == {"chat": {A}, "code": {B}}
    assert session.vouched("code") == {B}


@pytest.mark.parametrize(("clusters", "addresses"), [("7", "7"), ("7", ""), ("", "7"), (None, "7"), (None, "")])
def test_an_envoy_that_may_hold_addresses_is_never_told_that_there_are_none(
    clusters: str | None, addresses: str
) -> None:
    """We were started again, and now the file cannot be read: what it has from before it keeps.

    Nor is one whose clusters are another's: as one of them changes it asks anew, with nothing to show for the old.
    """
    session = AdsSession()
    session.offer(UNREAD)
    if clusters is not None:
        session.receive(Request(CDS, version=clusters))
    [response] = session.receive(Request(EDS, frozenset({"chat", "code"}), version=addresses))
    assert response.resources == {"chat": {A}}
    assert session.receive(Request(EDS, frozenset({"chat", "code"}), response.nonce, version="1")) == []


def test_what_an_envoy_was_sent_it_keeps_when_the_source_is_lost() -> None:
    """A pool that left and came back, with a file that is gone by then: its addresses stay."""
    envoy = connected(snapshot(0, chat={A}, code={B}), "chat", "code")
    assert envoy.known["code"] == {B}
    envoy.take(envoy.session.offer(UNREAD))
    assert envoy.inbox == []
    assert envoy.session.vouched("code") == {B}


def test_a_cluster_that_cannot_be_read_and_changes_is_not_waited_for_either() -> None:
    """It warms anew, and asks for its addresses again."""
    envoy = connected(UNREAD, "chat", "code")
    changed = Snapshot("2", {"chat": b"chat", "code": b"other"}, UNREAD.assignments, UNREAD.unread)
    envoy.take(envoy.session.offer(changed))
    assert [sorted(envoy.ack().resources) for _ in range(2)] == [["chat", "code"], ["code"]]
    assert envoy.inbox == []


def test_an_unknown_cluster_is_not_answered() -> None:
    """What we do not serve may be served by somebody else later."""
    session = AdsSession()
    session.offer(snapshot(1, chat={A}))
    assert session.receive(Request(EDS, frozenset({"other"}))) == []


def test_listeners_are_never_answered() -> None:
    """LDS and RDS belong to the bootstrap."""
    session = AdsSession()
    session.offer(snapshot(1, chat={A}))
    assert session.receive(Request(LDS)) == []


POOLS = st.dictionaries(st.sampled_from(["chat", "code", "search"]), st.sets(st.sampled_from([A, B, C])))


@given(st.data())
def test_every_order_ends_with_the_newest_acknowledged(data: st.DataObject) -> None:
    """In any order of publishes, ACKs and NACKs a session vouches only for what Envoy really has.

    Clusters and addresses come and go. No more than one response per type is in flight, no cluster counts whose removal
    is, and in the end Envoy knows the newest.
    """
    session = AdsSession()
    envoy = Envoy(session, eds={"chat", "code"})
    session.offer(snapshot(0, chat={A}, code=set()))
    envoy.connect()
    while envoy.inbox:
        envoy.follow()
    for version in range(1, data.draw(st.integers(1, 16))):
        step = data.draw(st.sampled_from(["publish", "ack", "ack", "nack"]))
        if step == "publish":
            envoy.take(session.offer(snapshot(version, **data.draw(POOLS))))
        elif envoy.inbox:
            envoy.follow() if step == "ack" else envoy.nack()
        check_session(envoy)
    for newest in ({"chat": {A, D}, "code": {D}}, {"chat": {D}, "code": {B, D}, "search": {C, D}}):
        settings = dict.fromkeys(newest, b"never refused before, as no D was")
        envoy.take(session.offer(Snapshot("99", settings, snapshot(99, **newest).assignments)))
        while envoy.inbox:
            envoy.follow()
            check_session(envoy)
        assert envoy.known == newest
        assert {name: session.vouched(name) for name in newest} == newest


def check_session(envoy: Envoy) -> None:
    """What holds at every moment."""
    clusters = [one.resources for one in envoy.inbox if one.type_url == CDS]
    assert len(clusters) <= 1
    assert len(envoy.inbox) - len(clusters) <= 1
    for name in ("chat", "code", "search"):
        vouched = envoy.session.vouched(name)
        assert vouched is not None
        assert vouched <= envoy.known.get(name, frozenset())
        assert not vouched or all(name in listed for listed in clusters)


def last_eds_nonce(envoy: Envoy) -> str:
    """The nonce an Envoy would repeat in its next EDS request."""
    subscription = envoy.session._addresses
    assert subscription is not None
    return subscription.nonce
