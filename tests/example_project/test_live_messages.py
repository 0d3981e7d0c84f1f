"""`async for message in topic.listen()`: what it hears, and that whoever leaves it leaves nothing behind."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import transaction

from django_pgqueue import Topic, subscriptions
from django_pgqueue.devdb import DevCluster
from django_pgqueue.runtime import listener
from django_pgqueue.services import notifying
from tests.runtime.test_listener import listeners, terminate
from tests.support.sessions import connect, drop_connections, in_threads, run_async
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

DEADLINE = 20.0


def topics() -> int:
    """Return how many sets are open in this process."""
    return sum(len(one._sets) for one in listener._listeners.values())


async def until(condition: Callable[[], Any]) -> None:
    """Wait for a condition while the loop goes on."""
    await sync_to_async(wait_until, thread_sensitive=False)(condition)


def test_it_hears_what_is_published_inside_the_block() -> None:
    """Of every size, in order, from the first line of the block on."""
    sent = ["small", "x" * 10_000, {"n": 1}, None]

    async def main() -> list[Any]:
        heard = []
        async with Topic("t").listen() as messages:
            for payload in sent:
                await Topic("t").apublish(payload)
            async for message in messages:
                heard.append(message.payload)
                if len(heard) == len(sent):
                    break
        return heard

    assert run_async(main()) == sent
    wait_until(lambda: not listeners())


def test_without_a_block_it_listens_from_its_first_step_on() -> None:
    """What is published before that is not for it; making one opens nothing."""

    async def main() -> Any:
        messages = Topic("t").listen()
        assert topics() == 0
        await Topic("t").apublish("before")
        first = asyncio.create_task(anext(messages))
        await until(listeners)
        await until(lambda: messages._subscription and messages._subscription.is_listening)
        await Topic("t").apublish("after")
        return (await asyncio.wait_for(first, DEADLINE)).payload

    assert run_async(main()) == "after"


def test_many_can_listen_in_one_loop() -> None:
    """Each hears everything, over one connection."""

    async def listen(started: asyncio.Semaphore) -> list[Any]:
        heard = []
        async with Topic("t").listen() as messages:
            started.release()
            async for message in messages:
                heard.append(message.payload)
                if len(heard) == 10:
                    return heard
        raise AssertionError

    async def main() -> list[list[Any]]:
        started = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(listen(started)) for _ in range(20)]
        for _ in tasks:
            await started.acquire()
        for number in range(10):
            await Topic("t").apublish(number)
        assert len(await sync_to_async(listeners)()) == 1
        return await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE)

    assert run_async(main()) == [list(range(10))] * 20


def test_two_loops_listen_at_the_same_time() -> None:
    """Each in its thread; both are woken."""
    heard: dict[int, list[Any]] = {1: [], 2: []}
    ready = threading.Barrier(3)

    async def main(number: int) -> None:
        async with Topic("t").listen() as messages:
            await asyncio.to_thread(ready.wait, DEADLINE)
            async for message in messages:
                heard[number].append(message.payload)
                if len(heard[number]) == 3:
                    break

    threads = [threading.Thread(target=asyncio.run, args=[main(number)]) for number in (1, 2)]
    for thread in threads:
        thread.start()
    ready.wait(DEADLINE)
    with transaction.atomic():
        for number in range(3):
            Topic("t").publish(number)
    for thread in threads:
        thread.join(DEADLINE)
    assert heard == {1: [0, 1, 2], 2: [0, 1, 2]}


def test_it_tells_when_messages_may_have_been_missed() -> None:
    """Whatever the reason: the buffer was full, the body had expired, the connection was away."""

    async def heard_after(messages: Any, cause: Callable[[], object]) -> int:
        before = messages.gaps
        await sync_to_async(cause)()
        await until(lambda: messages.gaps > before)
        await Topic("t").apublish("next")
        while (await asyncio.wait_for(anext(messages), DEADLINE)).payload != "next":
            pass
        return int(messages.gaps - before)

    def expire() -> None:
        with connect() as session:
            session.execute("SELECT pg_notify(%s, '#4711')", [notifying.topic_channel("t")])

    async def main() -> None:
        messages = Topic("t").listen(buffer=2)
        assert messages.gaps == 0
        async with messages:
            # Up to here it may have missed some.
            await until(lambda: messages.gaps == 1)
            await heard_after(messages, lambda: [Topic("t").publish(n) for n in range(3)])
            assert await heard_after(messages, expire) == 1
            assert await heard_after(messages, lambda: terminate(listeners()[0][0])) == 1
            before = messages.gaps
            await Topic("t").apublish("one more")
            assert (await asyncio.wait_for(anext(messages), DEADLINE)).payload == "one more"
            assert messages.gaps == before

    run_async(main())
    wait_until(lambda: not listeners())


# --- Leaving ---


def test_break_leaves_nothing_behind() -> None:
    """The object is dropped by the loop, and closes."""

    async def main() -> None:
        async def publish() -> None:
            await until(lambda: topics() == 1 and listeners())
            while topics():
                await Topic("t").apublish(1)

        publishing = asyncio.create_task(publish())
        async for _ in Topic("t").listen():
            break
        await asyncio.wait_for(publishing, DEADLINE)

    run_async(main())
    wait_until(lambda: not listeners())


def test_a_task_that_is_cancelled_leaves_nothing_behind() -> None:
    """Neither in a block nor without one."""

    async def listen(*, in_block: bool) -> None:
        if in_block:
            async with Topic("t").listen() as messages:
                async for _ in messages:
                    pass
        async for _ in Topic("t").listen():
            pass

    async def main() -> None:
        tasks = [asyncio.create_task(listen(in_block=in_block)) for in_block in (True, False)]
        await until(lambda: topics() == 2)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        del tasks, task
        gc.collect()
        await until(lambda: topics() == 0)

    run_async(main())
    wait_until(lambda: not listeners())


def test_aclose_ends_an_iteration_that_waits() -> None:
    """By itself, not by an error; afterwards it stays ended."""

    async def main() -> None:
        messages = Topic("t").listen()

        async def listen() -> list[Any]:
            return [message async for message in messages]

        task = asyncio.create_task(listen())
        await until(lambda: topics() == 1)
        await messages.aclose()
        assert await asyncio.wait_for(task, DEADLINE) == []
        assert [message async for message in messages] == []
        await messages.aclose()

    run_async(main())
    wait_until(lambda: not listeners())


def test_the_garbage_collector_closes_one_that_nobody_holds() -> None:
    """Also one that is part of a cycle, and whose loop has long ended."""

    class Holder:
        pass

    async def main() -> "weakref.ref[Any]":
        holder: Any = Holder()
        holder.messages = Topic("t").listen()
        holder.itself = holder
        async with asyncio.timeout(DEADLINE):
            await holder.messages.__aenter__()
        return weakref.ref(holder)

    gc.disable()
    try:
        holder = run_async(main())
        assert topics() == 1
        assert holder() is not None
        gc.collect()
    finally:
        gc.enable()
    wait_until(lambda: topics() == 0)
    wait_until(lambda: not listeners())


def test_closing_takes_no_lock() -> None:
    """The garbage collector may run where this very thread holds the listener's."""
    shared = listener.listener_of("default")

    async def main() -> None:
        messages = Topic("t").listen()
        await messages.__aenter__()
        with shared._lock:
            del messages
            gc.collect()

    thread = threading.Thread(target=run_async, args=[main()], daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    wait_until(lambda: not listeners())


# --- Slow ones ---


def test_a_loop_that_is_blocked_loses_the_oldest_and_gathers_nothing_else() -> None:
    """Its buffer is bounded, and so are the calls that wait for the loop."""
    calls = 0

    async def main() -> list[Any]:
        nonlocal calls
        loop = asyncio.get_running_loop()
        call_soon_threadsafe = loop.call_soon_threadsafe

        def count(callback: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return call_soon_threadsafe(callback, *args, **kwargs)

        async with Topic("t").listen(buffer=10) as messages:
            loop.call_soon_threadsafe = count  # type: ignore[method-assign]
            # Blocks the loop, as a careless view does.
            in_threads(1, lambda _: [Topic("t").publish(number) for number in range(100)])
            wait_until(lambda: messages.dropped == 90)
            loop.call_soon_threadsafe = call_soon_threadsafe  # type: ignore[method-assign]
            return [(await anext(messages)).payload for _ in range(10)]

    assert run_async(main()) == list(range(90, 100))
    assert calls <= 2


def test_the_block_begins_also_while_the_database_is_away(
    pg: DevCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a while, and it says so; once it is back the iteration goes on."""
    monkeypatch.setattr(subscriptions, "HEARD_WITHIN", 0.5)

    async def main() -> Any:
        async with Topic("t").listen() as messages:
            assert caplog.text.count("subscribed, but not connected yet topic=t") == 1
            await asyncio.to_thread(pg.start)
            await sync_to_async(drop_connections)()
            await until(lambda: messages._subscription and messages._subscription.is_listening)
            await Topic("t").apublish("hello")
            return (await asyncio.wait_for(anext(messages), DEADLINE)).payload

    pg.stop("fast")
    try:
        assert run_async(main()) == "hello"
    finally:
        pg.start()
        drop_connections()
