"""
What consumers do with a message: write a row, so that the ledger knows.

The payload says what else is to become of it: `fate` is "fail" (at the first delivery) or "reject".
"""

import os
import time

from asgiref.sync import sync_to_async
from django.db import DatabaseError, InterfaceError, connection

from django_pgqueue import Message, Reject, TopicMessage
from tests.chaos.plan import LIVE

# Seconds that handling takes, so that consumers hold messages when a fault comes.
WORK = 0.02
# So slow that a batch outlives its TTL.
SLOW_WORK = 0.1

TABLE = """
CREATE TABLE chaos_handled (
    id bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    message_id bigint NOT NULL,
    key text NOT NULL,
    queue text NOT NULL,
    pid integer NOT NULL,
    sent float8 NOT NULL,
    handled float8 NOT NULL
);
CREATE INDEX ON chaos_handled (sent);
"""
INSERT = "INSERT INTO chaos_handled (message_id, key, queue, pid, sent, handled) VALUES (%s, %s, %s, %s, %s, %s)"


def handle(message: Message) -> None:
    fate = message.payload["fate"]
    if fate == "reject":
        raise Reject("rejected, as its publisher asked")
    if fate == "fail" and message.delivery_count == 1:
        raise RuntimeError("failed, as its publisher asked")
    time.sleep(WORK)
    with connection.cursor() as cursor:
        cursor.execute(
            INSERT,
            # Monotonic: the same clock in all processes, and no fault shifts it.
            [message.id, message.payload["key"], message.queue, os.getpid(), message.payload["sent"], time.monotonic()],
        )


def handle_slowly(message: Message) -> None:
    time.sleep(SLOW_WORK)
    handle(message)


def hear(message: TopicMessage) -> None:
    """Do the same for a live message, as far as the database is there: nobody gives it again."""
    try:
        with connection.cursor() as cursor:
            payload = message.payload
            cursor.execute(INSERT, [0, payload["key"], LIVE, os.getpid(), payload["sent"], time.monotonic()])
    except (DatabaseError, InterfaceError):
        connection.close()


async def handle_async(message: Message) -> None:
    await sync_to_async(handle)(message)
