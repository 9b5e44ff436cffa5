"""A proxy in front of a server, which fails, truncates, delays, lies or answers HTML where a test says so."""

from __future__ import annotations

import contextlib
import http.client
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

_HTML = b"<html><body>Please log in to the network.</body></html>"
_ERROR = b'<?xml version="1.0"?><Error><Code>%s</Code><Message>%s</Message></Error>'


class Answer(NamedTuple):
    """What the server has answered, or the proxy in its place."""

    status: int
    headers: dict[str, str]
    body: bytes


Fault = Callable[[Callable[[], Answer]], Answer | None]
"""Gets a function that asks the server, and returns what the proxy answers; ``None`` for closing the connection."""


def dropped(ask: Callable[[], Answer]) -> None:
    return None


def refused(ask: Callable[[], Answer]) -> Answer:
    return Answer(403, {}, _ERROR % (b"AccessDenied", b"the name is not allowed"))


def unavailable(ask: Callable[[], Answer]) -> Answer:
    return Answer(503, {}, _ERROR % (b"ServiceUnavailable", b"come back later"))


def html(ask: Callable[[], Answer]) -> Answer:
    return Answer(200, {"Content-Type": "text/html"}, _HTML)


def ignored(ask: Callable[[], Answer]) -> Answer:
    """Say that an object was written, which was not."""
    return Answer(200, {"ETag": '"d41d8cd98f00b204e9800998ecf8427e"'}, b"")


def halved(ask: Callable[[], Answer]) -> Answer:
    """Answer with the first half, as if that were all."""
    answer = ask()
    headers = {name: value for name, value in answer.headers.items() if not name.lower().startswith("x-amz-checksum")}
    return answer._replace(headers=headers, body=answer.body[: len(answer.body) // 2])


def waiting_for(event: threading.Event) -> Fault:
    def fault(ask: Callable[[], Answer]) -> Answer:
        event.wait(60.0)
        return ask()

    return fault


class Proxy:
    """Forwards requests to the server at ``endpoint``, except where :attr:`fault` returns a fault.

    Attributes:
        fault: called with the method and the path of each request, such as ``("PUT", "/bucket/run/mirror.json")``.
        requests: the method and the path of each request, and the size of its answer.
    """

    def __init__(self, endpoint: str) -> None:
        self.fault: Callable[[str, str], Fault | None] = lambda method, path: None
        self.requests: list[tuple[str, str, int]] = []
        server = urllib.parse.urlsplit(endpoint).netloc
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # which waits 40 ms before the body of each answer

            def handle_request(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = urllib.parse.unquote(self.path)

                def ask() -> Answer:
                    connection = http.client.HTTPConnection(server, timeout=60)
                    try:
                        headers = {name: value for name, value in self.headers.items() if name != "Expect"}
                        connection.request(self.command, self.path, body, headers)
                        answer = connection.getresponse()
                        return Answer(answer.status, dict(answer.getheaders()), answer.read())
                    finally:
                        connection.close()

                fault = proxy.fault(self.command, path)
                answer = ask() if fault is None else fault(ask)
                proxy.requests.append((self.command, path, 0 if answer is None else len(answer.body)))
                if answer is None:
                    self.close_connection = True
                    return
                self.send_response_only(answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                length = answer.headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(answer.body))
                self.send_header("Content-Length", length)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request  # noqa: N815 - names of the base class

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def handle(self) -> None:
                with contextlib.suppress(OSError):  # the client is gone
                    super().handle()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
