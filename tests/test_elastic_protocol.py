"""One island's state machine, on a store that answers at once, or with what a test puts in its mouth."""

import zlib
from dataclasses import replace

import pytest

from isles import LostPeerError, MismatchError
from isles.core.schedule import Schedule
from isles.elastic.decisions import Apply, Load, Settings
from isles.elastic.documents import DamagedError
from isles.elastic.numbering import Numbering
from isles.elastic.objects import (
    Announcement,
    Blob,
    Manifest,
    Part,
    Run,
    Seal,
    digest,
    island_name,
    open_payload,
    part_name,
    payload_name,
    seal_name,
    told_of,
)
from isles.elastic.protocol import Member
from isles.elastic.requests import Answer, perform
from isles.wire.message import Header

PATIENCE, GONE_AFTER = 10.0, 3


class Driver:
    """An island without an engine: sends a round at every second step and applies it at once."""

    def __init__(self, store, token, method="toy", joins=False, observe=False, **settings):
        """`joins`: it has found a run, and brings no state to make one of."""
        self.store, self.now, self.answers, self.decisions, self.clock = store, 0.0, {}, [], 0
        start = b"start"
        part = Part(part_name(0, "state", digest(start)), len(start), digest(start))
        own = Run(token, method, "model", GONE_AFTER, Manifest(0, "", (part,)))
        numbering = Numbering(Schedule(sync_every=2, offsets=(0,), lateness=0))
        options = Settings(**{"patience": PATIENCE, "timeout": 60.0, "snapshot_every": 2, **settings})
        parts = {} if joins else {part.name: start}
        self.member = Member(own, parts, numbering, options, token, self.now, observe=observe)

    def run(self, seconds=1.0):
        end = self.now + seconds
        while True:
            operations = self.member.operations()
            for operation in operations:
                self.member.answer(operation, self.perform(operation), self.now)
            taken = self.member.take(self.member.log.tail, self.now)
            self.decisions += taken
            if operations or taken:
                continue
            if self.member.wake_at > end:
                break
            self.now = max(self.now, self.member.wake_at)
            self.member.wake(self.now)
        self.now = end
        return self

    def perform(self, operation):
        kind, name, store = operation.kind, operation.name, self.store
        if self.answers.get((kind, name)):
            answer, written = self.answers[kind, name].pop(0)
            if written:
                store[name] = operation.body
            return answer
        answer = perform(store, operation)
        if kind != "get" or answer.status != "ok":
            return answer
        try:
            return Answer("ok", told_of(name, store[name]))
        except DamagedError:
            return Answer("damaged")

    def send(self, number):
        """Takes the steps up to a round, and sends it."""
        self.clock = self.member.reach(2 * number, self.now)
        data = payload(b"%d of %d" % (number, self.member.number))
        self.member.send(number, open_payload(payload_name(number, 0), data)[0], data, self.now)
        self.member.wait(number, self.now)
        return self.run()

    def seal(self, number):
        return Seal.parse(self.store[seal_name(number)], seal_name(number))


def payload(body):
    return Header("store", "toy", 0, 1, 1, len(body), 2.0, 2, zlib.crc32(body)).pack() + body


def islands(count, store=None, **settings):
    store = {} if store is None else store
    return [Driver(store, f"token-{index}", **settings).run() for index in range(count)]


def test_the_first_island_makes_the_run_and_the_next_one_joins_it():
    first, second = islands(2)
    assert (first.member.number, second.member.number) == (0, 1)
    assert Run.parse(first.store["run.json"], "run.json").run == "token-0"
    for each in (first, second):
        assert [type(decision) for decision in each.decisions] == [Load]


def test_all_are_there_so_it_is_sealed_at_once_and_everybody_applies_it():
    first, second = islands(2)
    first.send(1)
    assert seal_name(1) not in first.store  # the other one has joined, and is waited for
    second.send(1)
    first.run()
    assert first.now < PATIENCE
    assert (first.seal(1).islands, first.seal(1).missing) == ((0, 1), ())
    for each in (first, second):
        assert isinstance(each.decisions[-1], Apply)
        assert each.decisions[-1].included
    assert first.decisions[-1].contributions == second.decisions[-1].contributions


def test_who_is_missing_costs_one_patience_and_is_not_waited_for_again():
    first, _ = islands(2)
    first.send(1).run(PATIENCE)
    assert (first.seal(1).islands, first.seal(1).missing) == ((0,), (1,))
    before = first.now
    first.send(2)
    assert first.seal(2).islands == (0,)
    assert first.seal(2).missing == ()
    assert first.now - before <= 1.0


def test_who_comes_back_is_looked_for_and_then_waited_for():
    first, second = islands(2)
    first.send(1).run(PATIENCE)
    second.now = first.now
    second.run()
    assert [each.included for each in second.decisions[1:]] == [False]
    second.send(2)
    first.send(2)
    assert first.seal(2).islands == (0, 1)
    first.send(3)
    assert seal_name(3) not in first.store


def test_who_was_away_for_long_takes_a_new_number():
    first, second = islands(2)
    for number in range(1, GONE_AFTER + 3):
        first.send(number).run(PATIENCE if number == 1 else 0)
    second.now = first.now
    second.run(30.0).send(GONE_AFTER + 3)
    assert second.member.number == 2
    first.send(GONE_AFTER + 3)
    assert first.seal(GONE_AFTER + 3).islands == (0, 2)


def test_an_island_in_a_long_step_is_waited_for_once():
    """Its threads see that it is gone, but its loop has nothing to send yet: a new number would only cost patience."""
    first, second = islands(2)
    for number in range(1, 20):
        first.send(number).run(PATIENCE)
        second.now = first.now
        second.run()
    assert [first.seal(number).missing for number in range(1, 20)] == [(1,)] + [()] * 18
    assert [name for name in first.store if name.startswith("islands/")] == [island_name(0), island_name(1)]
    second.send(20)
    first.send(20)
    assert first.seal(20).islands == (0, 2)


def test_a_quorum_is_needed_however_long_it_takes():
    first, second = islands(2, quorum=2)
    first.send(1).run(5 * PATIENCE)
    assert seal_name(1) not in first.store
    second.now = first.now
    second.send(1)
    assert first.seal(1).islands == (0, 1)


def test_who_leaves_is_not_waited_for():
    first, second = islands(2)
    second.member.leave(second.now)
    second.run()
    assert second.member.left
    first.send(1)
    first.run(2.0)
    assert (first.seal(1).islands, first.seal(1).missing) == ((0,), ())


def test_all_are_dead_and_the_next_one_goes_on():
    (first,) = islands(1)
    for number in (1, 2, 3):
        first.send(number)
    heir = Driver(first.store, "heir").run()
    assert (heir.member.number, heir.member.log.tail, heir.member.taken) == (1, 3, 3)
    assert heir.member.clock == 6  # where the third round was sent: the learning rate is the run's
    heir.send(4).run(PATIENCE)
    assert (heir.seal(4).islands, heir.seal(4).missing) == ((1,), (0,))


# ---- a create that says "exists"


def test_it_was_my_own_attempt_whose_answer_was_lost():
    driver = Driver({}, "me")
    driver.answers["create", island_name(0)] = [(Answer("again"), True)]
    driver.run(5.0)
    assert driver.member.number == 0


def test_nothing_was_written_so_it_is_tried_again():
    driver = Driver({}, "me")
    driver.answers["create", island_name(0)] = [(Answer("exists"), False)] * 2
    driver.run(5.0)
    assert driver.member.number == 0
    driver.answers["create", seal_name(1)] = [(Answer("exists"), False), (Answer("again"), True)]
    driver.send(1).run(5.0)
    assert driver.member.log.tail == 1


@pytest.mark.parametrize("name", ["run.json", island_name(0), seal_name(1)])
def test_a_store_that_refuses_and_has_nothing_is_tried_with_pauses_and_given_up_at_last(name):
    driver = Driver({}, "me")
    driver.answers["create", name] = [(Answer("exists"), False)] * 1000
    with pytest.raises(LostPeerError, match=f"create {name} has failed .* it exists, and has nothing of this name"):
        (driver if name != seal_name(1) else driver.run().send(1)).run(200.0)
    assert len(driver.answers["create", name]) > 950


def test_somebody_else_was_first():
    driver = Driver({island_name(0): Announcement("other", 1).pack()}, "me").run()
    assert driver.member.number == 1


# ---- what is wrong is said


def test_a_run_of_another_method_is_refused():
    islands(1, store := {})
    with pytest.raises(MismatchError, match=r"run\.json: this run has another method \(it='toy' there, 'eager' here\)"):
        Driver(store, "me", method="eager").run()


def test_a_store_that_refuses_is_named():
    driver = Driver({}, "me")
    driver.answers["get", "run.json"] = [(Answer("failed", "no such bucket"), False)]
    with pytest.raises(LostPeerError, match=r"the store refuses to get run\.json: no such bucket"):
        driver.run()


def test_a_payload_that_is_damaged_is_not_sealed():
    first, second = islands(2)
    second.send(1)
    first.store[payload_name(1, 1)] = first.store[payload_name(1, 1)][:-1]
    first.send(1).run(PATIENCE)
    assert (first.seal(1).islands, first.seal(1).missing) == ((0,), (1,))


def test_a_payload_that_no_seal_could_list_counts_as_not_there():
    """A seal with its steps could be read by nobody, and would stay there: the end of the run, by one bad payload."""
    first, second = islands(2)
    body = b"more steps than fit into a seal"
    header = Header("store", "toy", 0, 1, 1, len(body), 2.0, 1 << 60, zlib.crc32(body))
    first.store[payload_name(1, second.member.number)] = header.pack() + body
    first.send(1).run(PATIENCE)
    assert (first.seal(1).islands, first.seal(1).missing) == ((0,), (1,))


def test_a_seal_does_not_make_an_island_read_more_than_a_payload_can_have():
    (first,) = islands(1)
    first.send(1)
    seal = first.seal(1)
    listed = (replace(seal.contributions[0], num_bytes=1 << 50),)
    first.store[seal_name(1)] = replace(seal, contributions=listed).pack()
    late, limits = Driver(first.store, "late", max_payload_bytes=1000), []
    perform = late.perform

    def limited(operation):
        limits.extend([operation.limit] * operation.name.startswith("rounds/"))
        return perform(operation)

    late.perform = limited
    late.run(5.0)
    assert set(limits) == {1000}


@pytest.mark.parametrize("observe", [False, True])
def test_who_has_seen_a_run_never_makes_another_one(observe):
    """A store that says once that run.json is missing changes nothing; one that keeps saying so is an error."""
    islands(1, store := {})
    late = Driver(store, "late", joins=True, observe=observe)
    late.answers["get", "run.json"] = [(Answer("missing"), False)] * 2
    assert late.run(5.0).member.joined
    late = Driver({}, "lost", joins=True, observe=observe)
    with pytest.raises(LostPeerError, match=r"get run\.json has failed .* it was there, and is missing"):
        late.run(200.0)
    assert late.store == {}


def with_a_snapshot():
    """An island that has written one after its second round."""
    (first,) = islands(1)
    for number in (1, 2):
        first.send(number)
        if first.decisions[-1].save:
            first.member.save(first.decisions[-1], {"state": (Blob(1, digest(b"2")), b"2")}, first.now)
            first.run()
    return first


def test_a_snapshot_that_takes_long_to_write_is_not_joined_by_others():
    """Each holds the whole state in memory."""
    (first,) = islands(1)
    perform, puts = first.perform, []

    def slow(operation):
        if operation.kind != "put" or not operation.name.startswith("snapshots/"):
            return perform(operation)
        puts.append(operation.name)
        return Answer("again", "the link is slow") if number < 8 else perform(operation)

    first.perform = slow
    for number in range(1, 13):
        first.send(number)
        if first.decisions[-1].save:
            body = b"state %d" % number
            first.member.save(first.decisions[-1], {"state": (Blob(len(body), digest(body)), body)}, first.now)
        first.run(5.0)
    assert [name.split("/")[1] for name in dict.fromkeys(puts)] == ["00000002", "00000010", "00000012"]


@pytest.mark.parametrize("rename", [False, True], ids=["a seal was deleted", "a snapshot of the future"])
def test_a_snapshot_whose_seals_are_not_there_is_an_error_at_last(rename):
    store = with_a_snapshot().store
    if rename:
        for name in [name for name in store if name.startswith("snapshots/00000002/")]:
            store[name.replace("2", "9", 1)] = store[name].replace(b"00000002", b"00000009").replace(b":2", b":9")
    else:
        del store[seal_name(2)]
    late = Driver(store, "late")
    with pytest.raises(LostPeerError, match=r"seals/0000000\d\.json is missing, and there is a snapshot of round"):
        late.run(200.0)
    assert not late.member.joined


@pytest.mark.parametrize("lost", ["manifest.json", "-state"])
def test_a_snapshot_that_is_not_complete_is_an_error_at_last(lost):
    """Of the newest one something is missing, and nobody writes a newer one."""
    first = with_a_snapshot()
    gone = next(name for name in first.store if name.startswith("snapshots/00000002/") and name.endswith(lost))
    late, lists = Driver(first.store, "late"), []
    perform = late.perform

    def missing(operation):
        lists.extend([operation] * (operation.kind == "list"))
        return Answer("missing") if (operation.kind, operation.name) == ("get", gone) else perform(operation)

    late.perform = missing
    with pytest.raises(LostPeerError, match=f"get {gone} has failed .* it is missing, and there is no newer snapshot"):
        late.run(200.0)
    assert len(lists) < 50


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_payload_that_is_not_what_the_seal_lists_is_never_applied(damage):
    (first,) = islands(1, snapshot_every=100)
    first.send(1)
    first.send(2)
    if damage == "missing":
        del first.store[payload_name(1, 0)]
    else:
        first.store[payload_name(1, 0)] = payload(b"something else")
    late = Driver(first.store, "late")
    with pytest.raises(LostPeerError, match=r"rounds/00000001/0000.*seal 1 lists"):
        late.run(200.0)
    assert late.member.taken == 0
