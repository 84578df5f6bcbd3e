"""How the weights of a model are stored, from its name or from its config alone.

A scheme is "bf16", "awq", "gptq-int4", "gptq-int8", "fp8", "fp8-block", "w4a16", "w8a8", "nvfp4", "mxfp4", "bnb-4bit",
"bnb-8bit" or "gguf:" and a type such as Q4_K_M.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from quantry.models.hub import HUB_ID
from quantry.storage import read_data

GGUF_TYPE = r"(?:i?q[1-8](?:_[a-z0-9]+)+|bf16|f16|f32|mxfp4(?:_moe)?|tq[12]_0)"
GGUF_FILE = re.compile(rf"(?:^|[-_.])({GGUF_TYPE})(?:-\d+-of-\d+)?\.gguf$", re.IGNORECASE)
GGUF_END = re.compile(rf"(?:-qat)?(?:[-_.]i1)?(?:[-_.](?P<type>{GGUF_TYPE}))?[-_.]gguf$", re.IGNORECASE)
QUANTIZED = ("quantization_config", "compression_config")


class Name(NamedTuple):
    """The name of a repository without its owner: what names the model, and how its weights are stored."""

    base: str
    scheme: str | None  # None if the name says nothing


def read_name(name: str, native: str = "bf16") -> Name:
    """Splits a name or a hub id into the name of the model and the scheme; `native` is how its publisher stores it.

    Example: `read_name("Qwen/Qwen2.5-7B-Instruct-AWQ")` is `("Qwen2.5-7B-Instruct", "awq")`.
    """
    hub = HUB_ID.fullmatch(name)
    owner, _, last = (hub["repo"] if hub else name).rpartition("/")
    gguf = GGUF_END.search(last)
    base = last[: gguf.start()] if gguf else last
    if hub and hub["file"]:
        kind = GGUF_FILE.search(hub["file"])
        return Name(base, f"gguf:{kind[1].upper()}" if kind else None)
    if gguf:
        defaults = _table()["gguf"]
        return Name(base, f"gguf:{(gguf['type'] or defaults.get(native, defaults['default'])).upper()}")
    end = _ends().search(last)
    if end is None:
        return Name(last, None)
    scheme = _table()["ends"][end[1].lower()]
    block = scheme == "fp8" and owner.lower() in _table()["owners"]["fp8-block"]
    return Name(last[: end.start()], "fp8-block" if block else scheme)


def config_scheme(config: Mapping[str, Any]) -> str:
    """Returns the scheme that a config.json states; a method without a scheme of its own goes by its own name."""
    settings = next((value for key in QUANTIZED if isinstance(value := config.get(key), Mapping)), None)
    if settings is None:
        return "bf16"
    method = str(settings.get("quant_method") or settings.get("quant_algo") or "unknown").lower()
    match method:
        case "gptq":
            return f"gptq-int{settings.get('bits', 4)}"
        case "bitsandbytes":
            return "bnb-8bit" if settings.get("load_in_8bit") else "bnb-4bit"
        case "fp8":
            return "fp8-block" if settings.get("weight_block_size") else "fp8"
        case "modelopt":
            return "nvfp4" if "FP4" in str(settings.get("quant_algo", "")).upper() else "fp8"
        case "compressed-tensors":
            return _compressed(settings)
    return method


def _compressed(settings: Mapping[str, Any]) -> str:
    """Returns the scheme of the first group of compressed-tensors."""
    groups = settings.get("config_groups")
    group: Any = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
    weights = group.get("weights") if isinstance(group, Mapping) else None
    packed = str(settings.get("format", "")).partition("-pack-")
    if packed[1]:
        return packed[0]  # nvfp4-pack-quantized, mxfp4-pack-quantized
    if not isinstance(weights, Mapping):
        return "compressed-tensors"
    if weights.get("type") == "float":
        return "fp8-block" if weights.get("strategy") == "block" else "fp8"
    return f"w{weights.get('num_bits', 4)}a{8 if group.get('input_activations') else 16}"


@cache
def _ends() -> re.Pattern[str]:
    longest_first = sorted(_table()["ends"], key=len, reverse=True)
    return re.compile(rf"[-_.]({'|'.join(map(re.escape, longest_first))})$", re.IGNORECASE)


@cache
def _table() -> dict[str, Any]:
    return read_data("quantry.planning", "stored.toml")
