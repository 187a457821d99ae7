"""Serve the report of runs on this machine alone, made anew from their files at each request."""

import errno
import http.server
import pathlib
from collections.abc import Sequence

from jaxtrain.errors import UserError
from jaxtrain.reporting import page, records

HOST = "127.0.0.1"  # not on the network: the page shows a run's config and paths
PORT = 6007  # one above TensorBoard's
REFRESH_S = 5  # between two looks of a browser while a run goes on


class _Handler(http.server.BaseHTTPRequestHandler):
    server: "Server"

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/", "/index.html"):
            self.send_error(404, "only / is here")
            return
        try:
            code, text = 200, self.server.text()
        except UserError as error:
            code, text = 500, f"{error}\n"
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"text/{'html' if code == 200 else 'plain'}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: a browser asks every few seconds."""


class Server(http.server.ThreadingHTTPServer):
    """The page of some run folders. port: 0 takes any free one, which `address` then names.

    Raises UserError where a folder is no run folder, and where the port is in use or may not be opened.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[str | pathlib.Path], port: int = PORT):
        self.folders = list(folders)
        self.text()  # a mistake in a folder is told here, not by the browser
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            why = "is in use" if error.errno == errno.EADDRINUSE else "may not be opened by this user"
            raise UserError(f"--port {port} {why}; give another, or 0 for any that is free") from None

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def text(self) -> str:
        """The page as of now; it asks to be loaded again while a run goes on."""
        read = [records.read(folder) for folder in self.folders]
        going_on = any(not record.summary for record in read)
        return page.page(read, refresh_s=REFRESH_S if going_on else None)
