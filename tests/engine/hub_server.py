"""A server on this machine that speaks as much of the Hugging Face hub's protocol as its client asks for a snapshot.

https://huggingface.co/docs/hub/api, and the headers of a file's HEAD: X-Repo-Commit, ETag, Content-Length.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

NAME = "owner/model"
COMMIT = hashlib.sha1(b"the only commit").hexdigest()
FINDER = """
import json
import os
import sys
import engine.checkpoint.gguf.folder, engine.checkpoint.pulled  # slow to import; the hub's client comes later

for line in sys.stdin:
    name, variables = json.loads(line)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    os.environ.update(variables)
    from engine.checkpoint.hub import find_folder
    from wire.errors import ModelError
    try:
        print(find_folder(name), flush=True)
    except ModelError as error:
        print("refused:", error.message, flush=True)
    os._exit(0)
"""


class Finder:
    """A process that finds models, each in a child of its own: the hub's client reads its variables once."""

    def __init__(self) -> None:
        unset = {"HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGING_FACE_HUB_TOKEN"}
        inherited = {key: value for key, value in os.environ.items() if key not in unset}
        command = [sys.executable, "-c", FINDER]
        self._process = subprocess.Popen(
            command, env=inherited, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def find(self, name: str, variables: dict[str, str]) -> str:
        """Returns the folder of a model, or "refused: " and the reason."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, variables]) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.communicate(timeout=30)


class HubServer(ThreadingHTTPServer):
    """A hub with one model, the files of `folder`. paths: those asked for.

    refusals: the status and code of an error, by the beginning of a path. max_bytes: after this many a file's answer
    ends, whatever its length was said to be.
    """

    def __init__(self, folder: Path, home: Path, finder: Finder) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.paths: list[str] = []
        self.tokens: set[str] = set()
        self.refusals: dict[str, tuple[int, str]] = {}
        self.max_bytes = sys.maxsize
        self._home, self._finder = home, finder

    def find(self, name: str = NAME, **environment: str) -> str:
        """Finds a model in a process whose hub this is; returns its folder, or "refused: " and the reason."""
        own = {"HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}", "HF_HOME": str(self._home)}
        return self._finder.find(name, own | environment)


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self.server.paths.append(path)
        self.server.tokens.add(self.headers.get("Authorization", ""))
        model, files, listing = f"/api/models/{NAME}", f"/{NAME}/resolve/{COMMIT}/", f"/api/models/{NAME}/tree/{COMMIT}"
        refused = [answer for start, answer in self.server.refusals.items() if path.startswith(start)]
        if refused:
            self._send(refused[0][0], b"", **{"X-Error-Code": refused[0][1]})
        elif path in (model, f"{model}/revision/main"):
            self._send(200, json.dumps({"id": NAME, "sha": COMMIT, "siblings": []}).encode())
        elif path == listing:
            entries = [_entry(file) for file in sorted(self.server.folder.iterdir())]
            self._send(200, json.dumps(entries).encode())
        elif path.startswith(files) and (file := self.server.folder / path.removeprefix(files)).is_file():
            self._send(200, file.read_bytes(), **{"ETag": f'"{_entry(file)["oid"]}"', "X-Repo-Commit": COMMIT})
        else:
            self._send(404, b"", **{"X-Error-Code": "RepoNotFound"})

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: self.server.max_bytes])
            self.close_connection = len(body) > self.server.max_bytes


def _entry(file: Path) -> dict[str, str | int]:
    content = file.read_bytes()
    digest = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return {"type": "file", "path": file.name, "size": len(content), "oid": digest}


@contextmanager
def serving(folder: Path, home: Path, finder: Finder) -> Iterator[HubServer]:
    """A hub of a folder's model. home: the client's folder, with its cache."""
    with HubServer(folder, home, finder) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
