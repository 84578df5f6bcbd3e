"""The facts of engines: read without importing one, and consistent with each other."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from quantry.devices.catalogue import parse
from quantry.engines.contract.catalogue import Engine, engine_facts, engines, ranked, usual, verifying
from quantry.engines.contract.options import Serving
from quantry.jobs.load.switches import NAMES
from quantry.planning.memory.terms import cache_type, terms


@pytest.mark.parametrize("known", engines().values(), ids=engines())
def test_facts_agree_with_each_other(known: Engine) -> None:
    assert set(known.usual_for) <= set(known.formats)
    assert set(known.plan.formats) <= set(known.formats)
    assert known.own_format is None or known.own_format.name in known.formats
    assert known.like is None or engine_facts(known.like).memory
    assert all(hasattr(Serving, name) for name in known.lacks)
    assert set(known.switches) <= set(NAMES)
    assert bool(known.kv_cache.tuned) == ("kv" in known.switches)
    for module in filter(None, (known.installation.embedded, known.server.script)):
        assert find_spec(module)
    if known.verify and not known.verify.embedded:
        assert (known.folder / known.verify.scorer).is_file()


@pytest.mark.parametrize("known", engines().values(), ids=engines())
def test_types_of_the_cache_are_known_to_the_memory_model(known: Engine) -> None:
    facts, constants = known.kv_cache, terms(known.name, None, parse("cpu").device)
    sizes = {name: cache_type(name, constants, "bf16").bits for name in {*facts.tuned, *facts.recipes.values()}}
    assert all(bits < 16 for bits in sizes.values())
    if facts.half:
        assert 8 <= cache_type(facts.half, constants, "bf16").bits < 9


def test_the_usual_engines() -> None:
    assert usual("gguf") == ["llama.cpp"]
    assert usual("safetensors") == ["vllm", "transformers"]
    assert usual("bitsandbytes") == ["transformers"]
    assert usual("tensorrt-llm") == ["tensorrt-llm"]  # no engine claims it: all that load it
    assert usual("unheard-of") == []
    assert [known.name for known in ranked()][:2] == ["vllm", "llama.cpp"]
    assert list(verifying()) == ["vllm", "llama.cpp", "transformers"]


def test_reading_facts_imports_no_engine() -> None:
    code = (
        "import sys; from quantry.engines.contract.catalogue import engines; engines();"
        "print(*(name for name in sys.modules if name.startswith('quantry.engines.')))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) == {"quantry.engines.contract", "quantry.engines.contract.catalogue"}
