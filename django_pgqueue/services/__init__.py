"""
All SQL on the tables, with one module for each phase of a message's life.

Each statement stands directly above the function that runs it. Statements are written out in full, so each can be
pasted into psql once its ``%(parameters)s`` are filled in. Two rules apply to all of them:

* The clock is ``statement_timestamp()``. ``now()`` is the transaction's start and lags behind by the transaction's
  age; ``clock_timestamp()`` is volatile and cannot be used with an index.
* Ids are gathered in a CTE or an array before rows are locked. A subquery that the planner may run again would lock
  more rows than intended.

A walk that must follow an index reads ``FROM item, generate_series(1, (SELECT 1)) AS once`` with a plain ``LIMIT``.
The join adds one row, which the planner estimates as a thousand. The planner then expects a sort to cost a thousand
times more than it saves, and keeps the index's order whatever its statistics say about the table. With statistics from
when the table was empty or small, it would expect a walk of one row, and fetch and sort the whole backlog.
"""
