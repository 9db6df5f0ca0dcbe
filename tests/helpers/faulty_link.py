"""A link to an HTTP service that loses, delays and cuts what passes, for real."""

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

SECONDS = 600.0  # more than any request under load; a test that waits for one in vain ends by it
HOP_BY_HOP = {"connection", "transfer-encoding", "content-length"}


class Link:
    """Passes requests on to `target`; `fault(method, path)` names what happens to one of them:

    "refuse" answers 500, "stall" answers nothing before `released`, "lose" carries the request out and drops the
    connection before the answer, "cut" drops it in the middle of the answer's body; "" lets it through.
    """

    def __init__(self, target: str):
        self.target = urlsplit(target).netloc
        self.fault: Callable[[str, str], str] = lambda method, path: ""
        self.released = threading.Event()
        self.seen: list[tuple[str, str, str]] = []  # method, path and fault of each request


@contextmanager
def linked(target: str) -> Iterator[tuple[str, Link]]:
    """The URL of a link to `target`, and the link."""
    link = Link(target)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(link))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", link
    finally:
        link.released.set()
        server.shutdown()
        server.server_close()
        thread.join(SECONDS)


def _handler(link: Link) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass(self) -> None:
            fault = link.fault(self.command, self.path)
            link.seen.append((self.command, self.path, fault))
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if fault == "refuse":
                return self._answer(500, {}, b"", 0)
            if fault == "stall":
                assert link.released.wait(SECONDS)
                return self._drop()
            onward = http.client.HTTPConnection(link.target, timeout=SECONDS)
            onward.request(self.command, self.path, body, dict(self.headers))
            answer = onward.getresponse()
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in HOP_BY_HOP}
            length, content = answer.getheader("Content-Length"), answer.read()
            onward.close()
            if fault == "lose":
                return self._drop()
            self._answer(answer.status, headers, content, int(length or len(content)), cut=fault == "cut")

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass

        def _answer(self, status: int, headers: dict[str, str], body: bytes, length: int, *, cut: bool = False) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(length))  # of a HEAD: what a GET would send
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if cut else body)
            if cut:
                self._drop()

        def _drop(self) -> None:
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
