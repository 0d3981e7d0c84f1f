"""
`python -m tests.chaos`: everything runs while one fault after another is injected, and no message may be lost.

    python -m tests.chaos --seconds 600 --seed 1 --json docs/results/chaos-1.json

A server of its own (durable), publishers, consumers and the reaper as processes, some of them through
PgBouncer where there is one. The schedule of faults follows from the seed: first each kind once, then
at random. At the end the ledger is closed. The exit status is 1 when a message is lost, stuck or was
never published, when a fault was not recovered from, or when a kind of fault was not injected.
"""
