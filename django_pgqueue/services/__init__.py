"""
All SQL on the tables. There is one module for each phase of a message's life, and each statement stands directly
above the one function that runs it.

==================  ==========================================================================
``declaring``       make queues, write their attributes, mark them as in use
``publishing``      insert messages; heal queues that are missing; what follows a commit
``topics``          publish to topics, bind queues to them
``notifying``       wake consumers
``claiming``        lease messages; when to look again
``settling``        extend, ack, nack, reject, release
``dead_letters``    set messages aside, send them back
``tasks``           store the results of Django's tasks
``operating``       the operations of operators on a queue
``consumers``       heartbeats of consumers, owners of exclusive queues
``reaping``         remove what expired or fell idle, adopt orphans
``minutes``         count the outcomes of messages in each minute
``counting``        count messages and measure ages
``diagnosing``      read the state of the tables and the server
``journaling``      read published messages for the testing helpers
``session``         run a statement: transaction, isolation, timeouts
``beliefs``         what this process believes about queues
==================  ==========================================================================

Statements are written out in full, so each can be pasted into psql once its ``%(parameters)s`` are filled in. Two rules
apply to all of them:

* The clock is ``statement_timestamp()``. ``now()`` is the transaction's start and lags behind by the transaction's
  age; ``clock_timestamp()`` is volatile and cannot be used with an index.
* Ids are gathered in a CTE or an array before rows are locked. A subquery that the planner may run again would lock
  more rows than intended.

A walk that must follow an index reads ``FROM item, generate_series(1, (SELECT 1)) AS once`` with a plain ``LIMIT``.
The join adds one row, which the planner estimates as a thousand. The planner then expects a sort to cost a thousand
times more than it saves, and keeps the index's order whatever its statistics say about the table. With statistics from
when the table was empty or small, it would expect a walk of one row, and fetch and sort the whole backlog.

Publishing inherits the caller's transaction. All other statements (claims, settling, refreshes, reaping) are READ
COMMITTED, whatever the default of the database is.
"""
