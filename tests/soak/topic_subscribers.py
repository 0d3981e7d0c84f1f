"""
Case B82 at length: queues are bound, unbound and reaped at random while a topic is published to.

Four publishers, in autocommit and in transactions that stay open, commit or roll back; twenty subscribers
that join under ever new names and leave; a reaper in a tight loop. Each subscriber has to have what was
published from its join to its leave, without a gap and nothing twice, and each message is on exactly
those queues whose ids its publish returned.
"""

import random
import threading
import time
from collections import Counter
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from django.db import connections, transaction
from django.db.models.functions import Now

from django_pgqueue import Queue, Topic
from django_pgqueue.models import MessageQueue, MessageQueueItem, TopicBinding
from django_pgqueue.reaper import Reaper
from tests.soak import main
from tests.support.rows import seconds

PUBLISHERS = 4
SUBSCRIBERS = 20
TOPIC = "soak.topic"
HOUR = 3_600.0


@dataclass(frozen=True)
class Published:
    """A committed message: who published it as which, when that began and ended, and how many copies it made."""

    publisher: int
    number: int
    began: float
    ended: float
    copies: int


@dataclass(frozen=True)
class Stay:
    """One subscriber from its join to its leave, and what its queue had then."""

    queue: str
    way: str
    joined: float
    leaving: float
    got: list[tuple[int, int]]


@dataclass
class Fair:
    """What all threads share."""

    stop: threading.Event = field(default_factory=threading.Event)
    #: After the last subscriber has left, which takes a reaper.
    over: threading.Event = field(default_factory=threading.Event)
    published: list[Published] = field(default_factory=list)
    rolled_back: list[tuple[int, int]] = field(default_factory=list)
    stays: list[Stay] = field(default_factory=list)
    reaped: list[str] = field(default_factory=list)


def run(duration: float, *, messages: int = 0, seed: int = 0) -> dict[str, Any]:
    """Go on for so many seconds, and until each publisher has published so many messages."""
    fair = Fair()
    until = time.monotonic() + duration
    chances = random.Random(seed)
    with ThreadPoolExecutor(PUBLISHERS + SUBSCRIBERS + 1) as pool:
        seeds = [chances.random() for _ in range(PUBLISHERS + SUBSCRIBERS)]
        publishers = [
            pool.submit(closing, publish, fair, number, random.Random(seeds.pop()), until, messages)
            for number in range(PUBLISHERS)
        ]
        others = [
            pool.submit(closing, subscribe, fair, number, random.Random(seeds.pop())) for number in range(SUBSCRIBERS)
        ]
        reaper = pool.submit(closing, reap, fair)
        wait(publishers, return_when=FIRST_EXCEPTION)
        fair.stop.set()
        wait(others)
        fair.over.set()
    for future in (*publishers, *others, reaper):
        future.result()
    check(fair)
    return {
        "published": len(fair.published),
        "copies": sum(message.copies for message in fair.published),
        "rolled_back": len(fair.rolled_back),
        "left": dict(Counter(stay.way for stay in fair.stays)),
        "reaped": len(fair.reaped),
    }


def closing(work: Any, *arguments: Any) -> None:
    try:
        work(*arguments)
    finally:
        connections.close_all()


def publish(fair: Fair, publisher: int, chance: random.Random, until: float, messages: int) -> None:
    """Publish alone or in a transaction that spans joins and leaves, now and then one that is rolled back."""
    topic, number = Topic(TOPIC), 0
    while number < messages or time.monotonic() < until:
        size = chance.choice([1, 1, 1, 3])
        numbers = range(number, number + size)
        number += size
        began = time.monotonic()
        if size == 1 and chance.random() < 0.7:
            copies = [len(topic.publish([publisher, numbers[0]]))]
        elif chance.random() < 0.3:
            with transaction.atomic():
                for one in numbers:
                    topic.publish([publisher, one])
                transaction.set_rollback(True)
            fair.rolled_back += [(publisher, one) for one in numbers]
            continue
        else:
            copies = []
            with transaction.atomic():
                for one in numbers:
                    copies.append(len(topic.publish([publisher, one])))
                    time.sleep(chance.random() * 0.01)
        ended = time.monotonic()
        fair.published += [
            Published(publisher, one, began, ended, count) for one, count in zip(numbers, copies, strict=True)
        ]


def subscribe(fair: Fair, subscriber: int, chance: random.Random) -> None:
    """Join, stay a while, leave in one of two ways, and see what the queue has."""
    stays = 0
    while not fair.stop.is_set():
        name = f"subscriber.{subscriber}.{stays}"
        stays += 1
        queue = Queue(name, auto_deleted=True)
        Topic(TOPIC).bind(queue)
        joined = time.monotonic()
        fair.stop.wait(chance.random() * 0.5)
        leaving = time.monotonic()
        way = chance.choice(["unbound", "idle"])
        if way == "unbound":
            assert Topic(TOPIC).unbind(queue)
        forsake(name)
        got: list[tuple[int, int]] = []
        # Publishers that had met it before may still be putting messages there.
        while MessageQueue.objects.filter(name=name).exists():
            got += [tuple(payload) for payload in take(name)]
            time.sleep(0.02)
        fair.stays.append(Stay(name, way, joined, leaving, got))


def forsake(name: str) -> None:
    """Let it look as if its subscriber had gone an hour ago: it gets no more copies, and may be reaped."""
    MessageQueue.objects.filter(name=name).update(last_active=Now() - seconds(HOUR + 60))


def take(name: str) -> list[Any]:
    """Take what a queue has, in the order of publishing: empty it can be reaped."""
    items = dict(MessageQueueItem.objects.filter(queue=name).order_by("id").values_list("id", "payload"))
    MessageQueueItem.objects.filter(id__in=items).delete()
    return list(items.values())


def reap(fair: Fair) -> None:
    while not fair.over.is_set():
        fair.reaped += Reaper("default", idle_for=HOUR).run_once().queues


def check(fair: Fair) -> None:
    assert sorted(fair.reaped) == sorted(stay.queue for stay in fair.stays)
    assert not TopicBinding.objects.filter(topic=TOPIC).exists()
    assert not MessageQueueItem.objects.exists()

    committed: dict[int, list[int]] = {}
    for message in sorted(fair.published, key=lambda message: (message.publisher, message.number)):
        committed.setdefault(message.publisher, []).append(message.number)
    for stay in fair.stays:
        for publisher, numbers in committed.items():
            got = [number for by, number in stay.got if by == publisher]
            assert_no_gap(stay, got, numbers)
        must = {
            (message.publisher, message.number)
            for message in fair.published
            if stay.joined <= message.began and message.ended <= stay.leaving
        }
        assert must <= set(stay.got), (stay, sorted(must - set(stay.got)))
    found = Counter(one for stay in fair.stays for one in stay.got)
    assert found == Counter({(one.publisher, one.number): one.copies for one in fair.published if one.copies})


def assert_no_gap(stay: Stay, got: list[int], numbers: list[int]) -> None:
    if got:
        first = numbers.index(got[0])
        assert got == numbers[first : first + len(got)], (stay, got, numbers[first : first + len(got)])


if __name__ == "__main__":
    main(run, seconds=300)
