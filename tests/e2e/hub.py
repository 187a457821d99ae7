"""A Hugging Face hub of this machine: the models in a folder, and the datasets in its folder `datasets`, by the calls
that downloads make."""

import contextlib
import functools
import hashlib
import http.server
import json
import pathlib
import threading
from collections.abc import Iterator

COMMIT = "0" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """/api/models/NAME/revision/REVISION tells the commit, .../tree/COMMIT the files, /NAME/resolve/COMMIT/FILE is
    one of them. Of a dataset: /api/datasets/NAME and /datasets/NAME."""

    protocol_version = "HTTP/1.1"

    def __init__(self, folder: pathlib.Path, asked: list[str], *arguments):
        self.folder, self.asked = folder, asked
        super().__init__(*arguments)

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        path = self.path.split("?")[0].strip("/")
        if path.startswith("api/"):
            self._answer(*self._listing(*path.removeprefix("api/").removeprefix("models/").split("/")))
        else:
            name, _, rest = path.partition("/resolve/")
            self._answer(*self._file(self.folder / name / rest.partition("/")[2]))

    do_GET = do_HEAD

    def _listing(self, *parts: str) -> tuple[int, bytes]:
        named = 3 if parts[0] == "datasets" else 2
        name, what, place = "/".join(parts[:named]), parts[named : named + 1], parts[named + 1 :]
        files = sorted((self.folder / name).glob("*"))
        if not files or len(place) > 1:  # no model has folders
            return 404, b""
        if what == ("tree",):
            kinds = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": COMMIT} for f in files]
            return 200, json.dumps(kinds).encode()
        siblings = [{"rfilename": file.name} for file in files]
        return 200, json.dumps({"id": name.removeprefix("datasets/"), "sha": COMMIT, "siblings": siblings}).encode()

    def _file(self, path: pathlib.Path) -> tuple[int, bytes]:
        return (200, path.read_bytes()) if path.is_file() else (404, b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if status == 404:
            path = self.path.removeprefix("/api").removeprefix("/models").strip("/")
            known = self.folder.joinpath(*path.split("/")[: 3 if path.startswith("datasets/") else 2]).is_dir()
            self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments) -> None: ...


@contextlib.contextmanager
def serving(folder: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
    """The hub's address, and the paths it is asked for."""
    asked: list[str] = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Hub, folder, asked))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
