"""A consumer as one would write it by hand: raw psycopg around the package's own statements. For baselines."""

from __future__ import annotations

import json
from typing import Any, NamedTuple
from uuid import uuid4

import psycopg

from django_pgqueue.services import claiming, settling

# A claim takes so many messages, as ``PREFETCH`` says by default; seconds that it lasts.
BATCH = 100
LEASE = 60


class Claimed(NamedTuple):
    """A message, decoded, and what fences it."""

    id: int
    payload: Any
    headers: Any
    token: Any


class RawConsumer:
    """Claims and acks on one connection in autocommit, by prepared statements. No leases are extended."""

    def __init__(self, connection: psycopg.Connection[Any], queue: str) -> None:
        self._connection = connection
        # All that CLAIM takes but for the token, which is another for each claim.
        self._params = {
            "name": queue,
            "limit": BATCH,
            "lease": LEASE,
            "consumer": uuid4(),
            "suspects": True,
            "skip_suspects": False,
            "most_bytes": None,
            "above": 0,
        }

    def claim(self) -> list[Claimed]:
        """Lease what is ready."""
        token = uuid4()
        rows = self._connection.execute(claiming.CLAIM, {**self._params, "token": token}, prepare=True).fetchall()
        return [
            Claimed(message_id, json.loads(payload), json.loads(headers), token)
            for kind, message_id, payload, headers, *_ in rows
            if kind == "claimed"
        ]

    def ack(self, messages: list[Claimed]) -> None:
        """Delete messages that are done."""
        fence = {"ids": [message.id for message in messages], "tokens": [message.token for message in messages]}
        self._connection.execute(settling.ACK, fence, prepare=True)
