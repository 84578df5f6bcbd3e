"""The page of a load test, in the ink of the other reports: verdict, plots, every figure, what the engine counted."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from quantry.jobs.load.bench import Bench, Level, Spread
from quantry.report.drawing import NARROW, SMALL, WIDE, Plot, one_axes, spare
from quantry.report.ink import light, settings
from quantry.report.markup import bullets, document, escaped, figure, nested, section, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES = (("p50", "ours"), ("p95", "second"), ("p99", "fourth"))


def page(found: Bench) -> str:
    """One self-contained file: no scripts, no network."""
    with settings():
        drawn = {width: _plots(found, width) for width in (WIDE, NARROW)}
        figures = [figure(wide, narrow) for wide, narrow in zip(drawn[WIDE], drawn[NARROW], strict=True)]
    sections = (
        _head(found),
        section("Under load", *figures, _levels(found)),
        section("Limits", _findings(found)),
        section("What the engine counted", _engine(found.levels)),
        section("Notes", bullets(found.notes)),
        section("Provenance", nested({"server": found.url, "load": found.load, "versions": found.versions})),
    )
    return document(f"{found.model} under load", sections)


def _head(found: Bench) -> str:
    badge = {"pass": "keeps the limits", "fail": "does not keep the limits"}.get(found.verdict)
    shown = f'<p><span class="badge {found.verdict}">{badge}</span></p>' if badge else ""
    best = next((one for one in found.levels if one.name == found.best), None)
    tiles = _tiles(best, bool(found.slo)) if best else ""
    return (
        f"<header>\n<h1>{escaped(found.model)} under load</h1>\n"
        f'<p class="under">{escaped(found.url)} · {escaped(found.date)}</p>\n'
        f"{shown}{tiles}\n</header>"
    )


def _tiles(best: Level, limited: bool) -> str:
    rows = [
        (f"{best.output_tokens_per_second:.4g}", "tokens a second"),
        (f"{best.requests_per_second:.3g}", "requests a second"),
        (_ms(best.ttft, "p95"), "first token, p95"),
        (_ms(best.tpot, "p95"), "each token after, p95"),
    ]
    tiles = "".join(f"<li><b>{escaped(value)}</b><span>{escaped(words)}</span></li>" for value, words in rows)
    kept = " that keeps the limits" if limited else ""
    return f'<ul class="tiles">{tiles}</ul><p class="caption">{escaped(best.name)}: the fastest level{kept}</p>'


def _levels(found: Bench) -> str:
    columns = [
        "level", "answered", "errors", "unfinished", "requests/s", "tokens/s", "TTFT p50", "p95", "p99",
        "per token p50", "p95", "p99", "latency p50", "p95", "p99", "prompt tokens", "answer tokens", "at once",
    ]  # fmt: skip
    lines = [
        f'<tr{_class(one, found)}><th scope="row">{escaped(one.name)}</th>'
        + "".join(f"<td>{escaped(cell)}</td>" for cell in _cells(one))
        + "</tr>"
        for one in found.levels
    ]
    return table(columns, lines, caption="Every level")


def _class(one: Level, found: Bench) -> str:
    return ' class="chosen"' if one.name == found.best else ""


def _cells(one: Level) -> list[str]:
    times = [_ms(spread, name) for spread in (one.ttft, one.tpot, one.latency) for name, _ in LINES]
    rates = [f"{one.requests_per_second:.3g}", f"{one.output_tokens_per_second:.4g}"]
    counts = [f"{one.prompt_tokens:.0f}", f"{one.answer_tokens:.0f}", f"{one.at_once:.3g}"]
    return [str(one.completed), str(one.errors), str(one.unfinished), *rates, *times, *counts]


def _ms(spread: Spread | None, name: str) -> str:
    return "–" if spread is None else f"{getattr(spread, name):.4g} ms"


def _findings(found: Bench) -> str:
    lines = [
        f'<tr><td class="{kind}">{word}</td><td>{escaped(one.words)}</td></tr>'
        for one in found.findings
        for kind, word in [("pass", "kept") if one.ok else ("fail", "broken")]
    ]
    return table(["outcome", "finding"], lines, "words", "What was held against a limit") if lines else ""


def _engine(levels: Sequence[Level]) -> str:
    names = {
        "prefix_hit_rate": "prefix cache hits",
        "acceptance_rate": "accepted guesses",
        "kv_usage": "KV cache, peak",
    }
    told = {
        name: words for name, words in names.items() if any(one.engine and _told(one, name) != "–" for one in levels)
    }
    if not told:
        return ""
    lines = [
        f'<tr><th scope="row">{escaped(one.name)}</th>'
        + "".join(f"<td>{_told(one, name)}</td>" for name in told)
        + "</tr>"
        for one in levels
    ]
    return table(["level", *told.values()], lines, caption="From the engine's own metrics")


def _told(one: Level, name: str) -> str:
    value = getattr(one.engine, name) if one.engine else None
    return "–" if value is None else f"{value:.1%}"


# ---- plots ----


def _plots(found: Bench, width: int) -> list[Plot]:
    levels = [one for one in found.levels if one.completed]
    speeds = [one.output_tokens_per_second for one in levels]
    words = "; ".join(f"{one.name} {value:.4g}" for one, value in zip(levels, speeds, strict=True))
    figure, axes = one_axes(width, 230, (62, 14, 26, 34))
    axes.plot(range(len(levels)), speeds, "o-", color=light("ours"), lw=1.6, ms=6)
    _finish(axes, levels, "tokens a second")
    plots = [Plot("throughput", "Tokens a second by level", words, figure)]
    for name, title in (("ttft", "Time to the first token"), ("tpot", "Time of each token after the first")):
        shown = [(one, spread) for one in levels if (spread := getattr(one, name))]
        if shown:
            plots.append(_times(name, title, shown, width, found.slo))
    return plots


def _times(
    name: str, title: str, shown: Sequence[tuple[Level, Spread]], width: int, limits: Mapping[str, float]
) -> Plot:
    figure, axes = one_axes(width, 230, (62, 14, 26, 34))
    for statistic, role in LINES:
        values = [getattr(spread, statistic) for _, spread in shown]
        axes.plot(range(len(shown)), values, "o-", color=light(role), lw=1.6, ms=5, label=statistic)
        bar = limits.get(f"{name}_{statistic}")
        if bar is not None:
            axes.axhline(bar, color=light(role), lw=1, ls="--", label=f"limit of {statistic}")
    _finish(axes, [one for one, _ in shown], f"{title.lower()}, ms")
    figure.legend(loc="upper left", ncols=6, frameon=False, fontsize=SMALL, borderaxespad=0, handlelength=1.4)
    words = "; ".join(f"{one.name} p50 {spread.p50:.4g} ms, p95 {spread.p95:.4g} ms" for one, spread in shown)
    return Plot(name, title, words, figure)


def _finish(axes: "Axes", levels: Sequence[Level], label: str) -> None:
    spare(axes)
    axes.set_axisbelow(True)
    axes.grid(axis="y", lw=0.8)
    axes.set_ylim(bottom=0)
    axes.set_xlim(-0.4, len(levels) - 0.6)
    axes.set_xticks(range(len(levels)), [one.name for one in levels])
    axes.set_title(label, fontsize=SMALL, loc="right", color=light("muted"))
