"""What the 16-bit model says of the text: run once in float32, kept compactly, taken from a cache the next time.

Kept are the k most probable tokens of each position. How large k must be differs from model to model, so it is
measured: the same model with its linear weights rounded to 4 bits stands in for an artefact, and k is the smallest
power of two that finds 99 % of its divergence on a sample of positions. The full rows of the sample are kept too, so
that every artefact's own shortfall can be told. The noise floor is what 16-bit arithmetic alone does to the reference:
a divergence below it says nothing about quantization. Both are measured on the beginnings of a few windows, to cost
little beside the run.

The cache is a folder for each fingerprint; its note is written last and holds checksums, so what is damaged or only
half there is made anew.
"""

import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from quantry import __version__
from quantry.blockwise.walk import Source, Walk, run
from quantry.errors import OutputError, QuantryError, WeightError
from quantry.methods.fits import absmax
from quantry.methods.rounders import nearest
from quantry.models.attention import text_config
from quantry.models.linears import QUANTIZED_PARTS
from quantry.models.parts import part_of
from quantry.models.writer import Entry, ShardWriter, safetensors_header, write_atomically
from quantry.numerics.grids import dequantize
from quantry.proof import divergence
from quantry.proof.divergence import Array, Compact, all_ids, full_kl, kl, observe
from quantry.proof.sources import ModelSource, open_source
from quantry.proof.text import Window
from quantry.storage import VARIABLE, home
from quantry.types import Activation, Grid, Progress

NOTED = ("vocabulary", "k", "recovered", "noise", "notes", "seconds")
LAYOUT = 1  # of the files below; counted up when what they hold or how it is measured changes
DATA, NOTE, LOCK = "reference.safetensors", "reference.json", "lock"

KEPT_WHOLE = 8192  # vocabularies up to this size are kept whole
SMALLEST_K = 64
SHARE = 0.99  # of the full divergence that the compact one must find
SAMPLE_BYTES = 64 << 20
PROBES = 4  # windows, spread over all
PROBE_TOKENS = 256  # of each, for the choice of k
NOISE_TOKENS = 64  # of each; float16 takes ten times as long as float32 on a CPU that cannot multiply it
STAND_IN = Grid("int", 4, (1, 64))
NOISE_TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
BATCH, OTHER_BATCH = 4, 1

WEIGHT_FILES = (".safetensors", ".gguf")
WHOLE_FILES = ("config.json", "tokenizer.json")
HEAD_BYTES, SAMPLES, PIECE = 1 << 20, 64, 4096  # of a weight file, for the fingerprint


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Some positions with the log-probabilities of all tokens, ordered by window and row."""

    windows: Array  # (m,) int32
    rows: Array  # (m,) int32, among the scored positions of the window
    logp: Array  # (m, vocabulary) float32

    def pick(self, window: int, logits: Tensor, start: int) -> Tensor:
        """The rows of a window's (tokens, vocabulary) logits that are in the sample."""
        rows = self.rows[self.windows == window].astype(np.int64)
        return logits[torch.from_numpy(rows + start - 1).to(logits.device)].cpu()


@dataclass(frozen=True, slots=True)
class Reference:
    """A 16-bit model on some windows. What it says of each is read from the cache when it is asked for."""

    windows: tuple[Window, ...]
    vocabulary: int
    k: int
    recovered: float | None  # share of the stand-in's divergence that k tokens find; None where it was not measured
    noise: Mapping[str, float]  # type -> mean divergence of its arithmetic, in nats
    notes: tuple[str, ...]
    seconds: float  # that it took to make
    folder: Path

    @property
    def noise_floor(self) -> float:
        return max(self.noise.values(), default=0.0)

    @property
    def bytes(self) -> int:
        return (self.folder / DATA).stat().st_size

    @property
    def sample(self) -> Sample:
        with safe_open(self.folder / DATA, "numpy") as file:
            return Sample(*(file.get_tensor(f"sample.{name}") for name in ("windows", "rows", "logp")))

    def compact(self, index: int) -> Compact:
        """What is kept of a window."""
        with safe_open(self.folder / DATA, "numpy") as file:
            values = [file.get_tensor(f"{index}.{name}") for name in ("logp", "tail", "next", "top")]
            if self.k < self.vocabulary:
                return Compact(file.get_tensor(f"{index}.ids").astype(np.int32), *values)
        return Compact(all_ids(len(values[0]), self.vocabulary), *values)

    def compacts(self) -> Iterator[Compact]:
        """All windows in their order, one at a time."""
        return map(self.compact, range(len(self.windows)))


def reference(
    model: str | Path | ModelSource,
    windows: Sequence[Window],
    *,
    k: int | None = None,
    device: str = "cpu",
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Reference:
    """The reference of a model on some windows, from the cache (None: the user's) or made and put there."""
    if not windows or (k is not None and k < 1):
        raise QuantryError(f"{len(windows)} windows with k = {k} are nothing to measure on", fix="ask for at least 1")
    source = model if isinstance(model, ModelSource) else open_source(model)
    name = fingerprint(source, windows, k)
    folder = (cache or cache_folder()) / name
    with _locked(folder):
        found = _load(folder, windows)
        if found is None:
            _clear(folder)  # what is damaged, or was left by a run that was killed
            try:
                found = _Making(source, tuple(windows), k, device, folder, progress).make()
            except BaseException:
                _clear(folder)
                raise
    return found


def shortfall(reference: Reference, rows: Tensor) -> float:
    """The share of an artefact's divergence that k tokens miss, from its logits at the positions of the sample."""
    if reference.k >= reference.vocabulary:
        return 0.0
    return 1 - divergence.recovered(torch.from_numpy(reference.sample.logp), rows, [reference.k])[0]


def cache_folder() -> Path:
    """Where references are kept: in `~/.cache/quantry`, or where the environment says."""
    return home() / "references"


def fingerprint(source: ModelSource, windows: Sequence[Window], k: int | None) -> str:
    """A name that changes with all that a reference depends on: weights, tokenizer, text, the choice of k, version."""
    digest = hashlib.sha256(
        json.dumps(
            [__version__, LAYOUT, k or [SHARE, SAMPLE_BYTES, PROBES, PROBE_TOKENS], [PROBES, NOISE_TOKENS]]
        ).encode()
    )
    folder = source.path if source.path.is_dir() else source.path.parent
    for name in sorted(source.checkpoint.files):
        if name.endswith(WEIGHT_FILES):
            digest.update(_identity(folder / name))
        elif name in WHOLE_FILES:
            digest.update(name.encode() + b"\0" + (folder / name).read_bytes())
    for window in windows:
        digest.update(np.array([len(window.tokens), window.start, *window.tokens], "<i8").tobytes())
    return digest.hexdigest()[:32]


def _identity(file: Path) -> bytes:
    """What tells a file of weights from another without reading it all."""
    stat = file.stat()
    digest = hashlib.sha256(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    with file.open("rb") as data:
        digest.update(data.read(HEAD_BYTES))
        for number in range(1, SAMPLES + 1):
            data.seek(max(0, stat.st_size * number // SAMPLES - PIECE))
            digest.update(data.read(PIECE))
    return digest.digest()


class StandIn:
    """A model with the linear weights of its blocks rounded to 4 bits: some artefact, to choose k by."""

    activations: Mapping[str, Activation] = {}

    def __init__(self, source: Source) -> None:
        self.config, self.names = source.config, source.names
        self._source = source
        self._blocks = int(text_config(source.config)["num_hidden_layers"])

    def read(self, name: str) -> Tensor:
        weight = self._source.read(name)
        if weight.ndim < 2 or part_of(name, self._blocks) not in QUANTIZED_PARTS:
            return weight
        matrix = weight.float().reshape(-1, weight.shape[-1])
        return dequantize(nearest.round_weight(matrix, STAND_IN, absmax.fit(matrix, STAND_IN))).reshape(weight.shape)


class _Making:
    """One run of the reference, from the model to the cache."""

    def __init__(
        self,
        source: ModelSource,
        windows: tuple[Window, ...],
        k: int | None,
        device: str,
        folder: Path,
        progress: Progress | None,
    ) -> None:
        self._source, self._windows, self._k, self._device = source, windows, k, device
        self._folder, self._progress = folder, progress
        self._passes = 0
        self._probes = sorted(set(np.linspace(0, len(windows) - 1, min(PROBES, len(windows))).round().astype(int)))

    def make(self) -> Reference:
        """Runs the model on all windows, chooses k, keeps what k says, measures the noise; the note comes last."""
        begun = monotonic()
        walk = Walk(self._source, device=self._device, batch=BATCH)
        order = [*self._probes, *(index for index in range(len(self._windows)) if index not in self._probes)]
        for block in walk.blocks([self._windows[index].tokens for index in order]):
            self._tell(block.index, walk.count, block.name)
        self._passes = 1
        sample, vocabulary = self._sample(walk)
        k, share = self._choose(sample, vocabulary)
        self._passes = 2
        digest = self._keep(walk, order, sample, k, vocabulary)
        made = Reference(self._windows, vocabulary, k, share, {}, (), 0.0, self._folder)
        noise, notes = self._noise(made)
        made = replace(made, noise=noise, notes=notes, seconds=round(monotonic() - begun, 3))
        _write_note(made, digest)
        return made

    def _sample(self, walk: Walk) -> tuple[Sample, int]:
        """Rows of the probes, which the walk has first, and the size of the vocabulary."""
        vocabulary, rows, picked = 0, [], Sample(*[np.empty(0)] * 3)
        for index, logits in zip(self._probes, (logits for _, logits in walk.logits()), strict=False):
            if not vocabulary:
                vocabulary = logits.shape[1]
                picked = self._places(vocabulary)
            if not len(picked.rows):
                break
            rows.append(picked.pick(index, logits, self._windows[index].start).double().log_softmax(1).float())
        logp = torch.cat(rows) if rows else torch.empty(0, vocabulary)
        return replace(picked, logp=logp.numpy()), vocabulary

    def _places(self, vocabulary: int) -> Sample:
        """The positions of a sample, evenly over the probes; none where all of the vocabulary is kept."""
        kept_whole = vocabulary <= KEPT_WHOLE if self._k is None else vocabulary <= self._k
        places = [(index, row) for index in self._probes for row in range(self._begin(index, PROBE_TOKENS).scored)]
        room = 0 if kept_whole else min(len(places), max(1, SAMPLE_BYTES // (4 * vocabulary)))
        picked = np.array(places, np.int32)[np.linspace(0, len(places) - 1, room).round().astype(int)]
        return Sample(picked[:, 0].copy(), picked[:, 1].copy(), np.empty((0, vocabulary), np.float32))

    def _choose(self, sample: Sample, vocabulary: int) -> tuple[int, float | None]:
        """The smallest k that finds enough of the stand-in's divergence, and how much that is."""
        if not len(sample.rows):
            return vocabulary, 1.0
        if self._k is not None:
            return self._k, None
        seen = [
            sample.pick(index, logits, self._windows[index].start)
            for index, logits in self._run(StandIn(self._source), PROBE_TOKENS, torch.float32, BATCH)
        ]
        exact, rounded = torch.from_numpy(sample.logp), torch.cat(seen)
        if full_kl(exact, rounded).mean() < divergence.ROUNDING:  # nothing was rounded, so nothing can be told
            return vocabulary, 1.0
        sizes = [SMALLEST_K << power for power in range(32) if SMALLEST_K << power < vocabulary]
        found = zip(sizes, divergence.recovered(exact, rounded, sizes), strict=True)
        return next(((k, share) for k, share in found if share >= SHARE), (vocabulary, 1.0))

    def _keep(self, walk: Walk, order: Sequence[int], sample: Sample, k: int, vocabulary: int) -> str:
        """Writes what k tokens say of each window, one after the other; the checksum of the file."""
        entries = [entry for index in order for entry in _entries(index, self._windows[index].scored, k, vocabulary)]
        picked = {"windows": sample.windows, "rows": sample.rows, "logp": sample.logp}
        entries += [
            (f"sample.{name}", "F32" if name == "logp" else "I32", array.shape) for name, array in picked.items()
        ]
        header = safetensors_header(entries, {})
        with _writing(self._folder), ShardWriter(self._folder / DATA, header, entries) as writer:
            for place, logits in walk.logits():
                window = self._windows[order[place]]
                kept = divergence.compact(logits, window.tokens, window.start, k)
                for name, dtype, _ in _entries(order[place], window.scored, k, vocabulary):
                    _put(writer, name, getattr(kept, name.rpartition(".")[2]), dtype)
            for name, array in picked.items():
                _put(writer, f"sample.{name}", array, "F32" if name == "logp" else "I32")
            return writer.close()

    def _noise(self, made: Reference) -> tuple[dict[str, float], tuple[str, ...]]:
        """What 16-bit arithmetic and another batch shape alone do to the reference."""
        noise, notes = {}, []
        for name, dtype in NOISE_TYPES.items():
            try:
                found = [
                    kl(*self._beginnings(made, index, logits))
                    for index, logits in self._run(self._source, NOISE_TOKENS, dtype, OTHER_BATCH)
                ]
            except WeightError:
                notes.append(f"the reference overflows in {name}, which is left out of the noise floor")
                continue
            finally:
                self._passes += 1
            noise[name] = max(0.0, float(np.concatenate(found).mean()))
        return noise, tuple(notes)

    def _beginnings(self, made: Reference, index: int, logits: Tensor) -> tuple[Compact, divergence.Observed]:
        """What is kept of the beginning of a window, and what other logits say there."""
        window, kept = self._begin(index, NOISE_TOKENS), made.compact(index)
        part = slice(0, window.scored)
        kept = Compact(kept.ids[part], kept.logp[part], kept.tail[part], kept.next[part], kept.top[part])
        return kept, observe(logits, window.tokens, window.start, kept.ids)

    def _run(self, source: Source, tokens: int, dtype: torch.dtype, batch: int) -> Iterator[tuple[int, Tensor]]:
        """The logits of the beginnings of the probes, by the index of the window."""
        begins = [self._begin(index, tokens).tokens for index in self._probes]
        for place, logits in run(source, begins, device=self._device, dtype=dtype, batch=batch, progress=self._tell):
            yield self._probes[place], logits

    def _begin(self, index: int, tokens: int) -> Window:
        window = self._windows[index]
        return Window(window.tokens[: max(tokens, window.start + 1)], window.start)

    def _tell(self, done: int, blocks: int, name: str) -> None:
        """Blocks of all passes: the run, the stand-in, and those of the noise floor."""
        if self._progress:
            self._progress(self._passes * blocks + done, (2 + len(NOISE_TYPES)) * blocks, name)


def _entries(index: int, positions: int, k: int, vocabulary: int) -> list[Entry]:
    """The stored tensors of a window; the ids need not be stored where all are kept."""
    ids = "U16" if vocabulary <= 1 << 16 else "I32"
    each: list[Entry] = [(f"{index}.logp", "F32", (positions, k))]
    each += [(f"{index}.{name}", "I32" if name == "top" else "F32", (positions,)) for name in ("tail", "next", "top")]
    return each if k == vocabulary else [(f"{index}.ids", ids, (positions, k)), *each]


def _put(writer: ShardWriter, name: str, array: Array, dtype: str) -> None:
    stored = np.ascontiguousarray(array, {"U16": "<u2", "I32": "<i4", "F32": "<f4"}[dtype])
    flat: Any = stored.reshape(-1).view(np.uint8)
    writer.write(name, memoryview(flat))


def _write_note(made: Reference, digest: str) -> None:
    """The note that makes a cache entry whole."""
    content = {name: getattr(made, name) for name in NOTED} | {"data": digest}
    content["check"] = _check(content)
    with _writing(made.folder):
        write_atomically(made.folder / NOTE, json.dumps(content, indent=1).encode())


def _load(folder: Path, windows: Sequence[Window]) -> Reference | None:
    """A reference from the cache, if its bytes are those that were written."""
    try:
        content = json.loads((folder / NOTE).read_bytes())
        check = content.pop("check")
        with (folder / DATA).open("rb") as file:
            data = hashlib.file_digest(file, "sha256").hexdigest()
        if check != _check(content) or data != content.pop("data"):
            return None
        return Reference(windows=tuple(windows), folder=folder, **{**content, "notes": tuple(content["notes"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _check(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _clear(folder: Path) -> None:
    for file in folder.glob("reference.*"):
        file.unlink()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time makes a reference; another waits and then finds it made."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"cannot keep the reference in {folder}: {error.strerror}",
            fix=f"set the environment variable {VARIABLE} to a folder with room that can be written to",
        ) from error
