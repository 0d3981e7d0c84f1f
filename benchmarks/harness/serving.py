"""The server that is measured, the machine under it, and the message that is published."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg

from django_pgqueue.devdb import DevCluster, throwaway

ROOT = Path(__file__).resolve().parent.parent.parent

# What one changes first on a server of one's own; the defaults are for a very small machine. What makes it
# durable is on, as by default.
SERVER_OPTIONS = {
    "shared_buffers": "512MB",
    # Room for what a benchmark writes, or checkpoints in the middle of a round would be measured.
    "max_wal_size": "4GB",
    "checkpoint_timeout": "15min",
    "max_connections": "200",
    # By default autovacuum looks once a minute, and most rounds would be over before.
    "autovacuum_naptime": "15s",
}
DURABILITY = ("fsync", "synchronous_commit", "full_page_writes", "autovacuum")

# About 500 bytes of JSON, the size of a small webhook event.
PAYLOAD: dict[str, Any] = {
    "event": "order.paid",
    "order": {"id": 1_048_576, "currency": "EUR", "total": "129.90", "paid_at": "2026-11-29T12:00:00Z"},
    "customer": {"id": 4711, "name": "Ada Lovelace", "email": "ada@example.com", "country": "GB"},
    "items": [{"sku": f"SKU-{number:05}", "quantity": number, "price": "12.99"} for number in range(1, 5)],
    "note": "Leave it with the neighbours, please; the bell has been out of order since Monday.",
}


@contextlib.contextmanager
def server(options: Mapping[str, str] | None = None) -> Iterator[DevCluster]:
    """
    Start an empty server, as durable as in production, and set Django up on it. Once per process.

    ``options`` are settings beyond ``SERVER_OPTIONS``, or instead of them.
    """
    with throwaway(durable=True, options={**SERVER_OPTIONS, **(options or {})}) as cluster:
        os.environ["DATABASE_URL"] = cluster.url
        set_up_django()
        from django.core.management import call_command
        from django.db import connections

        call_command("migrate", verbosity=0)
        connections.close_all()
        try:
            yield cluster
        finally:
            connections.close_all()


def set_up_django() -> None:
    """Set Django up on ``DATABASE_URL``, also in child processes."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    # With DEBUG Django keeps and times every statement.
    os.environ.update(DEBUG="0", SECRET_KEY="only-for-benchmarks")
    import django

    django.setup()


def machine(cluster: DevCluster) -> dict[str, Any]:
    """Describe what the figures were measured on: the machine, versions, and the server's settings."""
    import django

    # But for where it listens, which is nobody's business.
    chosen = [name for name in cluster.options if not name.startswith(("listen_", "port", "unix_"))]
    with psycopg.connect(cluster.url) as connection:
        postgresql = connection.info.parameter_status("server_version")
        settings = {
            name: connection.execute("SELECT current_setting(%s)", [name]).fetchone()[0]  # type: ignore[index]
            for name in (*DURABILITY, *chosen)
        }
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "django": django.get_version(),
        "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
        "postgresql": postgresql,
        **settings,
    }


def cpu_model() -> str:
    """Return the processor's name, as far as the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
