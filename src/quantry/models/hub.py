"""A repository on the Hugging Face hub, read by range requests: the headers of a 140 GB model cost some 100 kB.

huggingface_hub supplies the addresses, the login, the session and the errors; `HF_ENDPOINT` and `HF_TOKEN` work as
usual.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from pathlib import Path

from quantry.errors import HubError
from quantry.models.files import whole

HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[^:]+\.gguf))?", re.ASCII)
SNAPSHOT = re.compile(r"/models--(?P<repo>[^/]+)/snapshots/(?P<commit>[^/]+)(?:/|$)")
TIMEOUT_S = 20.0
PICKLES = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "original/*"]


class HubFiles:
    """The files of one revision of a hub repository, pinned to its commit at the first request."""

    def __init__(self, repo: str, revision: str | None = None) -> None:
        self.repo = repo
        self.label = repo if revision is None else f"{repo}@{revision}"
        self._revision = revision

    @cached_property
    def _commit_and_sizes(self) -> tuple[str, Mapping[str, int]]:
        from huggingface_hub import HfApi

        with _hub_errors(self.label):
            info = HfApi().model_info(self.repo, revision=self._revision, files_metadata=True, timeout=TIMEOUT_S)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if "/" not in file.rfilename}
        return info.sha or self._revision or "main", sizes

    @property
    def sizes(self) -> Mapping[str, int]:
        return self._commit_and_sizes[1]

    def read(self, name: str, start: int, length: int) -> bytes:
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

        if length == 0:
            return b""
        url = hf_hub_url(self.repo, name, revision=self._commit_and_sizes[0])
        headers = {**build_hf_headers(), "range": f"bytes={start}-{start + length - 1}"}
        with (
            _hub_errors(self.label),
            get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True) as response,
        ):
            hf_raise_for_status(response)
            data = _take(response.iter_bytes(), start if response.status_code == 200 else 0, length)
        return whole(data, f"{self.label}/{name}", start, length)

    def download(self, names: list[str] | None = None) -> Path:
        """Downloads all files of the revision except pickles (or those named) into the hub's own cache."""
        from huggingface_hub import snapshot_download

        with _hub_errors(self.label):
            folder = snapshot_download(
                self.repo, revision=self._commit_and_sizes[0], allow_patterns=names, ignore_patterns=PICKLES
            )
        return Path(folder) / names[0] if names else Path(folder)


def cached_snapshot(folder: Path) -> str | None:
    """Returns the repository and commit of a folder in the hub's cache, owner--name/commit; None for any other folder.

    Its files are links to blobs that other revisions share.
    """
    for path in (folder.absolute(), folder.resolve()):
        found = SNAPSHOT.search(path.as_posix())
        if found:
            return f"{found['repo']}/{found['commit']}"
    return None


def _take(chunks: Iterable[bytes], skip: int, length: int) -> bytes:
    """Returns `length` bytes after the first `skip`, and stops there if a server ignores the range."""
    data = bytearray()
    for chunk in chunks:
        data += chunk[min(skip, len(chunk)) :]
        skip -= min(skip, len(chunk))
        if len(data) >= length:
            break
    return bytes(data[:length])


@contextmanager
def _hub_errors(label: str) -> Iterator[None]:
    from huggingface_hub import errors, get_session

    transport = import_module(type(get_session()).__module__.partition(".")[0])  # httpx or httpx2
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(
            f"{label} is gated on the hub", fix="accept its licence there and set HF_TOKEN to your access token"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{label} has no such revision", fix="check the name after '@'") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{label} is neither a local path nor a repository on the hub",
            fix="check the spelling; for a private repository set HF_TOKEN",
        ) from error
    except errors.HFValidationError as error:
        raise HubError(f"{label} is not a hub id", fix="write it as owner/name") from error
    except (OSError, transport.HTTPError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise HubError(
            f"{label} is not a local path and the hub did not answer ({reason[0]})",
            fix="check the path, or the network and HF_ENDPOINT",
        ) from error
