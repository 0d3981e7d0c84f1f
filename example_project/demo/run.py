"""One run of ``manage.py demo``: what was asked for, the clock it runs on, where its things are."""

import json
import os
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from urllib.parse import parse_qs, quote, urlencode, urlsplit

# How a process learns where its run keeps its files, and what it is in that run.
FOLDER_VARIABLE = "PGQUEUE_DEMO_RUN"
ROLE_VARIABLE = "PGQUEUE_DEMO_ROLE"

# An hour of production in seconds. Declaring and beating stay at a third of the idle time and below,
# as in production, so that a queue in use is not reaped.
SETTINGS = {
    "DECLARE_TTL": 0.25,
    "HEARTBEAT_INTERVAL": 0.25,
    "REAP_IDLE_AFTER": 1.0,
    "LEASE": 4.0,
    "POLL_INTERVAL": 1.0,
    "BACKOFF": {"base": 0.1, "factor": 2, "max": 1, "jitter": 0.1},
}
REAP_INTERVAL = 0.25

# Publishing lasts at least this many seconds, even with few messages: queues need time to fall idle.
SHORTEST = 12.0
MAX_PROBES = 100


@dataclass(frozen=True)
class Run:
    """What the processes of a run share. ``seconds``: publish no longer than that (None: no limit)."""

    id: str
    folder: str
    messages: int
    publishers: int
    seconds: float | None
    input: str | None

    @property
    def schema(self) -> str:
        """
        The schema that holds the run's tables.

        Its reaper is much too eager for queues of anybody else, so the run has tables of its own,
        in the project's database.
        """
        return f"pgqueue_demo_{self.id}"

    def queue_name(self, kind: str) -> str:
        """Return the name of a queue. It holds the run's id because notifications know no schemas."""
        return f"demo.{self.id}.{kind}"

    @property
    def probes(self) -> int:
        """How many of the messages measure wake-ups after the others."""
        return min(self.messages // 10, MAX_PROBES)

    def share(self, publisher: int) -> int:
        """Return how many of the messages are one publisher's."""
        return len(range(publisher, self.messages - self.probes, self.publishers))

    def environment(self) -> dict[str, str]:
        """Return the variables that the processes of this run get."""
        return {
            "DATABASE_URL": with_search_path(os.environ["DATABASE_URL"], self.schema),
            "PGQUEUE_SETTINGS": json.dumps(SETTINGS),
        }

    def save(self) -> None:
        """Write it down for the processes of the run."""
        (Path(self.folder) / "run.json").write_text(json.dumps(asdict(self)))

    @classmethod
    @cache
    def current(cls) -> "Run | None":
        """Return the run that this process belongs to, if it does."""
        file = Path(os.environ.get(FOLDER_VARIABLE, "")) / "run.json"
        return cls(**json.loads(file.read_text())) if FOLDER_VARIABLE in os.environ and file.exists() else None


def new_id() -> str:
    """Return an id that no other run on this database has."""
    return f"{time.time_ns() // 1_000_000:x}{os.getpid():x}"


def with_search_path(url: str, schema: str) -> str:
    """Return the database's URL with a search path. Other server options in it stay."""
    parts = urlsplit(url)
    query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    query["options"] = f"{query.get('options', '')} -c search_path={schema}".strip()
    # Put together by hand: urlunsplit drops the slashes of an empty host.
    return f"{url.partition('?')[0]}?{urlencode(query, quote_via=quote)}"
