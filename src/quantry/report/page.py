"""The page: sections in the order of a reader's questions."""

from collections.abc import Callable, Mapping
from typing import Any

from quantry.report import domains, markup
from quantry.report.content import BlockMap, Content, FileRow, Interval, Memory, modules_of
from quantry.report.drawing import NARROW, WIDE
from quantry.report.ink import settings
from quantry.report.markup import bullets, document, escaped, figure, nested, section, table
from quantry.report.plots import OUTLIERS, plots
from quantry.report.sizes import alike, human

WORST = 12  # layers that are listed
VERDICTS: Mapping[str | None, str] = {"pass": "passes", "fail": "fails"}


def page(content: Content) -> str:
    with settings():
        drawn = {width: plots(content, width) for width in (WIDE, NARROW)}
        figures = {name: figure(plot, drawn[NARROW][name]) for name, plot in drawn[WIDE].items()}
    sections = (
        _head(content),
        _sizes(content, figures),
        _quality(content, figures),
        _domains(content),
        _gate(content),
        _prompts(content),
        _sensitivity(content, figures),
        _map("Where the bits went", content.bits, figures.get("bits"), "Bits a weight", ".3g"),
        _map("Outlier channels", content.outliers, figures.get("outliers"), OUTLIERS, ".1f"),
        _caches(content, figures.get("caches", "")),
        _memory(content.memory, figures.get("memory", "")),
        section("Serve it", _command(content.serve), _own_words(content.engine_command)),
        section("Notes", bullets(content.notes)),
        _provenance(content),
    )
    return document(content.title, sections)


def _head(content: Content) -> str:
    under = " · ".join(escaped(part) for part in (content.model, content.date) if part)
    badge = VERDICTS.get(content.verdict)
    shown = f'<p><span class="badge {content.verdict}">{escaped(f"{badge} the gate {content.gate}".strip())}</span></p>'
    parts = [
        f"<h1>{escaped(content.title)}</h1>",
        f'<p class="under">{under}</p>' if under else "",
        shown if badge else "",
    ]
    return "<header>\n" + "\n".join(filter(None, [*parts, _tiles(content)])) + "\n</header>"


def _tiles(content: Content) -> str:
    row = content.chosen
    if row is None:
        return ""
    figures: list[tuple[str, str]] = [(human(row.bytes), "size")]
    if row.bits_per_weight is not None:
        figures.append((f"{row.bits_per_weight:.3g}", "bits a weight"))
    if row.judged is not None:
        figures.append((f"{row.judged:.3g}", f"KL divergence{'' if row.served_kl is None else ', as served'}"))
    if row.top1 is not None:
        figures.append((f"{row.top1:.1%}", "same first token"))
    if row.perplexity is not None:
        reference = content.reference_perplexity
        loss = f", {row.perplexity / reference - 1:+.1%} on 16 bit" if reference else ""
        figures.append((f"{row.perplexity:.4g}", f"perplexity{loss}"))
    name = f'<p class="caption">{escaped(row.name)}</p>' if row.name not in content.title else ""
    return f"{markup.tiles(figures)}{name}"


def _sizes(content: Content, figures: Mapping[str, str]) -> str:
    sizes = [row.bytes for row in content.rows]
    columns: dict[str, Callable[[FileRow], str]] = {
        "size": lambda row: alike(row.bytes, sizes),
        "bits a weight": lambda row: _number(row.bits_per_weight, ".3f"),
        "KL, decoded": lambda row: _spanned(row.kl, row.kl_interval, ".3g"),
        "KL, as served": lambda row: _spanned(row.served_kl, row.served_kl_interval, ".3g"),
        f"gate {content.gate}".strip(): lambda row: VERDICTS.get(row.verdict, "–"),
    }
    floor = (
        f'<p class="caption">Noise floor: the 16-bit model differs from itself in 16-bit arithmetic by a KL of'
        f" {content.noise_floor:.2g}.</p>"
        if content.noise_floor is not None
        else ""
    )
    return section("Size and what it costs", figures.get("pareto", ""), _rows(content, columns), floor)


def _quality(content: Content, figures: Mapping[str, str]) -> str:
    columns: dict[str, Callable[[FileRow], str]] = {
        "perplexity": lambda row: _spanned(row.perplexity, row.perplexity_interval, ".4g"),
        "same first token": lambda row: _spanned(row.top1, row.top1_interval, ".1%"),
    }
    rows = _rows(content, columns) if "quality" in figures else ""
    return section("Quality", figures.get("quality", ""), rows)


def _rows(content: Content, columns: Mapping[str, Callable[[FileRow], str]]) -> str:
    """Returns a table of the files, smallest first, without columns that have no figures."""
    rows = sorted(content.rows, key=lambda row: row.bytes)
    kept = {name: cell for name, cell in columns.items() if any(cell(row) != "–" for row in rows)}
    if not rows or not kept:
        return ""
    lines = [
        f'<tr{_class(row, content.chosen)}><th scope="row">{escaped(row.name)}'
        f"{' <small>(other tool)</small>' if row.peer else ''}</th>"
        + "".join(f"<td>{escaped(cell(row))}</td>" for cell in kept.values())
        + "</tr>"
        for row in rows
    ]
    return table(["file", *kept], lines)


def _class(row: FileRow, chosen: FileRow | None) -> str:
    names = [name for name, has in (("chosen", row is chosen), ("peer", row.peer)) if has]
    return f' class="{" ".join(names)}"' if names else ""


def _gate(content: Content) -> str:
    if not content.findings:
        return ""
    lines = [
        f'<tr><td class="{style}">{word}</td><td>{escaped(finding.get("words", finding.get("name", "")))}'
        f"{f'<br><small>{escaped(fix)}</small>' if (fix := finding.get('fix')) else ''}</td></tr>"
        for finding in content.findings
        for style, word in [_outcome(finding)]
    ]
    return section(
        f"Gate {content.gate}".strip(), table(["outcome", "finding"], lines, "words", "What was compared with a limit")
    )


def _domains(content: Content) -> str:
    lines = [markup.row(head, rest) for head, *rest in map(domains.cells, content.domains)]
    return section("On each text", table(domains.COLUMNS, lines, caption="What was lost on each text")) if lines else ""


def _prompts(content: Content) -> str:
    sentence = f"<p>{escaped(content.answered)}.</p>" if content.answered else ""
    return section("Your prompts", sentence, bullets(content.differing))


def _outcome(finding: Mapping[str, Any]) -> tuple[str, str]:
    if finding.get("ok", True):
        return "pass", "passes"
    return ("warn", "warning") if finding.get("warning") else ("fail", "fails")


def _sensitivity(content: Content, figures: Mapping[str, str]) -> str:
    """Returns the map, and a table of its worst layers with their bits and outliers."""
    cells = [(block, module, value) for block, row in content.sensitivity.items() for module, value in row.items()]
    if not cells:
        return ""
    total = sum(value for _, _, value in cells)
    extra = [
        (words, values, style)
        for words, values, style in (("bits", content.bits, ".3g"), ("outliers", content.outliers, ".1f"))
        if values
    ]
    lines = []
    for block, module, value in sorted(cells, key=lambda cell: -cell[2])[:WORST]:
        more = [_number(values.get(block, {}).get(module), style) for _, values, style in extra]
        lines.append(markup.row(module, [block, f"{value:.3g}", f"{value / total:.1%}" if total else "–", *more]))
    columns = ["module", "block", "predicted damage", "share of all", *(words for words, _, _ in extra)]
    worst = table(columns, lines, caption="The most fragile layers, worst first")
    whole = _whole_map(content.sensitivity, "Predicted damage", ".3g")
    return section("Where the model is fragile", figures.get("sensitivity", ""), worst, whole)


def _map(title: str, values: BlockMap, drawn: str | None, words: str, style: str) -> str:
    caption = f'<p class="caption">{escaped(words)}</p>'
    return section(title, caption, drawn, _whole_map(values, words, style)) if drawn else ""


def _whole_map(values: BlockMap, words: str, style: str) -> str:
    """Returns every figure of a map, in a folded table."""
    modules = modules_of(values)
    lines = [
        markup.row(block, (_number(row.get(module), style) for module in modules)) for block, row in values.items()
    ]
    cells = table(["block", *modules], lines, caption=words)
    return f"<details><summary>All figures of the map</summary>{cells}</details>"


def _caches(content: Content, drawn: str) -> str:
    """Returns what each type of KV cache loses, by position and in all, and how much of it fits."""
    if not content.cache_figures:
        return ""
    lines = [
        markup.row(
            name,
            (
                _spanned(row.get("kl"), (row["kl_low"], row["kl_high"]) if "kl_low" in row else None, ".3g"),
                _number(row.get("top1"), ".1%"),
                _number(row.get("perplexity"), ".4g"),
                *(_number(row.get(key), ",") for key in ("bytes_per_token", "tokens", "sequences")),
            ),
        )
        for name, row in content.cache_figures.items()
    ]
    columns = ["type", "mean KL", "same first token", "perplexity", "bytes a token", "tokens that fit", "sequences"]
    figures = table(columns, lines, caption="Types of KV cache")
    caption = f'<p class="caption">{escaped(content.cache_words)}.</p>'
    return section("KV cache at length", caption, drawn, figures)


def _memory(memory: Memory | None, drawn: str) -> str:
    if memory is None or not drawn:
        return ""
    sides = memory.sides
    names = dict.fromkeys(name for _, parts in sides for name in parts)
    lines = [
        markup.row(name.replace("_", " "), (human(parts[name]) if name in parts else "–" for _, parts in sides))
        for name in names
    ]
    lines.append(markup.row("in all", (human(sum(parts.values())) for _, parts in sides), "chosen"))
    if memory.capacity is not None:
        head = f"capacity of {memory.device}" if memory.device else "capacity"
        lines.append(markup.row(head, [human(memory.capacity)] * len(sides)))
    return section("Memory", drawn, table(["part", *(side for side, _ in sides)], lines, caption="Memory by part"))


def _command(words: str) -> str:
    return f'<pre class="command"><code>{escaped(words)}</code></pre>' if words else ""


def _own_words(words: str) -> str:
    return f'<p class="caption">In the engine\'s own words:</p>\n{_command(words)}' if words else ""


def _provenance(content: Content) -> str:
    versions = {"versions": content.versions} if content.versions else {}
    origin = {**content.provenance, **versions}
    return section("Provenance", nested(origin) if origin else "")


def _number(value: float | None, style: str) -> str:
    return "–" if value is None else f"{value:{style}}"


def _spanned(value: float | None, span: Interval | None, style: str) -> str:
    return _number(value, style) + (f" ({span[0]:{style}} to {span[1]:{style}})" if span and value is not None else "")
