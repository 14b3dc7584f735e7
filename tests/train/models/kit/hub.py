"""A Hugging Face hub on this machine: what huggingface_hub asks of one, from a folder of models."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = hashlib.sha1(b"hub").hexdigest()


@contextmanager
def hub(models: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve ``models/owner/name/file``. Yields the address, and the list of requested paths, which grows.

    The model "closed/model" needs a licence. There is one revision, "main". The token "right" may write, except to
    models of the owner "others".
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(False)

        def do_GET(self) -> None:
            self._answer(True)

        def do_POST(self) -> None:
            asked.append(f"POST {self.path}")
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path.partition("?")[0]
            if self.headers.get("Authorization") != "Bearer right" or "/others/" in path:
                self._send(403, b'{"error": "no permission to write"}')
            elif path == "/api/repos/create":
                values = json.loads(content)
                name = f"{values.get('organization') or 'me'}/{values['name']}"
                if values.get("organization") == "others":
                    self._send(403, b'{"error": "no permission to write"}')
                    return
                (models / name).mkdir(parents=True, exist_ok=True)
                (models / name / "private").write_text(str(values.get("private") or values.get("visibility")))
                self._send(200, json.dumps({"url": f"{self._address()}/{name}", "name": name}).encode())
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
                files = [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(content)["files"]
                ]
                self._send(200, json.dumps({"files": files}).encode())
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
                for line in map(json.loads, content.splitlines()):
                    if line["key"] == "file":
                        file = models / match[1] / line["value"]["path"]
                        file.write_bytes(base64.b64decode(line["value"]["content"]))
                    elif line["key"] == "header":
                        (models / match[1] / "message").write_text(line["value"]["summary"])
                url = f"{self._address()}/{match[1]}/commit/{COMMIT}"
                self._send(200, json.dumps({"commitUrl": url, "commitOid": COMMIT}).encode())
            else:
                self._send(404, b"{}")

        def _address(self) -> str:
            return f"http://127.0.0.1:{server.server_port}"

        def _answer(self, body: bool) -> None:
            asked.append(f"{self.command} {self.path}")
            path = self.path.partition("?")[0]
            if path == "/api/whoami-v2":
                right = self.headers.get("Authorization") == "Bearer right"
                self._send(
                    200 if right else 401, b'{"name": "me"}' if right else b'{"error": "Invalid token"}'
                )
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
                self._model(match[1], match[2] or "main")
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
                self._tree(match[1], match[2])
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._file(match[1], match[2], match[3], body)
            else:
                self._send(404, b"{}")

        def _known(self, model: str, revision: str) -> bool:
            if model == "closed/model":
                self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            elif not (models / model).is_dir():
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif revision not in ("main", COMMIT):
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            else:
                return True
            return False

        def _model(self, model: str, revision: str) -> None:
            if self._known(model, revision):
                files = [{"rfilename": file.name} for file in sorted((models / model).iterdir())]
                self._send(200, json.dumps({"id": model, "sha": COMMIT, "siblings": files}).encode())

        def _tree(self, model: str, revision: str) -> None:
            if self._known(model, revision):
                files = [
                    {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": _etag(f)}
                    for f in sorted((models / model).iterdir())
                ]
                self._send(200, json.dumps(files).encode())

        def _file(self, model: str, revision: str, name: str, body: bool) -> None:
            if not self._known(model, revision):
                return
            file = models / model / name
            headers = {"X-Repo-Commit": COMMIT}
            if not file.is_file():
                self._send(404, b"{}", {**headers, "X-Error-Code": "EntryNotFound"})
                return
            content = file.read_bytes()
            self._send(200, content, {**headers, "ETag": f'"{_etag(file)}"'}, body)

        def _send(
            self, status: int, content: bytes, headers: dict[str, str] | None = None, body: bool = True
        ) -> None:
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body and self.command != "HEAD":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
