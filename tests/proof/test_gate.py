"""The gate: limits hold on the right side, by use, by preset and for the engine; nothing unmeasured passes."""

import math
import tomllib
from dataclasses import asdict
from importlib.resources import files

import pytest

from quantry.errors import QuantryError, UnknownNameError
from quantry.planning.rules import uses as planned_uses
from quantry.proof import gate
from quantry.proof.gate import Finding, judge, uses
from quantry.proof.interval import Interval
from quantry.quantizing.recipe import presets

TABLE = tomllib.loads(files("quantry.proof").joinpath("gates.toml").read_text())
SOUND = {"kl": 0.0167, "perplexity_ratio": 1.0146, "top1": 0.925}  # the demo model in Q4_K_M
EIGHT = {"kl": 0.0002, "perplexity_ratio": 1.0009, "top1": 0.991}  # and in W8A8


def verdict(findings: tuple[Finding, ...]) -> str:
    return gate.verdict([asdict(finding) for finding in findings])


def failing(findings: tuple[Finding, ...]) -> set[tuple[str, str]]:
    return {(finding.name, finding.rule) for finding in findings if not finding.ok}


def test_a_sound_artefact_passes() -> None:
    found = judge(SOUND, "general", "gguf-q4_k_m")
    assert verdict(found) == "pass"
    assert {(finding.name, finding.rule) for finding in found} == {
        ("kl", "use general"), ("perplexity_ratio", "use general"), ("top1", "use general"),
        ("kl", "4 bit preset"), ("perplexity_ratio", "4 bit preset"),
    }  # fmt: skip
    assert all(finding.source and finding.words and not finding.fix for finding in found)


@pytest.mark.parametrize(
    ("use", "name", "good", "bad"),
    [
        ("general", "perplexity_ratio", 1.08, 1.0801),
        ("general", "kl", 0.08, 0.0801),
        ("general", "top1", 0.8, 0.7999),
        ("accuracy-critical", "perplexity_ratio", 1.02, 1.0201),
        ("accuracy-critical", "kl", 0.02, 0.0201),
        ("accuracy-critical", "top1", 0.93, 0.9299),
        ("draft", "top1", 0.6, 0.5999),
    ],
)
def test_limits_of_uses(use: str, name: str, good: float, bad: float) -> None:
    assert verdict(judge({**EIGHT, name: good}, use, None)) == "pass"
    found = judge({**EIGHT, name: bad}, use, None)
    assert verdict(found) == "fail"
    assert failing(found) == {(name, f"use {use}")}
    assert all(finding.fix for finding in found if not finding.ok)


def test_better_than_the_reference_passes() -> None:
    assert verdict(judge({"kl": 0.0, "perplexity_ratio": 0.98, "top1": 1.0}, "accuracy-critical", "w8a8")) == "pass"


def test_eight_bits_that_lose_like_four_are_broken() -> None:
    """Where the use would allow it."""
    lossy = {"kl": 0.04, "perplexity_ratio": 1.05, "top1": 0.9}
    assert verdict(judge(lossy, "general", "w4a16")) == "pass"
    for preset in ("w8a8", "w8a8-smoothquant+gptq", "fp8-dynamic", "gguf-q8_0", "gguf-q6_k", "bf16"):
        found = judge(lossy, "general", preset)
        assert verdict(found) == "fail"
        assert {name for name, rule in failing(found) if rule.endswith("preset")} == {"kl", "perplexity_ratio"}
    assert verdict(judge({**lossy, "top1": 0.7}, "draft", "w8a8")) == "fail"
    assert verdict(judge({**lossy, "top1": 0.7}, "draft", "gguf-q4_0")) == "pass"


def test_the_demo_passes_by_its_presets() -> None:
    """Measured with 16 windows of its held-out text: what rounding to nearest loses is not called broken."""
    measured = {
        "w8a16": (0.0002, 1.0003), "w8a8": (0.0002, 1.0009), "fp8-tensor": (0.0028, 0.9989), "w4a16": (0.045, 1.0157),
        "nf4": (0.0366, 1.0213), "fp4": (0.0629, 1.0361), "mxfp4": (0.0532, 1.0339), "w3a16": (0.1758, 1.1112),
        "gguf-q8_0": (0.0002, 1.0002), "gguf-q6_k": (0.002, 0.9986), "gguf-q5_0": (0.0082, 1.0042),
        "gguf-q4_0": (0.0325, 1.0189), "gguf-q3_k_s": (0.1009, 1.0826), "gguf-q2_k": (0.2506, 1.2084),
        "w2a16": (0.6722, 1.6312),
    }  # fmt: skip
    for preset, (kl, ratio) in measured.items():
        found = judge({"kl": kl, "perplexity_ratio": ratio, "top1": 0.9}, "draft", preset)
        assert verdict(found) == "pass", preset


def test_every_preset_has_one_row() -> None:
    from fnmatch import fnmatchcase

    for preset in presets().values():
        rows = [row for row in TABLE["presets"] if any(fnmatchcase(preset.name, match) for match in row["match"])]
        assert [int(row["class"].split()[0]) for row in rows] == [preset.scheme.weight.bits], preset.name


def test_an_unknown_preset_is_judged_by_its_use() -> None:
    for preset in (None, "their-own"):
        assert {finding.rule for finding in judge(SOUND, "general", preset)} == {"use general"}


def test_the_engine_has_the_same_limits_and_must_agree_with_the_bytes() -> None:
    served = {f"served.{name}": value for name, value in SOUND.items()}
    assert verdict(judge({**SOUND, **served}, "general", "gguf-q4_k_m")) == "pass"
    for kl, ok in ((0.0167 * 1.25 + 0.0099, True), (0.0167 * 1.25 + 0.0101, False), (0.0, False)):
        found = judge({**SOUND, **served, "served.kl": kl}, "general", "gguf-q4_k_m")
        assert (failing(found) == set()) is ok
    found = judge({**SOUND, **served, "kl": 0.06, "served.kl": 0.02}, "general", None)  # it must not lose less, either
    assert failing(found) == {("served_gap", "engine")}
    assert "0.0400, not at most 0.0250" in next(finding.words for finding in found if not finding.ok)
    found = judge({**SOUND, **served, "served.perplexity_ratio": 3.0}, "general", None)
    assert failing(found) == {("served.perplexity_ratio", "use general")}
    assert next(finding.words for finding in found if not finding.ok).startswith("as served, ")
    assert failing(judge({**SOUND, **served, "served_top1": 0.85}, "general", None)) == {("served_top1", "every use")}


def test_served_numbers_alone_are_enough() -> None:
    served = {f"served.{name}": value for name, value in SOUND.items()}
    assert verdict(judge(served, "general", "gguf-q4_k_m")) == "pass"


def test_agreement_only_warns() -> None:
    found = judge({**SOUND, "agreement": 0.8}, "general", None)
    assert verdict(found) == "pass"
    (low,) = (finding for finding in found if not finding.ok)
    assert (low.name, low.limit, low.warning) == ("agreement", 0.85, True)
    assert failing(judge({**SOUND, "agreement": 0.85}, "general", None)) == set()


def test_a_quantized_cache() -> None:
    assert verdict(judge({**SOUND, "kv_perplexity_ratio": 1.003}, "general", None)) == "pass"
    assert verdict(judge({**SOUND, "kv_perplexity_ratio": 1.004}, "general", None)) == "fail"


def test_the_noise_floor_is_allowed_on_top_of_kl() -> None:
    lossy = {**EIGHT, "kl": 0.021}
    assert verdict(judge(lossy, "accuracy-critical", None)) == "fail"
    found = judge({**lossy, "noise_floor": 0.002}, "accuracy-critical", None)
    assert verdict(found) == "pass"
    limits = {finding.name: finding.limit for finding in found}
    assert limits == {"kl": pytest.approx(0.022), "perplexity_ratio": 1.02, "top1": 0.93}


def test_intervals_that_straddle_are_told() -> None:
    found = judge({**SOUND, "kl": Interval(0.079, 0.07, 0.09), "top1": Interval(0.79, 0.78, 0.795)}, "general", None)
    by_name = {finding.name: finding for finding in found}
    assert (by_name["kl"].ok, by_name["kl"].straddles) == (True, True)
    assert (by_name["top1"].ok, by_name["top1"].straddles) == (False, False)
    assert "more text" in by_name["kl"].words
    assert not by_name["perplexity_ratio"].straddles


@pytest.mark.parametrize("value", [math.nan, math.inf, Interval(0.1, -math.inf, 0.2)])
def test_numbers_that_are_none(value: float | Interval) -> None:
    with pytest.raises(QuantryError, match="kl is .*not a finite number"):
        judge({**SOUND, "kl": value}, "general", None)


def test_what_was_not_measured_does_not_pass() -> None:
    with pytest.raises(QuantryError, match="needs kl, top1"):
        judge({"perplexity_ratio": 1.0}, "general", None)
    with pytest.raises(QuantryError, match="needs top1"):
        judge({}, "draft", None)


def test_unknown_use() -> None:
    with pytest.raises(UnknownNameError, match="did you mean general"):
        judge(SOUND, "generel", None)
    assert set(uses()) == {"general", "accuracy-critical", "draft"}


def test_the_planner_names_gates_that_exist() -> None:
    assert {use.gate for use in planned_uses().values()} <= set(uses())


def test_every_limit_has_a_source_and_a_measure() -> None:
    rows = [(name, limit) for use in TABLE["uses"].values() for name, limit in use["limits"].items()]
    rows += [(row["measure"], row) for row in TABLE["always"]]
    rows += [(name, row[name]) for row in TABLE["presets"] for name in row if name not in ("match", "class")]
    for name, row in rows:
        assert name in TABLE["measures"]
        assert len(row["source"]) > 10
        assert row["limit"] > 0
    assert TABLE["served"]["source"]


def test_findings_are_plain_data() -> None:
    (finding, *_) = judge(SOUND, "general", None)
    assert asdict(finding)["limit"] == finding.limit


def test_limits_of_ones_own_replace_those_of_the_use_and_are_kept_to_the_digit() -> None:
    measured = {**SOUND, "noise_floor": 0.01}
    own = gate.own_limits(max_kl=0.0166, min_top1=0.9, max_perplexity_ratio=None)
    assert own == {"kl": 0.0166, "top1": 0.9}
    found = judge(measured, "general", "gguf-q4_k_m", own)
    assert failing(found) == {("kl", "your limit")}  # without the noise floor, which would let it pass
    assert {(finding.name, finding.rule) for finding in found} >= {
        ("top1", "your limit"), ("perplexity_ratio", "use general"), ("kl", "4 bit preset")
    }  # fmt: skip
    assert ("kl", "use general") not in {(finding.name, finding.rule) for finding in found}
    assert not failing(judge(measured, "general", None, {"kl": 0.0167}))


@pytest.mark.parametrize("options", [{"max_kl": -0.1}, {"min_top1": 95.0}, {"max_perplexity_ratio": math.nan}])
def test_own_limits_are_numbers_of_their_measure(options: dict[str, float]) -> None:
    with pytest.raises(QuantryError, match=r"--(max|min)-\S+ \S+ is not (from 0 to 1|a number).*; write --m"):
        gate.own_limits(**options)
