"""
The only SQL on the tables: one module for each phase of a message's life.

TODO-DOC

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
