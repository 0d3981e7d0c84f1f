"""What argparse does not say of the commands: exit statuses, signals, output, units."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Words:
    """What is to be said of one command, in Markdown."""

    #: What the help leaves out.
    about: str
    #: Exit status, and when.
    exits: dict[int, str]
    #: What SIGTERM and SIGINT do.
    signals: str
    #: What it prints.
    prints: str
    #: Of `--format json`: what it is, and its keys.
    json: str = ""
    keys: dict[str, str] = field(default_factory=dict)


DONE = "It did what it was asked."
REFUSED = "the database refuses or is away"
#: Of what runs on and on.
REFUSED_FIRST = "the database refuses at the start (one that is away is waited for)"

LIKE_ANY = "SIGTERM or SIGINT ends it, as any program."

PROGRESS = "Where stderr is a terminal, it shows how far it is."
STOPPED = (
    "SIGTERM or SIGINT ends it, and it says how many there were so far. Each batch, of up to 1,000, is a transaction of"
    " its own: those that are done stay done."
)

#: Units of the options that take a number; a name means the same in all commands.
UNITS = {
    "--batch-size": "messages",
    "--canary": "messages",
    "--canary-timeout": "seconds",
    "--concurrency": "messages",
    "--delay": "seconds",
    "--grace": "seconds",
    "--health-port": "port",
    "--health-target": "seconds",
    "--id": "id",
    "--idle-for": "seconds",
    "--interval": "seconds",
    "--limit": "messages",
    "--max-messages": "messages",
    "--metrics-port": "port",
    "--prefetch": "messages",
    "--rate": "messages a second",
    "--ttl": "seconds",
}

#: Arguments and options that have no help text, or one that says too little: of one command, or of all.
OPTIONS = {
    "--database": "where the queues are",
    "--format": "for people, or for programs",
    "diagnose_queues --fail-level": "the least level that makes the exit status other than 0",
    "heartbeat_queues NAME": "queues",
    "inspect_queues --interval": "between two looks of `--watch`",
    "pause_queue NAME": "queues",
    "publish_messages FILE": "a file of JSON lines, in UTF-8",
    "publish_messages NAME": "the queue",
    "publish_messages --auto-deleted": "make the queue an auto-deleted one, if it is not declared in this project",
    "publish_messages --ttl": "seconds after which a message that is due expires; without it the queue's own",
    "purge_queue NAME": "the queue",
    "reap_queues --batch-size": "how many one statement takes at the most",
    "resume_queue NAME": "queues",
}

REAPED = {
    "expired": "messages deleted because their TTL had passed",
    "dead_lettered": "messages set aside: expired ones of queues with a configured dead-letter queue, and those that"
    " were delivered `max_deliveries` times and lapsed",
    "adopted": "orphans given back to their queues",
    "bodies": "stored bodies of topics' messages deleted; with `--dry-run` always 0",
    "events": "tombstones and other events deleted after a week; with `--dry-run` always 0",
    "queues": "names of the idle auto-deleted queues that were deleted",
}

COMMANDS = {
    "consume_queues": Words(
        about=(
            "All of them are of one database. The process declares its queues, writes heartbeats, extends leases and"
            " listens for wake-ups by itself, and waits for a database that is away. Handlers are declared in"
            " `queues.py` ([api](api.md)); with `--handler`, a queue that is not declared in this project stays as its"
            " row says, or is made as `Queue(NAME)`. [Deployment](deployment.md) tells how to run and probe it."
        ),
        exits={
            0: "A signal ended it, `--drain` found nothing more, or `--max-messages` were handled. Also when handlers"
            " outlived the grace: their leases run out.",
            1: "It could not start: no handler, a function that is not there, queues of several databases, a port"
            " that is"
            f" taken; or {REFUSED_FIRST}. Or the database held up the end.",
        },
        signals=(
            "At the first SIGTERM or SIGINT it claims nothing more, gives running handlers `--grace` seconds and gives"
            " back the rest at once, not counted as delivered. At the second it waits for no handler. Where the"
            " database keeps it from ending it ends all the same, 5 seconds after the grace or 2 after the second"
            " signal."
            " SIGKILL loses nothing either: leases run out, and the messages are delivered again."
        ),
        prints="Nothing, but for the log. With `--verbosity 2` at the end: `handled N messages`.",
        json="`/livez`, `/readyz` and the file of `--health-file` hold one object:",
        keys={
            "alive": "what `/livez` answers by",
            "ready": "what `/readyz` answers by",
            "listening": "whether wake-ups arrive; it polls without",
            "last_claim_age": "seconds since the last claim was sent; null: none was",
            "oldest_due_age": "seconds for which the oldest due message that nobody holds has been due, of those at the"
            " heads of its queues; null: there is none, or the database does not answer",
            "held": "messages that this process holds",
            "handled": "messages that it has settled, failed ones too",
        },
    ),
    "diagnose_queues": Words(
        about="[Findings](findings.md) lists all that it can find. It takes some seconds.",
        exits={
            0: "Nothing is wrong, or nothing of the level of `--fail-level`.",
            1: "There are warnings, and `--fail-level warning` was given.",
            2: f"There are errors, or {REFUSED}.",
        },
        signals=LIKE_ANY,
        prints="Each finding, the worst first, with what to do about it; at the end `N findings` or `nothing is"
        " wrong`.",
        json="One list, with an object for each finding:",
        keys={
            "id": "as `W020`: see [findings](findings.md)",
            "level": "`error`, `warning` or `info`",
            "text": "what was found",
            "remedy": "how that is mended, in Markdown",
            "hint": "where it is explained, or the statement or name that mends it; null: nothing",
        },
    ),
    "heartbeat_queues": Words(
        about=(
            "For consumers that are not this library's. A queue that is neither there nor declared in this project is"
            " reported in the log, once."
        ),
        exits={
            0: "`--once`: all queues are there. Else a signal ended it.",
            1: f"`--once`: a queue is not there, or {REFUSED}. Else {REFUSED_FIRST}.",
        },
        signals="SIGTERM or SIGINT ends it after the beat that is under way; with `--once`, as any program.",
        prints="Nothing, but for the log.",
    ),
    "inspect_queues": Words(
        about=(
            "It shows what the [admin](admin.md) shows, and reads little, however much waits: of each queue some 1,000"
            " messages, in each of three walks (due by a time, not due yet, never delayed), and as many of its dead"
            " letters and orphans. `1,000+` means at least so many. `--exact` reads all messages of the queues: with"
            " millions that takes a while. Queues that are gone and that orphans remember are shown as well. Rates are"
            " messages a second, of the last minutes that consumers have told of: [rates](admin.md#rates) says what"
            " they know and what not."
        ),
        exits={
            0: "Also when a signal ended `--watch`.",
            1: f"A queue that was named is not there (the others are shown), or {REFUSED}. With `--watch` only where"
            f" {REFUSED_FIRST}.",
        },
        signals="SIGTERM or SIGINT ends `--watch` after the look that is under way; without it, as any program.",
        prints="A table, one line a queue. `--watch` draws it anew on a terminal, else prints one after the other.",
        json="One list, with an object for each queue (`--watch`: one line a look). Ages are seconds:",
        keys={
            "name": "the queue",
            "exists": "whether it has a row; without one, orphans remember it",
            "ready": "messages that a claim may take",
            "delayed": "messages whose time has not come",
            "leased": "messages that consumers hold",
            "dead": "dead letters that lie on this queue",
            "expired": "messages whose TTL has passed, and that the reaper has not met yet",
            "at_least": "whether there may be more of these five",
            "orphaned": "messages that lost this queue's row",
            "orphaned_at_least": "whether there may be more of them",
            "orphans_expire_in": 'until the last orphan expires (`"never"`: some do not); null: there are none',
            "oldest_due_age": "for how long the oldest ready message has been due, of those that were counted; null:"
            " none is ready",
            "publish_rate": "messages published a second",
            "publish_rate_at_least": "whether it may be more",
            "handle_rate": "messages handled a second",
            "dead_letters": "messages that this queue gave up, wherever they wait",
            "dead_letters_at_least": "whether there may be more of them",
            "dead_letter": "the queue that they go to; null: they stay on this one, parked",
            "consumers": "living consumer processes that name the queue",
            "last_active_age": "since it was last declared, published to or consumed; null: it has no row",
            "reapable": "whether the reaper may delete it now: auto-deleted, idle, empty, not paused",
            "reapable_in": "until it may, if nobody uses it; null: it is no auto-deleted one, not empty, or paused",
            "paused": "whether claims are stopped",
            "exclusive": "whether one consumer at a time claims",
            "owner": "the id of the consumer that owns it, if it is exclusive; null: nobody",
            "revived_per_day": "how often within 24 hours it was made again after it was reaped",
            "vanished_per_day": "how often within 24 hours it was made again after something else had deleted its row",
        },
    ),
    "pause_queue": Words(
        about=(
            "Publishing goes on, and what handlers have begun ends normally. Consumers give back what they hold beyond"
            " that within `POLL_INTERVAL`. A paused queue is not reaped. A queue that is paused already stays so."
        ),
        exits={
            0: DONE,
            1: f"A queue is not there (the others are done all the same), or {REFUSED}.",
        },
        signals=LIKE_ANY,
        prints="`paused NAME`, for each.",
    ),
    "publish_messages": Words(
        about=(
            "Blank lines are passed over. All is one transaction. A queue that is not declared in this project stays as"
            " its row says, or is made as `Queue(NAME)`."
        ),
        exits={
            0: DONE,
            1: "Nothing was published: a line is no JSON or no payload (it is named), the file cannot be read,"
            f" or {REFUSED}.",
        },
        signals="SIGTERM or SIGINT ends it, as any program, and nothing is published.",
        prints="On a terminal: `published N messages to NAME`. Elsewhere nothing.",
    ),
    "purge_queue": Words(
        about=(
            "Ready, delayed, expired and dead ones. At a terminal it asks first. What is published after it began"
            " stays."
        ),
        exits={
            0: DONE,
            1: f"The queue is not there, the answer was not yes, or {REFUSED}.",
            130: "A signal ended it.",
        },
        signals=STOPPED,
        prints=f"`purged N messages`, or `would purge N messages`. {PROGRESS}",
    ),
    "reap_queues": Words(
        about="Run by cron it says nothing when there was nothing to do.",
        exits={
            0: "Also when a signal ended `--interval`.",
            1: "The database refuses or is away. With `--interval` only where it refuses at the start.",
        },
        signals=(
            "SIGTERM or SIGINT ends `--interval` after the run that is under way. A single run ends as any program;"
            " what it did until then is done, each batch in a transaction of its own."
        ),
        prints=(
            "One line where something was done, or always with `--verbosity 2`: `expired N, dead-lettered N, adopted N,"
            " queues reaped N, topic bodies N, tombstones N`. With `--dry-run`: `would expire N, dead-letter N, adopt"
            " N,"
            " reap N queues`, and the names of these."
        ),
        json="One object, with `--interval` a line for each run; with `--dry-run` what there would be to do:",
        keys=REAPED,
    ),
    "redrive_queue": Words(
        about=(
            "Choices add up. Of letters that died before it began; what somebody holds is left. A letter that came"
            " through several dead-letter queues goes one step back."
        ),
        exits={
            0: DONE,
            1: f"There is no such queue, nor a dead letter of it; a choice is wrong; or {REFUSED}.",
            2: "The canary failed: one of its messages died again or was not settled in time, and no other was sent.",
            130: "A signal ended it.",
        },
        signals=STOPPED,
        prints=f"`redriven N messages`, or `would redrive N messages`. {PROGRESS}",
    ),
    "resume_queue": Words(
        about="Consumers are woken.",
        exits={
            0: DONE,
            1: f"A queue is not there (the others are done all the same), or {REFUSED}.",
        },
        signals=LIKE_ANY,
        prints="`resumed NAME`, for each.",
    ),
}
