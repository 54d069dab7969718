"""The server of the live page: a few fixed addresses, read-only, on this machine unless told otherwise.

    /              the page             /live.js, /live.css    what it needs; nothing comes from elsewhere
    /data          what is new          /report.html           the report as it is now, one file to keep
    /metrics       for Prometheus

No address is turned into a path, so there is nothing to climb out of. Only GET and HEAD are answered. Text from runs
travels as JSON and is put on the page as text. The content security policy allows scripts and styles of this server
alone. A browser that is led here under another name (DNS rebinding) is refused: on a loopback address the Host of a
request must be one.
"""

from __future__ import annotations

import contextlib
import gzip
import ipaddress
import json
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6, SHUT_RDWR
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from isles.view import metrics, report
from isles.view.watcher import Watcher

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
COMPRESS_BYTES = 4096
DIGITS = 12
"""Of numbers: seconds since the epoch take ten."""
SCRIPTS = (*report.SCRIPTS[:-1], "derive.js", "status.js", "islands.js", "dots.js", "rates.js", "live.js")
"""The report's, with another beginning."""
STYLES = (*report.STYLES, "live.css", "islands.css")
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>isles watch</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/live.css">
</head>
<body>
<noscript>This page draws its charts with JavaScript, which is switched off here.</noscript>
<script src="/live.js"></script>
</body>
</html>
"""


class Server:
    """Serves a watcher from a thread of its own; a context manager."""

    def __init__(self, watcher: Watcher, host: str = "127.0.0.1", port: int = 0) -> None:
        if not 0 <= port <= 65535:
            raise ValueError(f"--port {port} must be from 0 to 65535; 0 takes a free one")
        kind = type("_Handler", (_Handler,), {"watcher": watcher, "server_host": host, "asked": {}})
        try:
            self._server = _HTTPServer(host, port, kind)
        except OSError as error:
            raise ValueError(f"cannot serve on {host} port {port}: {error.strerror or error}; try --port 0") from None
        self._handler: Any = kind
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="isles-serve", daemon=True)

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}/"

    @property
    def address(self) -> dict[str, Any]:
        return {"url": self.url, "host": self.host, "port": self.port}

    @property
    def warning(self) -> str:
        """Who else can see the runs; empty: nobody."""
        if is_loopback(self.host):
            return ""
        return f"everybody who can reach {self.host} port {self.port} can read these runs; there is no password"

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def wait(self) -> None:
        """Until the process is interrupted."""
        while self._thread.is_alive():
            self._thread.join(1.0)

    def linger(self, seconds: float = 3.0) -> None:
        """Gives pages that are open the time to fetch the end of a run."""
        begin = time.monotonic()
        fresh = [page for page, asked in self._handler.asked.items() if asked > begin - seconds]
        while time.monotonic() < begin + seconds and any(self._handler.asked[page] <= begin for page in fresh):
            time.sleep(0.05)


class _Handler(BaseHTTPRequestHandler):
    watcher: Watcher
    server_host: str
    asked: dict[str, float]
    """When each page asked for data the last time."""
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "isles", ""
    timeout = 30

    def do_GET(self) -> None:
        if not self._is_meant():
            self._fail(HTTPStatus.FORBIDDEN, "this address is not one of this server's")
            return
        address = urlsplit(self.path)
        answer = {
            "/": self._page,
            "/live.js": self._script,
            "/live.css": self._style,
            "/data": self._data,
            "/metrics": self._metrics,
            "/report.html": self._report,
        }.get(address.path)
        if answer is None:
            self._fail(HTTPStatus.NOT_FOUND, "there is no such page")
            return
        answer(parse_qs(address.query))

    do_HEAD = do_GET

    def _is_meant(self) -> bool:
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        return not is_loopback(self.server_host) or is_loopback(host)

    def _page(self, query: dict[str, list[str]]) -> None:
        self._answer(PAGE, "text/html; charset=utf-8", {"Content-Security-Policy": POLICY})

    def _script(self, query: dict[str, list[str]]) -> None:
        self._answer(report.script(SCRIPTS), "text/javascript; charset=utf-8")

    def _style(self, query: dict[str, list[str]]) -> None:
        self._answer(report.style(STYLES), "text/css; charset=utf-8")

    def _data(self, query: dict[str, list[str]]) -> None:
        boot, since, page = (query.get(name, [""])[0][:64] for name in ("boot", "since", "page"))
        update = self.watcher.update(boot, int(since) if since.isdigit() else 0)
        if len(self.asked) > 1000:
            self.asked.clear()
        self.asked[page] = time.monotonic()
        self._answer(
            json.dumps(report.short(update, DIGITS), separators=(",", ":"), allow_nan=False), "application/json"
        )

    def _metrics(self, query: dict[str, list[str]]) -> None:
        self._answer(metrics.text(self.watcher), metrics.CONTENT_TYPE)

    def _report(self, query: dict[str, list[str]]) -> None:
        try:
            text = self.watcher.page()
        except (ValueError, OSError) as error:
            self._fail(HTTPStatus.NOT_FOUND, str(error))
            return
        self._answer(text, "text/html; charset=utf-8", {"Content-Disposition": 'attachment; filename="report.html"'})

    def _answer(
        self, text: str, kind: str, more: dict[str, str] | None = None, status: HTTPStatus = HTTPStatus.OK
    ) -> None:
        body = text.encode()
        headers = {**HEADERS, **(more or {}), "Content-Type": kind}
        if len(body) > COMPRESS_BYTES and "gzip" in self.headers.get("Accept-Encoding", "") and not self._is_near():
            body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _is_near(self) -> bool:
        """Whether bytes cost less than compressing them."""
        return is_loopback(str(self.client_address[0]))

    def _fail(self, status: HTTPStatus, reason: str) -> None:
        self._answer(f"{reason}\n", "text/plain; charset=utf-8", status=status)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Methods other than GET and HEAD, and requests that are none: one line, no page."""
        wrong_method = code == HTTPStatus.NOT_IMPLEMENTED
        status = HTTPStatus.METHOD_NOT_ALLOWED if wrong_method else HTTPStatus(code)
        self.close_connection = True
        reason = b"only GET is answered\n" if wrong_method else b"this is not understood\n"
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Length": str(len(reason)), "Connection": "close"}.items():
            self.send_header(name, value)
        if wrong_method:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        self.wfile.write(reason)

    def handle(self) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a page that was closed
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a page asks every second."""


def is_loopback(host: str) -> bool:
    """
    >>> [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "x.y")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _HTTPServer(ThreadingHTTPServer):
    """Closing it ends connections that browsers keep open, too."""

    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[_Handler]) -> None:
        self.address_family = AF_INET6 if ":" in host else AF_INET
        self._open: set[Any] = set()
        super().__init__((host, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        for request in list(self._open):
            with contextlib.suppress(OSError):
                request.shutdown(SHUT_RDWR)
