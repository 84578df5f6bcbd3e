"""Hub ids, against a local stub of the hub's HTTP API: the real huggingface_hub client, real range requests."""

import json
import re
import shutil
import struct
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import quantry
from quantry.errors import QuantryError
from quantry.models.anatomy import inspect
from quantry.models.reader import demo_folder
from tiny_files import PARAMETERS, MakeFolder

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves `org/model` from a folder; remembers how many bytes of which file it sent."""

    folder: Path
    ranges = True
    gated = False
    break_after = 0  # cut the connection once, after so many bytes of a file
    sent: dict[str, int]


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == f"/api/models/org/model/tree/{SHA}":
            return self._tree()
        if path in (
            "/api/models/org/model",
            "/api/models/org/model/revision/v1",
            f"/api/models/org/model/revision/{SHA}",
        ):
            return self._gated() if self.server.gated else self._info()
        if path.startswith("/api/models/org/model/revision/"):
            return self._refuse(404, "RevisionNotFound")
        match = re.fullmatch(rf"/org/model/resolve/{SHA}/(.+)", path)
        if match and (self.server.folder / match[1]).is_file():
            return self._file(match[1])
        return self._refuse(401, "RepoNotFound")

    def do_HEAD(self) -> None:
        match = re.fullmatch(rf"/org/model/resolve/{SHA}/(.+)", self.path.partition("?")[0])
        if not match or not (self.server.folder / match[1]).is_file():
            return self._refuse(404, "EntryNotFound")
        data = (self.server.folder / match[1]).read_bytes()
        return self._send(200, data, self._identity(data))

    def _identity(self, data: bytes) -> dict[str, str]:
        return {"ETag": f'"{sha256(data).hexdigest()}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}

    def _info(self) -> None:
        siblings = [{"rfilename": f.name, "size": f.stat().st_size} for f in self.server.folder.iterdir()]
        self._send(200, json.dumps({"id": "org/model", "sha": SHA, "siblings": siblings}).encode())

    def _tree(self) -> None:
        files = [(file.name, file.read_bytes()) for file in self.server.folder.iterdir()]
        rows = [{"type": "file", "path": n, "size": len(d), "oid": sha256(d).hexdigest()[:40]} for n, d in files]
        self._send(200, json.dumps(rows).encode())

    def _gated(self) -> None:
        self._refuse(403, "GatedRepo")

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _file(self, name: str) -> None:
        whole = data = (self.server.folder / name).read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        status, headers = 200, self._identity(whole)
        if asked and self.server.ranges:
            data, status = whole[int(asked[1]) : int(asked[2] or len(whole) - 1) + 1], 206
            headers["Content-Range"] = f"bytes {asked[1]}-{int(asked[1]) + len(data) - 1}/{len(whole)}"
        only = self.server.break_after if 0 < self.server.break_after < len(data) else len(data)
        self.server.break_after = 0 if only < len(data) else self.server.break_after
        self.server.sent[name] = self.server.sent.get(name, 0) + only
        self._send(status, data, headers, only)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, only: int | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:only])
        if only is not None and only < len(body):
            self.close_connection = True


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


def test_quantize_downloads_and_resumes(
    hub: Hub, make_folder: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download that breaks off is taken up where it was left, and the result is that of the local folder."""
    folder = make_folder(name="repo")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle that no one asked for")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)  # what a break loses at most
    planned = quantry.quantize("org/model", tmp_path / "remote", preset="w8a8", dry_run=True)
    assert planned.bytes > 0
    header = 8 + struct.unpack("<Q", (folder / "model.safetensors").read_bytes()[:8])[0]
    assert hub.sent.pop("model.safetensors") == header, "a dry run fetches headers alone"
    hub.break_after = 50_000
    quantry.quantize("org/model", tmp_path / "remote", preset="w8a8")
    quantry.quantize(folder, tmp_path / "local", preset="w8a8")
    assert hub.break_after == 0
    size = (folder / "model.safetensors").stat().st_size
    assert hub.sent["model.safetensors"] == header + size, "the part that had come was fetched again"
    assert "pytorch_model.bin" not in hub.sent
    written = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("remote", "local")]
    assert written[0] == written[1]


def test_gguf_from_and_to_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run reads config and tokenizer but no weights; the file is that of a local model; and it turns back."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    shutil.copytree(demo_folder(), hub.folder)
    planned = quantry.quantize("org/model", tmp_path / "out", preset="gguf-q8_0", dry_run=True)
    assert hub.sent["model.safetensors"] < 100_000
    quantry.quantize("org/model", tmp_path / "out", preset="gguf-q8_0")
    quantry.quantize("demo", tmp_path / "local", preset="gguf-q8_0")
    ours, theirs = tmp_path / "out" / "model-Q8_0.gguf", tmp_path / "local" / "demo-Q8_0.gguf"
    tensors = [gguf.GGUFReader(file).tensors for file in (ours, theirs)]
    assert planned.bytes == sum(int(tensor.n_bytes) for tensor in tensors[0])
    assert all(np.array_equal(one.data, other.data) for one, other in zip(*tensors, strict=True))
    shutil.rmtree(hub.folder)
    hub.folder.mkdir()
    ours.rename(hub.folder / ours.name)
    with pytest.raises(QuantryError, match="changed between its header and its download"):  # the cache has another
        quantry.convert(f"org/model:{ours.name}", tmp_path / "back", to="bf16")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    quantry.convert(f"org/model:{ours.name}", tmp_path / "back", to="bf16")
    assert inspect(tmp_path / "back").parameters == planned.parameters


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
        ("org/bad--name-", "not a hub id"),
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
