"""The peers: where each one's program runs, with which settings, and what it guarantees meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Peer:
    """
    ``name``: as the tables have it, and the name of its database.
    ``program``: a file of this folder.
    ``interpreter``: makes the environment where it is not there yet and returns the command that runs ``program``;
    raises ``environments.Unavailable``.
    ``settings``: a text for the table to the settings of ``worker``: the ordinary ones first, the best last.
    ``guarantees``: durable? at least once? in-flight messages at a crash? publishing in the caller's transaction?
    ``recovery``: its mechanism for messages of a worker that died, and with which of its knobs it is measured.
    ``recovery_settings``: those knobs, added to the ordinary settings.
    ``service``: what has to run beside the server; gives the programs' further environment variables.
    ``on_postgresql``: whether an open snapshot can matter.
    ``quick``: whether it is quickly installed, and so takes part in the quick form.
    """

    name: str
    program: str
    interpreter: Callable[[], list[str]]
    settings: Mapping[str, Mapping[str, str]]
    guarantees: str
    recovery: str
    recovery_settings: Mapping[str, str] = field(default_factory=dict)
    service: Callable[[], AbstractContextManager[Mapping[str, str]]] = lambda: contextlib.nullcontext({})
    on_postgresql: bool = True
    quick: bool = False


PEERS: list[Peer] = []
