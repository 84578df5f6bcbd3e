"""The command line: frozen flags and JSON names, errors in one line, and nothing heavy imported at the start."""

import json
import pickle
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import typer.main

import quantry
from command import command, imported, process
from quantry import registry
from quantry.cli import _flags, app, examples, groups
from quantry.cli._welcome import TITLES
from quantry.errors import UnknownNameError
from tiny_files import LLAMA, MakeFolder

HEAVY = {"torch", "transformers", "numpy", "gguf", "huggingface_hub", "safetensors", "tokenizers", "xllamacpp", "httpx"}


def test_public_names_are_frozen() -> None:
    assert set(quantry.__all__) == {
        "Anatomy", "Artefact", "Device", "Difference", "Hardware", "Proof", "QuantryError", "__version__", "adapt", "bench", "cache",
        "convert", "diff", "hardware", "inspect", "matrix", "merge", "plan", "presets", "quantize", "run", "sensitivity", "serve", "sweep",
        "tune", "verify",
    }  # fmt: skip
    for name in quantry.__all__:
        assert getattr(quantry, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = quantry.nothing


def test_flags_are_frozen() -> None:
    group = typer.main.get_command(app)
    flags = {
        name: sorted(option for parameter in command.params for option in parameter.opts)
        for name, command in group.commands.items()  # type: ignore[attr-defined]
    }
    assert flags == {
        "adapt": [
            "--alpha", "--batch", "--data", "--device", "--dry-run", "--epochs", "--held-back", "--json", "--length", "--output",
            "--overwrite", "--qlora", "--rank", "--rate", "--rslora", "--seed", "--steps", "--target", "-o", "model",
        ],
        "bench": [
            "--against", "--answer-tokens", "--api-key", "--chat", "--concurrency", "--dataset", "--guidellm-python", "--json", "--model",
            "--output", "--prompt-tokens", "--rate", "--requests", "--seconds", "--seed", "--shared-prefix", "--slo", "--timeout",
            "--tokenizer", "-o", "url",
        ],
        "cache": ["--clear", "--json", "--older-than", "--yes", "-y", "kind"],
        "chat": ["--api-key", "--max-tokens", "--model", "--system", "--temperature", "url"],
        "convert": ["--dry-run", "--json", "--output", "--overwrite", "--requantize", "--to", "-o", "source"],
        "diff": ["--device", "--json", "--length", "--text", "--windows", "a", "b"],
        "hardware": ["--gpu", "--json"],
        "inspect": ["--json", "model"],
        "matrix": ["--json", "name"],
        "plan": [
            "--answer", "--budget", "--concurrency", "--context", "--engine", "--for", "--gpu", "--images", "--json",
            "--max-cost", "--output", "--price", "--prompt", "--requests-per-second", "--shared-prefix", "--suggest", "--tpot",
            "--trace", "--ttft", "-o", "model",
        ],
        "merge": ["--dry-run", "--json", "--output", "--overwrite", "-o", "adapter", "base"],
        "presets": ["--json"],
        "quantize": [
            "--budget", "--data", "--device", "--distil", "--distil-steps", "--dry-run", "--format", "--gpu", "--group", "--imatrix",
            "--input-scales", "--json", "--keep-odd", "--kv", "--learn-rounding", "--length", "--low-memory", "--output", "--overwrite", "--plan", "--preset", "--recipe", "--report",
            "--rounder", "--rounding-steps", "--samples", "--sequential", "--transform", "-o", "model",
        ],
        "run": [
            "--ask", "--budget", "--context", "--device", "--engine", "--engine-python", "--for", "--gpu", "--json", "--output",
            "--port", "--proof-time", "--serve", "--text", "--verify", "--windows", "--yes", "-o", "-y", "model",
        ],
        "sensitivity": [
            "--data", "--device", "--format", "--grids", "--json", "--length", "--rounder", "--samples", "--transform", "model",
        ],
        "serve": [
            "--api-key", "--batch-tokens", "--cache-gib", "--chunked-prefill", "--context", "--draft", "--draft-tokens",
            "--dry-run", "--dtype", "--eager", "--engine", "--engine-bin", "--engine-python", "--engine-version", "--explain",
            "--head", "--host", "--image", "--json", "--kv", "--log", "--lookup", "--name", "--nodes", "--offload-layers",
            "--parallel", "--patience", "--pipeline-parallel", "--port", "--prefix-cache", "--quantization", "--show-log",
            "--tensor-parallel", "--threads", "--trust-remote-code", "--utilization", "extra", "model",
        ],
        "sweep": [
            "--data", "--device", "--engine", "--engine-python", "--gate", "--group", "--json", "--length", "--output", "--peers",
            "--presets", "--rounder", "--samples", "--text", "--verify-length", "--windows", "-o", "model",
        ],
        "tune": [
            "--answer-tokens", "--cache-gib", "--chat", "--concurrency", "--context", "--dataset", "--draft", "--engine",
            "--engine-bin", "--engine-python", "--guidellm-python", "--image", "--json", "--others", "--output", "--parallel",
            "--prompt-tokens", "--requests", "--shared-prefix", "--slo", "--switches", "--tensor-parallel", "--threads",
            "--tokenizer", "--utilization", "-o", "artefact", "extra",
        ],
        "verify": [
            "--context", "--device", "--engine", "--engine-python", "--gate", "--json", "--judge", "--judge-key",
            "--judge-model", "--junit", "--kv", "--length", "--limit", "--markdown", "--max-kl", "--max-perplexity-ratio", "--max-tokens", "--min-top1",
            "--output", "--prompts", "--proof-time", "--record", "--reference", "--report", "--tasks", "--text", "--windows", "-o",
            "artefact",
        ],
    }  # fmt: skip


def test_json_names_are_frozen(make_folder: MakeFolder) -> None:
    done = command("inspect", str(make_folder()), "--json")
    anatomy = json.loads(done.stdout)
    assert set(anatomy) == {
        "source", "format", "architecture", "parameters", "bytes", "bits_per_weight", "tensors", "blocks", "context_length",
        "kv_bytes_per_token", "kv_layers", "parts", "tied_head", "quantization", "tokenizer", "chat_template",
    }  # fmt: skip
    assert set(anatomy["parts"][0]) == {"name", "tensors", "parameters", "bytes", "dtypes"}
    assert set(anatomy["kv_layers"][0]) == {"kind", "layers", "bytes_per_token", "window", "state_bytes"}


def test_the_command_is_the_function(make_folder: MakeFolder) -> None:
    folder = make_folder()
    assert json.loads(command("inspect", str(folder), "--json").stdout) == json.loads(
        json.dumps(quantry.inspect(folder).to_dict())
    )


def test_help_imports_nothing_heavy() -> None:
    assert not imported("--help") & HEAVY
    assert not imported("quantize", "--help") & {"torch", "transformers"}


WRONG = {
    "preset": ("quantize", "demo", "-o", "out", "--preset", "nonsense"),
    "model": ("quantize", "nothing", "-o", "out", "--preset", "awq"),
    "artefact": ("verify", "nothing"),
    "gate": ("verify", "demo", "--gate", "nonsense"),
    "file of verify": ("verify", "demo", "--junit", "/"),
    "preset of convert": ("convert", "demo", "-o", "out", "--to", "gguf", "--requantize", "nonsense"),
    "engine of verify": ("verify", "demo", "--engine", "tgi"),
    "cache of verify": ("verify", "demo", "--reference", "demo", "--engine", "vllm", "--kv", "q8_0"),
    "presets": ("sweep", "demo", "-o", "out", "--presets", "w4a16:group=64,nonsense"),
    "text": ("diff", "demo", "demo", "--text", "nothing.txt"),
    "engine": ("run", "demo", "--engine", "nonsense"),
    "data": ("sensitivity", "demo", "--data", "nothing.txt"),
    "data of adapt": ("adapt", "demo", "--data", "nothing.jsonl", "-o", "out"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_word_is_answered_before_torch_is_imported(wrong: str) -> None:
    done = command(*WRONG[wrong])
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert not imported(*WRONG[wrong]) & {"torch", "transformers", "matplotlib"}


def test_help_lists_what_may_be_given() -> None:
    """Names of plug-ins and of rows of data come from where they are defined; no help text is left with a placeholder."""
    shown = {name: _flags.filled(parameter.help) for name, parameter in parameters("quantize").items()}
    for flag in ("format", "rounder", "transform"):
        room = f"quantry.{flag}s" if flag == "format" else f"quantry.methods.{flag}s"
        assert all(choice in shown[flag] for choice in registry.choices(room)), shown[flag]
    assert "accuracy-critical" in _flags.filled(parameters("verify")["gate"].help)
    assert "llama.cpp" in _flags.filled(parameters("plan")["engine"].help)
    page = command("quantize", "--help").stdout
    assert "gptq or nearest" in page
    assert "{" not in page.partition("Arguments")[2]
    for name in registry.choices("quantry.cli"):
        for parameter in parameters(name).values():
            assert "{" not in _flags.filled(parameter.help), parameter.help


def parameters(name: str) -> dict[str, Any]:
    """The parameters of a command by name."""
    group: Any = typer.main.get_command(app)
    return {parameter.name: parameter for parameter in group.commands[name].params}


def test_inspect_imports_no_torch(make_folder: MakeFolder, gguf_file: Path) -> None:
    assert not imported("inspect", str(make_folder()), "--json") & HEAVY
    assert not imported("inspect", str(gguf_file)) & {"torch", "transformers"}


def test_picture(make_folder: MakeFolder) -> None:
    done = command("inspect", str(make_folder()))
    assert done.returncode == 0
    for words in ("LlamaForCausalLM, 2 blocks", "tied to the embedding", "2 full layers", "MLP", "█", "missing"):
        assert words in done.stdout


def pickle_only(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    return folder


def truncated(folder: Path) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return folder


def without_weights(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    return folder


def without_config(folder: Path) -> Path:
    (folder / "config.json").unlink()
    return folder


def not_gguf(folder: Path) -> Path:
    (folder / "x.gguf").write_bytes(b"hello, this is no GGUF file at all")
    return folder / "x.gguf"


def misspelt(folder: Path) -> Path:
    return folder.parent / "modle"


FAULTS = {
    pickle_only: "only pickled weights",
    truncated: "but its header describes",
    without_weights: "holds no weights",
    without_config: "has no config.json",
    not_gguf: "starts with b'hell'",
    misspelt: "did you mean",
}


@pytest.mark.parametrize("spoil", FAULTS, ids=lambda spoil: spoil.__name__)
def test_bad_input_is_one_line_and_exit_2(make_folder: MakeFolder, spoil: "type") -> None:
    done = command("inspect", str(spoil(make_folder())))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert FAULTS[spoil] in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("model", ["", "no/such/place", "/no/such", "x" * 5000, "a\nb", "model.gguf", "org/name"])
def test_absent_models(model: str) -> None:
    done = process("inspect", model) if model == "org/name" else command("inspect", model)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr


def test_unreadable_values_do_not_leak_a_traceback(make_folder: MakeFolder) -> None:
    folder = make_folder({**LLAMA, "num_key_value_heads": {"a": [1]}, "tie_word_embeddings": 7})
    done = command("inspect", str(folder))
    assert (done.returncode, done.stderr.count("Traceback")) == (2, 0)


def test_unknown_plugin_is_answered_with_the_choices() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown cli 'inspct'; did you mean inspect\?"):
        registry.load("quantry.cli", "inspct")
    with pytest.raises(UnknownNameError, match="choose one of: adapt, bench, cache, chat, convert, diff, hardware"):
        registry.load("quantry.cli", "zzz")
    assert registry.load("quantry.cli", "inspect").__name__ == "quantry.cli.inspect"


def test_an_unknown_name_of_many_is_answered_with_the_closest() -> None:
    """Not with all 46 presets, and with the command that lists them."""
    done = command("quantize", "demo", "-o", "out", "--preset", "zzz")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert len(done.stderr) < 200
    assert "such as w8a8-zeroquant, w4a8-zeroquant, " in done.stderr
    assert done.stderr.endswith("; quantry presets lists all\n")
    assert command("quantize", "demo", "-o", "out", "--preset", "W4A16-GTPQ").stderr.endswith(
        "did you mean w4a16-gptq or w3a16-gptq or w4a16-awq?\n"
    )


def test_version() -> None:
    assert command("--version").stdout == f"quantry {quantry.__version__}\n"


def test_versions_for_a_bug_report_name_engines_and_no_path() -> None:
    shown = dict(line.split(maxsplit=1) for line in command("--version", "-v").stdout.splitlines())
    assert shown["quantry"] == quantry.__version__
    assert "xllamacpp" in command("--version", "-v").stdout
    assert str(Path.home()) not in str(shown)


def test_quantry_alone_shows_six_commands_with_an_example_each() -> None:
    shown = command()
    lines = [line.split()[1] for line in shown.stdout.splitlines() if line.startswith("  quantry ")]
    assert (shown.returncode, lines) == (0, ["run", "plan", "quantize", "verify", "serve", "chat"])


def test_every_command_has_a_group_and_examples_that_its_help_shows() -> None:
    assert set(groups().values()) == set(TITLES)
    for name, lines in examples().items():
        assert lines
        assert all(line.startswith(f"quantry {name} ") or line == f"quantry {name}" for line in lines), name
    page = command("convert", "--help").stdout
    assert all(f"  {line}\n" in page for line in examples()["convert"])
    assert "<bool>" not in page


def test_tokens_may_be_written_as_people_write_them() -> None:
    assert [_flags.token_count(text) for text in ("8192", "8k", "8K", " 1m ")] == [8192, 8192, 8192, 1 << 20]
    refused = command("plan", "demo", "--context", "8x")
    assert refused.returncode == 2
    assert "'8x' is no number of tokens" in refused.stderr


def test_no_module_hides_a_function() -> None:
    """Importing a module of the package sets an attribute of that name, which would replace a function."""
    rooms = {module.name for module in pkgutil.iter_modules(quantry.__path__)}
    assert not rooms & set(quantry.__all__)
    assert {"inspect", "quantize", "convert", "presets"} <= set(quantry.__all__)
