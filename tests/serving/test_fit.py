"""Memory, cores and containers."""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from quantry import devices
from quantry.devices.host import physical_cores
from quantry.engines.contract.command import Command
from quantry.engines.contract.options import Serving
from quantry.errors import QuantryError
from quantry.planning.deployment import Deployment, Settings
from quantry.planning.memory.footprint import footprint
from quantry.planning.models import find_model
from quantry.planning.models import open_model as planned_model
from quantry.report.sizes import human
from quantry.serving import container, embedded, select
from quantry.serving.fit import CONTEXT, fitted
from quantry.types import Workload


def large(**more: Any) -> tuple[select.ServedModel, Serving]:
    """Llama 3.1 8B in 16 bit: 15 GiB of weights and 128 KiB a token."""
    checkpoint = planned_model("llama-3.1-8b")
    model = select.ServedModel("llama-3.1-8b", Path("m"), "safetensors", "m", checkpoint)
    return model, Serving(model="m", format="safetensors", engine="vllm", version="0.32.0", platform="cuda", **more)


def test_memory_that_is_not_there() -> None:
    assert find_model("llama-3.1-8b")
    machine = devices.hardware("RTX 4090")
    model, serving = large(context=65536, parallel=4)
    planned = Deployment(
        planned_model("llama-3.1-8b"), None, "vllm", machine.device, "0.32.0", settings=Settings(sequences=4)
    )
    needed = footprint(planned, Workload(65536, 4, prompt=65536))
    with pytest.raises(QuantryError) as caught:
        fitted(serving, model, machine)
    for part in (needed.weights, needed.kv_cache, needed.per_device):
        assert human(part) in str(caught.value)
    words = str(caught.value).partition("this would fit: ")[2].split()
    names = {"--context": "context", "--parallel": "parallel", "--kv": "kv"}
    change: dict[str, Any] = {
        names[flag]: value if flag == "--kv" else int(value)
        for flag, value in zip(words[::2], words[1::2], strict=True)
    }
    assert change
    fitted(replace(serving, **change), model, machine)  # what is named does fit
    with pytest.raises(QuantryError, match="quantize it to fewer bits"):
        fitted(serving, model, devices.hardware("RTX 3060"))


def test_a_context_is_chosen_that_fits() -> None:
    model, serving = large(parallel=32)
    roomy, _ = fitted(serving, model, devices.hardware("H100"))
    tight, needed = fitted(serving, model, devices.hardware("RTX 4090"))
    assert roomy.context == CONTEXT
    assert tight.context is not None
    assert tight.context < CONTEXT
    assert needed is not None
    with pytest.raises(QuantryError, match="does not fit"):
        fitted(replace(serving, context=2 * tight.context), model, devices.hardware("RTX 4090"))


def test_finished_prompts_get_half_of_the_room_that_is_left() -> None:
    """llama.cpp would keep 8 GiB of them; where there is more than twice that, it is left alone."""
    model = select.ServedModel("llama-3.1-8b", Path("m"), "gguf", "m", planned_model("llama-3.1-8b"))
    serving = Serving(model="m", format="gguf", engine="llama.cpp", version="b11549", context=8192, parallel=1)
    machine = devices.hardware("cpu")

    def kept(gib_free: int) -> int | None:
        place = replace(machine.cpu, usable=gib_free << 30, free=None)
        return fitted(serving, model, replace(machine, cpu=place))[0].prompt_cache_mib

    _, needed = fitted(serving, model, replace(machine, cpu=replace(machine.cpu, usable=64 << 30, free=None)))
    assert needed is not None
    assert kept(64) is None
    assert kept(24) == (int(0.95 * (24 << 30)) - needed.per_device) // 2 >> 20
    assert embedded.parse(["--model", "m", "--cache-ram", "77"]).cache_ram_mib == 77


def test_physical_cores(tmp_path: Path) -> None:
    for number in range(8):  # four cores of two threads
        folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    assert physical_cores(tmp_path, range(8)) == 4
    assert physical_cores(tmp_path, [0, 4]) == 1
    assert physical_cores(tmp_path, [0, 1, 5]) == 2
    assert physical_cores(tmp_path, [20, 21]) == 2  # nothing is known of these
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("250000 100000\n")
    assert physical_cores(tmp_path, range(8)) == 2
    assert 1 <= physical_cores() <= len(os.sched_getaffinity(0))


def test_a_container_runs_the_same_command() -> None:
    command = Command(("vllm", "serve", "/m/x", "--port", "8000"), env={"VLLM_API_KEY": "sesame"})
    found = container.contained(
        command,
        "vllm/vllm-openai:v0.32.0",
        program="podman",
        name="quantry-8000",
        platform="cuda",
        mounts=[Path("/m/x")],
    )
    words = list(found.argv)
    assert words[:2] == ["podman", "run"]
    assert words[words.index("--entrypoint") :] == [
        "--entrypoint",
        "vllm",
        "vllm/vllm-openai:v0.32.0",
        *command.argv[1:],
    ]
    assert words[words.index("--volume") + 1] == "/m/x:/m/x:ro"
    assert words[words.index("--gpus") + 1] == "all"
    assert words[words.index("--env") + 1] == "VLLM_API_KEY"
    assert "sesame" not in " ".join(words)
    assert asdict(found)["env"] == {"VLLM_API_KEY": "sesame"}
    with pytest.raises(QuantryError, match="cannot be run from an image"):
        container.contained(
            replace(command, files={"a": "b"}), "i", program="docker", name="n", platform="cpu", mounts=[]
        )
