"""The decision: every recommendation of published guides reproduced or overridden with a reason, commands that engines take,
a stable JSON, refusals with what is nearest, and tables whose every cell is answered."""

import json
import re
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from command import command, imported, process
from demo_artefacts import quantized_demo
from depth import cases, deep
from planning import make_plan
from planning.named_facts import named_facts
from quantry.devices.catalogue import catalogue, parse
from quantry.engines.contract.catalogue import engine_facts, engines, flags
from quantry.engines.contract.options import Serving
from quantry.errors import UnknownNameError
from quantry.jobs.quantize import quantize
from quantry.models.reader import demo_folder
from quantry.planning import matrices, rules
from quantry.planning.candidates import find
from quantry.planning.commands import PlannedArtefact, commands
from quantry.planning.conditions import agrees
from quantry.planning.load import LoadOptions
from quantry.planning.models import open_model
from quantry.planning.plan import Plan, plan
from quantry.planning.request import PlanOptions, Request, read_request
from quantry.quantizing.recipe import presets

GOLDENS = Path(__file__).parent
CASES = json.loads((GOLDENS / "plan_cases.json").read_text())
ADVICE = matrices.cases()
SHOWN = json.loads((GOLDENS / "plan_shown.json").read_text())
REQUEST_FACTS = {
    "use", "platform", "family", "capability", "tier", "kind", "devices", "device_gib", "parameters", "vision", "experts", "remote_code",
    "context", "concurrency", "sixteen_fits",
}  # fmt: skip
OPTION_FACTS = {
    "preset", "format", "scheme", "bits", "zero_points", "inputs", "calibrated", "engine", "kernel", "kv", "tensor_parallel",
    "replicas", "offloaded", "as_is",
}  # fmt: skip


def request_of(model: str, **options: Any) -> Request:
    """What `plan` makes of its arguments."""
    load = {field.name: options.pop(field.name) for field in fields(LoadOptions) if field.name in options}
    return read_request(model, open_model(model), PlanOptions(**options, load=LoadOptions(**load)))


def facts_of(found: Plan, number: int = 0) -> dict[str, Any]:
    """What a case may expect of an option."""
    one = found.options[number]
    return {
        "scheme": one.scheme,
        "engine": one.engine,
        "format": one.format,
        "bits": presets()[one.preset].scheme.weight.bits,
        "kv": one.kv_cache_type,
        "tensor_parallel": one.layout["tensor_parallel"],
        "offloaded": any("memory of the host" in warning for warning in one.warnings),
    }


# ---- common advice ----


@pytest.mark.parametrize("case", cases(ADVICE, ADVICE[::5]), ids=lambda case: case["id"])
def test_common_advice_is_reproduced_or_overridden(case: dict[str, Any]) -> None:
    found = plan(**case["ask"])
    assert make_plan.choice(found) == CASES[case["id"]]
    reproduced = agrees(case["expect"], facts_of(found), {})
    assert reproduced != ("overridden" in case), make_plan.choice(found)
    serve = found.options[0].commands["serve"]
    assert set(case.get("flags", ())) <= set(serve)
    assert any(case.get("warns", "") in warning for warning in ("", *found.options[0].warnings))
    for option in found.options:
        assert option.preset in presets()
        assert option.memory["per_device"] <= option.memory["limit"]


def test_every_part_of_the_guides_has_its_cases() -> None:
    ids = Counter(case["id"].partition(":")[0].split()[0] for case in ADVICE)
    assert ids["hardware"] >= 7  # section 3: seven rows
    assert ids["use"] >= 6  # section 3: six rules
    assert ids["size"] == 6
    assert ids["scenario"] >= 4  # section 12
    assert ids["stack"] == 9  # section 15
    assert ids["two"] == 3
    assert ids["engine"] >= 7  # "when to use which engine": seven rows
    assert ids["tree"] >= 4  # four branches
    assert len(CASES) == len(ADVICE)
    assert all(len(case["overridden"]) > 40 for case in ADVICE if "overridden" in case)


@pytest.mark.parametrize("name", cases(SHOWN, ("70B on two RTX 3090", "70B on an M2", "experts", "medical")))
def test_what_the_issue_asks_to_show(name: str) -> None:
    ask = {key: value for key, value in SHOWN[name].items() if key == "ask"}["ask"]
    expected = {key: value for key, value in SHOWN[name].items() if key != "ask"}
    assert make_plan.first(plan(**ask)) == expected


def test_the_numbers_of_70b_on_two_consumer_gpus() -> None:
    """By hand: 80 layers with 8 KV heads of 128, K and V of 2 bytes, 4096 tokens; 4-bit codes and scales of 68.45 billion
    weights in the layers, embedding and head in 16 bit."""
    found = plan("llama-3.1-70b", gpu="2x RTX 3090", context=4096).options
    option = next(one for one in found if one.preset == "w4a16" and one.engine == "vllm")
    assert option.memory["kv_cache"] == 80 * 8 * 128 * 2 * 2 * 4096
    layers = 80 * (8192 * (8192 * 2 + 1024 * 2) + 3 * 8192 * 28672)
    outside = 2 * 128256 * 8192 * 2
    assert option.memory["weights"] == pytest.approx(layers * (0.5 + 2 / 128) + outside, rel=0.005)
    parts = ("weights", "kv_cache", "activations", "overhead")
    assert option.memory["total"] == sum(option.memory[name] for name in parts) == sum(option.memory["parts"].values())


def test_fp8_gives_way_where_it_leaves_no_room() -> None:
    """One H100 holds 70B in FP8 and hardly a sequence; two hold it well."""
    one, two = (plan("llama-3.1-70b", gpu=gpu, use="high-throughput").options[0] for gpu in ("H100", "2x H100"))
    assert one.scheme == "w4a16"
    assert any("fp8-dynamic would be the choice" in reason for reason in one.reasons)
    assert two.scheme == "fp8"
    assert two.layout["concurrency"] == 64


def test_medical_use_never_goes_below_8_bits() -> None:
    found = plan("llama-3.1-8b", gpu="RTX 3060 12GB", use="legal")
    assert found.options
    assert min(presets()[one.preset].scheme.weight.bits for one in found.options) == 8
    assert any("8 bits at the least" in row["why"] and row["fix"] for row in found.refused)
    assert found.options[0].commands["verify"][-4:] == ["--gate", "accuracy-critical", "--engine", "vllm"]


def test_a_small_model_is_warned_of_4_bits() -> None:
    options = plan("qwen2.5-0.5b", gpu="RTX 3090").options
    four = [one for one in options if presets()[one.preset].scheme.weight.bits == 4]
    assert four
    assert all(any("under 3 billion" in warning for warning in one.warnings) for one in four)
    assert options[0] not in four


def test_a_gguf_of_a_vision_model_is_no_first_choice() -> None:
    options = plan("qwen2.5-vl-7b", gpu="RTX 3090").options
    assert options[0].engine == "vllm"
    assert all(option.format != "gguf" for option in options)


def test_ready_files_are_planned_where_quantry_writes_none() -> None:
    for model, gpu, repo in (
        ("qwen2.5-vl-7b", "M2 16GB", "ggml-org/Qwen2.5-VL-7B-Instruct-GGUF:Q4_K_M"),
        ("deepseek-ai/DeepSeek-R1", "32 cores 768GB", "unsloth/DeepSeek-R1-GGUF:Q4_K_M"),
        ("openai/gpt-oss-20b", "M3 24GB", "ggml-org/gpt-oss-20b-GGUF"),
    ):
        option = plan(model, gpu=gpu, use="local").options[0]
        assert list(option.commands) == ["serve"]
        assert option.commands["serve"][:3] == ["llama-server", "--hf-repo", repo]
        assert any("ready file of others" in warning for warning in option.warnings)


def test_the_limit_of_macos_is_raised_only_where_nothing_fits() -> None:
    found = plan("gpt-oss-20b", gpu="M3 16GB", use="local")
    assert found.options
    assert any("iogpu.wired_limit_mb=13107" in note for note in found.notes)
    assert not any("iogpu" in note for note in plan("qwen2.5-7b", gpu="M3 16GB").notes)


def test_four_bits_are_calibrated() -> None:
    option = plan("llama-3.1-8b", gpu="RTX 3090").options[0]
    assert presets()[option.preset].calibrated


def test_replicas_share_the_load() -> None:
    option = plan("llama-3.1-8b", gpu="8x H100", use="high-scale-api").options[0]
    layout = option.layout
    assert layout["replicas"] * layout["tensor_parallel"] == 8
    serve = option.commands["serve"]
    if layout["replicas"] > 1:
        assert serve[serve.index("--data-parallel-size") + 1] == str(layout["replicas"])


def test_less_memory_never_gives_more_sequences() -> None:
    def sequences(budget: str) -> int:
        found = plan("llama-3.1-8b", gpu="RTX 3090", use="public-api", budget=budget, engine="vllm").options
        return max(one.layout["concurrency"] for one in found)

    counts = [sequences(size) for size in ("6.5GiB", "7GiB", "8GiB", "12GiB", "20GiB")]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_a_budget_is_kept() -> None:
    for option in plan("llama-3.1-8b", gpu="RTX 3090", budget="8GB").options:
        assert option.memory["per_device"] <= 8 * 10**9
        if option.engine == "vllm":
            share = float(option.commands["serve"][option.commands["serve"].index("--gpu-memory-utilization") + 1])
            assert share * parse("RTX 3090").device.usable <= 8 * 10**9


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("8gb", 8 * 10**9),
        (" 8 G ", 8 << 30),
        ("8gi", 8 << 30),
        ("1.5k", 1536),
        ("4096", 4096),
        (4096, 4096),
    ],
)
def test_budgets_as_people_write_them(text: str | int, size: int) -> None:
    """GB is 10^9 bytes and GiB 2^30, as in `quantize --budget`; a letter alone is binary, a number alone bytes."""
    assert request_of("demo", gpu="RTX 3090", budget=text).budget == size


def test_asked_concurrency_is_kept_or_said_to_be_less() -> None:
    asked = plan("llama-3.1-8b", gpu="RTX 3090", concurrency=16)
    assert {one.layout["concurrency"] for one in asked.options} == {16}
    for option in plan("llama-2-13b", gpu="RTX 3060 12GB", concurrency=64).options:
        assert option.layout["concurrency"] < 64
        assert any("64 at once are asked for" in warning for warning in option.warnings)


# ---- commands ----


def commands_of(engine: str, **changes: Any) -> dict[str, list[str]]:
    loaded = {"llama.cpp": ("gguf-q4_k_m", "gguf"), "ollama": ("gguf-q4_k_m", "gguf"), "onnxruntime": ("w4a16", "gptq"),
              "deepspeed": ("bf16", "safetensors")}  # fmt: skip
    name, form = loaded.get(engine, ("w4a16", "compressed-tensors"))
    artefact = PlannedArtefact("meta-llama/Llama-3.1-8B", presets()[name], changes.get("format", form))
    serving = Serving(
        engine=engine, version=engine_facts(engine).latest, model=artefact.served, format=artefact.format, platform="cuda",
        context=4096, parallel=8, bits=presets()[name].scheme.weight.bits,
    )  # fmt: skip
    return commands(artefact, replace(serving, **changes))


FULL = {"tensor_parallel": 2, "replicas": 2, "utilization": 0.5, "prefix_cache": True, "dtype": "float16"}


@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_every_flag_is_one_of_the_engine(engine: str, platform: str) -> None:
    kv = "q8_0" if engine == "llama.cpp" else "fp8" if engine == "vllm" else None
    full = FULL if engine != "onnxruntime" else FULL | {"tensor_parallel": 1}
    words = commands_of(engine, platform=platform, kv=kv, **full)["serve"]
    known = set(flags(engine))
    text = " ".join(words)
    used = {word for word in re.findall(r"(?<= )--?[a-z][\w-]*", text) if word not in ("-m", "-c")}
    used -= {"--model"} if "api_server" in text else set()  # of the module, not of `vllm serve`
    assert used <= known
    if kv:
        assert any(flag.endswith(f" {kv}") for flag in known)


def test_a_flag_that_a_version_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from quantry.engines.contract import command as module

    known = {name: flag for name, flag in flags("vllm").items() if name != "--max-num-seqs"}
    monkeypatch.setattr(module, "flags", lambda engine, version: known)
    with pytest.raises(UnknownNameError, match="vllm 0.* has no --max-num-seqs"):
        commands_of("vllm")


def test_a_value_that_a_flag_does_not_take_is_an_error() -> None:
    """A guide's --kv-cache-dtype int8 never was one."""
    with pytest.raises(UnknownNameError, match="--kv-cache-dtype of vllm .* takes no int8"):
        commands_of("vllm", kv="int8")


def test_commands_of_engines() -> None:
    """The words that the issues give: engines' own programs, quantry's own flags."""
    words = {engine: commands_of(engine)["serve"][:2] for engine in engines()}
    assert words["vllm"] == ["vllm", "serve"]
    assert words["llama.cpp"][0] == "llama-server"
    assert words["transformers"] == ["transformers", "serve"]
    assert words["tensorrt-llm"][0] == "trtllm-serve"
    assert words["tgi"][0] == "text-generation-launcher"
    made = commands_of("vllm", format="gptq")
    assert made["quantize"] == [
        "quantry", "quantize", "meta-llama/Llama-3.1-8B", "-o", "Llama-3.1-8B-w4a16-gptq", "--preset", "w4a16", "--format", "gptq",
    ]  # fmt: skip
    assert made["verify"][:5] == [
        "quantry", "verify", "Llama-3.1-8B-w4a16-gptq", "--reference", "meta-llama/Llama-3.1-8B",
    ]  # fmt: skip


def test_no_flag_of_old_is_used() -> None:
    gone = {"--swap-space", "--task", "--speculative-model", "--disable-log-requests", "--calculate-kv-scales"}
    for case in ADVICE[:20:5]:
        for option in plan(**case["ask"]).options:
            words = option.commands["serve"]
            assert not gone & set(words)
            if "--kv-cache-dtype" in words:
                assert words[words.index("--kv-cache-dtype") + 1] != "int8"


# ---- JSON, files, exit codes ----


def test_a_plan_is_written_through_no_link_and_names_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, shared, target = tmp_path / "jane.doe", tmp_path / "shared", tmp_path / "plan.json"
    monkeypatch.setenv("HOME", str(home))
    (home / "models").mkdir(parents=True)
    (home / "models" / "tales").symlink_to(demo_folder())
    shared.write_text("of another")
    target.symlink_to(shared)
    done = command("plan", home / "models" / "tales", "--gpu", "RTX 4090", "-o", target)
    assert done.returncode == 0, done.stderr
    assert shared.read_text() == "of another"
    assert not target.is_symlink()
    assert "jane.doe" not in target.read_text()
    assert json.loads(target.read_text())["model"]["opened_as"] == "~/models/tales"
    assert command("quantize", "demo", "--plan", target, "-o", tmp_path / "out", "--dry-run").returncode == 0


def test_a_plan_goes_into_a_pipe_as_it_is(tmp_path: Path) -> None:
    done = process("plan", "demo", "--gpu", "RTX 4090", "-o", "/dev/stderr")
    assert json.loads(done.stderr)["model"]["source"] == "demo"
    assert Path("/dev/stderr").is_symlink()


def test_json_names_are_frozen(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    done = command("plan", "llama-3.1-8b", "--gpu", "RTX 4090", "--json", "-o", str(target))
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert found == json.loads(target.read_text())
    assert set(found) == {
        "schema", "model", "hardware", "use", "workload", "budget", "options", "refused", "nearest", "notes",
    }  # fmt: skip
    option = found["options"][0]
    assert set(option) == {
        "preset", "format", "group", "scheme", "engine", "version", "kernel", "kv_cache_type", "layout", "commands", "memory",
        "speed", "cost", "load", "speculation", "quality", "job", "score", "reasons", "warnings",
    }  # fmt: skip
    assert set(option["commands"]) == {"quantize", "verify", "serve"}
    assert set(option["memory"]) == {
        "weights", "kv_cache", "activations", "overhead", "total", "per_device", "limit", "device", "host", "parts",
    }  # fmt: skip
    assert set(option["speed"]) == {
        "decode_tokens_per_s", "decode_tokens_per_s_per_user", "prefill_tokens_per_s", "first_token_s", "bound", "spread", "measured",
        "basis",
    }  # fmt: skip
    assert all(
        {"engine", "presets", "why", "fix", "short"} == set(row) and row["why"] and row["fix"]
        for row in found["refused"]
    )
    totals = [one["score"]["total"] for one in found["options"]]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("gpu", [None, "RTX 3090"])
def test_a_plan_is_carried_out(gpu: str | None, tmp_path: Path) -> None:
    """plan -> quantize for the demo: on this machine, and for a GPU, where groups of 128 do not divide its layers."""
    found = plan("demo", gpu=gpu)
    four = next(one for one in found.options if presets()[one.preset].scheme.weight.bits <= 8)
    target = tmp_path / "plan.json"
    target.write_text(json.dumps(replace(found, options=(four,)).to_dict()))
    artefact = quantize("demo", tmp_path / "out", plan=target)
    assert (artefact.preset, artefact.format) == (four.preset, four.format)
    assert (tmp_path / "out/quantry.json").exists()
    assert artefact.bytes == pytest.approx(four.job["disk"], abs=4096)
    if four.format == "gguf":
        assert any(name in four.commands["serve"][2] for name in artefact.files if name.endswith(".gguf"))


def test_demo_on_this_machine() -> None:
    found = plan("demo")
    assert found.options[0].commands["quantize"][:3] == ["quantry", "quantize", "demo"]
    assert found.workload["context"] == 1024  # what it was made for


def test_nothing_fits_is_exit_code_1_with_what_does(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    done = command("plan", "llama-3.1-405b", "--gpu", "T4", "-o", target)
    assert done.returncode == 1
    assert "Nothing fits" in done.stdout
    assert "another device:" in done.stdout
    assert "a smaller model: llama-3.1-8b" in done.stdout
    assert "Traceback" not in done.stderr
    near = {row["what"]: row["change"] for row in json.loads(target.read_text())["nearest"]}
    assert find(request_of("llama-3.1-405b", gpu=near["another device"]))[0]
    assert find(request_of(near["a smaller model"], gpu="T4"))[0]


@pytest.mark.parametrize(
    ("arguments", "problem", "fix"),
    [
        (("lama-3.1-8",), "no such model", "llama-3.1-8b"),
        (("demo", "--gpu", "RTX 3091"), "unknown device", "RTX 3090"),
        (("demo", "--engine", "vlm"), "unknown engine", "vllm"),
        (("demo", "--for", "medcal"), "unknown use", "medical"),
        (("demo", "--budget", "much"), "'much' is no size of memory", "8GiB"),
        (("demo", "--budget", "0"), "no size of memory", "8GiB, 8GB (8 x 10^9 bytes), 8G (8 GiB) or a number of bytes"),
        (("demo", "--budget=-3GiB",), "no size of memory", "8GiB"),
        (("demo", "--budget", "4.5bpw"), "no size of memory", "8GiB"),
        (("demo", "--budget", "fits RTX 3060 at 8k"), "no size of memory", "8GiB"),
        (("demo", "--gpu", "T4", "--budget", "900GiB"), "more than", "larger machine"),
        (("llama-3.1-8b", "--gpu", "T4", "--budget", "1GiB"), "impossible", "more than"),
        (("demo", "--context", "4096"), "1024 tokens", "--context 1024"),
        (("demo", "--context", "0"), "--context 0", "1 to 1,073,741,824"),
        (("demo", "--concurrency", "-1"), "--concurrency -1", "1 to 1,048,576"),
        (("llama-3.1-8b", "--gpu", "M2 16GB", "--engine", "vllm"), "no build for Apple", "llama.cpp"),
        (("llama-3.1-8b", "--gpu", "T4", "--for", "vlm"), "no vision tower", "leave --for out"),
        (("demo", "-o", "/nowhere/plan.json"), "cannot write", "another file"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(arguments: tuple[str, ...], problem: str, fix: str) -> None:
    done = command("plan", *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert problem in line
    assert fix in line


def test_what_is_quantized_already_is_planned_as_it_is(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = quantized_demo(tmp_path_factory, "w8a8")
    option = plan(folder, gpu="RTX 3090").options[0]
    assert (option.preset, option.scheme, option.quality) == ("as-is", "w8a8", "as published")
    assert list(option.commands) == ["serve"]
    assert str(folder) in option.commands["serve"]


def test_planning_imports_no_torch() -> None:
    assert not {"torch", "transformers", "xllamacpp"} & imported("plan", "demo", "--json")


def test_a_person_reads_it_at_a_glance() -> None:
    done = command("plan", "llama-3.1-8b", "--gpu", "RTX 3090")
    for word in ("w4a16", "vllm serve", "quantry quantize", "quantry verify", "weights", "kv cache", "tok/s", "█"):
        assert word in done.stdout


# ---- the table of rules ----


def test_rules_are_readable_and_sourced() -> None:
    names = [rule.name for rule in rules.rules()]
    assert len(names) == len(set(names))
    for rule in rules.rules():
        assert rule.why, rule.name
        assert re.match(r"guide [1-4]|facts|feasibility|vLLM \d", rule.source), rule.name
        actions = [rule.prefer is not None, rule.avoid is not None, rule.require is not None, rule.warn is not None]
        assert sum(actions) == 1, rule.name
        assert (rule.weight > 0) == (rule.prefer is not None or rule.avoid is not None), rule.name
        assert not rule.require or rule.fix
        assert set(named_facts(rule.when)) <= REQUEST_FACTS, rule.name
        for conditions in (rule.prefer, rule.avoid, rule.require, rule.about):
            assert set(named_facts(conditions or {})) <= OPTION_FACTS, rule.name


def test_every_rule_is_about_some_case() -> None:
    """No row is dead: each holds for a request of the guides', or for one of these."""
    asked = [case["ask"] for case in ADVICE]
    asked += [{"model": "qwen2.5-0.5b", "gpu": "cpu"}, {"model": "llama-3.1-8b", "gpu": "T4"}]
    asked += [{"model": "llama-3.1-8b", "gpu": "Strix Halo"}]
    requests = [request_of(**ask).facts | {"sixteen_fits": True} for ask in asked]
    for rule in rules.rules():
        assert any(agrees(rule.when, facts, {}) for facts in requests), rule.name


def test_rules_name_what_exists() -> None:
    schemes = {
        "16-bit",
        "fp8",
        "nf4",
        "fp4",
        "llm-int8",
        "nvfp4",
        "mxfp4",
        "w8a8",
        "w8a16",
        "w4a16",
        "w4a8",
        "w3a16",
        "w2a16",
    }
    schemes |= {one.file_type for one in presets().values() if one.file_type}
    uses, names, tiers = set(rules.uses()), set(engines()), {rules.tier(device) for device in catalogue()}
    known = {
        "scheme": schemes,
        "use": uses,
        "engine": names,
        "tier": tiers,
        "family": {one.family for one in catalogue()},
    }
    for rule in rules.rules():
        for conditions in (rule.when, rule.prefer, rule.avoid, rule.require, rule.about):
            for name, allowed in known.items():
                wanted = (conditions or {}).get(name, [])
                wanted = wanted["not"] if isinstance(wanted, dict) else wanted
                assert set([wanted] if isinstance(wanted, str) else wanted) <= allowed, rule.name


def test_tiers() -> None:
    names = {"H100": "datacenter", "RTX 4090": "consumer", "A6000": "datacenter", "M2 16GB": "apple", "cpu": "cpu",
             "Jetson Orin 8GB": "edge", "Raspberry Pi 5": "edge", "RTX PRO 6000": "datacenter"}  # fmt: skip
    assert {name: rules.tier(parse(name).device) for name in names} == names


def test_presets_are_left_out_with_a_reason() -> None:
    assert "need no text" in (rules.left_out(presets()["fp8-static"]) or "")
    assert rules.left_out(presets()["fp8-dynamic"]) is None
    with pytest.raises(UnknownNameError, match="did you mean medical"):
        rules.find_use("medicla")


# ---- the tables ----

SIZES = {
    "memory": (6, 4),
    "hardware": (10, 5),
    "engines": (7, 9),
    "methods": (7, 6),
    "stack_engines": (7, 5),
    "stack": (9, 4),
}


TABLES = ("engines", "hardware", "formats", "methods", "memory")


@pytest.mark.parametrize("name", cases(TABLES, set(TABLES) - {"hardware"}))
def test_every_cell_is_answered(name: str) -> None:
    for table in matrices.matrix(name):
        if table.name in SIZES:
            assert (len(table.rows), len(table.columns)) == SIZES[table.name]
        for label, cells in table.rows.items():
            assert len(cells) == len(table.columns)
            for column, cell in zip(table.columns, cells, strict=True):
                assert cell.ours, (label, column)
                if table.name in ("engines", "hardware") and cell.advice in ("yes", "no", "partial"):
                    assert (cell.ours != cell.advice) == bool(cell.why), (label, column)
        text = matrices.markdown(name)
        assert all(f"| {label} |" in text for label in table.rows)


def cells_of(name: str) -> dict[tuple[str, str], str]:
    table = matrices.matrix(name)[0]
    rows = table.rows.items()
    return {(row, column): cell.ours for row, cells in rows for column, cell in zip(table.columns, cells, strict=True)}


def test_known_cells_of_engines() -> None:
    """Facts that stand in sources: vLLM's GGUF and bitsandbytes plug-ins, llama.cpp's formats."""
    cell = cells_of("engines")
    assert cell["vLLM", "AWQ"] == cell["vLLM", "GPTQ"] == cell["vLLM", "FP8"] == "yes"
    assert cell["vLLM", "GGUF"] == cell["llama.cpp", "AWQ"] == cell["TensorRT-LLM", "GGUF"] == "no"


@deep
def test_known_cells_of_hardware() -> None:
    """Ada multiplies FP8 itself, Ampere computes with FP8 weights in 16 bit, Volta not at all."""
    cell = cells_of("hardware")
    assert cell["RTX 4090 24GB", "FP8"] == "yes"
    assert cell["A100 80GB", "FP8"] == "partial"
    assert cell["V100 16GB", "FP8"] == "no"
    assert cell["H100 80GB SXM", "GGUF"] == "yes"


def test_matrix_command() -> None:
    done = command("matrix", "memory", "--json")
    assert done.returncode == 0
    (table,) = json.loads(done.stdout)
    assert table["rows"]["3B"][3]["ours"] == "RTX 3060 8GB"
    assert set(table["rows"]["3B"][3]) == {"ours", "advice", "why"}
    assert command("matrix", "memry").stderr.startswith("error: unknown matrix 'memry'; did you mean memory")
    assert "Methods" in command("matrix", "methods").stdout
