"""
A TCP proxy in front of the server, which can do what a network does: hold up, go dumb, cut off.

It knows each connection by its application_name, so that a test can hit one loop of a worker and
leave the others alone. A frozen connection stays open on both sides and carries nothing: to either
side the peer looks alive, and never says a word again.
"""

import contextlib
import os
import socket
import threading
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from django.db import connections
from psycopg.conninfo import conninfo_to_dict


class Link:
    """One connection through the proxy."""

    def __init__(self, proxy: "Proxy", client: socket.socket) -> None:
        self.proxy = proxy
        self.client = client
        self.server = connect_to_server()
        self.name = ""
        self.flowing = threading.Event()
        self.flowing.set()
        for pump in (self._upstream, self._downstream):
            threading.Thread(target=self._run, args=[pump], daemon=True).start()

    def close(self) -> None:
        self.flowing.set()
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _run(self, pump: Any) -> None:
        with contextlib.suppress(OSError):
            pump()
        # A frozen one has to look open to the other side, whatever this side does.
        self.flowing.wait()
        self.close()

    def _upstream(self) -> None:
        while data := self.client.recv(65536):
            if not self.name:
                self._introduce(data)
            self.flowing.wait()
            self.server.sendall(data)

    def _downstream(self) -> None:
        while data := self.server.recv(65536):
            self.flowing.wait()
            self.client.sendall(data)

    def _introduce(self, data: bytes) -> None:
        """Read the application_name from a startup packet, which may come after requests for encryption."""
        _, found, rest = data.partition(b"application_name\0")
        if found:
            self.name = rest.partition(b"\0")[0].decode()
            if self.proxy.holds(self.name):
                self.flowing.clear()


class Proxy:
    """Listens on a free port of the loopback interface from `with` on."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self._held = ""

    def __enter__(self) -> Self:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        # Without it the thread that accepts would go on waiting.
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for link in self.links:
            link.close()

    @property
    def netloc(self) -> str:
        """User, password, host and port, for a URL."""
        settings = connections["default"].settings_dict
        password = f":{quote(settings['PASSWORD'])}" if settings["PASSWORD"] else ""
        return f"{settings['USER']}{password}@127.0.0.1:{self.port}"

    def count(self, name: str) -> int:
        """Return how many connections of this application_name there were."""
        return sum(link.name == name for link in self.links)

    def freeze(self, name: str = "") -> list[Link]:
        """Let the connections whose application_name contains `name` carry nothing any more. New ones work."""
        frozen = [link for link in self.links if name in link.name]
        for link in frozen:
            link.flowing.clear()
        return frozen

    def hold(self, name: str) -> None:
        """Let new connections whose application_name contains `name` wait, from their first packet."""
        self._held = name

    def let_go(self) -> None:
        """Let the connections that wait, and new ones, carry data."""
        self._held = ""
        for link in self.links:
            link.flowing.set()

    def holds(self, name: str) -> bool:
        return bool(self._held) and self._held in name

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            try:
                self.links.append(Link(self, client))
            except OSError:
                # The server is away: say so as it would.
                client.close()


def connect_to_server() -> socket.socket:
    """Connect to the server of the test database, by a unix socket or by TCP."""
    # Not from Django's settings: those may name the proxy.
    server = conninfo_to_dict(os.environ["DATABASE_URL"])
    host, port = str(server.get("host") or "127.0.0.1"), int(server.get("port") or 5432)
    if not host.startswith("/"):
        return socket.create_connection((host, port), 10)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(Path(host) / f".s.PGSQL.{port}"))
    return connection
