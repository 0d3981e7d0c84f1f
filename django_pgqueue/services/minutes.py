"""How many messages were published, handled and failed, minute by minute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from django_pgqueue.services import session

# In seconds: minutes are kept for a day, for charts.
MINUTE_AGE = 86_400.0


class Tally(NamedTuple):
    """How many messages of one queue were handled, failed, dead-lettered and published."""

    handled: int = 0
    #: Deliveries that failed and were given back.
    failed: int = 0
    dead_lettered: int = 0
    #: Of these messages, those that were settled for the first time: how many were published in each minute since 1970.
    published: Mapping[int, int] = MappingProxyType({})

    def since(self, earlier: Tally) -> Tally:
        """Return the difference from ``earlier``."""
        published = {minute: count - earlier.published.get(minute, 0) for minute, count in self.published.items()}
        return Tally(
            self.handled - earlier.handled,
            self.failed - earlier.failed,
            self.dead_lettered - earlier.dead_lettered,
            {minute: count for minute, count in published.items() if count > 0},
        )


# COUNT_MINUTE - add a consumer's counts for each queue to the current minute, and its counts of published messages to
# the minutes in which they were published, given as minutes since 1970.
# Minutes that are more than %(age)s seconds old, or in the future, are ignored.
# Locks: the rows of these queues and minutes, in this order.
COUNT_MINUTE = """
INSERT INTO django_pgqueue_queueminute AS kept (queue, minute, handled, failed, dead_lettered, published)
SELECT queue, minute, sum(handled), sum(failed), sum(dead_lettered), sum(published)
FROM (SELECT queue, date_trunc('minute', statement_timestamp()) AS minute, handled, failed, dead_lettered,
             0 AS published
      FROM unnest(%(queues)s::text[], %(handled)s::bigint[], %(failed)s::bigint[], %(dead_lettered)s::bigint[])
          AS told (queue, handled, failed, dead_lettered)
      UNION ALL
      SELECT queue, to_timestamp(minute * 60), 0, 0, 0, published
      FROM unnest(%(published_to)s::text[], %(minutes)s::bigint[], %(published)s::bigint[])
          AS told (queue, minute, published)) AS told
WHERE minute > statement_timestamp() - %(age)s * interval '1 second' AND minute <= statement_timestamp()
GROUP BY queue, minute
ORDER BY queue, minute
ON CONFLICT (queue, minute) DO UPDATE
SET handled = kept.handled + excluded.handled,
    failed = kept.failed + excluded.failed,
    dead_lettered = kept.dead_lettered + excluded.dead_lettered,
    published = kept.published + excluded.published
"""


def count_minute(tallies: Mapping[str, Tally], using: str) -> None:
    """Add the tallies, by queue, to the current minute and to the minutes in which the messages were published."""
    told = list(tallies.values())
    published = [(queue, *each) for queue, tally in tallies.items() for each in tally.published.items()]
    session.run(
        using,
        COUNT_MINUTE,
        queues=list(tallies),
        handled=[tally.handled for tally in told],
        failed=[tally.failed for tally in told],
        dead_lettered=[tally.dead_lettered for tally in told],
        published_to=[queue for queue, _, _ in published],
        minutes=[minute for _, minute, _ in published],
        published=[count for _, _, count in published],
        age=MINUTE_AGE,
    )


class Minute(NamedTuple):
    """The counts of a queue in one minute."""

    #: Minutes before the current one, which is 0.
    ago: int
    handled: int
    failed: int
    dead_lettered: int
    #: Messages that were published in this minute and have been settled since.
    published: int = 0


# MINUTES - read the last %(minutes)s minutes of these queues. No lock.
MINUTES = """
SELECT queue,
       (extract(epoch FROM date_trunc('minute', statement_timestamp()) - minute) / 60)::int,
       handled, failed, dead_lettered, published
FROM django_pgqueue_queueminute
WHERE queue = ANY (%(names)s)
  AND minute > statement_timestamp() - %(minutes)s * interval '1 minute'
ORDER BY queue, minute
"""


def minutes(names: Sequence[str], count: int, using: str) -> dict[str, list[Minute]]:
    """Return the last ``count`` minutes of these queues, oldest first. Minutes without any messages are left out."""
    found: dict[str, list[Minute]] = {name: [] for name in names}
    for name, *minute in session.run(using, MINUTES, names=list(names), minutes=count):
        found[name].append(Minute(*minute))
    return found


class Newest(NamedTuple):
    """When the newest waiting messages of a queue were published, without delayed and retried messages."""

    #: How many messages, by minutes before the current one.
    by_minute: Mapping[int, int] = MappingProxyType({})
    #: Seconds since the oldest of these messages was published.
    span: float = 0.0
    #: Whether there may be more messages.
    more: bool = False


# NEWEST - count the newest messages of these queues by the minute in which they were published.
# Reads at most %(most)s messages of each queue, and only those that were published without a delay and not retried.
# No lock.
# Returns name, minutes ago (%(minutes)s for all older ones), how many, and seconds since the oldest of them. A queue
# without any has no row.
# Index: django_pgqueue_item_claim_idx, from its end.
NEWEST = """
SELECT name, ago, count(*),
       greatest(extract(epoch FROM statement_timestamp() - min(published_at) FILTER (WHERE isfinite(published_at))),
                0)::float8
FROM unnest(%(names)s::text[]) AS name
CROSS JOIN LATERAL (
    SELECT published_at,
           greatest(0, least(%(minutes)s,
                             date_part('epoch', date_trunc('minute', statement_timestamp())) / 60
                             - floor(date_part('epoch', published_at) / 60)))::int AS ago
    FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
    WHERE queue_id = name AND read_after IS NULL
    ORDER BY read_after DESC, id DESC
    LIMIT %(most)s) AS newest
GROUP BY name, ago
ORDER BY name, ago
"""


def newest(names: Sequence[str], most: int, count: int, using: str) -> dict[str, Newest]:
    """
    Return when the newest messages of these queues were published, reading at most ``most`` of each.

    Messages that are older than ``count`` minutes are counted together, as ``count`` minutes ago.
    """
    found: dict[str, dict[int, int]] = {name: {} for name in names}
    span = dict.fromkeys(names, 0.0)
    for name, ago, messages, age in session.run(using, NEWEST, names=list(names), most=most, minutes=count):
        found[name][ago] = messages
        span[name] = max(span[name], age)
    return {name: Newest(ages, span[name], sum(ages.values()) >= most) for name, ages in found.items()}


class LetterHistory(NamedTuple):
    """How many messages a queue dead-lettered recently, and in the ``seconds`` before that."""

    recent: int
    before: int
    seconds: float


# LETTER_HISTORY - count the messages that these queues dead-lettered in the last %(age)s seconds, and before that.
# No lock.
# Returns name, the recent count, the count before that, and the seconds that the latter covers.
LETTER_HISTORY = """
SELECT queue,
       coalesce(sum(dead_lettered) FILTER (WHERE is_recent), 0)::bigint,
       coalesce(sum(dead_lettered) FILTER (WHERE NOT is_recent), 0)::bigint,
       coalesce(extract(epoch FROM statement_timestamp() - min(minute)
                    FILTER (WHERE handled > 0 OR failed > 0 OR dead_lettered > 0)) - %(age)s, 0)::float8
FROM (SELECT queue, minute, handled, failed, dead_lettered,
             minute > statement_timestamp() - %(age)s * interval '1 second' AS is_recent
      FROM django_pgqueue_queueminute
      WHERE queue = ANY (%(names)s)) AS told
GROUP BY queue
ORDER BY queue
"""


def letter_history(names: Sequence[str], age: float, using: str) -> dict[str, LetterHistory]:
    """Return how many messages these queues dead-lettered in the last ``age`` seconds, and before that."""
    rows = session.run(using, LETTER_HISTORY, names=list(names), age=age)
    return {name: LetterHistory(*history) for name, *history in rows}


# FORGET_MINUTES - delete a batch of minutes that are %(age)s seconds old or older.
# Returns the ids.
FORGET_MINUTES = """
DELETE FROM django_pgqueue_queueminute
WHERE id = ANY (ARRAY(SELECT id
                      FROM django_pgqueue_queueminute
                      WHERE minute < statement_timestamp() - %(age)s * interval '1 second'
                      ORDER BY minute
                      LIMIT %(limit)s))
RETURNING id
"""


def forget_minutes(limit: int, using: str) -> int:
    """Delete a batch of minutes that are a day old or older. Returns how many."""
    return len(session.run(using, FORGET_MINUTES, age=MINUTE_AGE, limit=limit))
