"""A hub on this machine, as far as huggingface_hub asks one, and a cache in its layout."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def lay_out(cache: Path, name: str, source: Path, ref: str = "main", commit: str = COMMIT) -> Path:
    """Puts the files of a folder into a cache, as blobs and links to them; returns the snapshot."""
    storage = cache / f"models--{name.replace('/', '--')}"
    snapshot = storage / "snapshots" / commit
    for folder in (snapshot, storage / "blobs", (storage / "refs" / ref).parent):
        folder.mkdir(parents=True, exist_ok=True)
    (storage / "refs" / ref).write_text(commit)
    for file in source.iterdir():
        data = file.read_bytes()
        blob = storage / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def reach(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets huggingface_hub ask this hub until the end of the test."""
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


class FakeHub:
    """Models of the hub by name, each the files of a folder, and what was asked of it.

    Attributes:
        fetched: names of files that were downloaded.
        url: where it listens.
    """

    def __init__(self, models: dict[str, Path], url: str) -> None:
        self.models = models
        self.url = url
        self.asked: list[str] = []
        self.fetched: list[str] = []

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Returns status, headers and body of a GET; a HEAD is the same without the body."""
        self.asked.append(path)
        for name, folder in self.models.items():
            if path.startswith(f"/api/models/{name}/revision/"):
                if path.rpartition("/")[2] not in ("main", COMMIT):
                    return 404, {"X-Error-Code": "RevisionNotFound"}, b""
                names = [{"rfilename": file} for file in _files(folder)]
                return _json({"id": name, "sha": COMMIT, "siblings": names})
            if path.startswith(f"/api/models/{name}/tree/{COMMIT}"):
                return _json([_entry(folder, file) for file in _files(folder)])
            if path.startswith(f"/{name}/resolve/{COMMIT}/"):
                file = path.removeprefix(f"/{name}/resolve/{COMMIT}/")
                data = (folder / file).read_bytes()
                headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
                return 200, headers, data
        return 404, {"X-Error-Code": "RepoNotFound"}, b""


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _entry(folder: Path, file: str) -> dict[str, Any]:
    data = (folder / file).read_bytes()
    return {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


def _json(value: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


@contextmanager
def fake_hub(models: dict[str, Path]) -> Iterator[FakeHub]:
    """Serves models until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.path)
            if "/resolve/" in self.path and self.command == "GET":
                hub.fetched.append(self.path.partition(f"/{COMMIT}/")[2])
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub = FakeHub(models, f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
