"""Commands on files that are damaged at random: what each kind of file is read by, and how a command ends on it.

`run(kind, number, folder)` damages the files of a kind by the seed `number` and runs a command on them in a process of
its own, which a signal, a hang or too much memory ends alone. A command may do its work or say in one line why not; any other ending
is a fault.
"""

import json
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quantry
from killed_jobs import PRELOAD
from mutations import damaged_bytes, damaged_json, damaged_safetensors, damaged_toml, hostile_template
from tiny_models import write_model

SECONDS = 60.0
MEMORY = 6 << 30  # bytes that a command may map beyond what is imported
MEMORY_USED = 3 << 30  # bytes that it may use
DEMO = Path(quantry.__file__).parent / "demo"
MODELS = {"model": "LlamaForCausalLM", "experts": "Qwen3MoeForCausalLM", "gemma": "Gemma3ForCausalLM"}
RECIPE = """preset = "w4a16"
format = "compressed-tensors"
group = 64
rounder = "nearest"
fit = "mse"
kv = "fp8"

[[rules]]
match = "*.layers.0.*"
preset = "w8a16"

[[rules]]
match = "*.layers.1.mlp.*"
keep = true
"""
CHAT = {
    "messages": [
        {"role": "user", "content": "Tell me a story."},
        {"role": "assistant", "content": "There was a cat. " * 9},
    ]
}
Words = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """A file that is read, and the commands that read it.

    In their words MODEL, ART and FILE are what is damaged, OUT is the output, and WHOLE a model that is not damaged.
    """

    source: str  # a folder of `intact`
    file: str
    damage: Callable[[bytes, random.Random], bytes]
    commands: tuple[Words, ...]

    @property
    def weight(self) -> float:
        """How often a case is of this kind: less often if all its commands take seconds."""
        return max(map(_weight, self.commands))


def _weight(words: Words) -> float:
    if "--rounder" in words:
        return 0.2
    return (
        0.05
        if words[0] in ("sweep", "verify", "run")
        or (words[0] == "quantize" and not {"--dry-run", "--no-report"} & set(words))
        else 1.0
    )


MEASURE = ("--windows", "1", "--length", "64")
QUICK = ("--samples", "2", "--length", "64")
ON_MODELS: tuple[Words, ...] = (
    ("inspect", "MODEL"),
    ("plan", "MODEL", "--gpu", "RTX 3060"),
    ("quantize", "MODEL", "-o", "OUT", "--preset", "w8a16"),
    ("quantize", "MODEL", "-o", "OUT", "--preset", "w8a16", "--no-report"),
    ("quantize", "MODEL", "-o", "OUT", "--preset", "gguf-q4_0", "--no-report"),
    ("sweep", "MODEL", "-o", "OUT", "--presets", "w8a16,gguf-q8_0", "--windows", "1", "--verify-length", "64"),
)  # fmt: skip
ON_TOKENIZERS: tuple[Words, ...] = (
    ("quantize", "MODEL", "-o", "OUT", "--preset", "gguf-q8_0", "--no-report"),
    ("quantize", "MODEL", "-o", "OUT", "--preset", "w4a16", "--rounder", "gptq", *QUICK, "--no-report"),
    ("sweep", "MODEL", "-o", "OUT", "--presets", "gguf-q8_0", "--windows", "1", "--verify-length", "64"),
)  # fmt: skip
ON_ARTEFACTS: tuple[Words, ...] = (
    ("verify", "ART", "--reference", "WHOLE", *MEASURE),
    ("verify", "ART", "--reference", "WHOLE", *MEASURE, "--json"),
    ("serve", "ART", "--dry-run", "--engine", "llama.cpp"),
    ("inspect", "ART"),
)  # fmt: skip
KINDS = {
    "config": Kind("model", "config.json", damaged_json, ON_MODELS),
    "config of experts": Kind("experts", "config.json", damaged_json, ON_MODELS),
    "config of gemma": Kind("gemma", "config.json", damaged_json, ON_MODELS),
    "generation config": Kind("model", "generation_config.json", damaged_json, ON_TOKENIZERS),
    "safetensors": Kind("model", "model.safetensors", damaged_safetensors, ON_MODELS),
    "tokenizer": Kind("model", "tokenizer.json", damaged_json, ON_TOKENIZERS),
    "tokenizer config": Kind("model", "tokenizer_config.json", damaged_json, ON_TOKENIZERS),
    "artefact": Kind("gguf", "quantry.json", damaged_json, ON_ARTEFACTS),
    "folder artefact": Kind("folder", "quantry.json", damaged_json, ON_ARTEFACTS[:2]),
    "gguf": Kind(
        "gguf", "*.gguf", lambda data, chance: damaged_bytes(data, chance, first=20_000),
        (("inspect", "ART"), ("convert", "ART", "-o", "OUT", "--to", "bf16"), ON_ARTEFACTS[0]),
    ),
    "recipe": Kind("files", "recipe.toml", damaged_toml, (("quantize", "demo", "-o", "OUT", "--recipe", "FILE", "--dry-run"),)),
    "plan": Kind("files", "plan.json", damaged_json, (("quantize", "demo", "-o", "OUT", "--plan", "FILE", "--dry-run"),)),
    "sweep": Kind("sweep", "sweep.json", damaged_json, (("sweep", "WHOLE", "-o", "ART", "--presets", "gguf-q8_0", "--windows", "1", "--verify-length", "64"),)),
    "run": Kind("run", "run.json", damaged_json, (("run", "WHOLE", "-o", "ART", "--yes", "--no-serve", "--windows", "1", "--port", "0"),)),
    "chat template": Kind("model", "chat_template.jinja", hostile_template, (("quantize", "MODEL", "-o", "OUT", "--preset", "w4a16", "--rounder", "gptq", "--data", "CHATS", "--no-report", *QUICK),)),
    "sweep artefact": Kind("sweep", "gguf-q8_0/quantry.json", damaged_json, (("sweep", "WHOLE", "-o", "ART", "--presets", "gguf-q8_0", "--windows", "1", "--verify-length", "64"),)),
}  # fmt: skip


def make_intact(folder: Path) -> None:
    """Writes what is damaged later: tiny models, artefacts of one, a recipe, a plan, a sweep."""
    for name, architecture in MODELS.items():
        (folder / name).mkdir()
        write_model(folder / name, architecture, hidden_size=128, intermediate_size=128)  # whole groups of 128
        for file in ("chat_template.jinja", "generation_config.json"):
            shutil.copy(DEMO / file, folder / name)
    model = folder / "model"
    quantry.quantize(model, folder / "gguf", preset="gguf-q8_0")
    quantry.quantize(model, folder / "folder", preset="w8a16")
    quantry.sweep(model, folder / "sweep", presets="gguf-q8_0", windows=1, verify_length=64)
    (folder / "files").mkdir()
    (folder / "files" / "recipe.toml").write_text(RECIPE)
    (folder / "files" / "chats.jsonl").write_text((json.dumps(CHAT) + "\n") * 40)
    quantry.run(model, folder / "run", serve=False, windows=1, port=0)
    plan = quantry.plan("demo", gpu="RTX 3060").to_dict()
    read = {
        "model": plan["model"],
        "options": [{key: plan["options"][0][key] for key in ("preset", "format", "group")}],
    }
    (folder / "files" / "plan.json").write_text(json.dumps(read))


@dataclass(frozen=True, slots=True)
class Ending:
    """How a command ended: `code` is negative for a signal, None if it had to be stopped."""

    words: Words
    code: int | None
    errors: str
    seconds: float
    memory: int  # bytes at most

    @property
    def fault(self) -> str:
        """What is wrong with it; an empty text if nothing is."""
        if self.code is None:
            return f"still running after {SECONDS:.0f} s"
        if self.code < 0:
            return f"signal {-self.code}: {self.errors[-200:]}"
        if self.code not in (0, 1, 2) or "Traceback" in self.errors:
            return f"exit code {self.code}: {self.errors[-400:]}"
        if self.code == 2 and not self.errors.strip():
            return "exit code 2 without a word"
        return ""


def run(kind: Kind, number: int, intact: Path, folder: Path) -> Ending:
    """Damages a file by a seed in a copy under `folder`, and runs one of the commands that read it."""
    chance = random.Random(f"{kind.source} {kind.file} {number}")
    place = folder / kind.source
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(intact / kind.source, place)
    file = next(place.glob(kind.file))
    file.write_bytes(kind.damage(file.read_bytes(), chance))
    paths = {
        "MODEL": place,
        "ART": place,
        "FILE": file,
        "OUT": folder / "out",
        "WHOLE": intact / "model",
        "CHATS": intact / "files" / "chats.jsonl",
    }
    words = tuple(
        str(paths.get(word, word)) for word in chance.choices(kind.commands, [*map(_weight, kind.commands)])[0]
    )
    return run_words(words, folder)


def run_words(words: Words, folder: Path, memory: int = MEMORY, seconds: float = SECONDS) -> Ending:
    """Runs a command line in a process that forks from one with everything imported."""
    return start_words(words, folder, memory).ended(seconds)


@dataclass(frozen=True)
class Started:
    """A command line at work, with its own group of processes; its cache is `folder`/cache."""

    words: Words
    folder: Path
    child: Any
    began: float

    def ended(self, seconds: float = SECONDS) -> Ending:
        """Waits for its end, and stops it after some seconds."""
        self.child.join(seconds)
        stopped = self.child.is_alive()
        if stopped:
            self.child.kill()
            self.child.join()
        errors, usage = self.folder / "errors.txt", self.folder / "usage.txt"
        text = errors.read_text(errors="replace") if errors.exists() else ""
        memory = int(usage.read_text() or 0) if usage.exists() else 0
        code = None if stopped else self.child.exitcode
        return Ending(self.words, code, text, time.monotonic() - self.began, memory)


def start_words(words: Words, folder: Path, memory: int = MEMORY) -> Started:
    """Starts a command line; it may map `memory` bytes beyond what is imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "quantry.cli", "quantry.serving.prepare", "xllamacpp"])
    errors, usage = folder / "errors.txt", folder / "usage.txt"
    for file in (errors, usage):
        file.unlink(missing_ok=True)
    child = context.Process(target=_command, args=(words, errors, usage, memory))
    child.start()
    return Started(words, folder, child, time.monotonic())


def _command(words: Words, errors: Path, usage: Path, memory: int) -> None:
    """Runs in the child: the command line with its output in a file."""
    from quantry.cli import main

    os.setpgid(0, 0)
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "QUANTRY_CACHE": str(errors.parent / "cache")}
    tempfile.tempdir = os.environ["TMPDIR"] = str(_made(errors.parent / "tmp"))
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + memory, mapped + memory))
    sys.stdin, sys.stderr, sys.stdout = open(os.devnull), os.fdopen(2, "w"), os.fdopen(1, "w")  # noqa: PTH123, SIM115
    sys.argv = ["quantry", *words]
    code: Any = 1
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    sys.stderr.flush()
    usage.write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
    os._exit(code if isinstance(code, int) else 1)


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder
