"""Hub ids, against a local stub of the hub's HTTP API: the real huggingface_hub client, real range requests."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from conftest import PARAMETERS, MakeFolder
from quantry.anatomy import inspect
from quantry.errors import QuantryError

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves `org/model` from a folder; remembers how many bytes of which file it sent."""

    folder: Path
    ranges = True
    gated = False
    sent: dict[str, int]


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in ("/api/models/org/model", "/api/models/org/model/revision/v1"):
            return self._gated() if self.server.gated else self._info()
        if path.startswith("/api/models/org/model/revision/"):
            return self._refuse(404, "RevisionNotFound")
        match = re.fullmatch(rf"/org/model/resolve/{SHA}/(.+)", path)
        if match and (self.server.folder / match[1]).is_file():
            return self._file(match[1])
        return self._refuse(401, "RepoNotFound")

    def _info(self) -> None:
        siblings = [{"rfilename": f.name, "size": f.stat().st_size} for f in self.server.folder.iterdir()]
        self._send(200, json.dumps({"id": "org/model", "sha": SHA, "siblings": siblings}).encode())

    def _gated(self) -> None:
        self._refuse(403, "GatedRepo")

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _file(self, name: str) -> None:
        data = (self.server.folder / name).read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        status = 200
        if asked and self.server.ranges:
            data, status = data[int(asked[1]) : int(asked[2]) + 1], 206
        self.server.sent[name] = self.server.sent.get(name, 0) + len(data)
        self._send(status, data)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(("127.0.0.1", 0), Handler)
    server.folder, server.sent = tmp_path / "repo", {}
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


@pytest.mark.parametrize("shards", [1, 2])
def test_headers_by_range(hub: Hub, make_folder: MakeFolder, shards: int) -> None:
    folder = make_folder(name="repo", shards=shards)
    ours, local = inspect("org/model"), inspect(folder)
    assert ours.parameters == PARAMETERS
    assert ours.parts == local.parts
    assert ours.tokenizer == "tokenizer.json"
    for file in folder.glob("*.safetensors"):
        header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        assert hub.sent[file.name] == header, "only the header may be fetched"


def test_a_server_without_ranges(hub: Hub, make_folder: MakeFolder) -> None:
    make_folder(name="repo")
    hub.ranges = False
    assert inspect("org/model@v1").parameters == PARAMETERS


def test_gguf_on_the_hub(hub: Hub, gguf_file: Path) -> None:
    hub.folder.mkdir()
    gguf_file.rename(hub.folder / gguf_file.name)
    assert inspect("org/model").architecture == "llama"
    assert inspect(f"org/model:{gguf_file.name}").format == "gguf"
    (hub.folder / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(QuantryError, match=r"2 GGUF files; name one, for example org/model:other.gguf"):
        inspect("org/model")
    with pytest.raises(QuantryError, match=r"has no file gone.gguf"):
        inspect("org/model:gone.gguf")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/gone", "neither a local path nor a repository"),
        ("org/model@v2", "no such revision"),
        ("org/-bad--name-", "not a hub id"),
    ],
)
def test_refusals(hub: Hub, make_folder: MakeFolder, model: str, message: str) -> None:
    make_folder(name="repo")
    with pytest.raises(QuantryError, match=message):
        inspect(model)


def test_gated(hub: Hub, make_folder: MakeFolder) -> None:
    make_folder(name="repo")
    hub.gated = True
    with pytest.raises(QuantryError, match="gated.*HF_TOKEN"):
        inspect("org/model")


def test_no_hub_at_all(hub: Hub) -> None:
    hub.shutdown()
    hub.server_close()
    with pytest.raises(QuantryError, match="the hub did not answer") as caught:
        inspect("org/model")
    assert "\n" not in str(caught.value)
