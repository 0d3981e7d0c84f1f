"""
How does it compare with other queues? Publishing, draining, waking up, a held snapshot, a killed worker.

Each peer is a small program of its own in this folder, ``run_NAME.py`` (or ``.mjs``), in its own
environment. ``catalog.py`` says for each peer what its environment is, with which settings its
workers run, and what it guarantees. All of them follow one protocol:

``PROGRAM setup``
    Make the peer's tables in the empty database at ``DATABASE_URL`` (a URL for libpq; the server is
    on a unix socket, whose folder is the URL's parameter ``host``), and exit. Each peer has a
    database to itself on the same server.

``PROGRAM publisher``
    Connect, print ``READY``, and obey the lines of stdin. Each is answered with one line of integers;
    times are nanoseconds of CLOCK_MONOTONIC.

    ``one SECONDS``  publish the payload one by one, each a commit of its own, for so long.
                     Answer: ``COUNT START END``
    ``many COUNT``   publish so many by the peer's way for many, 1,000 a call; where it has none,
                     1,000 in a transaction. COUNT is a multiple of 1,000. Answer: ``COUNT START END``
    ``tag NUMBER``   publish one whose payload has ``"tag": NUMBER`` as well.
                     Answer: ``1 START END``, where END is when the publish returned
    ``left``         Answer: how many messages are stored that are not done (ready or being worked on)
    ``clear``        delete all messages, done ones too. Answer: ``0``

``PROGRAM worker MODE [KEY=VALUE ...]``
    Import and connect what can be before the first claim, print ``READY``, wait for a line on stdin,
    then run the peer's own worker until killed: SIGTERM ends it in an orderly way. The settings are
    those of ``catalog.py``. The handler has the payload as an object (where the peer hands out
    bytes, the handler decodes them) and calls ``handled(payload)``, which depends on MODE:

    ``count``  count only. A thread or timer prints ``NS COUNT`` at once for the first message and
               then every 20 ms if there are new ones: how many have started so far, and when the
               last of them did. A handler of many calls ``handled`` once for all of them.
    ``note``   print ``TAG NS`` for each message as it starts: its tag and the time
    ``hold``   the same, and then never return (until killed)

    Lines are written in one piece and past any buffer, since several processes may share a stdout.
    Nothing else may go to stdout.

The payload (about 500 bytes of JSON) is in the environment, ``PEERS_PAYLOAD``. ``wire.py`` is this
protocol for programs in Python; it needs the standard library alone.
"""
