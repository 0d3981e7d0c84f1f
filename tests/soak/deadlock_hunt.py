"""
Look for deadlocks: every verb over many rows, at random, from 16 sessions at once.

The server is one of its own. It looks for deadlocks after 100 ms, and writes each wait for a lock that
lasts so long into its log, which is the witness: no deadlock, and no such wait in a statement of a
publish. At the end the ledger of the messages balances.

Transactions that touch several queues do so in name order, publish before they settle, and settle in id order.
"""

import json
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
from django.db import connection, transaction

from django_pgqueue import LeaseLost, Message, Queue, QueueNotFound, Topic, signals
from django_pgqueue.consumer.heartbeat import Heartbeat
from django_pgqueue.devdb import DevCluster, throwaway
from django_pgqueue.models import MessageQueueItem
from django_pgqueue.queue_internals import declaration_of
from django_pgqueue.reaper import Reaper
from django_pgqueue.services import declaring, publishing, topics
from tests.soak import main
from tests.support.crew import crew
from tests.support.processes import run as run_command
from tests.support.waiting import DEADLINE, wait_until

SESSIONS = 16
# What a publish may wait for a lock, and the server's deadlock_timeout.
DEADLOCK_TIMEOUT = timedelta(milliseconds=100)
# Seconds between two questions of the pacer, and what counts as a stall of the machine.
STEP = 0.01
STALL = timedelta(milliseconds=50)
# Above so many messages the hammer adds none: a deletion by hand locks all of a queue's.
DEPTH = 500

SERVER = {
    "deadlock_timeout": f"{DEADLOCK_TIMEOUT.total_seconds()}s",
    "log_timezone": "UTC",
    "log_lock_waits": "on",
    "logging_collector": "on",
    "log_destination": "jsonlog",
    "log_directory": "log",
    "log_rotation_size": "0",
}

# What no verb does by itself, and must have happened all the same.
HAPPENED = (
    "queue_healed",
    "queue_reaped",
    "orphans_adopted",
    "messages_expired",
    "messages_dead_lettered",
    "lease_lost",
    "messages_redriven",
    "messages_purged",
    "queue_taken_over",
)

# --- The hammer, in processes of its own ----------------------------------------------------------


class Hammer:
    """One session: does one thing after another, and notes what became of its messages."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        options: dict[str, Any] = {"lease": 0.5, "max_deliveries": 3}
        self.queues = [
            Queue("a", **options),
            Queue("b", dead_letter="letters", **options),
            Queue("c", auto_deleted=True, **options),
            Queue("d", auto_deleted=True, durable=False, dead_letter="letters", **options),
            Queue("e", exclusive=True, **options),
        ]
        self.topic = Topic("t")
        self.letters = [Queue(name, **options) for name in ("a.dead", "c.dead", "letters")]
        self.by_name = {queue.name: queue for queue in self.queues + self.letters}
        self.heartbeat = Heartbeat("default", declared=[declaration_of(queue) for queue in self.queues])
        self.held: list[Message] = []
        self.verbs: dict[Callable[[], None], int] = {
            self.publish: 4,
            self.publish_many: 2,
            self.publish_in_atomic: 4,
            self.publish_to_topic: 2,
            self.claim: 8,
            self.ack: 3,
            self.ack_in_atomic: 3,
            self.nack: 2,
            self.reject: 2,
            self.extend: 2,
            self.reap: 2,
            self.declare: 1,
            self.touch: 1,
            self.bind: 1,
            self.pause: 1,
            self.redrive: 1,
            self.purge: 1,
            self.delete_queue: 1,
        }
        self.done: Counter[str] = Counter()
        self.published: list[int] = []
        self.acked: list[int] = []
        # What left otherwise: expired or purged.
        self.removed = 0
        signals.messages_expired.connect(self.note_expired)
        for name in HAPPENED:
            getattr(signals, name).connect(partial(self.note, name), weak=False)

    def run(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            (verb,) = self.chance.choices(list(self.verbs), list(self.verbs.values()))
            verb()
            self.done[verb.__name__] += 1

    def note(self, name: str, **_: Any) -> None:
        self.done[name] += 1

    def note_expired(self, count: int, **_: Any) -> None:
        self.removed += count

    # --- Publishing ---

    def publish(self) -> None:
        self.add([self.chance.choice(self.queues)])

    def publish_many(self) -> None:
        self.add([self.chance.choice(self.queues)], many=20)

    def publish_in_atomic(self) -> None:
        with transaction.atomic():
            added = self.add(self.some_queues(), many=self.chance.choice([0, 5]))
        self.published += added

    def publish_to_topic(self) -> None:
        if not self.is_full():
            self.published += self.topic.publish({}, ttl=self.ttl())

    def add(self, queues: Sequence[Queue], many: int = 0) -> list[int]:
        """Publish to each of these queues. A standing queue that was deleted is loud, and adds nothing."""
        added: list[int] = []
        if self.is_full():
            return added
        for queue in queues:
            ttl = self.ttl()
            with suppress(QueueNotFound):
                if many:
                    added += queue.publish_many([{}] * many, ttl=ttl)
                else:
                    added.append(queue.publish({}, ttl=ttl))
        if not connection.in_atomic_block:
            self.published += added
        return added

    def ttl(self) -> float | None:
        return self.chance.choice([None, None, 0.2])

    def some_queues(self) -> list[Queue]:
        """Return two or three queues in name order."""
        return sorted(self.chance.sample(self.queues, self.chance.randint(2, 3)), key=lambda queue: queue.name)

    def is_full(self) -> bool:
        return len(MessageQueueItem.objects.values_list("id")[:DEPTH]) == DEPTH

    # --- Consuming ---

    def claim(self) -> None:
        self.held += self.chance.choice(list(self.by_name.values())).claim(self.chance.choice([1, 10, 50]))

    def ack(self) -> None:
        self.acked += self.settle(Queue.ack, self.take())

    def ack_in_atomic(self) -> None:
        messages = sorted(self.take(), key=lambda message: message.id)
        half = len(messages) // 2
        with transaction.atomic():
            published = self.add(self.some_queues())
            # Holding some while it waits for others, as a handler may that settles one by one.
            acked = self.settle(Queue.ack, messages[:half]) | self.settle(Queue.ack, messages[half:])
        self.published += published
        self.acked += acked

    def nack(self) -> None:
        self.settle(lambda queue, *messages: queue.nack(*messages, delay=0), self.take())

    def reject(self) -> None:
        messages = self.take()
        if messages and self.by_name[messages[0].queue] in self.letters:
            # Rejected once more it would lie there for good.
            self.acked += self.settle(Queue.ack, messages)
        else:
            self.settle(Queue.reject, messages)

    def extend(self) -> None:
        messages = self.take()[::-1]
        kept = self.settle(Queue.extend, messages)
        self.held += [message for message in messages if message.id in kept]

    def take(self) -> list[Message]:
        """Take some of what is held, of one queue and in any order. Some leases have lapsed by now."""
        self.chance.shuffle(self.held)
        taken = self.held[: self.chance.randint(0, len(self.held))]
        taken = [message for message in taken if message.queue == taken[0].queue]
        self.held = [message for message in self.held if message not in taken]
        return taken

    def settle(self, verb: Callable[..., object], messages: list[Message]) -> set[int]:
        """Settle messages, and return the ids of those that still were this session's."""
        # A set: this session may have claimed a message twice, the second time after its lease lapsed.
        ids = {message.id for message in messages}
        if messages:
            try:
                verb(self.by_name[messages[0].queue], *messages)
            except LeaseLost as error:
                ids -= set(error.ids)
        return ids

    # --- Queues ---

    def reap(self) -> None:
        Reaper("default", idle_for=0, batch_size=50).run_once()

    def declare(self) -> None:
        # Deleted by hand before its bindings were written.
        with suppress(QueueNotFound):
            self.chance.choice(self.queues).declare()

    def touch(self) -> None:
        self.heartbeat.run_once()

    def bind(self) -> None:
        queue = self.chance.choice(self.queues)
        verb = self.chance.choice([self.topic.bind, self.topic.bind, self.topic.unbind])
        with suppress(QueueNotFound):
            verb(queue)

    def pause(self) -> None:
        queue = self.chance.choice(self.queues)
        with suppress(QueueNotFound):
            queue.pause()
            queue.resume()

    def redrive(self) -> None:
        self.chance.choice(self.queues).redrive(self.chance.choice([None, 5]))

    def purge(self) -> None:
        self.removed += self.by_name[self.chance.choice(list(self.by_name))].purge(self.chance.choice([5, 20]))

    def delete_queue(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "DELETE FROM django_pgqueue_messagequeue WHERE name = %s", [self.chance.choice(list(self.by_name))]
            )


def hammer(number: int, seconds: float, seed: int) -> dict[str, Any]:
    """Be a member of the crew."""
    # Thousands of lines about what is meant to happen.
    logging.disable(logging.WARNING)
    one = Hammer(random.Random(f"{seed}/{number}"))
    one.run(seconds)
    return {"done": one.done, "published": one.published, "acked": one.acked, "removed": one.removed}


# --- The witness ----------------------------------------------------------------------------------


class Witness:
    """The server's own log."""

    def __init__(self, server: DevCluster) -> None:
        self._folder = server.pgdata / "log"

    def entries(self) -> list[dict[str, Any]]:
        lines = [line for path in sorted(self._folder.glob("*.json")) for line in path.read_text().splitlines()]
        return [json.loads(line) for line in lines]

    def deadlocks(self) -> list[dict[str, Any]]:
        return [entry for entry in self.entries() if entry.get("state_code") == "40P01"]

    def waits(self) -> list[dict[str, Any]]:
        return [entry for entry in self.entries() if " still waiting for " in entry["message"]]

    def publish_waits(self) -> list[dict[str, Any]]:
        return [entry for entry in self.waits() if is_one_of(PUBLISHES, entry)]

    def heal_waits(self) -> list[dict[str, Any]]:
        return [entry for entry in self.waits() if is_one_of(HEALS, entry)]


class Pacer:
    """
    Ask the server for nothing, again and again, and note when the answer took long.

    A machine that is busy elsewhere lets everybody wait, who holds a lock and who waits for it.
    """

    def __init__(self, server: DevCluster) -> None:
        self._url = server.url
        self._ended = threading.Event()
        self._stalls: list[tuple[datetime, datetime]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(1) as thread:
            future = thread.submit(self._run)
            try:
                yield
            finally:
                self._ended.set()
                future.result(DEADLINE)

    def _run(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as session:
            while not self._ended.is_set():
                began = datetime.now(UTC)
                session.execute("SELECT")
                self._ended.wait(STEP)
                if datetime.now(UTC) - began > STALL:
                    self._stalls.append((began, datetime.now(UTC)))

    def excuses(self, entry: dict[str, Any]) -> bool:
        """Tell whether the machine stalled while this statement waited."""
        logged = datetime.strptime(entry["timestamp"], "%Y-%m-%d %H:%M:%S.%f UTC").replace(tzinfo=UTC)
        return any(began < logged and ended > logged - 2 * DEADLOCK_TIMEOUT for began, ended in self._stalls)

    @property
    def stalls(self) -> int:
        return len(self._stalls)


PUBLISHES = (
    publishing.PUBLISH,
    publishing.PUBLISH_RELAXED,
    publishing.PUBLISH_IF_QUEUE,
    publishing.PUBLISH_MANY,
    topics.PUBLISH_TO_TOPIC,
)
# Who needs a queue that another transaction is making waits for its commit, which is the caller's.
HEALS = (publishing.ENSURE_AND_PUBLISH, declaring.ENSURE_QUEUE)


def is_one_of(statements: Sequence[str], entry: dict[str, Any]) -> bool:
    # By what stands after the last parameter.
    ends = tuple(statement.rpartition(")s")[2].strip() for statement in statements)
    return str(entry.get("statement", "")).strip().endswith(ends)


def check_witness(server: DevCluster, witness: Witness) -> None:
    """Let a publish wait for a lock: a witness that does not tell is none."""
    params = {"name": "a", "payload": "{}", "headers": "{}", "delay": None, "expires_in": None, "due": None}
    with (
        psycopg.connect(server.url) as holder,
        psycopg.connect(server.url, cursor_factory=psycopg.ClientCursor) as publisher,
        ThreadPoolExecutor(1) as thread,
    ):
        holder.execute("INSERT INTO django_pgqueue_messagequeue (name) VALUES ('a')")
        holder.commit()
        holder.execute("SELECT FROM django_pgqueue_messagequeue WHERE name = 'a' FOR UPDATE")
        waiting = thread.submit(publisher.execute, publishing.PUBLISH, params)
        try:
            wait_until(witness.publish_waits, what="the log to tell of a publish that waits")
        finally:
            holder.rollback()
        waiting.result(DEADLINE)
        publisher.rollback()


# --- The run --------------------------------------------------------------------------------------


def run(seconds: float, seed: int = 0) -> dict[str, Any]:
    """Hammer for so many seconds. Returns how often what was done."""
    with throwaway(options=SERVER) as server:
        assert run_command("migrate", url=server.url).returncode == 0
        witness = Witness(server)
        check_witness(server, witness)
        provoked = len(witness.publish_waits())
        pacer = Pacer(server)
        with (
            crew(SESSIONS, "tests.soak.deadlock_hunt:hammer", settings={"DECLARE_TTL": 1}, url=server.url) as members,
            pacer.running(),
        ):
            told = members.each(seconds, seed)
        done = sum((Counter(member["done"]) for member in told), Counter())
        with psycopg.connect(server.url) as session:
            left = [message_id for (message_id,) in session.execute("SELECT id FROM django_pgqueue_messagequeueitem")]
        check_ledger(told, left)
        assert not witness.deadlocks(), witness.deadlocks()
        waits, heal_waits = witness.waits()[provoked:], witness.heal_waits()
        publish_waits = witness.publish_waits()[provoked:]
        unexcused = [entry for entry in publish_waits if not pacer.excuses(entry)]
        assert not unexcused, unexcused
    return {
        "seconds": seconds,
        "seed": seed,
        "published": sum(len(member["published"]) for member in told),
        "left": len(left),
        "stalls_of_the_machine": pacer.stalls,
        "publishes_that_waited": len(publish_waits),
        "heals_that_waited": len(heal_waits),
        "waits_of_others": len(waits) - len(heal_waits) - len(publish_waits),
        "done": dict(sorted(done.items())),
    }


def check_ledger(told: list[dict[str, Any]], left: list[int]) -> None:
    """Published is acked, expired, purged or left, and nothing else."""
    published = {message_id for member in told for message_id in member["published"]}
    acked = [message_id for member in told for message_id in member["acked"]]
    assert len(acked) == len(set(acked)), "acked twice"
    assert not set(acked) & set(left), "acked and still there"
    assert published >= {*acked, *left}, "never published"
    gone = published - {*acked, *left}
    removed = sum(member["removed"] for member in told)
    assert len(gone) == removed, f"{len(gone)} are gone, {removed} were removed"


if __name__ == "__main__":
    main(run, seconds=60)
