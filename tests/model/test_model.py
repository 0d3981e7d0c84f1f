"""
Random interleavings of everything that a queue can do, checked step by step against `tests/model/model.py`.

One session, and time passes by SQL: all times in the tables move into the past. What happens between
sessions is the matter of other tests.
"""

import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import UUID

import pytest
from django.db import transaction
from django.db.models import Value
from django.db.models.functions import Now
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from django_pgqueue import LeaseLost, Message, Queue, QueueNotFound, signals
from django_pgqueue.consumer.heartbeat import Heartbeat
from django_pgqueue.models import MessageQueue, MessageQueueItem, QueueEvent
from django_pgqueue.queue_internals import declaration_of
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import counting, reaping, session, settling
from django_pgqueue.services.beliefs import beliefs
from django_pgqueue.services.counting import QueueStats
from tests.model.model import EPHEMERAL_TTL, IDLE_AFTER, PARKED, STATES, MessageRow, Model
from tests.support.sessions import fetch

pytestmark = pytest.mark.django_db(transaction=True)

# Times are hundreds of seconds, so that the seconds that an example takes change nothing.
PGQUEUE = {
    "DECLARE_TTL": 90,
    "HEARTBEAT_INTERVAL": 90,
    "REAP_IDLE_AFTER": IDLE_AFTER,
    "EPHEMERAL_TTL": EPHEMERAL_TTL,
    "LEASE": 200,
}
SPANS = st.sampled_from([100, 200, 300])

# How many random runs, each of a few examples. In longer ones Hypothesis mostly varies what it has had.
SEEDS = int(os.environ.get("PGQUEUE_MODEL_SEEDS", "4"))
RUN = settings(
    max_examples=8,
    stateful_step_count=50,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)

QUEUES = {
    "orders": {"max_deliveries": 2},
    "invoices": {"max_deliveries": 2, "dead_letter": "letters"},
    "replies": {"auto_deleted": True, "max_deliveries": 1},
}
# Not declared: they come with the others, or when the first message goes there.
LETTERS = ("orders.dead", "replies.dead", "letters", "letters.dead")

PASS_TIME = """
WITH queue AS (
    UPDATE django_pgqueue_messagequeue SET last_active = last_active - %(by)s * interval '1 second'
)
UPDATE django_pgqueue_messagequeueitem
SET expires_at = expires_at - %(by)s * interval '1 second',
    lease_expires_at = lease_expires_at - %(by)s * interval '1 second',
    read_after = CASE WHEN read_after < '9000-01-01' THEN read_after - %(by)s * interval '1 second'
                      ELSE read_after END
"""


QUEUE = st.sampled_from(sorted(QUEUES))
NAME = st.sampled_from([*QUEUES, *LETTERS])
COUNT = st.integers(1, 3)
PICK = st.integers(0, 20)
LIMIT = st.none() | st.just(1)
VERB = st.sampled_from(["ack", "nack", "reject", "reject", "extend", "give_back"])

# What may happen, with its arguments. One rule draws from all of it: Hypothesis would leave out some of
# many rules in each example, so that few examples see much.
STEPS: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "publish": (QUEUE, COUNT, st.sampled_from([0, 0, 100, 200]), st.none() | SPANS),
    "publish_in_a_transaction": (QUEUE, COUNT, st.booleans()),
    "claim": (PICK, st.integers(1, 4)),
    "settle_some": (st.lists(PICK, min_size=1, max_size=4), VERB, st.booleans()),
    "let_a_lease_lapse": (PICK,),
    "let_time_pass": (SPANS,),
    "declare": (QUEUE,),
    "beat": (),
    "pause_or_resume": (NAME,),
    "delete_a_queue_by_hand": (NAME,),
    "redrive": (st.sampled_from([*QUEUES, *LETTERS, "letters", "letters"]), LIMIT),
    "purge": (NAME, st.sampled_from([1, 1, 1, None])),
    "adopt": (),
    "expire": (),
    "reap": (),
}
# Most of what else happens needs these.
OFTEN = ["publish", "publish", "claim", "claim", "claim", "settle_some", "settle_some", "settle_some", "redrive"]


class Machine(RuleBasedStateMachine):
    """Does to the database what it does to the model."""

    def __init__(self) -> None:
        super().__init__()
        for table in (MessageQueueItem, MessageQueue, QueueEvent):
            table.objects.all().delete()
        beliefs.forget()
        self.model = Model()
        self.declared = {name: Queue(name, **options) for name, options in QUEUES.items()}
        self.all = {**self.declared, **{name: Queue(name) for name in LETTERS}}
        self.healed: list[str | None] = []
        self.dead_lettered: list[int] = []
        self.number = 0
        self.claimed: list[Message] = []
        signals.queue_healed.connect(self.note_healed)
        signals.messages_dead_lettered.connect(self.note_dead_lettered)

    def teardown(self) -> None:
        signals.queue_healed.disconnect(self.note_healed)
        signals.messages_dead_lettered.disconnect(self.note_dead_lettered)

    def note_healed(self, cause: str, **_: Any) -> None:
        self.healed.append(cause)

    def note_dead_lettered(self, ids: list[int], **_: Any) -> None:
        self.dead_lettered += ids

    def expect_healed(self, *causes: str | None) -> None:
        assert self.healed == [cause for cause in causes if cause]
        self.healed.clear()

    @initialize()
    def begin(self) -> None:
        """Have some of everything: few steps lead to a letter that came through two queues."""
        for name in QUEUES:
            self.publish(name, 3, 0, None)
        for name in ("invoices", "letters"):
            self.claim_from(name, 2)
            self.reject(self.claimed[-2:], 0)
            self.dead_lettered.clear()

    @rule(step=st.one_of([st.tuples(st.just(name), *STEPS[name]) for name in [*STEPS, *OFTEN]]))
    def step(self, step: tuple[Any, ...]) -> None:
        name, *arguments = step
        getattr(self, name)(*arguments)

    # --- Publishing ---

    def publish(self, name: str, count: int, delay: int, ttl: int | None) -> None:
        queue, model = self.declared[name], self.model
        causes = [model.refresh(declaration_of(queue))]
        if name in model.queues or declaration_of(queue).auto_deleted:
            if name not in model.queues:
                causes.append(model.heal(declaration_of(queue)))
                if count == 1:
                    model.remember(name)
            self.send(name, count, delay, ttl)
        else:
            # It was there a moment ago.
            model.believed.discard(name)
            with pytest.raises(QueueNotFound):
                self.send(name, count, delay, ttl)
        self.expect_healed(*causes)

    def publish_in_a_transaction(self, name: str, count: int, commit: bool) -> None:
        queue, model = self.declared[name], self.model
        is_loud = name not in model.queues and name in model.believed and not declaration_of(queue).auto_deleted
        cause = None
        if is_loud:
            model.believed.discard(name)
        elif name not in model.queues:
            model.believed.discard(name)
            cause = model.heal(declaration_of(queue)) if commit else None
        with suppress(ZeroDivisionError), transaction.atomic():
            if is_loud:
                with pytest.raises(QueueNotFound):
                    self.send(name, count)
            elif commit:
                self.send(name, count)
            else:
                self.send(name, count, is_kept=False)
                raise ZeroDivisionError
        if commit and not is_loud:
            model.refresh(declaration_of(queue))
        self.expect_healed(cause)

    def send(self, name: str, count: int, delay: int = 0, ttl: int | None = None, *, is_kept: bool = True) -> None:
        queue = self.declared[name]
        payloads = [{"number": self.number + index} for index in range(count)]
        self.number += count
        if count == 1:
            ids = [queue.publish(payloads[0], delay=delay, ttl=ttl)]
        else:
            ids = queue.publish_many(payloads, delay=delay, ttl=ttl)
        if ttl is None and declaration_of(queue).auto_deleted:
            ttl = EPHEMERAL_TTL
        for message_id, payload in zip(ids, payloads, strict=True):
            if is_kept:
                self.model.add(message_id, name, payload, delay, ttl)

    # --- Consuming ---

    def claim(self, pick: int, limit: int) -> None:
        """Mostly from a queue that has something."""
        names = [name for name in self.all if self.model.claimable(name)] or sorted(self.all)
        self.claim_from(names[pick % len(names)], limit)

    def claim_from(self, name: str, limit: int) -> None:
        model = self.model
        found = model.claimable(name)
        spent = {message.id for message in found if model.is_spent(message)}
        fit = [message for message in found if message.id not in spent]
        messages = self.all[name].claim(limit)
        # Spent ones are set aside as far as they were met.
        assert spent.issuperset(self.dead_lettered)
        for message_id in self.dead_lettered:
            model.dead_letter(declaration_of(self.all[name]), [model.messages[message_id]])
        if not messages:
            assert not fit
            assert spent == set(self.dead_lettered)
        self.dead_lettered.clear()
        lapsed = [message.id for message in fit if message.lease_ends is not None]
        taken = {message.id for message in messages}
        if not taken & set(lapsed):
            # Each walk gives what comes first in it.
            for walk in model.in_order(fit):
                assert taken.intersection(walk) == set(walk[: len(taken.intersection(walk))])
            assert lapsed or spent or len(messages) == min(limit, len(fit))
        else:
            # A suspect comes alone.
            assert len(messages) == 1
        for message in messages:
            assert (message.suspect, message.queue) == (message.id in lapsed, name)
            model.claim(message.id, message.token, PGQUEUE["LEASE"])
            row = model.messages[message.id]
            assert (message.payload, message.delivery_count) == (row.payload, row.delivery_count)
        self.claimed += messages

    def settle_some(self, picks: list[int], verb: str, stale: bool) -> None:
        """Settle messages of one queue; with `stale` also such that are no longer this session's."""
        if not self.claimed:
            return
        pool = self.claimed if stale else [one for one in self.claimed if self.owned([one])] or self.claimed
        messages = [pool[pick % len(pool)] for pick in picks]
        messages = [message for message in messages if message.queue == messages[0].queue]
        getattr(self, verb)(messages, picks[0])
        self.dead_lettered.clear()

    def ack(self, messages: list[Message], _: int) -> None:
        self.model.ack(self.settle(messages, lambda queue: queue.ack(*messages)))

    def nack(self, messages: list[Message], pick: int) -> None:
        delay = pick % 2 * 100
        mine = self.settle(messages, lambda queue: queue.nack(*messages, delay=delay))
        self.model.nack(declaration_of(self.all[messages[0].queue]), mine, delay)

    def reject(self, messages: list[Message], _: int) -> None:
        mine = self.settle(messages, lambda queue: queue.reject(*messages))
        self.model.dead_letter(declaration_of(self.all[messages[0].queue]), mine)
        assert sorted(self.dead_lettered) == sorted(message.id for message in mine)

    def extend(self, messages: list[Message], pick: int) -> None:
        seconds = 100 + pick % 3 * 100
        self.model.extend(self.settle(messages, lambda queue: queue.extend(*messages, seconds=seconds)), seconds)

    def give_back(self, messages: list[Message], _: int) -> None:
        """What a consumer does at its end with what it has not started."""
        self.model.release(self.settle(messages, lambda queue: release(queue, messages)))

    def settle(self, messages: list[Message], verb: Callable[[Queue], object]) -> list[MessageRow]:
        """Settle, and return the model's rows of those that were this session's. It is told of the others."""
        mine = self.owned(messages)
        lost = {message.id for message in messages} - {message.id for message in mine}
        try:
            verb(self.all[messages[0].queue])
        except LeaseLost as error:
            assert set(error.ids) == lost
        else:
            assert not lost
        return mine

    def owned(self, messages: list[Message]) -> list[MessageRow]:
        fence: dict[int, set[UUID]] = defaultdict(set)
        for message in messages:
            fence[message.id].add(message.token)
        return self.model.owned(fence)

    def let_a_lease_lapse(self, pick: int) -> None:
        if not self.claimed:
            return
        message = self.claimed[pick % len(self.claimed)]
        MessageQueueItem.objects.filter(pk=message.id, lease_token=message.token).update(lease_expires_at=Now())
        for row in self.owned([message]):
            row.lease_ends = self.model.now

    def let_time_pass(self, by: int) -> None:
        fetch(PASS_TIME, {"by": by})
        # So long that this process looks at its queues again.
        beliefs.forget()
        self.model.now += by
        self.model.believed.clear()
        self.model.known.clear()

    # --- Queues ---

    def declare(self, name: str) -> None:
        self.declared[name].declare()
        self.expect_healed(self.model.declare(declaration_of(self.declared[name])))

    def beat(self) -> None:
        declarations = [declaration_of(queue) for queue in self.declared.values()]
        Heartbeat("default", declared=declarations).run_once()
        self.expect_healed(*self.model.touch(declarations))

    def pause_or_resume(self, name: str) -> None:
        row = self.model.queues.get(name)
        if row is None:
            with pytest.raises(QueueNotFound):
                self.all[name].pause()
            return
        row.paused = not row.paused
        if row.paused:
            self.all[name].pause()
        else:
            self.all[name].resume()

    def delete_a_queue_by_hand(self, name: str) -> None:
        fetch("DELETE FROM django_pgqueue_messagequeue WHERE name = %s", [name])
        self.model.delete_queue(name)

    def redrive(self, name: str, limit: int | None) -> None:
        sent, cause = self.model.redrive(declaration_of(self.all[name]), limit)
        assert self.all[name].redrive(limit) == sent
        self.expect_healed(cause)

    def purge(self, name: str, limit: int | None) -> None:
        assert self.all[name].purge(limit) == self.model.purge(name, limit)

    def adopt(self) -> None:
        """What the consumers' looks do."""
        for name in self.all:
            assert reaping.adopt(name, 100, "default") == self.model.adopt(name)

    def expire(self) -> None:
        assert reaping.expire(100, "default") == self.model.expire()
        self.dead_lettered.clear()

    def reap(self) -> None:
        model = self.model
        reaped = Reaper("default").run_once()
        expired, set_aside = model.expire()
        assert reaped.expired == expired
        assert reaped.adopted == sum(model.adopt(name) for name in sorted(model.queues))
        assert reaped.queues == model.reap_queues()
        assert reaped.dead_lettered == set_aside + model.set_spent_aside()
        self.dead_lettered.clear()

    # --- What must hold after each step ---

    @invariant()
    def all_is_as_in_the_model(self) -> None:
        self.check_rows()
        self.check_states()

    def check_rows(self) -> None:
        model = self.model
        assert {row.name: stored(row) for row in MessageQueue.objects.all()} == {
            name: (row.auto_deleted, row.dead_letter, row.max_deliveries, row.paused)
            for name, row in model.queues.items()
        }
        now = session.now("default")
        assert {item.pk: (item.state(now), *stored_message(item)) for item in MessageQueueItem.objects.all()} == {
            row.id: (
                model.state(row),
                *((None, row.name) if row.is_orphan else (row.name, None)),
                row.payload,
                row.due is None,
                row.due == PARKED,
                row.expires_at is None,
                row.delivery_count,
                row.token if row.lease_ends is not None else None,
                row.path,
                row.path[-1] if row.path else None,
                not row.path,
            )
            for row in model.messages.values()
        }

    def check_states(self) -> None:
        """By the query set's methods, and by a queue's own figures."""
        model = self.model
        first, *others = (
            getattr(MessageQueueItem.objects, state)().order_by().values_list("pk", Value(state)) for state in STATES
        )
        # Each message in one of them, and in no other.
        assert sorted(first.union(*others, all=True)) == sorted(
            (message.id, model.state(message)) for message in model.messages.values()
        )
        found = {stats.name: stats for stats in counting.stats(list(self.all), "default")}
        for name in self.all:
            stats = found.get(name, QueueStats(name, exists=False))
            row, events, depth = model.queues.get(name), model.events.get(name, []), model.depth(name)
            assert {state: getattr(stats, state) for state in STATES} == {state: depth[state] for state in STATES}
            assert (stats.exists, stats.paused) == (row is not None, row is not None and row.paused)
            assert bool(stats.reapable) == (row is not None and model.reapable(name))
            if name in found:
                told = stats.revived_per_day, stats.vanished_per_day
                assert told == (events.count("revived"), events.count("vanished"))


def release(queue: Queue, messages: list[Message]) -> None:
    settling.raise_lost(queue.name, settling.release(messages, queue.using))


def stored(row: MessageQueue) -> tuple[Any, ...]:
    return row.auto_deleted, row.dead_letter, row.max_deliveries, row.paused_at is not None


def stored_message(row: MessageQueueItem) -> tuple[Any, ...]:
    return (
        row.queue_id,
        row.orphaned_from,
        row.payload,
        row.read_after is None,
        row.read_after is not None and row.read_after.year == 9000,
        row.expires_at is None,
        row.delivery_count,
        row.lease_token,
        row.dead_letter_path or [],
        row.dead_lettered_from,
        row.dead_lettered_at is None,
    )


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.full) for number in range(1, SEEDS))])
def test_any_order_of_events_leaves_what_the_model_says(number: int, settings: Any) -> None:
    """Messages are where they should be, in the state that they should be in, and none is lost, after every step."""
    settings.PGQUEUE = PGQUEUE
    run_state_machine_as_test(seed(number)(type("Machine", (Machine,), {})), settings=RUN)
