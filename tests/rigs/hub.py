"""A stand-in of the Hugging Face hub on loopback: what huggingface_hub asks for comes from files in memory.

Uploads go there, too, by the LFS protocol (HF_HUB_DISABLE_XET).
"""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.rigs.processes import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WRITER = "hf_writer"  # the token that may write
ERRORS = {"nobody": (404, "RepoNotFound"), "gated": (403, "GatedRepo")}  # by owner


class StandIn:
    """The repositories 'models/OWNER/NAME' and 'datasets/OWNER/NAME', one commit each, and what was asked for."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.requests: Counter[str] = Counter()  # 'GET FILE' for a body, or 'API'
        self.held_back, self.go_on = "", threading.Event()  # bodies of matching files stop in the middle until then
        self.arrived = threading.Event()  # such a body is half sent
        self.url = ""
        self.stored: dict[str, bytes] = {}  # uploaded bodies by SHA-256
        self.commits: list[tuple[str, str]] = []  # (repository, message)

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """The variables of a process that uses this hub, with a cache of its own.

        Offline mode is switched off here: an engine in the test's process switches it on.
        """
        mine = {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0"}
        path = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        return {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | mine | path | more

    def ask(self, home: Path, key: str, name: str, **more: str) -> subprocess.Popen[str]:
        """A process that prints the local copy of a name, or fails with the text of its UsageError."""
        code = (
            "import sys; from common import hub; from common.errors import UsageError\n"
            "try: print(hub.local_copy(sys.argv[1], sys.argv[2]))\n"
            "except UsageError as error: sys.exit(str(error))"
        )
        words, env = [sys.executable, "-c", code, key, name], self.environment(home, **more)
        return subprocess.Popen(words, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@contextmanager
def hub_standin() -> Iterator[StandIn]:
    """Serves until the end of the block."""
    hub = StandIn()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def do_PUT(self) -> None:
        data = self._body()
        self.hub.stored[self.path.rpartition("/")[2]] = data
        self._send(b"", True)

    def do_POST(self) -> None:
        """The requests of an upload: for a new repository, which files are large, where they go, and the commit."""
        data = self._body()
        if self.headers.get("Authorization") != f"Bearer {WRITER}":
            return self._send(b"{}", True, 401)
        match urlsplit(self.path).path.strip("/").split("/"):
            case ["api", "repos", "create"]:
                self._create(json.loads(data))
            case ["api", *repo, "preupload", "main"]:
                large = {True: "lfs", False: "regular"}
                files = [file["path"] for file in json.loads(data)["files"]]
                modes = [{"path": f, "uploadMode": large[f.endswith(".safetensors")]} for f in files]
                found = "/".join(repo) in self.hub.repos
                self._json({"files": [mode | {"shouldIgnore": False} for mode in modes]}, 200 if found else 404)
            case [*_, "info", "lfs", "objects", "batch"]:
                wanted = [(one["oid"], one["size"]) for one in json.loads(data)["objects"]]
                places = [(oid, size, {"upload": {"href": f"{self.hub.url}/lfs/{oid}"}}) for oid, size in wanted]
                self._json({"objects": [{"oid": o, "size": s, "actions": at} for o, s, at in places]})
            case ["api", *repo, "commit", "main"]:
                self._commit("/".join(repo), [json.loads(line) for line in data.splitlines()])

    def _create(self, asked: dict[str, str]) -> None:
        repo = f"{asked.get('type', 'model')}s/{asked['organization']}/{asked['name']}"
        code = 409 if repo in self.hub.repos else 200
        self.hub.repos.setdefault(repo, {})
        self.hub.requests[f"made {asked['visibility']} {repo}"] += code == 200
        self._json({"url": f"{self.hub.url}/{repo.partition('/')[2]}"}, code)

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.hub.commits.append((repo, value["summary"]))
            elif line["key"] == "lfsFile":  # refused, as by the hub, unless its body came before
                self.hub.repos[repo][value["path"]] = self.hub.stored[value["oid"]]
            else:
                self.hub.repos[repo][value["path"]] = base64.b64decode(value["content"])
        address = f"{self.hub.url}/{repo.partition('/')[2]}/commit/{COMMIT}"
        self._json({"commitUrl": address, "commitOid": COMMIT})

    def _json(self, answer: object, code: int = 200) -> None:
        self._send(json.dumps(answer).encode(), True, code)

    def _body(self) -> bytes:
        """The request's body, also one that is sent in chunks."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _answer(self, body: bool) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        api = parts[0] == "api"
        parts = parts[1:] if api else parts if parts[0] == "datasets" else ["models", *parts]
        if len(parts) < 5:  # other requests of the client, such as /api/agent-harnesses
            return self._send(b"", body, 404)
        repo, what, commit, file = "/".join(parts[:3]), parts[3], parts[4], "/".join(parts[5:])
        if parts[1] in ERRORS or repo not in self.hub.repos:
            code, name = ERRORS.get(parts[1], (404, "RepoNotFound"))
            return self._send(b"", body, code, {"X-Error-Code": name})
        if commit not in ("main", COMMIT):
            return self._send(b"", body, 404, {"X-Error-Code": "RevisionNotFound"})
        files = self.hub.repos[repo]
        if api:
            self.hub.requests["API"] += 1
            tree = [{"type": "file", "path": f, "size": len(b), "oid": _tag(b)} for f, b in files.items()]
            info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}
            return self._send(json.dumps(tree if what == "tree" else info).encode(), body)
        self.hub.requests[f"GET {file}"] += body
        headers = {"ETag": f'"{_tag(files[file])}"', "X-Repo-Commit": COMMIT}
        self._send(files[file], body, 200, headers, stop=bool(self.hub.held_back and fnmatch(file, self.hub.held_back)))

    def _send(self, data: bytes, body: bool, code: int = 200, headers: dict[str, str] = {}, stop: bool = False) -> None:  # noqa: B006
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else code)
        for name, value in {**headers, "Content-Length": str(len(data) - start)}.items():
            self.send_header(name, value)
        self.end_headers()
        if not body:
            return
        try:
            if stop:
                self.wfile.write(data[start : start + len(data) // 2])
                self.hub.arrived.set()
                self.hub.go_on.wait()
                start += len(data) // 2
            self.wfile.write(data[start:])
        except OSError:  # the client was killed
            self.close_connection = True


def _tag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
