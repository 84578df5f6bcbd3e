"""A proof for continuous integration: a JUnit file that every CI shows as tests, and Markdown for a job's summary."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from quantry.report import domains
from quantry.report.caches import cache_lines
from quantry.report.sizes import counted, percent

if TYPE_CHECKING:
    from quantry.types import Proof

SHOWN, LETTERS = 5, 80  # prompts with other answers, and letters of an answer
FIGURES = {"kl": ("mean KL", ".4f"), "top1": ("same first token", ".1%"), "perplexity": ("perplexity", ".3f")}


def junit(proof: "Proof") -> bytes:
    """Returns a proof as JUnit XML: one test a finding; warnings pass and are told in the test's output."""
    failed = sum(not finding["ok"] and not finding["warning"] for finding in proof.findings)
    suite = ElementTree.Element(
        "testsuite", name=f"quantry verify {_plain(proof.artefact)}", tests=str(len(proof.findings)), errors="0",
        failures=str(failed), skipped="0",
    )  # fmt: skip
    for finding in proof.findings:
        rule = finding.get("rule")
        name = f"{finding['name']} ({rule})" if rule else str(finding["name"])
        case = ElementTree.SubElement(suite, "testcase", classname=f"quantry.{proof.gate}", name=_plain(name))
        words = _plain(_sentence(finding))
        if finding["ok"] or finding["warning"]:
            ElementTree.SubElement(case, "system-out").text = words
        else:
            ElementTree.SubElement(case, "failure", message=words).text = words
    whole: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return whole


def markdown(proof: "Proof") -> str:
    """Returns a proof as Markdown: the verdict, the figures, and what failed."""
    return "\n".join(_lines(proof)) + "\n"


def _lines(proof: "Proof") -> Iterator[str]:
    passed = sum(finding["ok"] for finding in proof.findings)
    yield f"## {'Passed' if proof.passed else 'FAILED'}: {_cell(proof.artefact)} against {_cell(proof.reference)}"
    yield ""
    served = proof.served
    yield "| | decoded | 95 % interval |" + (f" in {served['engine']} |" if served else "")
    yield f"|---|--:|--:|{'--:|' if served else ''}"
    for name, (words, style) in FIGURES.items():
        low, high = proof.intervals[name]
        last = f" {served[name]:{style}} |" if served else ""
        yield f"| {words} | {getattr(proof, name):{style}} | {low:{style}} to {high:{style}} |{last}"
    yield ""
    text = proof.text
    windows = f"{counted(text['windows'], 'window')} of {text['length']} tokens of {_cell(text['name'])}"
    yield from (*domains.markdown(proof.domains), "") if proof.domains else ()
    yield f"Gate {proof.gate}: {passed} of {len(proof.findings)} checks passed, on {windows}."
    if proof.prompts:
        yield from ("", *listed(answered(proof.prompts), differing(proof.prompts)))
    if proof.kv_cache:
        yield from ("", *cache_lines(proof.kv_cache))
    failed = [finding for finding in proof.findings if not finding["ok"]]
    if failed:
        yield ""
        yield from (f"- {'warning' if row['warning'] else '**failed**'}: {_cell(_sentence(row))}" for row in failed)


def answered(prompts: Mapping[str, Any]) -> str:
    """Returns how many of the prompts the two models answer alike, in words."""
    return f"{percent(prompts['agreement']['value'])} of {counted(prompts['prompts'], 'prompt')} answered alike"


def differing(prompts: Mapping[str, Any]) -> list[str]:
    """Returns a line for each of the first prompts that the two models answer differently."""
    other = [record for record in prompts["records"] if not record["agree"]]
    lines = [
        f"{record['id']}: {_short(record['quantized'])!r}, in 16 bit {_short(record['base'])!r}"
        for record in other[:SHOWN]
    ]
    return [*lines, f"and {len(other) - SHOWN} more"] if len(other) > SHOWN else lines


def listed(sentence: str, lines: Iterable[str]) -> Iterator[str]:
    """Yields a sentence and a list below it as Markdown, in which nothing of a model's answer is markup."""
    yield f"{inline(sentence)}."
    bullets = [f"- {inline(line)}" for line in lines]
    yield from ("", *bullets) if bullets else ()


def inline(text: str) -> str:
    """Returns text as Markdown that shows it unchanged, in one line."""
    return re.sub(r"([\\`*_\[\]<>&|~!])", r"\\\1", " ".join(_plain(text).split()))


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= LETTERS else f"{words[:LETTERS]} ..."


def _sentence(finding: Mapping[str, Any]) -> str:
    fix = f"; {finding['fix']}" if finding.get("fix") and not finding["ok"] else ""
    return f"{finding['words']}{fix}"


def _plain(text: str) -> str:
    """Leaves out what XML cannot hold."""
    return "".join(letter for letter in text if letter >= " " or letter in "\t\n")


def _cell(text: str) -> str:
    return _plain(str(text)).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
