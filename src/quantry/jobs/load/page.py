"""The page of a load test, in the style of the other reports: verdict, plots, every figure, the engine's counters."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from quantry.jobs.load.bench import Bench
from quantry.jobs.load.results import Level, Spread
from quantry.report.drawing import NARROW, SMALL, WIDE, Plot, one_axes, spare
from quantry.report.ink import light, settings
from quantry.report.markup import bullets, document, escaped, figure, nested, row, section, table, tiles
from quantry.report.sizes import percent, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES = (("p50", "ours"), ("p95", "second"), ("p99", "fourth"))


def page(result: Bench) -> str:
    """Returns a self-contained HTML page, without scripts or network access."""
    with settings():
        drawn = {width: _plots(result, width) for width in (WIDE, NARROW)}
        figures = [figure(wide, narrow) for wide, narrow in zip(drawn[WIDE], drawn[NARROW], strict=True)]
    sections = (
        _head(result),
        section("Under load", *figures, _levels(result)),
        section("Limits", _findings(result)),
        section("What the engine counted", _engine(result.levels)),
        section("Notes", bullets(result.notes)),
        section("Provenance", nested(_provenance(result))),
    )
    return document(f"{result.model} under load", sections)


def _head(result: Bench) -> str:
    words = result.verdict_words
    shown = f'<p><span class="badge {result.verdict}">{words}</span></p>' if words else ""
    best = next((level for level in result.levels if level.name == result.best), None)
    figures = _tiles(best, bool(result.slo)) if best else ""
    return (
        f"<header>\n<h1>{escaped(result.model)} under load</h1>\n"
        f'<p class="under">{escaped(_where(result))} · {escaped(result.date)}</p>\n'
        f"{shown}{figures}\n</header>"
    )


def _provenance(result: Bench) -> dict[str, object]:
    server = {"address": result.url, **result.server}
    return {"server": server, "load": result.load, "versions": result.versions}


def _where(result: Bench) -> str:
    engine = " ".join(filter(None, (result.server.get(name) for name in ("engine", "version"))))
    return " · ".join(filter(None, (result.url, engine, result.server.get("hardware"))))


def _tiles(best: Level, limited: bool) -> str:
    figures = [
        (short(best.output_tokens_per_second), "tok/s"),
        (short(best.requests_per_second), "requests/s"),
        (_ms(best.ttft, "p95"), "first token, p95"),
        (_ms(best.tpot, "p95"), "each token after, p95"),
    ]
    kept = " that keeps the limits" if limited else ""
    return f'{tiles(figures)}<p class="caption">{escaped(best.name)}: the fastest level{kept}</p>'


def _levels(result: Bench) -> str:
    columns = [
        "level", "answered", "errors", "unfinished", "requests/s", "tok/s", "first token p50", "p95", "p99",
        "each after p50", "p95", "p99", "latency p50", "p95", "p99", "prompt tokens", "answer tokens", "at once",
    ]  # fmt: skip
    lines = [row(level.name, _cells(level), "chosen" * (level.name == result.best)) for level in result.levels]
    return table(columns, lines, caption="Every level; times in ms")


def _cells(level: Level) -> list[str]:
    times = [_time(spread, name) for spread in (level.ttft, level.tpot, level.latency) for name, _ in LINES]
    rates = [short(level.requests_per_second), short(level.output_tokens_per_second)]
    counts = [f"{level.prompt_tokens:.0f}", f"{level.answer_tokens:.0f}", short(level.at_once)]
    return [str(level.completed), str(level.errors), str(level.unfinished), *rates, *times, *counts]


def _time(spread: Spread | None, name: str) -> str:
    return "–" if spread is None else short(getattr(spread, name))


def _ms(spread: Spread | None, name: str) -> str:
    return f"{_time(spread, name)} ms" if spread else "–"


def _findings(result: Bench) -> str:
    lines = [
        f'<tr><td class="{css}">{outcome}</td><td>{escaped(finding.words)}</td></tr>'
        for finding in result.findings
        for css, outcome in [("pass", "kept") if finding.ok else ("fail", "broken")]
    ]
    return table(["outcome", "finding"], lines, "words", "What was compared with a limit") if lines else ""


def _engine(levels: Sequence[Level]) -> str:
    names = {
        "prefix_hit_rate": "prefix cache hits",
        "acceptance_rate": "accepted guesses",
        "kv_usage": "KV cache, peak",
    }
    reported = {
        name: words for name, words in names.items() if any(_engine_figure(level, name) != "–" for level in levels)
    }
    if not reported:
        return ""
    lines = [row(level.name, (_engine_figure(level, name) for name in reported)) for level in levels]
    return table(["level", *reported.values()], lines, caption="From the engine's own metrics")


def _engine_figure(level: Level, name: str) -> str:
    value = getattr(level.engine, name) if level.engine else None
    return "–" if value is None else percent(value)


def _plots(result: Bench, width: int) -> list[Plot]:
    levels = [level for level in result.levels if level.completed]
    speeds = [level.output_tokens_per_second for level in levels]
    words = "; ".join(f"{level.name} {short(value)} tok/s" for level, value in zip(levels, speeds, strict=True))
    figure, axes = one_axes(width, 230, (62, 14, 26, 34))
    axes.plot(range(len(levels)), speeds, "o-", color=light("ours"), lw=1.6, ms=6)
    _finish(axes, levels, "tok/s")
    plots = [Plot("throughput", "Speed by level, in tok/s", words, figure)]
    for name, title in (("ttft", "Time to the first token"), ("tpot", "Time of each token after the first")):
        shown = [(level, spread) for level in levels if (spread := getattr(level, name))]
        if shown:
            plots.append(_times(name, title, shown, width, result.slo))
    return plots


def _times(
    name: str, title: str, shown: Sequence[tuple[Level, Spread]], width: int, limits: Mapping[str, float]
) -> Plot:
    figure, axes = one_axes(width, 230, (62, 14, 26, 34))
    for statistic, role in LINES:
        values = [getattr(spread, statistic) for _, spread in shown]
        axes.plot(range(len(shown)), values, "o-", color=light(role), lw=1.6, ms=5, label=statistic)
        limit = limits.get(f"{name}_{statistic}")
        if limit is not None:
            axes.axhline(limit, color=light(role), lw=1, ls="--", label=f"limit of {statistic}")
    _finish(axes, [level for level, _ in shown], f"{title.lower()}, ms")
    figure.legend(loc="upper left", ncols=6, frameon=False, fontsize=SMALL, borderaxespad=0, handlelength=1.4)
    words = "; ".join(f"{level.name} p50 {short(spread.p50)} ms, p95 {short(spread.p95)} ms" for level, spread in shown)
    return Plot(name, title, words, figure)


def _finish(axes: "Axes", levels: Sequence[Level], label: str) -> None:
    spare(axes)
    axes.set_axisbelow(True)
    axes.grid(axis="y", lw=0.8)
    axes.set_ylim(bottom=0)
    axes.set_xlim(-0.4, len(levels) - 0.6)
    axes.set_xticks(range(len(levels)), [level.name for level in levels])
    axes.set_title(label, fontsize=SMALL, loc="right", color=light("muted"))
