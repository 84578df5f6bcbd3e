"""The page of `quantry tune`: what to serve with, every setting as bars and in a table, and how it was measured."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantry.jobs.load.choice import Trial
from quantry.jobs.load.tune import Tuned
from quantry.report.drawing import NARROW, SMALL, WIDE, Plot, figure_of, name_width, shortened, spare
from quantry.report.ink import light, settings
from quantry.report.markup import bullets, document, escaped, figure, nested, row, section, table, tiles
from quantry.report.sizes import counted, human, percent, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAR, HEAD, FOOT, GAP = 22, 30, 12, 14  # pixels: a bar, what is above and below a panel, between panels
TIP = 1.3  # times the longest bar: room for the figure at its tip
PANELS = {  # of the picture: a figure of a level, and its words
    "output_tokens_per_second": "tok/s",
    "ttft_p95": "first token, p95, ms",
    "tpot_p95": "each token after, p95, ms",
}
TIMES = {"ttft_p50": "first token p50", "ttft_p95": "p95", "tpot_p50": "each after p50", "tpot_p95": "p95"}


def tune_page(tuned: Tuned) -> str:
    """Returns a self-contained HTML page, without scripts or network access."""
    name = f"{Path(tuned.artefact).name}: settings of {tuned.engine}"
    why = f"{tuned.chosen}: {tuned.why}" if tuned.chosen else tuned.why
    with settings():
        drawn = figure(_picture(tuned, WIDE), _picture(tuned, NARROW))
    command = f'<pre class="command"><code>{escaped(shlex.join(tuned.command))}</code></pre>' if tuned.command else ""
    sections = (
        _head(tuned, name),
        section("Serve with", f"<p>{escaped(why)}</p>", command),
        section("Every setting", drawn, _trials(tuned)),
        section("Why not the others", _objections(tuned.trials)),
        section("Notes", bullets(tuned.notes)),
        section("Provenance", nested(_provenance(tuned))),
    )
    return document(name, sections)


def _head(tuned: Tuned, name: str) -> str:
    where = " · ".join(filter(None, (f"{tuned.engine} {tuned.version}", tuned.hardware, tuned.date)))
    load = tuned.load
    shape = f"{load['prompt_tokens']} tokens in, {load['answer_tokens']} out, {load['concurrency'][0]} at once"
    asked = f"{shape}, {counted(load['requests'], 'request')}; context {tuned.context}"
    return (
        f'<header>\n<h1>{escaped(name)}</h1>\n<p class="under">{escaped(where)}</p>\n'
        f'<p class="under">{escaped(asked)}</p>\n{_tiles(tuned.recommended)}\n</header>'
    )


def _tiles(chosen: Trial | None) -> str:
    if chosen is None or chosen.level is None:
        return '<p><span class="badge fail">no setting keeps the limits</span></p>'
    figures = [(short(chosen.speed), "tok/s")]
    if chosen.gain is not None and chosen.changes:
        figures.append((percent(chosen.gain, "+"), "against the default"))
    times = (
        (f"{name}_p95", words) for name, words in (("ttft", "first token, p95"), ("tpot", "each token after, p95"))
    )
    return tiles([*figures, *((_ms(chosen, name), words) for name, words in times)])


def _runs(tuned: Tuned) -> list[Trial]:
    """Returns every trial, the second run of the default below the first."""
    default, *others = tuned.trials
    return [default, tuned.again, *others]


def _trials(tuned: Tuned) -> str:
    columns = ["setting", "tok/s", "gain", *TIMES.values(), "errors", "prefix hits", "accepted", "KV cache", "verdict"]
    lines = [row(trial.name, _cells(trial), "chosen" * (trial.name == tuned.chosen)) for trial in _runs(tuned)]
    return table(columns, lines, caption="Every setting, the default twice")


def _cells(trial: Trial) -> list[str]:
    if trial.level is None:
        return [*["–"] * 10, "not measured"]
    rates = (trial.engine("prefix_hit_rate"), trial.engine("acceptance_rate"))
    verdict = "" if not trial.objection else "not chosen" if trial.keeps_limits else "breaks the limits"
    return [
        short(trial.speed),
        "–" if trial.gain is None or not trial.changes else percent(trial.gain, "+"),
        *(_ms(trial, name) for name in TIMES),
        str(trial.level.errors),
        *("–" if rate is None else percent(rate) for rate in rates),
        "–" if trial.kv_cache_bytes is None else human(trial.kv_cache_bytes),
        verdict,
    ]


def _objections(trials: Sequence[Trial]) -> str:
    lines = [row(trial.name, [trial.objection]) for trial in trials if trial.objection]
    return table(["setting", "objection"], lines, "words", "What speaks against a setting") if lines else ""


def _provenance(tuned: Tuned) -> Mapping[str, object]:
    return {
        "artefact": Path(tuned.artefact).name,
        "proof": {"verdict": tuned.proof.verdict, "gate": tuned.proof.gate},
        "engine": {"name": tuned.engine, "version": tuned.version, "hardware": tuned.hardware},
        "load": tuned.load,
        "limits": tuned.slo,
        "two runs of the default differ by": percent(tuned.noise),
        "versions": tuned.versions,
    }


def _ms(trial: Trial, name: str) -> str:
    value = trial.level.figure(name) if trial.level else None
    return "–" if value is None else f"{short(value)} ms"


def _picture(tuned: Tuned, width: int) -> Plot:
    """Draws a bar for each setting that was measured: speed, and both times; the chosen one in colour."""
    trials = [trial for trial in _runs(tuned) if trial.level]
    panels = {name: words for name, words in PANELS.items() if any(_figure(trial, name) for trial in trials)}
    rows, columns = (1, len(panels)) if width == WIDE else (len(panels), 1)
    each, room = BAR * len(trials) + HEAD + FOOT, name_width((trial.name for trial in trials), width)
    across, height = (width - room - GAP * columns) / columns, each * rows
    drawing = figure_of(width, height)
    for at, name in enumerate(panels):
        left = room + (at * (across + GAP) if rows == 1 else 0)
        base = FOOT + (0 if rows == 1 else (rows - 1 - at) * each)
        axes = drawing.add_axes((left / width, base / height, across / width, BAR * len(trials) / height))
        named = room if rows > 1 or at == 0 else 0
        _bars(axes, trials, name, tuned.chosen, named)
        axes.set_title(panels[name], fontsize=SMALL, loc="left", color=light("ink"), pad=6)
    words = "; ".join(f"{trial.name} {short(trial.speed)} tok/s" for trial in trials)
    chosen = f" Chosen: {tuned.chosen}." if tuned.chosen else ""
    return Plot("settings", "Speed and times of every setting", f"{words}.{chosen}", drawing, _caption(tuned.chosen))


def _caption(chosen: str | None) -> str:
    marked = f" {chosen}, in colour, is recommended." if chosen else ""
    return f"More tok/s and shorter times are better.{marked}"


def _bars(axes: "Axes", trials: Sequence[Trial], name: str, chosen: str | None, room: float) -> None:
    values = [_figure(trial, name) for trial in trials]
    for at, (trial, value) in enumerate(zip(trials, values, strict=True)):
        axes.barh(at, value, height=0.62, color=light("ours" if trial.name == chosen else "fifth"))
        axes.annotate(short(value), (value, at), (4, 0), textcoords="offset points", va="center", fontsize=SMALL)
    spare(axes)
    axes.set_xticks([])
    axes.set_xlim(0, TIP * max(values))
    axes.set_ylim(len(trials) - 0.5, -0.5)
    names = [shortened(trial.name, room - 8) if room else "" for trial in trials]
    axes.set_yticks(range(len(trials)), names, fontsize=SMALL)
    for trial, tick in zip(trials, axes.get_yticklabels(), strict=True):
        tick.set_fontweight("bold" if trial.name == chosen else "normal")


def _figure(trial: Trial, name: str) -> float:
    return (trial.level.figure(name) if trial.level else None) or 0.0
