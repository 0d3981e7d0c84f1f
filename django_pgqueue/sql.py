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

# DEAD_LETTER_CHAIN - where dead letters of a queue would go next, and next, as stored: it ends where
# it comes to a queue for the second time.
# Returns the names, in order.
DEAD_LETTER_CHAIN = """
WITH RECURSIVE chain (name, place) AS (
    SELECT %(target)s::text, 1
    UNION ALL
    SELECT queue.dead_letter, chain.place + 1
    FROM chain JOIN django_pgqueue_messagequeue AS queue ON queue.name = chain.name
    WHERE queue.dead_letter IS NOT NULL
) CYCLE name SET is_cycle USING path
SELECT name FROM chain WHERE NOT is_cycle ORDER BY place
"""

# QUEUE_EXISTS - the name, or no row.
QUEUE_EXISTS = "SELECT name FROM django_pgqueue_messagequeue WHERE name = %(name)s"

# STORED - a queue's attributes, by the key. No lock.
STORED = """
SELECT durable, auto_deleted, exclusive, dead_letter, max_deliveries
  FROM django_pgqueue_messagequeue
 WHERE name = %(name)s
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

# RECORD_RETURN - a queue that is made again leaves an event that says why it was gone: revived (the
# last event is the reaper's tombstone) or vanished (none, and %(known)s: this process had known it).
# Locks: nothing; an event is only ever added.
# Returns the kind, or no row: a first use.
RECORD_RETURN = """
INSERT INTO django_pgqueue_queueevent (queue, kind)
SELECT %(name)s, cause.kind
FROM (SELECT CASE WHEN (SELECT kind
                        FROM django_pgqueue_queueevent
                        WHERE queue BETWEEN %(name)s AND %(name)s
                        ORDER BY queue DESC, id DESC
                        LIMIT 1) = 'reaped' THEN 'revived'
                  WHEN %(known)s THEN 'vanished'
             END) AS cause (kind)
WHERE cause.kind IS NOT NULL
RETURNING kind
"""

# PAUSE, RESUME - stop and start claims. A column of the operators', which no declare writes.
# Locks: the queue's row, as an update of a non-key column does.
# Return the name, or no row: there is no such queue.
PAUSE = """
UPDATE django_pgqueue_messagequeue
SET paused_at = coalesce(paused_at, statement_timestamp())
WHERE name = %(name)s
RETURNING name
"""
RESUME = """
UPDATE django_pgqueue_messagequeue SET paused_at = NULL WHERE name = %(name)s RETURNING name
"""

# IS_PAUSED - the name of a queue that is paused, or no row.
IS_PAUSED = """
SELECT name FROM django_pgqueue_messagequeue WHERE name = %(name)s AND paused_at IS NOT NULL
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

# SECONDS_UNTIL - from now to a moment, by the clock that counts; 0 for one that is past. No lock.
SECONDS_UNTIL = "SELECT greatest(date_part('epoch', %(due)s::timestamptz - statement_timestamp()), 0)"

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

# PUBLISH_RELAXED - PUBLISH to a queue that is not durable: the commit of this one statement does not
# wait for the disk. Only in autocommit, where the setting ends with the statement.
# Locks: as PUBLISH.
PUBLISH_RELAXED = """
INSERT INTO django_pgqueue_messagequeueitem (queue_id, payload, headers, read_after, expires_at)
SELECT %(name)s, %(payload)s::jsonb, %(headers)s::jsonb,
       statement_timestamp() + %(delay)s * interval '1 second',
       statement_timestamp() + %(expires_in)s * interval '1 second'
FROM set_config('synchronous_commit', 'off', true)
RETURNING id
"""

# RELAX - the same for a transaction of the library's own, around PUBLISH_MANY.
RELAX = "SET LOCAL synchronous_commit = off"

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

# PUBLISH_TO_TOPIC - put a message on every queue that is bound to a topic, and store what does not
# fit into a notification.
# A bound auto-deleted queue that nobody has used for %(idle_for)s seconds is left out, and not even
# locked: its subscriber went away, and what is put there must not keep it. A bound queue without a row
# (deleted by hand; the reaper removes the bindings along) gets its message as an orphan, which comes in
# when it is back.
# Locks: KEY SHARE on the bindings and on the queues' rows, each in name order. Once locked they stay.
# Returns rows: the id of the body (null: none), and id and queue of each message put on a queue (null
# in the only row if there is none).
PUBLISH_TO_TOPIC = """
WITH binding AS MATERIALIZED (
    SELECT queue, ttl
    FROM django_pgqueue_topicbinding AS binding
    WHERE topic = %(topic)s
      AND NOT EXISTS (SELECT
                      FROM django_pgqueue_messagequeue
                      WHERE name = binding.queue
                        AND auto_deleted
                        AND last_active < statement_timestamp() - %(idle_for)s * interval '1 second')
    ORDER BY queue
    FOR KEY SHARE OF binding
), bound AS MATERIALIZED (
    SELECT name, auto_deleted
    FROM django_pgqueue_messagequeue
    WHERE name = ANY (ARRAY(SELECT queue FROM binding))
    ORDER BY name
    FOR KEY SHARE
), target AS MATERIALIZED (
    SELECT binding.queue, bound.name,
           coalesce(%(ttl)s::float8, binding.ttl,
                    CASE WHEN bound.auto_deleted THEN %(ephemeral_ttl)s::float8
                         ELSE %(default_ttl)s::float8 END) AS ttl
    FROM binding LEFT JOIN bound ON bound.name = binding.queue
), published AS (
    INSERT INTO django_pgqueue_messagequeueitem
        (queue_id, orphaned_from, payload, headers, expires_at)
    SELECT target.name, CASE WHEN target.name IS NULL THEN target.queue END,
           %(payload)s::jsonb, %(headers)s::jsonb,
           CASE WHEN target.ttl < 'infinity' THEN statement_timestamp() + target.ttl * interval '1 second' END
    FROM target
    ORDER BY target.queue
    RETURNING id, coalesce(queue_id, orphaned_from) AS queue
), body AS (
    INSERT INTO django_pgqueue_topicbody (content, expires_at)
    SELECT %(body)s::text, statement_timestamp() + %(body_ttl)s * interval '1 second'
    WHERE %(body)s::text IS NOT NULL
    RETURNING id
)
SELECT body.id, published.id, published.queue
FROM (SELECT 1) AS always LEFT JOIN body ON true LEFT JOIN published ON true
ORDER BY published.id
"""

# NOTIFY_TOPIC - tell the live subscribers of a topic. Its own statement after commit, as NOTIFY.
NOTIFY_TOPIC = "SELECT pg_notify(%(channel)s, %(content)s)"

# TOPIC_BODY - read what did not fit into a notification. Nobody takes it away: the reaper does.
TOPIC_BODY = "SELECT content FROM django_pgqueue_topicbody WHERE id = %(id)s"

# BIND - let a queue get a copy of each message of a topic.
# Locks: KEY SHARE on the queue's row, so that the reaper, which locks it first, never meets a binding that
# it has not locked; and the binding's row, if it is there.
# Returns the queue's name, or no row: there is no such queue.
BIND = """
WITH queue AS MATERIALIZED (
    SELECT name FROM django_pgqueue_messagequeue WHERE name = %(queue)s FOR KEY SHARE
), bound AS (
    INSERT INTO django_pgqueue_topicbinding AS binding (topic, queue, ttl)
    SELECT %(topic)s::text, name, %(ttl)s::float8 FROM queue
    ON CONFLICT (topic, queue) DO UPDATE
    SET ttl = excluded.ttl
    WHERE binding.ttl IS DISTINCT FROM excluded.ttl
)
SELECT name FROM queue
"""

# UNBIND - end that. Locks: the binding's row; waits for publishers that put messages there.
# Returns the id, or no row: it was not bound.
UNBIND = """
DELETE FROM django_pgqueue_topicbinding WHERE topic = %(topic)s AND queue = %(queue)s RETURNING id
"""

# NOTIFY - wake the consumers of a queue. Its own statement, after commit: inside the publishing
# transaction it would make all commits of the database stand in line.
NOTIFY = "SELECT pg_notify(%(channel)s, '')"

# --- Consuming ------------------------------------------------------------------------------------

# CLAIM - lease messages of one queue.
# Two walks over the claim index: what is due (delayed, retried, given back), then what was never
# delayed, by id, starting behind %(above)s (0: all; see low_water.py). When both have messages the claim
# takes from both, so that neither starves.
# A lapsed lease makes a message a suspect: it may have killed its worker, and is claimed alone.
# %(suspects)s: whether one may be taken; %(skip_suspects)s: walk past them, to what is behind.
# Of an exclusive queue only its owner may claim. No more is taken once %(most_bytes)s are (null: no
# such bound), about: a compressed payload counts sixteen times what is stored. Unpacking all candidates
# to measure them would cost more than the claim; PostgreSQL's compression does up to ninety times.
# A CTE's rows come out as they went in, so what is in order is not sorted again: this is the most
# frequent statement but for publishing, and half of its time was sorting and comparing. What is used
# twice or locks is materialized without being told: psycopg parses a text of more than 4,096 characters
# anew each time.
# Locks: the candidates FOR UPDATE; rows that others hold are skipped, nobody waits. An exclusive
# queue's row FOR SHARE, so that a change of its owner and a claim cannot pass each other unseen.
# Index: django_pgqueue_item_claim_idx; the update changes none of its columns.
# Times (published, end of the lease, due if it was ever delayed) are seconds since 1970: Django's way to read a
# timestamp takes as long as decoding the payload.
# Whoever was never given back or set aside has no failures: its publish is counted when it is settled.
# Returns rows of kind "claimed", "exhausted" (delivered max_deliveries times: to be dead-lettered),
# "ready" (the lowest and, in place of the count, the highest id claimed by the walk in id order)
# and these, of nothing but the kind: "suspect" (%(suspects)s is false and one was met), "more" (not
# all that was met was taken), "paused", "foreign" (another consumer owns the queue, or nobody).
CLAIM = """
WITH shared AS (
    SELECT name, max_deliveries
    FROM django_pgqueue_messagequeue
    WHERE name = %(name)s AND paused_at IS NULL AND NOT exclusive
), owned AS (
    SELECT name, max_deliveries
    FROM django_pgqueue_messagequeue
    WHERE name = %(name)s AND paused_at IS NULL AND exclusive AND exclusive_consumer_id = %(consumer)s
    FOR SHARE
), queue AS (
    SELECT * FROM shared
    UNION ALL
    SELECT * FROM owned
), due AS MATERIALIZED (
    SELECT id, read_after, delivery_count, lease_expires_at IS NOT NULL AS lapsed,
           pg_column_size(payload) * CASE WHEN pg_column_compression(payload) IS NULL THEN 1 ELSE 16 END AS bytes
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
    SELECT * FROM (
        SELECT id, delivery_count, lease_expires_at IS NOT NULL AS lapsed,
               pg_column_size(payload) * CASE WHEN pg_column_compression(payload) IS NULL THEN 1 ELSE 16 END AS bytes
        FROM django_pgqueue_messagequeueitem AS item, generate_series(1, (SELECT 1)) AS once
        WHERE queue_id = (SELECT name FROM queue)
          AND read_after IS NULL
          AND id > %(above)s
          AND (lease_expires_at IS NULL
               OR (lease_expires_at <= statement_timestamp() AND NOT %(skip_suspects)s))
          AND (expires_at IS NULL OR expires_at > statement_timestamp())
        ORDER BY read_after, id
        LIMIT %(limit)s
        FOR UPDATE OF item SKIP LOCKED
    ) AS walk
    LIMIT (SELECT greatest(%(limit)s - count(*), (%(limit)s + 1) / 2) FROM due)
), candidate AS (
    SELECT id, delivery_count, lapsed, bytes, true AS is_due, row_number() OVER () AS place, random() AS tie
    FROM due
    UNION ALL
    SELECT id, delivery_count, lapsed, bytes, false, row_number() OVER (), random()
    FROM ready
), fit AS (
    SELECT id, lapsed, is_due,
           sum(candidate.bytes) OVER (ORDER BY candidate.place, candidate.tie) - candidate.bytes AS bytes_before
    FROM candidate, queue
    WHERE candidate.delivery_count < queue.max_deliveries
), chosen AS (
    SELECT id, lapsed, is_due
    FROM fit
    WHERE lapsed = (%(suspects)s AND EXISTS (SELECT FROM fit WHERE lapsed))
      AND ((bytes_before < %(most_bytes)s::bigint) IS NOT FALSE OR lapsed)
    LIMIT CASE WHEN %(suspects)s AND EXISTS (SELECT FROM fit WHERE lapsed) THEN 1 ELSE %(limit)s END
), claimed AS (
    UPDATE django_pgqueue_messagequeueitem
    SET lease_expires_at = statement_timestamp() + %(lease)s * interval '1 second',
        lease_token = %(token)s,
        leased_by = %(consumer)s,
        delivery_count = delivery_count + 1
    WHERE id = ANY (ARRAY(SELECT id FROM chosen))
    RETURNING id, payload::text, headers::text, delivery_count,
              date_part('epoch', published_at), date_part('epoch', lease_expires_at), failures IS NULL,
              date_part('epoch', read_after)
)
SELECT 'claimed', claimed.*, (SELECT bool_or(lapsed) FROM chosen)
FROM claimed
UNION ALL
SELECT 'exhausted', id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM candidate, queue
WHERE candidate.delivery_count >= queue.max_deliveries
UNION ALL
SELECT 'ready', min(id), NULL, NULL, max(id), NULL, NULL, NULL, NULL, NULL
FROM chosen
WHERE NOT is_due
HAVING count(*) > 0
UNION ALL
SELECT flag, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM (
    (SELECT 'suspect' AS flag FROM fit WHERE lapsed AND NOT %(suspects)s LIMIT 1)
    UNION ALL
    SELECT 'more' WHERE (SELECT count(*) FROM fit) > (SELECT count(*) FROM chosen)
    UNION ALL
    SELECT CASE WHEN paused_at IS NULL THEN 'foreign' ELSE 'paused' END
    FROM django_pgqueue_messagequeue
    WHERE name = %(name)s AND NOT EXISTS (SELECT FROM queue)
) AS flags
"""

# TAKE_OVER - become the owner of an exclusive queue that has none, or whose owner has not beaten for
# %(patience)s seconds (its row may be gone too). Only for a consumer that has a row itself.
# Locks: the queue's row, skipping it if somebody holds it. The owner is compared again under the
# lock: two that see the same dead owner do not both become the new one.
# Returns the name, or no row.
TAKE_OVER = """
WITH stale AS MATERIALIZED (
    SELECT name, exclusive_consumer_id AS owner
    FROM django_pgqueue_messagequeue AS queue
    WHERE name = %(name)s
      AND exclusive
      AND NOT EXISTS (SELECT
                      FROM django_pgqueue_queueconsumer AS owner
                      WHERE owner.id = queue.exclusive_consumer_id
                        AND owner.last_heartbeat > statement_timestamp() - %(patience)s * interval '1 second')
      AND EXISTS (SELECT FROM django_pgqueue_queueconsumer WHERE id = %(consumer)s)
), free AS MATERIALIZED (
    SELECT queue.name
    FROM django_pgqueue_messagequeue AS queue JOIN stale ON stale.name = queue.name
    WHERE queue.exclusive_consumer_id IS NOT DISTINCT FROM stale.owner
    FOR NO KEY UPDATE OF queue SKIP LOCKED
)
UPDATE django_pgqueue_messagequeue
SET exclusive_consumer_id = %(consumer)s
WHERE name = ANY (ARRAY(SELECT name FROM free))
RETURNING name
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
                'process', (SELECT host || ':' || pid
                            FROM django_pgqueue_queueconsumer
                            WHERE id = item.leased_by),
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
# is configured parks its failures: they stay, due in the year 9000, until somebody redrives them. So
# does every queue whose dead-letter queue has given the message up before: none is visited twice.
# Fenced by token; with %(tokens)s null, only what nobody holds and what still is expired or spent:
# several consumers and reapers may find the same message, and it must move once.
# Locks: the messages in id order, then KEY SHARE on the target's row, in name order.
# Returns the ids taken, their target (null: parked) and whether each was moved (false: the target
# does not exist yet).
DEAD_LETTER = """
WITH mine AS MATERIALIZED (
    SELECT id, coalesce(queue_id, orphaned_from) AS name,
           coalesce(dead_letter_path,
                    CASE WHEN dead_lettered_from IS NOT NULL THEN jsonb_build_array(dead_lettered_from) END,
                    '[]') AS path
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
), wanted AS MATERIALIZED (
    SELECT mine.id, mine.name, mine.path,
           coalesce(queue.dead_letter,
                    CASE WHEN queue.name IS NULL THEN %(dead_letter)s END,
                    CASE WHEN right(mine.name, 5) <> '.dead' THEN mine.name || '.dead' END) AS target
    FROM mine LEFT JOIN django_pgqueue_messagequeue AS queue ON queue.name = mine.name
), route AS MATERIALIZED (
    SELECT id, name, path,
           target = name OR path ? target AS is_cycle,
           CASE WHEN target <> name AND NOT path ? target THEN target END AS target
    FROM wanted
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
        dead_lettered_from = CASE WHEN route.target IS NULL AND route.path <> '[]' THEN route.path ->> -1
                                  ELSE route.name END,
        dead_letter_path = CASE WHEN route.target IS NULL AND route.path <> '[]' THEN route.path
                                ELSE route.path || to_jsonb(route.name) END,
        dead_lettered_at = statement_timestamp(),
        failures = jsonb_path_query_array(
            coalesce(item.failures, '[]') || jsonb_build_object(
                'at', statement_timestamp(),
                'queue', coalesce(item.queue_id, item.orphaned_from),
                'delivery_count', item.delivery_count,
                'consumer', item.leased_by,
                'process', (SELECT host || ':' || pid
                            FROM django_pgqueue_queueconsumer
                            WHERE id = item.leased_by),
                'expires_at', item.expires_at,
                'reason', CASE WHEN route.is_cycle THEN 'cycle: ' ELSE '' END || told.reason),
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

# REDRIVE - send dead letters back to the queue that gave them up, due now and with a fresh count.
# Their history stays. A letter that came through several queues goes one step back.
# A batch: %(limit)s letters behind id %(after)s, of those that match and died up to %(before)s, so that
# one which dies again is not met twice by the same redrive.
# Locks: KEY SHARE on the queue, then the letters in id order, skipping what others hold (a second
# redrive beside this one takes others).
# Index: django_pgqueue_item_dead_idx.
# Returns the ids.
REDRIVE = """
WITH queue AS MATERIALIZED (
    SELECT name FROM django_pgqueue_messagequeue WHERE name = %(name)s FOR KEY SHARE
), letter AS MATERIALIZED (
    SELECT id
    FROM django_pgqueue_messagequeueitem AS item, generate_series(1, (SELECT 1)) AS once
    WHERE dead_lettered_from = (SELECT name FROM queue)
      AND id > %(after)s
      AND dead_lettered_at <= %(before)s
      AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())
      AND (%(ids)s::bigint[] IS NULL OR id = ANY (%(ids)s))
      AND (%(reason)s::text IS NULL OR strpos(failures -> -1 ->> 'reason', %(reason)s) > 0)
      AND (%(headers)s::jsonb IS NULL OR headers @> %(headers)s::jsonb)
    ORDER BY dead_lettered_from, id
    LIMIT %(limit)s
    FOR UPDATE OF item SKIP LOCKED
)
UPDATE django_pgqueue_messagequeueitem
SET queue_id = dead_lettered_from,
    orphaned_from = NULL,
    read_after = statement_timestamp(),
    lease_expires_at = NULL,
    lease_token = NULL,
    delivery_count = 0,
    dead_lettered_from = dead_letter_path ->> -2,
    dead_lettered_at = CASE WHEN dead_letter_path ->> -2 IS NOT NULL THEN dead_lettered_at END,
    dead_letter_path = nullif(dead_letter_path - -1, '[]')
WHERE id = ANY (ARRAY(SELECT id FROM letter))
RETURNING id
"""

# UNPARK - the same for what a queue has parked: it stays where it is, due now.
# Index: django_pgqueue_item_claim_idx.
UNPARK = """
WITH letter AS MATERIALIZED (
    SELECT id
    FROM django_pgqueue_messagequeueitem AS item, generate_series(1, (SELECT 1)) AS once
    WHERE queue_id = %(name)s
      AND read_after >= timestamptz '9000-01-01 00:00:00+00'
      AND dead_lettered_at <= %(before)s
      AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())
      AND (%(ids)s::bigint[] IS NULL OR id = ANY (%(ids)s))
      AND (%(reason)s::text IS NULL OR strpos(failures -> -1 ->> 'reason', %(reason)s) > 0)
      AND (%(headers)s::jsonb IS NULL OR headers @> %(headers)s::jsonb)
    ORDER BY read_after, id
    LIMIT %(limit)s
    FOR UPDATE OF item SKIP LOCKED
)
UPDATE django_pgqueue_messagequeueitem
SET read_after = statement_timestamp(),
    lease_expires_at = NULL,
    lease_token = NULL,
    delivery_count = 0
WHERE id = ANY (ARRAY(SELECT id FROM letter))
RETURNING id
"""

# REDRIVABLE - what the two would take now, counted and changed in nothing.
REDRIVABLE = """
SELECT count(*)
FROM django_pgqueue_messagequeueitem
WHERE (dead_lettered_from = %(name)s
       OR (queue_id = %(name)s AND read_after >= timestamptz '9000-01-01 00:00:00+00'
           AND dead_lettered_at IS NOT NULL))
  AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())
  AND (%(ids)s::bigint[] IS NULL OR id = ANY (%(ids)s))
  AND (%(reason)s::text IS NULL OR strpos(failures -> -1 ->> 'reason', %(reason)s) > 0)
  AND (%(headers)s::jsonb IS NULL OR headers @> %(headers)s::jsonb)
"""

# FATES - what became of redriven messages: the ids that are still there, and whether each has died
# again since %(since)s.
FATES = """
SELECT id, coalesce(dead_lettered_at > %(since)s, false)
FROM django_pgqueue_messagequeueitem
WHERE id = ANY (%(ids)s)
"""

# QUEUE_OF - the queue of a message.
QUEUE_OF = "SELECT queue_id FROM django_pgqueue_messagequeueitem WHERE id = %(id)s AND queue_id IS NOT NULL"

# PURGE - delete a batch of what waits on a queue: all that nobody holds and that was published up to
# %(before)s.
# Locks: the batch, skipping what others hold.
# Index: django_pgqueue_item_claim_idx.
# Returns the ids.
PURGE = """
WITH waiting AS MATERIALIZED (
    SELECT id
    FROM django_pgqueue_messagequeueitem AS item, generate_series(1, (SELECT 1)) AS once
    WHERE queue_id = %(name)s
      AND published_at <= %(before)s
      AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())
    ORDER BY read_after, id
    LIMIT %(limit)s
    FOR UPDATE OF item SKIP LOCKED
)
DELETE FROM django_pgqueue_messagequeueitem
WHERE id = ANY (ARRAY(SELECT id FROM waiting))
RETURNING id
"""

# PURGEABLE - what PURGE would delete now, counted and changed in nothing.
PURGEABLE = """
SELECT count(*)
FROM django_pgqueue_messagequeueitem
WHERE queue_id = %(name)s
  AND (lease_expires_at IS NULL OR lease_expires_at <= statement_timestamp())
"""

# --- Tasks ----------------------------------------------------------------------------------------

# START_RUN - note that a worker starts a task whose message it holds, for people who ask for its result.
# The commit does not wait for the disk: what a crash of the server takes is that it was started.
# Sent again after an answer that got lost it changes nothing.
# Locks: the run's row, which nobody but the holder of the message's lease writes.
# Returns one row: the times of the first and of this start, the workers and the errors so far; or no row: the lease
# was lost.
START_RUN = """
INSERT INTO django_pgqueue_taskrun AS run
    (id, queue, task, backend, key, status, enqueued_at, started_at, last_attempted_at, worker_ids, lease_token)
SELECT item.id, %(queue)s, %(task)s, %(backend)s, %(key)s, 'RUNNING', %(enqueued_at)s::timestamptz,
       statement_timestamp(), statement_timestamp(), jsonb_build_array(item.leased_by), item.lease_token
FROM django_pgqueue_messagequeueitem AS item, set_config('synchronous_commit', 'off', true)
WHERE item.id = %(id)s AND item.lease_token = %(token)s
ON CONFLICT (id) DO UPDATE
SET status = 'RUNNING',
    last_attempted_at = statement_timestamp(),
    finished_at = NULL,
    worker_ids = CASE WHEN run.lease_token = excluded.lease_token THEN run.worker_ids
                      ELSE run.worker_ids || excluded.worker_ids END,
    lease_token = excluded.lease_token
RETURNING started_at, last_attempted_at, worker_ids::text, errors::text
"""

# FINISH_RUN - a task is done: its message is gone and its result is there, in one statement.
# What START_RUN wrote may be gone (%(started)s has it again).
# Locks: the message's row, then the run's.
# Returns the time, or no row: the lease was lost. Sent again after an answer that got lost it returns the same.
FINISH_RUN = """
WITH mine AS MATERIALIZED (
    SELECT id FROM django_pgqueue_messagequeueitem WHERE id = %(id)s AND lease_token = %(token)s FOR UPDATE
), gone AS (
    DELETE FROM django_pgqueue_messagequeueitem WHERE id = ANY (ARRAY(SELECT id FROM mine)) RETURNING id, payload
), ended AS (
    INSERT INTO django_pgqueue_taskrun AS run
        (id, queue, task, backend, key, status, run_after, enqueued_at, started_at, last_attempted_at, finished_at,
         worker_ids, errors, arguments, return_value, lease_token)
    SELECT gone.id, %(queue)s, %(task)s, %(backend)s, %(key)s,
           'SUCCESSFUL', %(run_after)s::timestamptz,
           %(enqueued_at)s::timestamptz, %(started_at)s::timestamptz, %(last_attempted_at)s::timestamptz,
           statement_timestamp(), %(worker_ids)s::jsonb, %(errors)s::jsonb, gone.payload, %(return_value)s::jsonb,
           %(token)s
    FROM gone
    ON CONFLICT (id) DO UPDATE
    SET status = excluded.status,
        run_after = excluded.run_after,
        finished_at = excluded.finished_at,
        arguments = excluded.arguments,
        return_value = excluded.return_value
    RETURNING finished_at
)
SELECT finished_at FROM ended
UNION ALL
SELECT finished_at
FROM django_pgqueue_taskrun
WHERE id = %(id)s AND lease_token = %(token)s AND status = 'SUCCESSFUL'
"""

# FAIL_RUN - an attempt failed. In the transaction in which its message was given back or given up, which
# tells the two apart: what was given up counts from 0 again.
# Locks: the run's row.
# Returns one row: whether it was given up, and the time.
FAIL_RUN = """
INSERT INTO django_pgqueue_taskrun AS run
    (id, queue, task, backend, key, status, run_after, enqueued_at, started_at, last_attempted_at, finished_at,
     worker_ids, errors, arguments, lease_token)
SELECT item.id, %(queue)s, %(task)s, %(backend)s, %(key)s,
       CASE WHEN item.delivery_count = 0 THEN 'FAILED' ELSE 'READY' END,
       %(run_after)s::timestamptz, %(enqueued_at)s::timestamptz, %(started_at)s::timestamptz,
       %(last_attempted_at)s::timestamptz, CASE WHEN item.delivery_count = 0 THEN statement_timestamp() END,
       %(worker_ids)s::jsonb, %(errors)s::jsonb, item.payload, %(token)s
FROM django_pgqueue_messagequeueitem AS item
WHERE item.id = %(id)s
ON CONFLICT (id) DO UPDATE
SET status = excluded.status,
    run_after = excluded.run_after,
    finished_at = excluded.finished_at,
    errors = excluded.errors,
    arguments = excluded.arguments
RETURNING status = 'FAILED', statement_timestamp()
"""

# RESULT_OF - all that is known of a task: its message, if that is there, and what workers noted of it.
# Returns one row: whether its message is there, whether that is dead or expired, whether the attempt that was
# noted last still holds it, its headers, queue and arguments, when and why it was given up; then what was
# noted, null where no attempt was. Or no row: there is nothing.
RESULT_OF = """
SELECT item.id IS NOT NULL,
       item.dead_lettered_at IS NOT NULL
           OR (item.expires_at <= statement_timestamp()
               AND (item.lease_expires_at > statement_timestamp()) IS NOT TRUE),
       item.lease_expires_at > statement_timestamp() AND item.lease_token = run.lease_token,
       item.headers::text,
       coalesce(run.queue, item.dead_letter_path ->> 0, item.dead_lettered_from,
                item.queue_id, item.orphaned_from),
       coalesce(item.payload, run.arguments)::text,
       item.dead_lettered_at,
       CASE WHEN item.dead_lettered_at IS NOT NULL THEN item.failures -> -1 ->> 'reason' END,
       run.task, run.backend, run.key, run.status, run.run_after, run.enqueued_at, run.started_at,
       run.last_attempted_at, run.finished_at, run.worker_ids::text, run.errors::text, run.return_value::text
FROM (SELECT %(id)s::bigint AS id) AS asked
LEFT JOIN django_pgqueue_messagequeueitem AS item ON item.id = asked.id
LEFT JOIN django_pgqueue_taskrun AS run ON run.id = asked.id
WHERE item.id IS NOT NULL OR run.id IS NOT NULL
"""

# FORGET_RUNS - drop what is known of tasks that ended %(age)s seconds ago or earlier, a batch. What is known of one
# whose message is there, as a dead letter say, stays.
# Index: django_pgqueue_run_attempt_idx.
FORGET_RUNS = """
DELETE FROM django_pgqueue_taskrun
WHERE id = ANY (ARRAY(SELECT id
                      FROM django_pgqueue_taskrun AS run
                      WHERE last_attempted_at < statement_timestamp() - %(age)s * interval '1 second'
                        AND coalesce(finished_at, last_attempted_at)
                            < statement_timestamp() - %(age)s * interval '1 second'
                        AND NOT EXISTS (SELECT FROM django_pgqueue_messagequeueitem AS item WHERE item.id = run.id)
                      ORDER BY last_attempted_at
                      LIMIT %(limit)s))
RETURNING id
"""

# --- Consumers ------------------------------------------------------------------------------------

# BEAT - write a consumer process's heartbeat.
BEAT = """
INSERT INTO django_pgqueue_queueconsumer (id, host, pid, queues)
VALUES (%(id)s, %(host)s, %(pid)s, %(queues)s::jsonb)
ON CONFLICT (id) DO UPDATE SET last_heartbeat = statement_timestamp(), queues = excluded.queues
"""

# FORGET_CONSUMER - a consumer process ended in good order: it owns nothing any more.
# Locks: the rows of its exclusive queues, in name order.
# Returns the names of the queues that it owned.
FORGET_CONSUMER = """
WITH gone AS (
    DELETE FROM django_pgqueue_queueconsumer WHERE id = %(id)s
), owned AS MATERIALIZED (
    SELECT name
    FROM django_pgqueue_messagequeue
    WHERE exclusive_consumer_id = %(id)s
    ORDER BY name
    FOR NO KEY UPDATE
)
UPDATE django_pgqueue_messagequeue
SET exclusive_consumer_id = NULL
WHERE name = ANY (ARRAY(SELECT name FROM owned))
RETURNING name
"""

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
# each queue's two walks. %(patience)s: seconds since the last heartbeat of a consumer that counts.
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
  AND (queue.paused_at IS NOT NULL
       OR NOT EXISTS (SELECT
                      FROM django_pgqueue_queueconsumer AS consumer
                      WHERE consumer.queues ? queue.name
                        AND consumer.last_heartbeat > statement_timestamp() - %(patience)s * interval '1 second'))
"""

# IDLE_QUEUES - the auto-deleted queues that may be reaped: idle, without any message, and not paused
# (with its row the operators' pause would be gone).
IDLE_QUEUES = """
SELECT name, (extract(epoch FROM statement_timestamp()) - extract(epoch FROM last_active))::float8
FROM django_pgqueue_messagequeue AS queue
WHERE auto_deleted
  AND paused_at IS NULL
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
                          AND item.queue_id = queue.name AND queue.dead_letter IS NOT NULL),
       count(*) FILTER (WHERE item.orphaned_from = queue.name
                          AND (item.expires_at > statement_timestamp()) IS NOT FALSE)
FROM django_pgqueue_messagequeueitem AS item
LEFT JOIN django_pgqueue_messagequeue AS queue
    ON queue.name = coalesce(item.queue_id, item.orphaned_from)
WHERE (item.lease_expires_at > statement_timestamp()) IS NOT TRUE
  AND (item.expires_at <= statement_timestamp() OR item.orphaned_from IS NOT NULL)
"""

# LOCK_IDLE_QUEUE, LOCK_BINDINGS, DELETE_IDLE_QUEUE - reap one queue, in one short transaction.
# The deletion is a statement of its own, because it must have a snapshot that is younger than the
# locks: a message committed between the snapshot and the lock of a single statement would be cut
# loose. What it leaves is a tombstone.
# Locks: the queue's row and its bindings FOR UPDATE. A publisher in flight, to the queue or to a topic,
# holds KEY SHARE on one of them: skipped. (A topic's publisher locks bindings first and waits for the
# queue: the reaper never waits, so the two cannot deadlock.)
# The commit does not wait for the disk: a queue that a crash brings back is idle, and reaped again.
# Index: the claim index. The foreign key's own search for messages is a statement that the server
# plans once in a session; a plan from when the table was empty would scan the table at every deletion,
# so that this transaction wants no such plan.
LOCK_IDLE_QUEUE = """
SELECT name, set_config('enable_seqscan', 'off', true), set_config('synchronous_commit', 'off', true)
FROM django_pgqueue_messagequeue
WHERE name = %(name)s
  AND auto_deleted
  AND paused_at IS NULL
  AND last_active < statement_timestamp() - %(idle_for)s * interval '1 second'
FOR UPDATE SKIP LOCKED
"""
LOCK_BINDINGS = """
WITH locked AS MATERIALIZED (
    SELECT id FROM django_pgqueue_topicbinding WHERE queue = %(name)s FOR UPDATE SKIP LOCKED
)
SELECT (SELECT count(*) FROM locked) = (SELECT count(*) FROM django_pgqueue_topicbinding WHERE queue = %(name)s)
"""
DELETE_IDLE_QUEUE = """
WITH gone AS (
    DELETE FROM django_pgqueue_messagequeue AS queue
    WHERE name = %(name)s
      AND auto_deleted
      AND paused_at IS NULL
      AND last_active < statement_timestamp() - %(idle_for)s * interval '1 second'
      AND (SELECT id
           FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
           WHERE queue_id = queue.name
           ORDER BY read_after, id
           LIMIT 1) IS NULL
    RETURNING name,
              (extract(epoch FROM statement_timestamp()) - extract(epoch FROM last_active))::float8 AS idle_seconds
), unbound AS (
    DELETE FROM django_pgqueue_topicbinding WHERE queue IN (SELECT name FROM gone)
), tombstone AS (
    INSERT INTO django_pgqueue_queueevent (queue, kind) SELECT name, 'reaped' FROM gone
)
SELECT idle_seconds FROM gone
"""

# FORGET_EVENTS - drop tombstones, and what became of them, a week old or older: a batch.
FORGET_EVENTS = """
DELETE FROM django_pgqueue_queueevent
WHERE id = ANY (ARRAY(SELECT id
                      FROM django_pgqueue_queueevent
                      WHERE at < statement_timestamp() - %(age)s * interval '1 second'
                      ORDER BY at
                      LIMIT %(limit)s))
RETURNING id
"""

# FORGET_BODIES - drop what did not fit into a notification and has been there long enough: a batch.
FORGET_BODIES = """
DELETE FROM django_pgqueue_topicbody
WHERE id = ANY (ARRAY(SELECT id
                      FROM django_pgqueue_topicbody
                      WHERE expires_at <= statement_timestamp()
                      ORDER BY expires_at
                      LIMIT %(limit)s))
RETURNING id
"""

# RECORD_RUN - note that a run of the reaper has ended, and what it did.
RECORD_RUN = """
INSERT INTO django_pgqueue_reaperrun (id, seconds, report)
VALUES (1, %(seconds)s, %(report)s::jsonb)
ON CONFLICT (id) DO UPDATE
SET finished_at = statement_timestamp(), seconds = %(seconds)s, report = %(report)s::jsonb
"""

# COUNT_MINUTE - add what a consumer did with each queue's messages to the minute that it is now, and how many of
# them were published to the minutes in which they were, given as minutes since 1970. What is older than %(age)s
# seconds is not kept, and no minute is that has not come.
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

# MINUTES - the last %(minutes)s minutes of these queues.
MINUTES = """
SELECT queue,
       (extract(epoch FROM date_trunc('minute', statement_timestamp()) - minute) / 60)::int,
       handled, failed, dead_lettered, published
FROM django_pgqueue_queueminute
WHERE queue = ANY (%(names)s)
  AND minute > statement_timestamp() - %(minutes)s * interval '1 minute'
ORDER BY queue, minute
"""

# NEWEST - when the newest messages of these queues were published: no more than %(most)s of each are looked at, of
# those that were published without a delay and have not come back.
# Returns name, minutes ago (%(minutes)s for all that are older), how many, and seconds since the first of them; no
# row of a queue without any.
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

# LETTER_HISTORY - what these queues gave up in the last %(age)s seconds, and before that.
# Returns name, how many then, how many before, and seconds that the time before covers.
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

# FORGET_MINUTES - drop minutes a day old or older: a batch.
FORGET_MINUTES = """
DELETE FROM django_pgqueue_queueminute
WHERE id = ANY (ARRAY(SELECT id
                      FROM django_pgqueue_queueminute
                      WHERE minute < statement_timestamp() - %(age)s * interval '1 second'
                      ORDER BY minute
                      LIMIT %(limit)s))
RETURNING id
"""

# NOW - the clock that decides.
NOW = "SELECT statement_timestamp()"

# --- Seeing ---------------------------------------------------------------------------------------

# STATS - depth by state and the oldest due age, of the queues named or, with null, of all, also of
# those that only orphans remember, and how often each came back within a day: revived after it was
# reaped, or vanished. Reads every message of those queues.
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
           CASE WHEN count(*) FILTER (WHERE state = 'orphaned' AND expires_at IS NULL) > 0 THEN 'infinity'
                ELSE extract(epoch FROM max(expires_at) FILTER (WHERE state = 'orphaned' AND isfinite(expires_at))
                    - statement_timestamp())
           END::float8 AS orphans_expire_in,
           extract(epoch FROM statement_timestamp()
                              - min(due_at) FILTER (WHERE state = 'ready' AND isfinite(due_at))
               )::float8 AS oldest_due_age,
           count(*) AS messages
    FROM item
    GROUP BY name
), event AS (
    SELECT queue,
           count(*) FILTER (WHERE kind = 'revived') AS revived,
           count(*) FILTER (WHERE kind = 'vanished') AS vanished
    FROM django_pgqueue_queueevent
    WHERE at > statement_timestamp() - interval '1 day'
    GROUP BY queue
)
SELECT coalesce(queue.name, depth.name), queue.name IS NOT NULL,
       coalesce(ready, 0), coalesce(delayed, 0), coalesce(leased, 0), coalesce(dead, 0),
       coalesce(expired, 0), coalesce(orphaned, 0), oldest_due_age,
       extract(epoch FROM statement_timestamp()
                          - CASE WHEN isfinite(queue.last_active) THEN queue.last_active END)::float8,
       queue.auto_deleted
           AND queue.paused_at IS NULL
           AND queue.last_active < statement_timestamp() - %(idle_for)s * interval '1 second'
           AND coalesce(messages, 0) = 0,
       orphans_expire_in,
       queue.paused_at IS NOT NULL,
       queue.exclusive_consumer_id,
       coalesce(event.revived, 0), coalesce(event.vanished, 0)
FROM depth
FULL JOIN django_pgqueue_messagequeue AS queue ON queue.name = depth.name
LEFT JOIN event ON event.queue = coalesce(queue.name, depth.name)
WHERE %(names)s::text[] IS NULL OR coalesce(queue.name, depth.name) = ANY (%(names)s)
ORDER BY 1
"""

# DEPTHS - as STATS, but bounded: of each queue no more than %(most)s messages are looked at in each of its
# three walks (due by a time, not due yet, never delayed). Whether there are more is told.
# Returns name, auto_deleted, whether it is paused, exclusive, its owner, dead_letter, seconds since it was last active,
# how many living consumers name it, ready, delayed, leased, dead, expired, the oldest due age in seconds or null,
# whether a walk was cut short. %(patience)s as in BACKLOGS.
# Index: django_pgqueue_item_claim_idx.
DEPTHS = """
SELECT queue.name,
       queue.auto_deleted,
       queue.paused_at IS NOT NULL,
       queue.exclusive,
       queue.exclusive_consumer_id,
       queue.dead_letter,
       date_part('epoch', statement_timestamp()) - date_part('epoch', queue.last_active),
       (SELECT count(*)
        FROM django_pgqueue_queueconsumer AS consumer
        WHERE consumer.queues ? queue.name
          AND consumer.last_heartbeat > statement_timestamp() - %(patience)s * interval '1 second'),
       count(*) FILTER (WHERE state = 'ready'),
       count(*) FILTER (WHERE state = 'delayed'),
       count(*) FILTER (WHERE state = 'leased'),
       count(*) FILTER (WHERE state = 'dead'),
       count(*) FILTER (WHERE state = 'expired'),
       extract(epoch FROM statement_timestamp()
                          - min(due_at) FILTER (WHERE state = 'ready' AND isfinite(due_at)))::float8,
       greatest(count(*) FILTER (WHERE walk = 1),
                count(*) FILTER (WHERE walk = 2),
                count(*) FILTER (WHERE walk = 3)) >= %(most)s
FROM django_pgqueue_messagequeue AS queue
LEFT JOIN LATERAL (
    SELECT walk,
           due_at,
           CASE WHEN lease_expires_at > statement_timestamp() THEN 'leased'
                WHEN dead_lettered_at IS NOT NULL THEN 'dead'
                WHEN expires_at <= statement_timestamp() THEN 'expired'
                WHEN walk = 2 THEN 'delayed'
                ELSE 'ready'
           END AS state
    FROM ((SELECT 1 AS walk, read_after AS due_at, lease_expires_at, dead_lettered_at, expires_at
           FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
           WHERE queue_id = queue.name AND read_after <= statement_timestamp()
           ORDER BY read_after, id
           LIMIT %(most)s)
          UNION ALL
          (SELECT 2, read_after, lease_expires_at, dead_lettered_at, expires_at
           FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
           WHERE queue_id = queue.name AND read_after > statement_timestamp()
           ORDER BY read_after, id
           LIMIT %(most)s)
          UNION ALL
          (SELECT 3, published_at, lease_expires_at, dead_lettered_at, expires_at
           FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
           WHERE queue_id = queue.name AND read_after IS NULL
           ORDER BY read_after, id
           LIMIT %(most)s)) AS head
) AS item ON true
WHERE %(names)s::text[] IS NULL OR queue.name = ANY (%(names)s)
GROUP BY queue.name
ORDER BY queue.name
"""

# ORPHANS - how many orphans each queue has, that is there or not. Of all of them no more than %(most)s are looked at.
# Index: django_pgqueue_item_orphan_idx.
ORPHANS = """
SELECT orphaned_from, count(*)
FROM (SELECT orphaned_from
      FROM django_pgqueue_messagequeueitem
      WHERE orphaned_from IS NOT NULL
      ORDER BY orphaned_from, id
      LIMIT %(most)s) AS orphan
GROUP BY orphaned_from
ORDER BY orphaned_from
"""

# ORPHANS_OF - how many orphans each of these queues has, and seconds until the last of them expires. No more than
# %(most)s of each are looked at.
# Index: django_pgqueue_item_orphan_idx.
ORPHANS_OF = """
SELECT name, count(*),
       CASE WHEN count(*) > count(expires_at) THEN 'infinity'
            ELSE nullif(date_part('epoch', max(expires_at)) - date_part('epoch', statement_timestamp()), '-infinity')
       END::float8
FROM unnest(%(names)s::text[]) AS name
CROSS JOIN LATERAL (
    SELECT expires_at
    FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
    WHERE orphaned_from = name
    ORDER BY orphaned_from, id
    LIMIT %(most)s) AS orphan
GROUP BY name
ORDER BY name
"""

# DEAD_LETTERS - how many messages that each of these queues gave up are there, wherever they wait. No more than
# %(most)s of each are counted.
# Index: django_pgqueue_item_dead_idx.
DEAD_LETTERS = """
SELECT name,
       (SELECT count(*)
        FROM (SELECT id
              FROM django_pgqueue_messagequeueitem
              WHERE dead_lettered_from = name
              ORDER BY dead_lettered_from, id
              LIMIT %(most)s) AS letter)
FROM unnest(%(names)s::text[]) AS name
"""

# EVENTS_PER_DAY - how often each queue was reaped, revived, vanished within a day.
# Index: django_pgqueue_event_at_idx.
EVENTS_PER_DAY = """
SELECT queue, kind, count(*)
FROM django_pgqueue_queueevent
WHERE at > statement_timestamp() - interval '1 day'
GROUP BY queue, kind
ORDER BY queue, kind
"""

# --- Diagnosing -----------------------------------------------------------------------------------

# FOREIGN_KEY - the foreign key as PostgreSQL has it.
FOREIGN_KEY = """
SELECT confdeltype = 'n', NOT condeferrable, convalidated,
       NOT EXISTS (SELECT
                   FROM pg_trigger
                   WHERE tgconstraint = pg_constraint.oid AND tgenabled NOT IN ('O', 'A'))
FROM pg_constraint
WHERE conname = 'django_pgqueue_item_queue_fk'
  AND contype = 'f'
  AND conrelid = to_regclass('django_pgqueue_messagequeueitem')
  AND confrelid = to_regclass('django_pgqueue_messagequeue')
"""

# SCHEMA - what else migrations made, as PostgreSQL has it.
# Returns one row: whether claims can use their index (null: it is missing), whether the trigger that keeps
# orphans fires (null: missing), and the tables that autovacuum is switched off for.
SCHEMA = """
SELECT (SELECT indisvalid AND indisready AND indoption::text = '0 0 0'
               AND ARRAY(SELECT pg_get_indexdef(indexrelid, number, true)
                         FROM generate_series(1, indnkeyatts) AS number) = ARRAY['queue_id', 'read_after', 'id']
        FROM pg_index
        WHERE indexrelid = to_regclass('django_pgqueue_item_claim_idx')),
       (SELECT tgenabled IN ('O', 'A')
        FROM pg_trigger
        WHERE tgname = 'django_pgqueue_orphan_messages' AND tgrelid = to_regclass('django_pgqueue_messagequeue')),
       ARRAY(SELECT relname::text
             FROM pg_class, pg_options_to_table(reloptions)
             WHERE oid IN (to_regclass('django_pgqueue_messagequeue'), to_regclass('django_pgqueue_messagequeueitem'))
               AND option_name = 'autovacuum_enabled'
               AND NOT option_value::boolean
             ORDER BY 1)
"""

# SERVER - the server, as this role sees it.
# Returns one row: version number, whether autovacuum runs, the clock as seconds since 1970, how full the queue of
# notifications is (0 to 1), how many connections there are for ordinary roles, the age of the oldest MultiXact
# of all databases, the age at which autovacuum deals with them, and whether this role sees what others run.
SERVER = """
SELECT current_setting('server_version_num')::int,
       current_setting('autovacuum')::boolean AND current_setting('track_counts')::boolean,
       extract(epoch FROM statement_timestamp())::float8,
       pg_notification_queue_usage(),
       current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int,
       (SELECT max(mxid_age(datminmxid)) FROM pg_database),
       current_setting('autovacuum_multixact_freeze_max_age')::int,
       pg_has_role('pg_read_all_stats', 'USAGE')
"""

# DEAD_ROWS - rows that vacuum has not removed yet, as the statistics have it.
# Returns table, dead rows, live rows.
DEAD_ROWS = """
SELECT relname::text, n_dead_tup, n_live_tup
FROM pg_stat_all_tables
WHERE relid IN (to_regclass('django_pgqueue_messagequeue'), to_regclass('django_pgqueue_messagequeueitem'))
ORDER BY 1
"""

# HOLDERS - what has held back vacuum in this database for %(age)s seconds or more.
# A standby's or a slot's age in seconds is not known; a slot counts while nobody reads from it.
# Returns kind, name, seconds or null; the longest first.
HOLDERS = """
SELECT 'session',
       format('pid %%s, %%s, %%s', pid, coalesce(nullif(application_name, ''), 'no application name'), state),
       extract(epoch FROM statement_timestamp() - xact_start)::float8 AS seconds
FROM pg_stat_activity
WHERE datname = current_database()
  AND pid <> pg_backend_pid()
  AND backend_type = 'client backend'
  AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
  AND xact_start <= statement_timestamp() - %(age)s * interval '1 second'
UNION ALL
SELECT 'prepared transaction', gid, extract(epoch FROM statement_timestamp() - prepared)::float8
FROM pg_prepared_xacts
WHERE database = current_database() AND prepared <= statement_timestamp() - %(age)s * interval '1 second'
UNION ALL
SELECT 'replication slot', slot_name::text, NULL
FROM pg_replication_slots
WHERE NOT active AND xmin IS NOT NULL
ORDER BY seconds DESC NULLS LAST
"""

# BACKLOGS - the oldest due age at the head of each queue's two walks (of the queues named or, with null, of all),
# and who is there to take it. Bounded.
# Returns name, whether it is paused, whether a consumer that lives names it, seconds or null. %(patience)s:
# seconds since the last heartbeat of a consumer that counts.
# Index: django_pgqueue_item_claim_idx.
BACKLOGS = """
SELECT queue.name,
       queue.paused_at IS NOT NULL,
       EXISTS (SELECT
               FROM django_pgqueue_queueconsumer AS consumer
               WHERE consumer.queues ? queue.name
                 AND consumer.last_heartbeat > statement_timestamp() - %(patience)s * interval '1 second'),
       (SELECT extract(epoch FROM statement_timestamp() - min(head.due_at))::float8
        FROM ((SELECT read_after AS due_at, lease_expires_at, expires_at, dead_lettered_at
               FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
               WHERE queue_id = queue.name AND read_after <= statement_timestamp()
               ORDER BY read_after, id
               LIMIT %(limit)s)
              UNION ALL
              (SELECT published_at, lease_expires_at, expires_at, dead_lettered_at
               FROM django_pgqueue_messagequeueitem, generate_series(1, (SELECT 1)) AS once
               WHERE queue_id = queue.name AND read_after IS NULL
               ORDER BY read_after, id
               LIMIT %(limit)s)) AS head
        WHERE isfinite(head.due_at)
          AND head.dead_lettered_at IS NULL
          AND (head.lease_expires_at > statement_timestamp()) IS NOT TRUE
          AND (head.expires_at <= statement_timestamp()) IS NOT TRUE)
FROM django_pgqueue_messagequeue AS queue
WHERE %(names)s::text[] IS NULL OR queue.name = ANY (%(names)s)
ORDER BY queue.name
"""

# RECENT_LETTERS - how many of the youngest %(limit)s dead letters of each queue were set aside within %(age)s
# seconds. Skips from queue to queue.
# Index: django_pgqueue_item_dead_idx.
RECENT_LETTERS = """
WITH RECURSIVE origin AS (
    (SELECT dead_lettered_from AS name
     FROM django_pgqueue_messagequeueitem
     WHERE dead_lettered_from IS NOT NULL
     ORDER BY dead_lettered_from
     LIMIT 1)
    UNION ALL
    SELECT (SELECT dead_lettered_from
            FROM django_pgqueue_messagequeueitem
            WHERE dead_lettered_from > origin.name
            ORDER BY dead_lettered_from
            LIMIT 1)
    FROM origin
    WHERE origin.name IS NOT NULL
), recent AS (
    SELECT origin.name,
           (SELECT count(*)
            FROM (SELECT dead_lettered_at
                  FROM django_pgqueue_messagequeueitem
                  WHERE dead_lettered_from = origin.name
                  ORDER BY dead_lettered_from DESC, id DESC
                  LIMIT %(limit)s) AS letter
            WHERE dead_lettered_at > statement_timestamp() - %(age)s * interval '1 second') AS letters
    FROM origin
    WHERE origin.name IS NOT NULL
)
SELECT name, letters FROM recent WHERE letters > 0 ORDER BY name
"""

# VANISHED - how often queues vanished within %(age)s seconds.
# Index: django_pgqueue_event_at_idx.
VANISHED = """
SELECT queue, count(*)
FROM django_pgqueue_queueevent
WHERE at > statement_timestamp() - %(age)s * interval '1 second' AND kind = 'vanished'
GROUP BY queue
ORDER BY queue
"""

# LAST_RUN - seconds since a run of the reaper ended.
LAST_RUN = """
SELECT extract(epoch FROM statement_timestamp() - finished_at)::float8 FROM django_pgqueue_reaperrun
"""

# LIVE_CONSUMERS - how many consumer processes live. %(patience)s as in BACKLOGS.
LIVE_CONSUMERS = """
SELECT count(*)
FROM django_pgqueue_queueconsumer
WHERE last_heartbeat > statement_timestamp() - %(patience)s * interval '1 second'
"""

# --- Sessions -------------------------------------------------------------------------------------

# STATEMENT_TIMEOUT - end this transaction's statements after %(limit)s, a text such as 5000ms.
STATEMENT_TIMEOUT = "SELECT set_config('statement_timeout', %(limit)s, true)"

# DEFAULT_ISOLATION - what a statement outside a transaction gets.
DEFAULT_ISOLATION = "SELECT current_setting('default_transaction_isolation')"

# READ_COMMITTED - for the transaction that has just begun; before its first statement.
READ_COMMITTED = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
