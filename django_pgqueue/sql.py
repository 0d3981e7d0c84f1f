"""
Every runtime statement, in the order in which a message lives. ``services.py`` runs them.

Written out in full, so that each can be pasted into psql after its ``%(parameters)s`` are filled.
Two rules hold for all of them:

* The clock is ``statement_timestamp()``: ``now()`` is the transaction's start and lags behind by
  the transaction's age, ``clock_timestamp()`` is volatile and cannot be used with an index.
* Rows are taken by ids gathered in a CTE or an array first. A subquery that the planner may run
  again would lock more rows than it was asked for.

A walk that must follow an index reads ``FROM item, generate_series(1, (SELECT 1)) AS once`` with a
plain ``LIMIT``. It joins one row, which the planner takes for a thousand: it then expects that
sorting costs a thousand times more than it saves, and keeps the index's order whatever its
statistics say of the table (from when it was empty, or not yet full: it believes that the walk is
one row long, and would fetch and sort the whole backlog).
"""

# --- Queues ---------------------------------------------------------------------------------------

# REFRESH_QUEUE - mark a queue as in use, unless somebody did so within the last %(ttl)s seconds,
# and write its declared attributes along.
# Locks: the queue's row FOR NO KEY UPDATE, if it is stale and nobody else holds it: never waits,
# never makes a publisher wait. A fresh row is not even locked, because the test for staleness
# stands in the locking SELECT.
# Returns one row: exists, fresh, refreshed, differs (the stored attributes are not the declared).
REFRESH_QUEUE = """
WITH stale AS MATERIALIZED (
    SELECT name
    FROM django_pgqueue_messagequeue
    WHERE name = %(name)s
      AND last_active < statement_timestamp() - %(ttl)s * interval '1 second'
    FOR NO KEY UPDATE SKIP LOCKED
), refreshed AS (
    UPDATE django_pgqueue_messagequeue
    SET last_active = statement_timestamp(),
        durable = %(durable)s,
        auto_deleted = %(auto_deleted)s,
        exclusive = %(exclusive)s,
        dead_letter = %(dead_letter)s,
        max_deliveries = %(max_deliveries)s
    WHERE name = ANY (ARRAY(SELECT name FROM stale))
    RETURNING name
), seen AS (
    SELECT last_active >= statement_timestamp() - %(ttl)s * interval '1 second' AS fresh,
           (durable, auto_deleted, exclusive, max_deliveries)
               IS DISTINCT FROM (%(durable)s, %(auto_deleted)s, %(exclusive)s, %(max_deliveries)s)
           OR dead_letter IS DISTINCT FROM %(dead_letter)s AS differs
    FROM django_pgqueue_messagequeue
    WHERE name = %(name)s
)
SELECT EXISTS (SELECT FROM seen),
       coalesce((SELECT fresh FROM seen), false),
       EXISTS (SELECT FROM refreshed),
       coalesce((SELECT differs FROM seen), false)
"""

# DECLARE_QUEUE - make a queue, or write its attributes where they differ, and refresh it.
# Locks: the queue's row, waiting for it if need be. For an explicit declare(), never for publish.
# Returns one row: created.
DECLARE_QUEUE = """
INSERT INTO django_pgqueue_messagequeue
    (name, durable, auto_deleted, exclusive, dead_letter, max_deliveries)
VALUES
    (%(name)s, %(durable)s, %(auto_deleted)s, %(exclusive)s, %(dead_letter)s, %(max_deliveries)s)
ON CONFLICT (name) DO UPDATE
SET last_active = statement_timestamp(),
    durable = excluded.durable,
    auto_deleted = excluded.auto_deleted,
    exclusive = excluded.exclusive,
    dead_letter = excluded.dead_letter,
    max_deliveries = excluded.max_deliveries
RETURNING xmax = 0
"""

# ENSURE_DEAD_LETTER_QUEUE - make the queue that takes another queue's dead letters, if it is not
# there. The default one, NAME.dead, is auto-deleted if NAME is; a configured one is standing.
# Locks: nothing that is there.
ENSURE_DEAD_LETTER_QUEUE = """
INSERT INTO django_pgqueue_messagequeue (name, auto_deleted)
SELECT %(target)s,
       coalesce((SELECT auto_deleted AND dead_letter IS NULL
                 FROM django_pgqueue_messagequeue
                 WHERE name = %(name)s), false)
ON CONFLICT (name) DO NOTHING
"""

# TOUCH_QUEUES - mark these queues as in use, each under the same condition as REFRESH_QUEUE.
# Locks: stale rows that nobody holds, in name order. Never waits.
# Returns the names of those that exist.
TOUCH_QUEUES = """
WITH stale AS MATERIALIZED (
    SELECT name
    FROM django_pgqueue_messagequeue
    WHERE name = ANY (%(names)s)
      AND last_active < statement_timestamp() - %(ttl)s * interval '1 second'
    ORDER BY name
    FOR NO KEY UPDATE SKIP LOCKED
), touched AS (
    UPDATE django_pgqueue_messagequeue
    SET last_active = statement_timestamp()
    WHERE name = ANY (ARRAY(SELECT name FROM stale))
)
SELECT name FROM django_pgqueue_messagequeue WHERE name = ANY (%(names)s)
"""

# --- Publishing -----------------------------------------------------------------------------------

# PUBLISH - the hot path in autocommit: one plain INSERT. A queue that is gone is a foreign-key
# violation, raised here and not at COMMIT because the constraint is not deferrable.
# Locks: KEY SHARE on the queue's row (by the foreign key's check), which publishers share.
PUBLISH = """
INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, headers, read_after, expires_at)
VALUES (%(name)s, %(payload)s::jsonb, %(headers)s::jsonb,
        statement_timestamp() + %(delay)s * interval '1 second',
        statement_timestamp() + %(expires_in)s * interval '1 second')
RETURNING id
"""

# PUBLISH_IF_QUEUE - the hot path inside a transaction: a queue that is gone gives no row instead of
# an error, so the caller's transaction stays usable without a savepoint.
# Locks: KEY SHARE on the queue's row. The lock is what makes "no row" certain: without it a
# concurrent deletion surfaces as a foreign-key violation after all.
PUBLISH_IF_QUEUE = """
INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, headers, read_after, expires_at)
SELECT queue.name, %(payload)s::jsonb, %(headers)s::jsonb,
       statement_timestamp() + %(delay)s * interval '1 second',
       statement_timestamp() + %(expires_in)s * interval '1 second'
FROM django_pgqueue_messagequeue AS queue
WHERE queue.name = %(name)s
FOR KEY SHARE OF queue
RETURNING id
"""

# ENSURE_AND_PUBLISH - heal: make the queue that is gone and publish, in one statement.
# Locks: the queue's row as an update of a non-key column does. DO NOTHING would leave an existing
# row unlocked, to be deleted before the foreign key is checked; setting the key column would lock
# as a deletion does, and one open publisher would block every healer.
# Returns one row: id, created (false: somebody else healed first).
ENSURE_AND_PUBLISH = """
WITH ensured AS (
    INSERT INTO django_pgqueue_messagequeue
        (name, durable, auto_deleted, exclusive, dead_letter, max_deliveries)
    VALUES
        (%(name)s, %(durable)s, %(auto_deleted)s, %(exclusive)s, %(dead_letter)s, %(max_deliveries)s)
    ON CONFLICT (name) DO UPDATE SET last_active = statement_timestamp()
    RETURNING name, xmax = 0 AS created
), published AS (
    INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, headers, read_after, expires_at)
    SELECT name, %(payload)s::jsonb, %(headers)s::jsonb,
           statement_timestamp() + %(delay)s * interval '1 second',
           statement_timestamp() + %(expires_in)s * interval '1 second'
    FROM ensured
    RETURNING id
)
SELECT published.id, ensured.created FROM published, ensured
"""

# ENSURE_QUEUE - the healing half of ENSURE_AND_PUBLISH alone, for publish_many.
# Returns one row: created.
ENSURE_QUEUE = """
INSERT INTO django_pgqueue_messagequeue
    (name, durable, auto_deleted, exclusive, dead_letter, max_deliveries)
VALUES
    (%(name)s, %(durable)s, %(auto_deleted)s, %(exclusive)s, %(dead_letter)s, %(max_deliveries)s)
ON CONFLICT (name) DO UPDATE SET last_active = statement_timestamp()
RETURNING xmax = 0
"""

# PUBLISH_MANY - many payloads in one JSON array, unpacked by the server in their order.
# Locks: KEY SHARE on the queue's row, taken first; no queue, no rows.
# Returns the ids. They rise in the order of the payloads: identity values are drawn as the sorted
# rows are inserted.
PUBLISH_MANY = """
WITH queue AS MATERIALIZED (
    SELECT name FROM django_pgqueue_messagequeue WHERE name = %(name)s FOR KEY SHARE
)
INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, headers, read_after, expires_at)
SELECT queue.name, element.payload, %(headers)s::jsonb,
       statement_timestamp() + %(delay)s * interval '1 second',
       statement_timestamp() + %(expires_in)s * interval '1 second'
FROM queue,
     jsonb_array_elements(%(payloads)s::jsonb) WITH ORDINALITY AS element (payload, position)
ORDER BY element.position
RETURNING id
"""

# NOTIFY - wake the consumers of a queue. Its own statement, after commit: inside the publishing
# transaction it would make all commits of the database stand in line.
NOTIFY = "SELECT pg_notify(%(channel)s, '')"

# --- Consuming ------------------------------------------------------------------------------------

# CLAIM - lease messages of one queue.
# Two walks over the claim index: what is due (delayed, retried, given back), then what was never
# delayed, by id. When both have messages the claim takes from both, so that neither starves.
# A lapsed lease makes a message a suspect: it may have killed its worker, and is claimed alone.
# %(suspects)s: whether one may be taken; %(skip_suspects)s: walk past them, to what is behind.
# Locks: the candidates FOR UPDATE; rows that others hold are skipped, nobody waits.
# Index: django_pgqueue_item_claim_idx; the update changes none of its columns.
# published_at is brought into Python's range, with a day to spare for time zones: reading a row that
# somebody's SQL dated "infinity" would raise after the claim, and cost its neighbours a delivery each.
# Returns rows of kind "claimed", "exhausted" (delivered max_deliveries times: to be dead-lettered)
# and, when %(suspects)s is false and one was met, "suspect" (one row, nothing but the kind).
CLAIM = """
WITH queue AS MATERIALIZED (
    SELECT name, max_deliveries
    FROM django_pgqueue_messagequeue
    WHERE name = %(name)s AND paused_at IS NULL
), due AS MATERIALIZED (
    SELECT id, read_after, delivery_count, lease_expires_at IS NOT NULL AS lapsed
    FROM django_pgqueue_messagequeueitem AS item, generate_series(1, (SELECT 1)) AS once
    WHERE queue_id = (SELECT name FROM queue)
      AND read_after <= statement_timestamp()
      AND (lease_expires_at IS NULL
           OR (lease_expires_at <= statement_timestamp() AND NOT %(skip_suspects)s))
      AND (expires_at IS NULL OR expires_at > statement_timestamp())
    ORDER BY read_after, id
    LIMIT %(limit)s
    FOR UPDATE OF item SKIP LOCKED
), ready AS MATERIALIZED (
    SELECT *
    FROM (SELECT id, delivery_count, lease_expires_at IS NOT NULL AS lapsed
          FROM django_pgqueue_messagequeueitem AS item, generate_series(1, (SELECT 1)) AS once
          WHERE queue_id = (SELECT name FROM queue)
            AND read_after IS NULL
            AND (lease_expires_at IS NULL
                 OR (lease_expires_at <= statement_timestamp() AND NOT %(skip_suspects)s))
            AND (expires_at IS NULL OR expires_at > statement_timestamp())
          ORDER BY read_after, id
          LIMIT %(limit)s
          FOR UPDATE OF item SKIP LOCKED) AS walk
    LIMIT (SELECT greatest(%(limit)s - count(*), (%(limit)s + 1) / 2) FROM due)
), candidate AS MATERIALIZED (
    SELECT id, delivery_count, lapsed, row_number() OVER (ORDER BY read_after, id) AS place FROM due
    UNION ALL
    SELECT id, delivery_count, lapsed, row_number() OVER (ORDER BY id) FROM ready
), fit AS MATERIALIZED (
    SELECT candidate.id, candidate.lapsed, candidate.place
    FROM candidate, queue
    WHERE candidate.delivery_count < queue.max_deliveries
), chosen AS MATERIALIZED (
    SELECT id, lapsed
    FROM fit
    WHERE lapsed = (%(suspects)s AND EXISTS (SELECT FROM fit WHERE lapsed))
    ORDER BY place, random()
    LIMIT CASE WHEN %(suspects)s AND EXISTS (SELECT FROM fit WHERE lapsed) THEN 1 ELSE %(limit)s END
), claimed AS (
    UPDATE django_pgqueue_messagequeueitem
    SET lease_expires_at = statement_timestamp() + %(lease)s * interval '1 second',
        lease_token = %(token)s,
        leased_by = %(consumer)s,
        delivery_count = delivery_count + 1
    WHERE id = ANY (ARRAY(SELECT id FROM chosen))
    RETURNING id, payload::text, headers::text, delivery_count,
              greatest(least(published_at, '9999-12-30 00:00:00+00'), '0001-01-02 00:00:00+00'),
              lease_expires_at
)
SELECT 'claimed', claimed.*, EXISTS (SELECT FROM chosen WHERE chosen.id = claimed.id AND lapsed)
FROM claimed
UNION ALL
SELECT 'exhausted', candidate.id, NULL, NULL, NULL, NULL, NULL, NULL
FROM candidate, queue
WHERE candidate.delivery_count >= queue.max_deliveries
UNION ALL
(SELECT 'suspect', NULL, NULL, NULL, NULL, NULL, NULL, NULL
 FROM fit
 WHERE lapsed AND NOT %(suspects)s
 LIMIT 1)
"""

# NEXT_LOOK - what a consumer asks before it sleeps.
# Index: the claim index for the earliest due time, the orphan index for orphans.
# BETWEEN and not =, or the primary key would be in the order that is asked for, and might be walked.
# Returns one row: exists, seconds until a delayed message is due (null: none), orphans waiting. The
# look goes back one second, so that what became due since the last claim is not slept through. Two
# epochs, because an infinite time minus another is an error before PostgreSQL 17.
NEXT_LOOK = """
SELECT EXISTS (SELECT FROM django_pgqueue_messagequeue WHERE name = %(name)s),
       (SELECT (extract(epoch FROM read_after) - extract(epoch FROM statement_timestamp()))::float8
        FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
        WHERE queue_id = %(name)s
          AND read_after > statement_timestamp() - interval '1 second'
          AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())
        ORDER BY read_after, id
        LIMIT 1),
       (SELECT id
        FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
        WHERE orphaned_from BETWEEN %(name)s AND %(name)s
        ORDER BY orphaned_from, id
        LIMIT 1) IS NOT NULL
"""

# EXTEND - prolong leases that are still the caller's.
# Locks: the rows in id order. A row that a settling transaction holds is skipped and not lost: it
# is returned with extended = false.
EXTEND = """
WITH held AS MATERIALIZED (
    SELECT id
    FROM django_pgqueue_messagequeueitem
    WHERE id = ANY (%(ids)s)
      AND (id, lease_token) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]))
), mine AS MATERIALIZED (
    SELECT id
    FROM django_pgqueue_messagequeueitem
    WHERE id = ANY (%(ids)s)
      AND (id, lease_token) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]))
    ORDER BY id
    FOR UPDATE SKIP LOCKED
), extended AS (
    UPDATE django_pgqueue_messagequeueitem
    SET lease_expires_at = statement_timestamp() + %(lease)s * interval '1 second'
    WHERE id = ANY (ARRAY(SELECT id FROM mine))
    RETURNING id
)
SELECT held.id, extended.id IS NOT NULL
FROM held LEFT JOIN extended USING (id)
"""

# ACK - done: the messages are gone.
# Locks: the rows in id order, as every statement that settles does.
# Returns the ids that were still the caller's.
ACK = """
WITH mine AS MATERIALIZED (
    SELECT id
    FROM django_pgqueue_messagequeueitem
    WHERE id = ANY (%(ids)s)
      AND (id, lease_token) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]))
    ORDER BY id
    FOR UPDATE
)
DELETE FROM django_pgqueue_messagequeueitem
WHERE id = ANY (ARRAY(SELECT id FROM mine))
RETURNING id
"""

# NACK - give messages back, each due after its own delay, with a line in their history.
# Messages delivered max_deliveries times are left as they are, for DEAD_LETTER.
# %(told)s is a JSON object: delay and reason by id. Joined as arrays, the planner may compare every
# message with every element.
# Locks: the rows in id order.
# Returns the ids that were still the caller's, and whether each was given back.
NACK = """
WITH mine AS MATERIALIZED (
    SELECT id, queue_id, delivery_count
    FROM django_pgqueue_messagequeueitem
    WHERE id = ANY (%(ids)s)
      AND (id, lease_token) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]))
    ORDER BY id
    FOR UPDATE
), fit AS MATERIALIZED (
    SELECT mine.id
    FROM mine LEFT JOIN django_pgqueue_messagequeue AS queue ON queue.name = mine.queue_id
    WHERE mine.delivery_count < coalesce(queue.max_deliveries, %(max_deliveries)s)
), given_back AS (
    UPDATE django_pgqueue_messagequeueitem AS item
    SET read_after = statement_timestamp() + (told.by_id -> item.id::text ->> 0)::float8 * interval '1 second',
        lease_expires_at = NULL,
        lease_token = NULL,
        failures = jsonb_path_query_array(
            coalesce(item.failures, '[]') || jsonb_build_object(
                'at', statement_timestamp(),
                'queue', coalesce(item.queue_id, item.orphaned_from),
                'delivery_count', item.delivery_count,
                'consumer', item.leased_by,
                'reason', told.by_id -> item.id::text ->> 1),
            '$[last - 9 to last]')
    FROM (SELECT %(told)s::jsonb) AS told (by_id)
    WHERE item.id = ANY (ARRAY(SELECT id FROM fit))
    RETURNING item.id
)
SELECT mine.id, given_back.id IS NOT NULL
FROM mine LEFT JOIN given_back USING (id)
"""

# RELEASE - give back what was claimed and never started: the delivery that the claim counted is
# taken back.
# Locks: the rows in id order.
RELEASE = """
WITH mine AS MATERIALIZED (
    SELECT id
    FROM django_pgqueue_messagequeueitem
    WHERE id = ANY (%(ids)s)
      AND (id, lease_token) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]))
    ORDER BY id
    FOR UPDATE
)
UPDATE django_pgqueue_messagequeueitem
SET read_after = coalesce(read_after, statement_timestamp()),
    lease_expires_at = NULL,
    lease_token = NULL,
    delivery_count = delivery_count - 1
WHERE id = ANY (ARRAY(SELECT id FROM mine))
RETURNING id
"""

# DEAD_LETTER - set messages aside: to the dead-letter queue of the queue they are on. The move
# clears expiry, lease and count, which are kept in the history. A queue named *.dead for which none
# is configured parks its failures: they stay, due in the year 9000, until somebody redrives them.
# Fenced by token; with %(tokens)s null, only what nobody holds and what still is expired or spent:
# several consumers and reapers may find the same message, and it must move once.
# Locks: the messages in id order, then KEY SHARE on the target's row, in name order.
# Returns the ids taken, their target (null: parked) and whether each was moved (false: the target
# does not exist yet).
DEAD_LETTER = """
WITH mine AS MATERIALIZED (
    SELECT id, coalesce(queue_id, orphaned_from) AS name
    FROM django_pgqueue_messagequeueitem
    WHERE id = ANY (%(ids)s)
      AND CASE WHEN %(tokens)s::uuid[] IS NULL
               THEN (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())
                    AND (expires_at <= statement_timestamp()
                         OR delivery_count >= (SELECT max_deliveries
                                               FROM django_pgqueue_messagequeue
                                               WHERE name = queue_id))
               ELSE (id, lease_token) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]))
          END
    ORDER BY id
    FOR UPDATE
), route AS MATERIALIZED (
    SELECT mine.id,
           coalesce(queue.dead_letter,
                    CASE WHEN queue.name IS NULL THEN %(dead_letter)s END,
                    CASE WHEN right(mine.name, 5) <> '.dead' THEN mine.name || '.dead' END) AS target
    FROM mine LEFT JOIN django_pgqueue_messagequeue AS queue ON queue.name = mine.name
), target AS MATERIALIZED (
    SELECT name
    FROM django_pgqueue_messagequeue
    WHERE name IN (SELECT target FROM route)
    ORDER BY name
    FOR KEY SHARE
), moved AS (
    UPDATE django_pgqueue_messagequeueitem AS item
    SET queue_id = coalesce(target.name, item.queue_id),
        orphaned_from = CASE WHEN target.name IS NULL THEN item.orphaned_from END,
        read_after = CASE WHEN target.name IS NULL THEN timestamptz '9000-01-01 00:00:00+00'
                          ELSE statement_timestamp() END,
        expires_at = NULL,
        lease_expires_at = NULL,
        lease_token = NULL,
        delivery_count = 0,
        dead_lettered_from = coalesce(item.queue_id, item.orphaned_from),
        dead_lettered_at = statement_timestamp(),
        failures = jsonb_path_query_array(
            coalesce(item.failures, '[]') || jsonb_build_object(
                'at', statement_timestamp(),
                'queue', coalesce(item.queue_id, item.orphaned_from),
                'delivery_count', item.delivery_count,
                'consumer', item.leased_by,
                'expires_at', item.expires_at,
                'reason', told.reason),
            '$[last - 9 to last]')
    FROM unnest(%(ids)s::bigint[], %(reasons)s::text[]) AS told (id, reason)
    JOIN route ON route.id = told.id
    LEFT JOIN target ON target.name = route.target
    WHERE item.id = ANY (ARRAY(SELECT id FROM mine))
      AND item.id = told.id
      AND (target.name IS NOT NULL OR route.target IS NULL)
    RETURNING item.id
)
SELECT route.id, route.target, moved.id IS NOT NULL
FROM route LEFT JOIN moved USING (id)
"""

# --- Consumers ------------------------------------------------------------------------------------

# BEAT - write a consumer process's heartbeat.
BEAT = """
INSERT INTO django_pgqueue_queueconsumer (id, host, pid, queues)
VALUES (%(id)s, %(host)s, %(pid)s, %(queues)s::jsonb)
ON CONFLICT (id) DO UPDATE SET last_heartbeat = statement_timestamp(), queues = excluded.queues
"""

# FORGET_CONSUMER - a consumer process ended in good order.
FORGET_CONSUMER = "DELETE FROM django_pgqueue_queueconsumer WHERE id = %(id)s"

# FORGET_CONSUMERS - drop the rows of processes that ended otherwise, a day ago or earlier.
FORGET_CONSUMERS = """
DELETE FROM django_pgqueue_queueconsumer
WHERE last_heartbeat < statement_timestamp() - %(age)s * interval '1 second'
"""

# --- Orphans --------------------------------------------------------------------------------------

# ORPHANED_NAMES - the queues that orphans belong to and that exist again.
ORPHANED_NAMES = """
SELECT queue.name
FROM django_pgqueue_messagequeue AS queue
WHERE (SELECT id
       FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
       WHERE orphaned_from BETWEEN queue.name AND queue.name
       ORDER BY orphaned_from, id
       LIMIT 1) IS NOT NULL
ORDER BY queue.name
"""

# ADOPT - give a batch of orphans back to their queue. They come in through the due walk; their
# expiry and a lease that somebody still holds stay as they are.
# Locks: KEY SHARE on the queue (no row, nothing to do: a queue that is deleted again meanwhile is
# not an error), then the orphans in id order, skipping what others hold.
# Index: django_pgqueue_item_orphan_idx.
ADOPT = """
WITH queue AS MATERIALIZED (
    SELECT name FROM django_pgqueue_messagequeue WHERE name = %(name)s FOR KEY SHARE
), orphan AS MATERIALIZED (
    SELECT id
    FROM django_pgqueue_messagequeueitem AS item, generate_series(1, (SELECT 1)) AS once
    WHERE orphaned_from = (SELECT name FROM queue)
    ORDER BY orphaned_from, id
    LIMIT %(limit)s
    FOR UPDATE OF item SKIP LOCKED
)
UPDATE django_pgqueue_messagequeueitem
SET queue_id = orphaned_from,
    orphaned_from = NULL,
    read_after = coalesce(read_after, statement_timestamp())
WHERE id = ANY (ARRAY(SELECT id FROM orphan))
RETURNING id
"""

# --- Reaping --------------------------------------------------------------------------------------

# EXPIRE - take a batch of expired messages that nobody holds, orphans as well, and delete those for
# which no dead-letter queue was configured.
# One walk for both kinds: a search for one of them would read past all of the other kind each time.
# Locks: the batch, skipping what others hold.
# Index: django_pgqueue_item_expiry_idx.
# Returns id, queue, and whether it is still there, for DEAD_LETTER to move.
EXPIRE = """
WITH expired AS MATERIALIZED (
    SELECT id,
           coalesce(queue_id, orphaned_from) AS name,
           coalesce((SELECT dead_letter IS NOT NULL
                     FROM django_pgqueue_messagequeue
                     WHERE name = queue_id), false) AS is_kept
    FROM django_pgqueue_messagequeueitem AS item, generate_series(1, (SELECT 1)) AS once
    WHERE expires_at <= statement_timestamp()
      AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())
    ORDER BY expires_at
    LIMIT %(limit)s
    FOR UPDATE OF item SKIP LOCKED
), gone AS (
    DELETE FROM django_pgqueue_messagequeueitem
    WHERE id = ANY (ARRAY(SELECT id FROM expired WHERE NOT is_kept))
)
SELECT id, name, is_kept FROM expired
"""

# EXHAUSTED - find lapsed messages that were delivered max_deliveries times. A claim that meets one
# would dead-letter it; this is for queues that nobody claims from. Bounded: it looks at the head of
# each queue's two walks.
EXHAUSTED = """
SELECT head.id, queue.name
FROM django_pgqueue_messagequeue AS queue
CROSS JOIN LATERAL (
    (SELECT id, lease_expires_at, delivery_count
     FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
     WHERE queue_id = queue.name AND read_after <= statement_timestamp()
     ORDER BY read_after, id
     LIMIT %(limit)s)
    UNION ALL
    (SELECT id, lease_expires_at, delivery_count
     FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
     WHERE queue_id = queue.name AND read_after IS NULL
     ORDER BY read_after, id
     LIMIT %(limit)s)
) AS head
WHERE head.lease_expires_at <= statement_timestamp()
  AND head.delivery_count >= queue.max_deliveries
"""

# IDLE_QUEUES - the auto-deleted queues that may be reaped: idle, and without any message.
IDLE_QUEUES = """
SELECT name, (extract(epoch FROM statement_timestamp()) - extract(epoch FROM last_active))::float8
FROM django_pgqueue_messagequeue AS queue
WHERE auto_deleted
  AND last_active < statement_timestamp() - %(idle_for)s * interval '1 second'
  AND (SELECT id
       FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
       WHERE queue_id = queue.name
       ORDER BY read_after, id
       LIMIT 1) IS NULL
ORDER BY name
"""

# REAPABLE - what the reaper would find, counted and changed in nothing.
# Returns one row: expired, of these with a configured dead-letter queue, orphans to adopt.
REAPABLE = """
SELECT count(*) FILTER (WHERE item.expires_at <= statement_timestamp()),
       count(*) FILTER (WHERE item.expires_at <= statement_timestamp()
                          AND queue.dead_letter IS NOT NULL),
       count(*) FILTER (WHERE item.orphaned_from = queue.name
                          AND (item.expires_at > statement_timestamp()) IS NOT FALSE)
FROM django_pgqueue_messagequeueitem AS item
LEFT JOIN django_pgqueue_messagequeue AS queue
    ON queue.name = coalesce(item.queue_id, item.orphaned_from)
WHERE (item.lease_expires_at > statement_timestamp()) IS NOT TRUE
  AND (item.expires_at <= statement_timestamp() OR item.orphaned_from IS NOT NULL)
"""

# LOCK_IDLE_QUEUE, DELETE_IDLE_QUEUE - reap one queue, in one short transaction.
# Two statements, because the second must have a snapshot that is younger than the lock: a message
# committed between the snapshot and the lock of a single statement would be cut loose.
# Locks: the queue's row FOR UPDATE. A publisher in flight holds KEY SHARE on it: skipped.
# Index: the claim index. The foreign key's own search for messages is a statement that the server
# plans once in a session; a plan from when the table was empty scans the table at every deletion,
# so that this transaction wants it planned anew.
LOCK_IDLE_QUEUE = """
SELECT name, set_config('plan_cache_mode', 'force_custom_plan', true)
FROM django_pgqueue_messagequeue
WHERE name = %(name)s
  AND auto_deleted
  AND last_active < statement_timestamp() - %(idle_for)s * interval '1 second'
FOR UPDATE SKIP LOCKED
"""
DELETE_IDLE_QUEUE = """
DELETE FROM django_pgqueue_messagequeue AS queue
WHERE name = %(name)s
  AND auto_deleted
  AND last_active < statement_timestamp() - %(idle_for)s * interval '1 second'
  AND (SELECT id
       FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
       WHERE queue_id = queue.name
       ORDER BY read_after, id
       LIMIT 1) IS NULL
RETURNING (extract(epoch FROM statement_timestamp()) - extract(epoch FROM last_active))::float8
"""

# --- Seeing ---------------------------------------------------------------------------------------

# STATS - depth by state and the oldest due age, of the queues named or, with null, of all, also of
# those that only orphans remember. Reads every message of those queues.
STATS = """
WITH item AS (
    SELECT coalesce(queue_id, orphaned_from) AS name,
           CASE WHEN lease_expires_at > statement_timestamp() THEN 'leased'
                WHEN queue_id IS NULL THEN 'orphaned'
                WHEN dead_lettered_at IS NOT NULL THEN 'dead'
                WHEN expires_at <= statement_timestamp() THEN 'expired'
                WHEN read_after > statement_timestamp() THEN 'delayed'
                ELSE 'ready'
           END AS state,
           coalesce(read_after, published_at) AS due_at,
           expires_at
    FROM django_pgqueue_messagequeueitem
    WHERE %(names)s::text[] IS NULL OR queue_id = ANY (%(names)s) OR orphaned_from = ANY (%(names)s)
), depth AS (
    SELECT name,
           count(*) FILTER (WHERE state = 'ready') AS ready,
           count(*) FILTER (WHERE state = 'delayed') AS delayed,
           count(*) FILTER (WHERE state = 'leased') AS leased,
           count(*) FILTER (WHERE state = 'dead') AS dead,
           count(*) FILTER (WHERE state = 'expired') AS expired,
           count(*) FILTER (WHERE state = 'orphaned') AS orphaned,
           extract(epoch FROM statement_timestamp()
                              - min(due_at) FILTER (WHERE state = 'ready' AND isfinite(due_at))
               )::float8 AS oldest_due_age,
           count(*) AS messages
    FROM item
    GROUP BY name
)
SELECT coalesce(queue.name, depth.name), queue.name IS NOT NULL,
       coalesce(ready, 0), coalesce(delayed, 0), coalesce(leased, 0), coalesce(dead, 0),
       coalesce(expired, 0), coalesce(orphaned, 0), oldest_due_age,
       extract(epoch FROM statement_timestamp()
                          - CASE WHEN isfinite(queue.last_active) THEN queue.last_active END)::float8,
       queue.auto_deleted
           AND queue.last_active < statement_timestamp() - %(idle_for)s * interval '1 second'
           AND coalesce(messages, 0) = 0
FROM depth FULL JOIN django_pgqueue_messagequeue AS queue ON queue.name = depth.name
WHERE %(names)s::text[] IS NULL OR coalesce(queue.name, depth.name) = ANY (%(names)s)
ORDER BY 1
"""

# FOREIGN_KEY - the foreign key as PostgreSQL has it, for the system check.
FOREIGN_KEY = """
SELECT confdeltype = 'n', NOT condeferrable, convalidated
FROM pg_constraint
WHERE conname = 'django_pgqueue_item_queue_fk'
  AND contype = 'f'
  AND conrelid = to_regclass('django_pgqueue_messagequeueitem')
  AND confrelid = to_regclass('django_pgqueue_messagequeue')
"""

# DEFAULT_ISOLATION - what a statement outside a transaction gets.
DEFAULT_ISOLATION = "SELECT current_setting('default_transaction_isolation')"
READ_COMMITTED = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
