"""The store of the laboratory: moto's S3 server, in memory, in a bad mood when it is told so.

    python -m isles.lab.elastic.server ADDRESS PORT MOOD

On port 0 it takes a free one, and says which. MOOD is a file with one JSON object. It is read again before every
request, so whoever writes it decides what happens from then on; no file, or `{}`: all is well.

    {"refuses": true}              every connection is closed without an answer
    {"errors": 0.3, "seed": 7}     this share of the requests fails, each in a way that the seed chooses

The ways of failing are those that real stores have: 429, 500 and 503 for any request; for a create also 409 and 412
with nothing written; and an answer that is lost after the request was carried out, so the client has to find out what
has become of it. How many requests there were, and how they ended, is written to MOOD with the ending `.served`.
"""

from __future__ import annotations

import json
import logging
import random
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

BUCKET = "islands"
ANY = ("429", "500", "503", "lost")
OF_A_CREATE = (*ANY, "409", "412")
CODES = {
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    429: "TooManyRequests",
    500: "InternalError",
    503: "SlowDown",
}

Start = Callable[..., Any]


class Moody:
    """A WSGI application in front of another one."""

    def __init__(self, inner: Callable[[dict[str, Any], Start], Iterable[bytes]], mood: Path) -> None:
        self._inner, self._file = inner, mood
        self._lock, self._random, self._seed = threading.Lock(), random.Random(0), None
        self.served: Counter[str] = Counter()

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        way = self._choose(environ)
        if way is None:
            return self._inner(environ, start)
        if way == "lost":
            return self._lose(environ)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if way == "refused":
            return _hang_up(environ)
        status = int(way)
        text = f"<Error><Code>{CODES[status]}</Code><Message>the laboratory says {status}</Message></Error>".encode()
        start(f"{status} {CODES[status]}", [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
        return [text]

    def _lose(self, environ: dict[str, Any]) -> Iterable[bytes]:
        """Carries a request out, and drops the answer."""
        answer = self._inner(environ, lambda *_: lambda data: None)
        for _ in answer:
            pass
        return _hang_up(environ)

    def _choose(self, environ: dict[str, Any]) -> str | None:
        """How this request fails; None if it does not."""
        with self._lock:
            mood = self._mood()
            way: str | None = None
            if mood.get("refuses"):
                way = "refused"
            elif mood.get("errors"):
                if mood.get("seed") != self._seed:
                    self._seed = mood.get("seed")
                    self._random = random.Random(self._seed)
                if self._random.random() < float(mood["errors"]):
                    creates = environ["REQUEST_METHOD"] == "PUT" and "HTTP_IF_NONE_MATCH" in environ
                    way = self._random.choice(OF_A_CREATE if creates else ANY)
            self.served[way or "ok"] += 1
            self._file.with_suffix(".served").write_text(json.dumps(self.served))
        return way

    def _mood(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._file.read_text() or "{}"))
        except (OSError, ValueError):
            return {}


def _hang_up(environ: dict[str, Any]) -> Iterable[bytes]:
    connection: socket.socket = environ["werkzeug.socket"]
    connection.shutdown(socket.SHUT_RDWR)
    return []


def main(address: str, port: int, mood: Path) -> None:
    """Serves until it is killed."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = Moody(DomainDispatcherApplication(create_backend_app), mood)
    server = make_server(address, port, app, threaded=True)
    print("listening", server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
