"""The probabilities of the 16-bit model on the text: computed once in float32, cached in compact form.

The cache keeps the k most probable tokens of each position. The k that is needed differs from model to model, so it is
measured: the same model with its linear weights rounded to 4 bits stands in for an artefact, and k is the smallest
power of two that shows 99 % of its divergence on a sample of positions. The full rows of the sample are kept too, so
that the shortfall of every artefact can be computed. The noise floor is the divergence that 16-bit arithmetic alone
causes: anything below it says nothing about quantization. Both are measured on the first tokens of a few windows, so
they add little to the cost of the run.

Every fingerprint has a folder in the cache. Its note is written last and holds checksums, so a damaged or incomplete
entry is recognized and computed again.
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
from quantry.blockwise.skeleton import WeightSource
from quantry.blockwise.walk import Walk, run
from quantry.errors import OutputError, QuantryError, WeightError
from quantry.methods.fits import absmax
from quantry.methods.rounders import nearest
from quantry.models.attention import text_config
from quantry.models.linears import QUANTIZED_PARTS
from quantry.models.parts import part_of
from quantry.models.writer import Entry, ShardWriter, safetensors_header
from quantry.numerics.grids import dequantize
from quantry.proof import divergence
from quantry.proof.divergence import Array, TopK, all_ids, full_kl, kl, scores_at
from quantry.proof.text import Window
from quantry.quantizing.sources import ModelSource, open_source
from quantry.report.stages import stages
from quantry.storage import VARIABLE, home, write_atomically
from quantry.storage.holding import Holder, hold
from quantry.storage.reading import read_json
from quantry.types import Activation, Grid, Progress

NOTED = ("vocabulary", "k", "recovered", "noise", "notes", "seconds", "run_seconds")
LAYOUT = 2  # version of the files below; increase it when their content or the measurement changes
DATA, NOTE, LOCK = "reference.safetensors", "reference.json", "lock"

KEPT_WHOLE = 8192  # for vocabularies up to this size k is the whole vocabulary
SMALLEST_K = 64
SHARE = 0.99  # of the exact divergence that the top k must show
SAMPLE_BYTES = 64 << 20
PROBES = 4  # windows that k and the noise floor are measured on, spread over all
PROBE_TOKENS = 256  # of each probe, for the choice of k
NOISE_TOKENS = 64  # of each probe; float16 takes ten times as long as float32 on a CPU that cannot multiply it
STAND_IN = Grid("int", 4, (1, 64))
NOISE_TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
NOISE_COSTS = {"bf16": 1, "f16": 10}  # of a token, against float32
HEAD_COST = 0.25  # of a token: its logits and their top k, against the blocks
BATCH, OTHER_BATCH = 4, 1

WEIGHT_FILES = (".safetensors", ".gguf")
WHOLE_FILES = ("config.json", "tokenizer.json")
HEAD_BYTES, SAMPLES, PIECE = 1 << 20, 64, 4096  # of a weight file, for the fingerprint


@dataclass(frozen=True, slots=True, eq=False)
class PositionSample:
    """Some positions with the log-probabilities of the whole vocabulary, ordered by window and row."""

    windows: Array  # (m,) int32
    rows: Array  # (m,) int32, counted over the scored positions of the window
    logp: Array  # (m, vocabulary) float32

    def pick(self, window: int, logits: Tensor, start: int) -> Tensor:
        """Returns the rows of a window's (tokens, vocabulary) logits that are in the sample."""
        rows = self.rows[self.windows == window].astype(np.int64)
        return logits[torch.from_numpy(rows + start - 1).to(logits.device)].cpu()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Reference:
    """A 16-bit model on some windows. The probabilities of a window are read from the cache on demand."""

    windows: tuple[Window, ...]
    vocabulary: int
    k: int
    recovered: float | None  # share of the stand-in's divergence that the top k show; None if it was not measured
    noise: Mapping[str, float]  # dtype -> mean divergence of its arithmetic, in nats
    notes: tuple[str, ...]
    seconds: float  # that the computation took
    run_seconds: float  # of these, for the windows themselves
    folder: Path

    @property
    def noise_floor(self) -> float:
        return max(self.noise.values(), default=0.0)

    @property
    def bytes(self) -> int:
        return (self.folder / DATA).stat().st_size

    @property
    def sample(self) -> PositionSample:
        with safe_open(self.folder / DATA, "numpy") as file:
            return PositionSample(*(file.get_tensor(f"sample.{name}") for name in ("windows", "rows", "logp")))

    def top_k(self, index: int) -> TopK:
        """Reads the top k of a window."""
        with safe_open(self.folder / DATA, "numpy") as file:
            values = [file.get_tensor(f"{index}.{name}") for name in ("logp", "tail", "next", "top")]
            if self.k < self.vocabulary:
                return TopK(file.get_tensor(f"{index}.ids").astype(np.int32), *values)
        return TopK(all_ids(len(values[0]), self.vocabulary), *values)


def reference(
    model: str | Path | ModelSource,
    windows: Sequence[Window],
    *,
    k: int | None = None,
    like: Reference | None = None,
    device: str = "cpu",
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Reference:
    """Returns the reference of a model on some windows from the cache (None: the user's), or computes and stores it.

    `like` is that of other windows of the same text: its k and noise floor are taken over rather than measured again.
    Raises QuantryError if there is no window or `k` is below 1, and OutputError if the cache cannot be written.
    """
    if not windows or (k is not None and k < 1):
        raise QuantryError(f"{len(windows)} windows with k = {k} leave nothing to measure", fix="ask for at least 1")
    source = model if isinstance(model, ModelSource) else open_source(model)
    folder = (cache or cache_folder()) / fingerprint(source, windows, k, like)
    with _locked(folder):
        builder = _Builder(source, tuple(windows), like.k if like else k, like, device, folder, progress)
        made = _load(folder, windows) or _built(builder, folder)
        hold(folder, made)
        return made


def _built(builder: "_Builder", folder: Path) -> Reference:
    """Computes a reference in the place of a damaged entry, or of one that a killed run left."""
    _clear(folder)
    try:
        return builder.build()
    except BaseException:
        _clear(folder)
        raise


def shortfall(reference: Reference, rows: Tensor) -> float:
    """Returns the share of an artefact's divergence outside the top k, from its logits at the sampled positions."""
    if reference.k >= reference.vocabulary:
        return 0.0
    return 1 - divergence.recovered(torch.from_numpy(reference.sample.logp), rows, [reference.k])[0]


def cache_folder() -> Path:
    """Returns the folder of the cache, in `~/.cache/quantry` or in the folder that QUANTRY_CACHE names."""
    return home() / "references"


def fingerprint(source: ModelSource, windows: Sequence[Window], k: int | None, like: Reference | None = None) -> str:
    """Returns a hash of everything a reference depends on: weights, tokenizer, windows, the choice of k, version."""
    method = [__version__, LAYOUT, k or [SHARE, SAMPLE_BYTES, PROBES, PROBE_TOKENS], [PROBES, NOISE_TOKENS]]
    method += [like.folder.name] if like else []
    digest = hashlib.sha256(json.dumps(method).encode())
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
    """Hashes the name, size, time, header and some samples of a weight file, without reading all of it."""
    stat = file.stat()
    digest = hashlib.sha256(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    with file.open("rb") as data:
        digest.update(data.read(HEAD_BYTES))
        for number in range(1, SAMPLES + 1):
            data.seek(max(0, stat.st_size * number // SAMPLES - PIECE))
            digest.update(data.read(PIECE))
    return digest.digest()


class StandIn:
    """A model with the linear weights of its blocks rounded to 4 bits: it stands for an artefact to choose k.

    They are rounded on the device.
    """

    activations: Mapping[str, Activation] = {}

    def __init__(self, source: WeightSource, device: str = "cpu") -> None:
        self.config, self.names = source.config, source.names
        self._source, self._device = source, device
        self._blocks = int(text_config(source.config)["num_hidden_layers"])

    def read(self, name: str) -> Tensor:
        weight = self._source.read(name)
        if weight.ndim < 2 or part_of(name, self._blocks) not in QUANTIZED_PARTS:
            return weight
        matrix = weight.to(self._device).float().reshape(-1, weight.shape[-1])
        return dequantize(nearest.round_weight(matrix, STAND_IN, absmax.fit(matrix, STAND_IN))).reshape(weight.shape)


class _Builder:
    """Computes a reference and writes it into its folder of the cache."""

    def __init__(
        self,
        source: ModelSource,
        windows: tuple[Window, ...],
        k: int | None,
        like: Reference | None,
        device: str,
        folder: Path,
        progress: Progress | None,
    ) -> None:
        self._source, self._windows, self._k, self._like, self._device = source, windows, k, like, device
        self._folder, self._pass = folder, "run"
        self._probes = sorted(set(np.linspace(0, len(windows) - 1, min(PROBES, len(windows))).round().astype(int)))
        self._shown = stages(progress, self._costs())

    def build(self) -> Reference:
        """Runs the model on all windows, chooses k, writes the top k, measures the noise, and writes the note last."""
        started = monotonic()
        walk = Walk(self._source, device=self._device, batch=BATCH)
        order = [*self._probes, *(index for index in range(len(self._windows)) if index not in self._probes)]
        for block in walk.blocks([self._windows[index].tokens for index in order]):
            self._report(block.index, walk.count, block.name)
        ran = monotonic() - started
        sample, vocabulary = self._sample(walk)
        self._pass = "k"
        k, share = self._choose(sample, vocabulary)
        self._pass, began = "head", monotonic()
        digest = self._write(walk, order, sample, k, vocabulary)
        ran += monotonic() - began
        written = Reference(self._windows, vocabulary, k, share, {}, (), 0.0, round(ran, 3), self._folder)
        noise, notes = (self._like.noise, ()) if self._like else self._noise(written)
        finished = replace(written, noise=noise, notes=notes, seconds=round(monotonic() - started, 3))
        _write_note(finished, digest)
        return finished

    def _sample(self, walk: Walk) -> tuple[PositionSample, int]:
        """Returns rows of the probes, which come first in the walk, and the size of the vocabulary."""
        vocabulary, rows, picked = 0, [], PositionSample(*[np.empty(0)] * 3)
        for index, logits in zip(self._probes, (logits for _, logits in walk.logits()), strict=False):
            if not vocabulary:
                vocabulary = logits.shape[1]
                picked = self._places(vocabulary)
            if not len(picked.rows):
                break
            rows.append(picked.pick(index, logits, self._windows[index].start).double().log_softmax(1).float())
        logp = torch.cat(rows) if rows else torch.empty(0, vocabulary)
        return replace(picked, logp=logp.numpy()), vocabulary

    def _places(self, vocabulary: int) -> PositionSample:
        """Returns positions spread evenly over the probes, without rows; none if the whole vocabulary is kept."""
        kept_whole = vocabulary <= KEPT_WHOLE if self._k is None else vocabulary <= self._k
        places = [(index, row) for index in self._probes for row in range(self._start_of(index, PROBE_TOKENS).scored)]
        room = 0 if kept_whole else min(len(places), max(1, SAMPLE_BYTES // (4 * vocabulary)))
        picked = np.array(places, np.int32)[np.linspace(0, len(places) - 1, room).round().astype(int)]
        return PositionSample(picked[:, 0].copy(), picked[:, 1].copy(), np.empty((0, vocabulary), np.float32))

    def _choose(self, sample: PositionSample, vocabulary: int) -> tuple[int, float | None]:
        """Returns the smallest k that shows SHARE of the stand-in's divergence, and the share that it shows."""
        if not len(sample.rows):
            return vocabulary, 1.0
        if self._k is not None:
            return self._k, None
        rows = [
            sample.pick(index, logits, self._windows[index].start)
            for index, logits in self._run(StandIn(self._source, self._device), PROBE_TOKENS, torch.float32, BATCH)
        ]
        exact, rounded = torch.from_numpy(sample.logp), torch.cat(rows)
        if full_kl(exact, rounded).mean() < divergence.ROUNDING:  # nothing was rounded, so k cannot be measured
            return vocabulary, 1.0
        sizes = [SMALLEST_K << power for power in range(32) if SMALLEST_K << power < vocabulary]
        shares = zip(sizes, divergence.recovered(exact, rounded, sizes), strict=True)
        return next(((k, share) for k, share in shares if share >= SHARE), (vocabulary, 1.0))

    def _write(self, walk: Walk, order: Sequence[int], sample: PositionSample, k: int, vocabulary: int) -> str:
        """Writes the top k of all windows, one after the other, and the sample; returns the checksum of the file."""
        entries = [entry for index in order for entry in _entries(index, self._windows[index].scored, k, vocabulary)]
        picked = {"windows": sample.windows, "rows": sample.rows, "logp": sample.logp}
        entries += [
            (f"sample.{name}", "F32" if name == "logp" else "I32", array.shape) for name, array in picked.items()
        ]
        header = safetensors_header(entries, {})
        with _writing(self._folder), ShardWriter(self._folder / DATA, header, entries) as writer:
            for place, logits in walk.logits():
                self._report(place, len(order), "the probabilities")
                window = self._windows[order[place]]
                kept = divergence.top_k(logits, window.tokens, window.start, k)
                for name, dtype, _ in _entries(order[place], window.scored, k, vocabulary):
                    _put(writer, name, getattr(kept, name.rpartition(".")[2]), dtype)
            for name, array in picked.items():
                _put(writer, f"sample.{name}", array, "F32" if name == "logp" else "I32")
            return writer.close()

    def _noise(self, written: Reference) -> tuple[dict[str, float], tuple[str, ...]]:
        """Measures the divergence that 16-bit arithmetic and another batch shape alone cause."""
        noise, notes = {}, []
        for name, dtype in NOISE_TYPES.items():
            self._pass = name
            try:
                divergences = [
                    self._noise_of(written, index, logits)
                    for index, logits in self._run(self._source, NOISE_TOKENS, dtype, OTHER_BATCH)
                ]
            except WeightError:
                notes.append(f"the reference overflows in {name}, which is left out of the noise floor")
                continue
            noise[name] = max(0.0, float(np.concatenate(divergences).mean()))
        return noise, tuple(notes)

    def _noise_of(self, written: Reference, index: int, logits: Tensor) -> Array:
        window = self._start_of(index, NOISE_TOKENS)
        exact = written.top_k(index).first(window.scored)
        return kl(exact, scores_at(logits, window.tokens, window.start, exact.ids))

    def _run(self, source: WeightSource, tokens: int, dtype: torch.dtype, batch: int) -> Iterator[tuple[int, Tensor]]:
        """Yields the index of each probe with the logits of its first tokens."""
        starts = [self._start_of(index, tokens).tokens for index in self._probes]
        for place, logits in run(source, starts, device=self._device, dtype=dtype, batch=batch, progress=self._report):
            yield self._probes[place], logits

    def _start_of(self, index: int, tokens: int) -> Window:
        """Returns the first tokens of a window, at least one of them scored."""
        window = self._windows[index]
        return Window(window.tokens[: max(tokens, window.start + 1)], window.start)

    def _costs(self) -> dict[str, float]:
        """Returns the tokens that each pass takes: the run, the stand-in, the head, one for each type of the noise."""
        tokens = sum(len(window.tokens) for window in self._windows)
        probed, noisy = (
            sum(len(self._start_of(index, count).tokens) for index in self._probes)
            for count in (PROBE_TOKENS, NOISE_TOKENS)
        )
        costs = {"run": tokens, "k": 0 if self._k else probed, "head": HEAD_COST * tokens}
        return costs | {name: 0 if self._like else noisy * NOISE_COSTS[name] for name in NOISE_TYPES}

    def _report(self, done: int, total: int, name: str) -> None:
        if report := self._shown[self._pass]:
            report(done, total, name)


def _entries(index: int, positions: int, k: int, vocabulary: int) -> list[Entry]:
    """Returns the stored tensors of a window; ids are stored only if k is less than the vocabulary."""
    ids = "U16" if vocabulary <= 1 << 16 else "I32"
    each: list[Entry] = [(f"{index}.logp", "F32", (positions, k))]
    each += [(f"{index}.{name}", "I32" if name == "top" else "F32", (positions,)) for name in ("tail", "next", "top")]
    return each if k == vocabulary else [(f"{index}.ids", ids, (positions, k)), *each]


def _put(writer: ShardWriter, name: str, array: Array, dtype: str) -> None:
    stored = np.ascontiguousarray(array, {"U16": "<u2", "I32": "<i4", "F32": "<f4"}[dtype])
    flat: Any = stored.reshape(-1).view(np.uint8)
    writer.write(name, memoryview(flat))


def _write_note(finished: Reference, digest: str) -> None:
    content = {name: getattr(finished, name) for name in NOTED} | {"data": digest}
    content["check"] = _checksum(content)
    with _writing(finished.folder):
        write_atomically(finished.folder / NOTE, json.dumps(content, indent=1).encode())


def _load(folder: Path, windows: Sequence[Window]) -> Reference | None:
    """Reads a reference from the cache; returns None if it is missing, incomplete or damaged."""
    try:
        content = read_json(folder / NOTE, fix="remove it")
        check = content.pop("check")
        with (folder / DATA).open("rb") as file:
            data = hashlib.file_digest(file, "sha256").hexdigest()
        if check != _checksum(content) or data != content.pop("data"):
            return None
        return Reference(windows=tuple(windows), folder=folder, **{**content, "notes": tuple(content["notes"])})
    except (OSError, QuantryError, KeyError, TypeError):
        return None


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _clear(folder: Path) -> None:
    for file in folder.glob("reference.*"):
        file.unlink()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lets one process at a time compute a reference; the others wait and then load it."""
    holder = Holder()
    with _writing(folder):
        hold(folder, holder)
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
            f"cannot write the reference to {folder}: {error.strerror}",
            fix=f"set the environment variable {VARIABLE} to a writable folder with free space",
        ) from error
