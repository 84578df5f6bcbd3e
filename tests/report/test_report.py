"""The report: the page and the picture, what they refuse, and the page in a real browser."""

import ast
import html.parser
import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from numpy.typing import NDArray

from depth import cases
from quantry.errors import QuantryError
from quantry.report import Content, FileRow, Memory, frontier, picture, render
from quantry.report.bars import quality
from quantry.report.drawing import NARROW, WIDE, Plot
from quantry.report.ink import PALETTE, ROLES, STEPS, settings
from quantry.report.labels import leader, overlap, place
from quantry.report.maps import heat, steps_of
from quantry.report.markup import row as row_of
from quantry.report.markup import table
from quantry.report.memory import memory_bars
from quantry.report.pareto import pareto
from report.chromium import Browser, decoded
from shared import shared

GIB = 1 << 30
BLOCKS = 12
EVIL = '<script>alert(\'x\')</script> "&amp; $\\frac{1}{2}$ \x00\x1b[31m\ud800 id="x"'
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZES = {  # what the presets gave on a small model: bytes, KL, KL as served, same first token, perplexity
    "gguf-q2_k": (88201568, 0.4454, 0.4522, 0.622, 41.9),
    "gguf-q3_k_m": (93510016, 0.2140, 0.2186, 0.729, 36.82),
    "gguf-q4_k_m": (105453920, 0.0599, 0.0645, 0.858, 31.86),
    "w4a16": (113177088, 0.4103, 0.4097, 0.660, 42.92),
    "gguf-q8_0": (144810848, 0.0016, 0.0043, 0.973, 30.51),
    "bf16": (269060552, 2e-11, 0.0009, 1.0, 30.36),
}


def a_map(blocks: int, seed: int, scale: float = 1.0) -> dict[str, dict[str, float]]:
    draw = random.Random(seed)
    return {str(block): {name: scale * math.exp(draw.gauss(0, 1.5)) for name in MODULES} for block in range(blocks)}


def a_row(name: str, /, **changes: Any) -> FileRow:
    size, kl, served, top1, perplexity = SIZES[name]
    full = FileRow(
        name, size, 8 * size / 134515008, kl, (kl * 0.9, kl * 1.1), served, None, top1, (top1 - 0.01, min(top1 + 0.01, 1)),
        perplexity, (perplexity * 0.98, perplexity * 1.02),
    )  # fmt: skip
    return replace(full, **changes)


def a_sweep() -> Content:
    """Everything that a page can show."""
    rows = [a_row(name, chosen=name == "gguf-q4_k_m") for name in SIZES]
    peer = a_row("gguf-q4_k_m", name="llama.cpp Q4_K_M", peer=True)
    return Content(
        title="A sweep of the small model",
        model="small-model",
        rows=(*rows, peer),
        noise_floor=0.0015,
        reference_perplexity=30.36,
        gate="general",
        verdict="fail",
        findings=(
            {"name": "kl", "ok": True, "words": "KL of 0.06 is within 0.08"},
            {"name": "top1", "ok": False, "words": "78 % is below 80 %", "fix": "use more bits"},
            {"name": "tail", "ok": False, "warning": True, "words": "the tail is long"},
        ),
        domains=(
            {"name": "chat.jsonl", "verdict": "pass", "kl": 0.03, "top1": 0.9, "intervals": {"kl": [0.02, 0.04]}},
            {"name": "code.txt", "verdict": "fail", "kl": 0.2, "served": {"kl": 0.21, "intervals": {}}},
        ),
        answered="67% of 3 prompts answered alike",
        differing=("sky: 'blue', in 16 bit 'It is blue.'",),
        sensitivity=a_map(BLOCKS, 1, 1e-4),
        outliers=a_map(BLOCKS, 2, 20),
        bits={str(block): dict.fromkeys(MODULES, 3.4375 if block % 3 else 4.5) for block in range(BLOCKS)},
        memory=Memory(
            {"weights": 4 * GIB, "kv_cache": GIB, "activations": GIB // 3, "overhead": GIB // 2},
            {"weights": 4 * GIB, "kv_cache": GIB, "compute": GIB // 4},
            12 * GIB,
            "RTX 3060",
        ),
        serve="quantry serve small-model-q4_k_m",
        engine_command="llama-server -m small-model-q4_k_m.gguf -c 8192 --port 8080",
        notes=("The head is tied to the embedding.",),
        versions={"quantry": "0.1.0"},
        caches={"0-512": {"q8_0": 0.00031, "q4_0": 0.0123}, "512-1k": {"q8_0": 0.00042, "q4_0": 0.0145}},
        cache_figures={
            "f16": {"bytes_per_token": 131072, "tokens": 45678, "sequences": 5},
            "q8_0": {
                "kl": 0.00037,
                "kl_low": 0.00035,
                "kl_high": 0.0004,
                "top1": 0.991,
                "perplexity": 30.4,
                "tokens": 87654,
            },
        },
        cache_words="KV caches in llama.cpp against its own of f16",
        provenance={
            "recipe": {"preset": "gguf-q4_k_m", "rules": [{"match": "*.v_proj"}]},
            "sha256": {"a.gguf": "ab" * 32},
        },
    )


def an_evil_one() -> Content:
    """The same text wherever text goes."""
    row = FileRow(EVIL, 10, kl=0.1, perplexity=3, top1=0.5, chosen=True)
    return Content(
        EVIL, EVIL, EVIL, (row, replace(row, bytes=5, kl=0.2, peer=True, chosen=False)), 0.01, 2.0, EVIL, "pass",
        ({"words": EVIL, "ok": False, "fix": EVIL},), EVIL, (EVIL,), {EVIL: {EVIL: 1.0}}, {EVIL: {EVIL: 1.0}}, {EVIL: {EVIL: 1.0}},
        Memory({EVIL: 5}, {EVIL: 6}, 7, EVIL), EVIL, (EVIL,), {EVIL: EVIL}, {EVIL: [EVIL, {EVIL: EVIL}]},
        domains=({"name": EVIL, "verdict": EVIL, "kl": EVIL, "intervals": EVIL, "served": EVIL},),
    )  # fmt: skip


@cache
def evil_page() -> str:
    return render(an_evil_one())


class Tags(html.parser.HTMLParser):
    """What a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value or "" for name, value in attrs if name == "id"]


@pytest.fixture(scope="session")
def report_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """report.html and report.png of `a_sweep`, drawn once a run."""

    def draw(folder: Path) -> None:
        (folder / "report.html").write_text(render(a_sweep()), encoding="utf-8")
        (folder / "report.png").write_bytes(picture(a_sweep()))

    return shared(tmp_path_factory, "report of a sweep", draw)


@pytest.fixture
def sweep_page(report_folder: Path) -> str:
    return (report_folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def sweep_picture(report_folder: Path) -> bytes:
    return (report_folder / "report.png").read_bytes()


def test_json_and_back() -> None:
    content = a_sweep()
    assert Content.from_json(content.to_json()) == content
    assert Content.from_json('{"title": "t"}') == Content("t")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "a report is list"),
        ("{}", "no title"),
        ('{"title": 3}', "title is int"),
        ('{"title": "t", "colour": 1}', "has no 'colour'"),
        ('{"title": "t", "rows": "abc"}', "rows is str"),
        ('{"title": "t", "rows": [{"name": "a"}]}', "no bytes"),
        ('{"title": "t", "rows": [{"name": "a", "bytes": 1.5}]}', "bytes of 'a' is '1.5'"),
        ('{"title": "t", "rows": [{"name": "a", "bytes": -1}]}', "bytes of 'a' is '-1'"),
        ('{"title": "t", "rows": [{"name": "a", "bytes": 1e400}]}', "bytes of 'a' is 'inf'"),
        ('{"title": "t", "rows": [{"name": "a", "bytes": 1, "kl": NaN}]}', "kl of 'a' is 'nan'"),
        ('{"title": "t", "rows": [{"name": "a", "bytes": 1, "kl": "0.1"}]}', "kl of 'a' is '0.1'"),
        ('{"title": "t", "rows": [{"name": "a", "bytes": 1, "top1": 93}]}', "not between 0 and 1"),
        ('{"title": "t", "rows": [{"name": "a", "bytes": 1, "perplexity": 0.5}]}', "below 1"),
        ('{"title": "t", "rows": [{"name": "a", "bytes": 1, "kl": 1, "kl_interval": [2, 1]}]}', "from 2 to 1"),
        ('{"title": "t", "rows": [{"name": "a", "bytes": 1, "kl": 1, "kl_interval": [2]}]}', "not two numbers"),
        ('{"title": "t", "rows": [{"name": "a", "bytes": 1, "kl_interval": [1, 2]}]}', "without its value"),
        ('{"title": "t", "verdict": "maybe"}', "'maybe'"),
        ('{"title": "t", "bits": {"0": {"q": -1}}}', "below 0"),
        ('{"title": "t", "bits": {"0": [1]}}', "bits of block '0' is list"),
        ('{"title": "t", "memory": {"predicted": {"weights": true}}}', "'weights' of memory.predicted"),
        ('{"title": "t", "memory": {"predicted": 3}}', "memory.predicted is int"),
        ('{"title": "t", "notes": [3]}', "a line of notes is int"),
        ('{"title": "t", "findings": [3]}', "a finding is int"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(QuantryError) as refused:
        Content.from_json(text)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_too_much_is_refused() -> None:
    with pytest.raises(QuantryError, match="501 rows, more than 500"):
        Content("t", rows=(FileRow("a", 1),) * 501)
    with pytest.raises(QuantryError, match="60,000 cells"):
        Content("t", bits={str(block): {str(module): 4.0 for module in range(600)} for block in range(100)})


def test_same_content_same_bytes() -> None:
    """In another process, with other hashes and other settings of matplotlib."""
    few = {str(block): dict.fromkeys(MODULES[:2], 3.5 + block) for block in range(2)}
    content = replace(a_sweep(), rows=a_sweep().rows[-3:], sensitivity=few, outliers={}, bits=few)
    script = (
        "import sys, hashlib, matplotlib; matplotlib.rcParams.update({'axes.linewidth': 5, 'lines.linestyle': ':'}); from quantry.report import *;"
        "c = Content.from_json(sys.stdin.read());"
        "print(hashlib.sha256(render(c).encode()).hexdigest(), hashlib.sha256(picture(c)).hexdigest())"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], input=content.to_json(), capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONHASHSEED": "7", "SOURCE_DATE_EPOCH": "1"},
    )  # fmt: skip
    assert result.stdout.split() == [sha256(render(content).encode()).hexdigest(), sha256(picture(content)).hexdigest()]


def test_drawing_leaves_no_settings_behind() -> None:
    """The reader may plot things too: nothing global changes, and no window system is looked for."""

    def kept() -> dict[str, Any]:
        return {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}

    before = kept()
    render(Content("t", bits={"0": {"q": 4.0}}))
    assert kept() == before
    assert "matplotlib.pyplot" not in sys.modules


def test_content_alone_draws_nothing() -> None:
    """Commands that may write a report do not pay for matplotlib until they do."""
    script = "import sys, quantry.report; print([m for m in ('matplotlib', 'torch', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ast.literal_eval(result.stdout) == []


def test_the_page_needs_nothing_else(sweep_page: str) -> None:
    found = Tags(sweep_page)
    assert not {"script", "iframe", "object", "embed", "img", "base", "form"} & set(found.tags)
    for name, value in found.attributes:
        assert not name.startswith("on")
        if name in ("src", "href", "xlink:href", "action"):
            assert value == "data:," or (value or "").startswith("#"), (name, value)
    assert "@import" not in sweep_page
    assert not re.findall(r"url\((?!#)", sweep_page)
    assert "://" not in sweep_page


def test_ids_are_unique_and_pointed_at_rightly(sweep_page: str) -> None:
    found = Tags(sweep_page)
    assert len(found.ids) == len(set(found.ids))
    wanted = set(re.findall(r'(?:href="#|url\(#)([^")]+)', sweep_page))
    wanted |= {name for key, value in found.attributes if key == "aria-labelledby" for name in (value or "").split()}
    assert wanted <= set(found.ids)


def test_everything_is_on_the_page(sweep_page: str) -> None:
    content = a_sweep()
    for words in (
        content.title,
        content.model,
        content.serve,
        content.engine_command,
        "use more bits",
        "tail is long",
        "ab" * 32,
        "*.v_proj",
        "RTX 3060",
        content.cache_words,
        "0.00037 (0.00035 to 0.0004)",
        "<td>87,654</td>",
    ):
        assert words in sweep_page
    assert re.findall(r'<figure id="(\w+)"', sweep_page) == [
        "pareto",
        "quality",
        "sensitivity",
        "bits",
        "outliers",
        "caches",
        "memory",
    ]
    for row in content.rows:
        assert f"{row.kl:.3g}" in sweep_page
        assert f"{row.bytes / (1 << 20):.1f} MiB" in sweep_page
    for block in content.sensitivity.values():
        for value in block.values():
            assert f"<td>{value:.3g}</td>" in sweep_page


def test_worst_layers_come_first(sweep_page: str) -> None:
    cells = [(value, block, module) for block, row in a_sweep().sensitivity.items() for module, value in row.items()]
    table = sweep_page.split("worst first</caption>")[1].split("</table>")[0]
    listed = re.findall(r'<th scope="row">(\w+)</th><td>(\d+)</td><td>([\d.e-]+)</td>', table)
    assert listed == [(module, block, f"{value:.3g}") for value, block, module in sorted(cells, reverse=True)[:12]]


def test_what_is_not_known_is_not_there() -> None:
    bare = render(Content("Just a title"))
    assert "<h1>Just a title</h1>" in bare
    assert "<section>" not in bare
    quantized = render(
        Content("t", rows=(FileRow("w4a16", 5 * GIB, 4.5),), memory=Memory({"weights": 5 * GIB}), serve="vllm serve x")
    )
    assert re.findall(r'<figure id="(\w+)"', quantized) == ["memory"]
    assert "5.0 GiB" in quantized
    assert "KL" not in quantized.split("</style>")[1]
    assert decoded(picture(Content("Just a title"))).std() > 0


def test_nothing_escapes() -> None:
    """Names are text: on the page, in drawings, in the picture."""
    text = evil_page()
    text.encode()
    found = Tags(text)
    assert "script" not in found.tags
    assert "\x00" not in text
    assert "\x1b" not in text
    assert text.count("&lt;script&gt;") > 12
    assert found.ids.count("x") == 0
    assert decoded(picture(an_evil_one())).std() > 0


def test_names_are_no_formulas() -> None:
    text = render(Content("t", rows=(FileRow("a$^2$b", 1, kl=0.1), FileRow("b", 9, kl=0.05))))
    assert text.count(">a$^2$b</text>") == 2


def test_drawings_are_sound_xml_in_known_colours(sweep_page: str) -> None:
    drawings = re.findall(r"<svg.*?</svg>", sweep_page, re.DOTALL)
    assert len(drawings) == 14
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        assert [child.tag for child in root][:2] == ["title", "desc"]
        assert all(child.text for child in root[:2])
        assert not re.findall(r"(?:fill|stroke): (?!none|var\(--)[^;\"]+", drawing)
        assert set(re.findall(r"var\(--([\w-]+)\)", drawing)) <= set(PALETTE)
    assert len(ROLES) == len(PALETTE)


def figure_of(plot: Plot | None) -> Any:
    assert plot is not None
    return plot.figure


def colours(image: NDArray[np.uint8]) -> dict[str, int]:
    """How many pixels there are of each colour."""
    red, green, blue = (image[:, :, at].astype(np.int64) for at in range(3))
    found, counts = np.unique(red << 16 | green << 8 | blue, return_counts=True)
    return {f"#{colour:06x}": int(count) for colour, count in zip(found, counts, strict=True)}


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1])
def test_contrast(scheme: int) -> None:
    """Text 4.5 to 1 by WCAG, on the surface and where it stands on a colour; steps of a map all differ."""
    surface, ink = PALETTE["surface"][scheme], PALETTE["ink"][scheme]
    for role in ("ink", "muted", "ours", "peer", "second", "third", "fourth", "fifth"):
        assert contrast(PALETTE[role][scheme], surface) >= 4.5, role
    assert contrast(PALETTE["muted"][scheme], PALETTE["noise"][scheme]) >= 4.5
    for step in range(STEPS):
        colour = PALETTE[f"cool-{step}"][scheme]
        assert contrast(colour, surface if step >= STEPS // 2 else ink) >= 3, step  # the table has the figures too
    for ramp in ("warm", "cool"):
        light = [luminance(PALETTE[f"{ramp}-{step}"][scheme]) for step in range(STEPS)]
        assert light == sorted(light, reverse=scheme == 0)


@pytest.mark.parametrize("seed", range(20))
def test_frontier_by_its_definition(seed: int) -> None:
    draw = random.Random(seed)
    rows = [FileRow(str(at), draw.randrange(1, 12), kl=draw.randrange(12) / 10) for at in range(draw.randrange(2, 15))]
    best = frontier(rows)
    beaten = [
        any(
            (o.bytes, o.judged) != (r.bytes, r.judged) and o.bytes <= r.bytes and (o.judged or 0) <= (r.judged or 0)
            for o in rows
        )
        for r in rows
    ]
    assert [(row.bytes, row.kl) for row in best] == sorted(
        {(r.bytes, r.kl) for r, lost in zip(rows, beaten, strict=True) if not lost}
    )


def test_frontier_counts_what_is_served() -> None:
    good, bad = FileRow("a", 10, kl=0.5, served_kl=0.1), FileRow("b", 10, kl=0.2, served_kl=0.3)
    assert frontier([bad, good]) == [good]


@pytest.mark.parametrize("seed", range(25))
def test_labels_never_overlap(seed: int) -> None:
    draw = random.Random(seed)
    crowd = draw.choice((40.0, 120.0, 400.0))
    points = [(100 + draw.random() * crowd, 60 + draw.random() * crowd / 2) for _ in range(draw.randrange(2, 40))]
    marks = [(x - 5, y - 5, x + 5, y + 5) for x, y in points]
    sizes = [(draw.uniform(20, 120), 13.0) for _ in points]
    frame = (0.0, 0.0, 600.0, 400.0)
    boxes = place(points, sizes, frame, marks)
    placed = [(box, point) for box, point in zip(boxes, points, strict=True) if box is not None]
    assert placed
    for at, (box, point) in enumerate(placed):
        assert frame[0] <= box[0] and frame[1] <= box[1] and box[2] <= frame[2] and box[3] <= frame[3]  # noqa: PT018
        assert not any(overlap(box, mark) for mark in marks)
        for other, theirs in placed[:at]:
            assert not overlap(box, other)
            assert not any(overlap(bit, other) for bit in leader(box, point))
            assert not any(overlap(bit, box) for bit in leader(other, theirs))


def test_lonely_labels_are_all_placed() -> None:
    points = [(50.0 + 90 * at, 50.0 + 40 * at) for at in range(5)]
    marks = [(x - 5, y - 5, x + 5, y + 5) for x, y in points]
    assert None not in place(points, [(60.0, 13.0)] * 5, (0, 0, 600, 400), marks)


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_drawn_names_do_not_overlap(width: int) -> None:
    """As matplotlib itself measures them, in the finished figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Annotation

    with settings():
        figure = figure_of(pareto(a_sweep(), width))
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        names = [one for one in figure.axes[0].texts if isinstance(one, Annotation) and one.get_gid() == "name"]
        boxes = [name.get_window_extent(canvas.get_renderer()) for name in names]
    assert len(names) >= (7 if width == WIDE else 5)
    for at, box in enumerate(boxes):
        assert box.x0 >= 0 and box.x1 <= width  # noqa: PT018
        assert not any(box.overlaps(other) for other in boxes[:at])


def test_marks_are_where_the_figures_are() -> None:
    content = a_sweep()
    with settings():
        axes: Any = figure_of(pareto(content, WIDE)).axes[0]
    spots = {tuple(np.round(line.get_xydata()[0], 9)) for line in axes.lines if len(line.get_xydata()) == 1}
    assert spots == {(round(row.bytes / (1 << 20), 9), round(row.judged or 0.0, 9)) for row in content.rows}
    (line,) = (line for line in axes.lines if len(line.get_xydata()) > 1)
    assert line.get_drawstyle() == "steps-post"  # between two files the smaller one is what one can have
    assert [tuple(spot) for spot in line.get_xydata()] == [
        (row.bytes / (1 << 20), row.judged) for row in frontier(content.rows[:-1])
    ]
    assert axes.get_yscale() == "log"
    assert axes.patches[0].get_extents().ymax == pytest.approx(axes.transData.transform((0.1, content.noise_floor))[1])


def test_bars_are_as_long_as_what_was_lost() -> None:
    content = a_sweep()
    rows = sorted(content.rows, key=lambda row: row.bytes)
    with settings():
        panels: Any = figure_of(quality(content, WIDE)).axes
    perplexity, top1 = panels
    for row, bar in zip(rows, perplexity.patches, strict=True):
        assert (bar.get_x(), bar.get_x() + bar.get_width()) == pytest.approx((30.36, row.perplexity))
    for row, bar in zip(rows, top1.patches, strict=True):
        assert (bar.get_x(), bar.get_x() + bar.get_width()) == pytest.approx((1.0, row.top1))


def test_memory_bars_add_up() -> None:
    content = a_sweep()
    assert content.memory is not None
    with settings():
        axes: Any = figure_of(memory_bars(content.memory, WIDE)).axes[0]
    ends: dict[float, float] = {}
    for bar in axes.patches:
        assert bar.get_x() == pytest.approx(ends.get(bar.get_y(), 0.0))
        ends[bar.get_y()] = bar.get_x() + bar.get_width()
    sides = (content.memory.predicted, content.memory.measured)
    assert list(ends.values()) == pytest.approx([sum(side.values()) / GIB for side in sides])


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_every_cell_has_its_colour(width: int) -> None:
    """Read back from the pixels of the finished map."""
    from quantry.report.ink import SHARP, light, pixels

    content = a_sweep()
    steps = steps_of([value for row in content.sensitivity.values() for value in row.values()])
    with settings():
        figure = figure_of(heat(content.sensitivity, width, "sensitivity", "damage", "warm"))
        image = pixels(figure)
        box = figure.axes[0].get_position()
    height, across = image.shape[:2]
    assert across == width * SHARP
    for column, row in enumerate(content.sensitivity.values()):
        for line, value in enumerate(row.values()):
            x = (box.x0 + box.width * (column + 0.5) / BLOCKS) * across
            y = (1 - box.y1 + box.height * (line + 0.5) / len(MODULES)) * height
            shown = "#" + "".join(f"{part:02x}" for part in image[int(y), int(x)])
            assert shown == light(f"warm-{steps.of(value)}")


@pytest.mark.parametrize("values", [[1.0, 2.0, 5.0], [1e-6, 1e-3, 0.5, 2.0], [0.0, 1e-9, 1.0], [3.0, 3.0], [0.0]])
def test_steps_rise_with_the_values(values: list[float]) -> None:
    steps = steps_of(values)
    found = [steps.of(value) for value in values]
    assert found == sorted(found)
    assert 0 <= min(found) <= max(found) < STEPS
    if min(values) < max(values):
        assert (found[0], found[-1]) == (0, STEPS - 1)


ODD = [
    Content("zero", rows=(FileRow("a", 0, kl=0.0), FileRow("b", 0, kl=0.0)), noise_floor=0.0),
    Content("negative", rows=(FileRow("a", 1, kl=-1e-10), FileRow("b", 2, kl=-1e-9)), noise_floor=-1e-12),
    Content("same", rows=(FileRow("a", 7, kl=0.1, top1=1.0, perplexity=5.0),) * 3, reference_perplexity=5.0),
    Content("broken", rows=(FileRow("a", 1, kl=1e250, perplexity=1e300, top1=0.0), FileRow("b", 1 << 59, kl=1e-300, perplexity=1.0)), reference_perplexity=2.0),
    Content("long", rows=(FileRow("n" * 100_000, 5, kl=1, perplexity=2), FileRow("m", 9, kl=2))),
    Content("sparse", bits={"0": {"q": 4.0}, "1": {}, "2": {"k": 8.0}}, sensitivity={"0": {"q": 0.0}}),
    Content("many", sensitivity={"0": {str(at): 1.0 + at for at in range(400)}}),
    Content("full", memory=Memory({"weights": 20 * GIB}, {}, 8 * GIB, "small")),
    Content("none", memory=Memory({"weights": 0})),
    Content("peers only", rows=(FileRow("a", 1, kl=1, peer=True), FileRow("b", 2, kl=0.5, peer=True))),
    Content("漢字 🦙", rows=(FileRow("漢字", 1, kl=1), FileRow("🦙", 2, kl=0.5))),
]  # fmt: skip
QUICK = [content for content in ODD if content.title in ("broken", "many", "漢字 🦙")]


@pytest.mark.parametrize("content", cases(ODD, QUICK), ids=lambda content: content.title)
@pytest.mark.filterwarnings("error")
def test_odd_contents_are_drawn(content: Content) -> None:
    assert content.title in render(content)
    assert decoded(picture(content)).std() > 0


def test_the_picture_has_every_plot(sweep_picture: bytes) -> None:
    image = decoded(sweep_picture)
    present = colours(image)
    for role in ("ink", "ours", "peer", "noise", "second", "third", "fourth", "warm-0", "warm-8", "cool-0", "cool-8"):
        assert PALETTE[role][0] in present, role
    assert b"matplotlib" not in sweep_picture[:400].lower()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if os.environ.get("QUANTRY_NO_BROWSER") == "1":
        pytest.skip("QUANTRY_NO_BROWSER is set")
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


@pytest.fixture
def page_file(report_folder: Path) -> Path:
    return report_folder / "report.html"


OUTSIDE = """[...document.querySelectorAll('figure svg')].filter(one => one.getBoundingClientRect().width > 0)
  .flatMap(one => { const frame = one.getBoundingClientRect();
    return [...one.querySelectorAll('text')].filter(text => { const box = text.getBoundingClientRect();
      return box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1
        || box.bottom > frame.bottom + 1 }).map(text => text.textContent) })"""
BOXES = """JSON.parse(JSON.stringify([...document.querySelectorAll('figure')].map(figure => {
  const seen = [...figure.querySelectorAll('svg')].filter(one => one.getBoundingClientRect().width > 0);
  const box = seen[0].getBoundingClientRect();
  return [figure.id, seen.length, box.left + scrollX, box.top + scrollY, box.width, box.height]})))"""


def test_in_a_browser(browser: Browser, page_file: Path) -> None:
    """Plots have the colours of the scheme, nothing is logged or requested, nothing scrolls sideways."""
    for width in (900, 390):
        for dark in (False, True):
            check_page(browser, page_file, width, dark)
        assert browser.evaluate(OUTSIDE) == []  # with the browser's fonts, which the drawing was not measured with


def check_page(browser: Browser, page_file: Path, width: int, dark: bool) -> None:
    browser.open(page_file, width=width, dark=dark)
    image = browser.screenshot()
    assert browser.complaints() == []
    assert browser.requests() == [page_file.as_uri()]
    assert browser.evaluate("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    surface = PALETTE["surface"][dark]
    assert list(colours(image[3:4, 3:4])) == [surface]
    boxes = browser.evaluate(BOXES)
    assert [box[0] for box in boxes] == ["pareto", "quality", "sensitivity", "bits", "outliers", "caches", "memory"]
    wanted = {
        "pareto": "ours",
        "quality": "peer",
        "sensitivity": "warm-8",
        "bits": "cool-8",
        "outliers": "warm-0",
        "caches": "warm-8",
        "memory": "second",
    }
    for name, seen, *box in boxes:
        assert seen == 1, f"one of the two drawings of {name} is shown"
        left, top, across, down = map(round, box)
        assert left >= 0
        assert left + across <= width
        shown = colours(image[top : top + down, left : left + across])
        assert len(shown) > 30, name
        assert max(shown.values()) < 0.97 * across * down, f"{name} is nearly empty"
        assert PALETTE[wanted[name]][dark] in shown, name


HIDDEN = """[...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth)
  .map(one => one.querySelector('thead').textContent)"""
LEFT_OUT = """[...document.querySelectorAll('.scroll')].map(one => one.getBoundingClientRect())
  .filter(box => box.left < 0 || box.right > innerWidth).length"""


@pytest.mark.parametrize("width", [1400, 400])
def test_whole_tables_and_labels_in_a_wide_window(browser: Browser, tmp_path: Path, width: int) -> None:
    """Eighteen columns of figures, as a load test has, need no scrolling at 1400 pixels; long names are drawn whole."""
    name = "w4a16-awq+gptq_format-compressed-tensors_group-64"
    content = a_sweep()
    rows = (*(replace(row, served_kl_interval=(0.00123, 0.00125)) for row in content.rows), a_row("w4a16", name=name))
    file = tmp_path / "wide.html"
    levels = table(
        ["level", "answered", "errors", "unfinished", "requests/s", "tok/s", *["per token p50", "p95", "p99"] * 3,
         "prompt tokens", "answer tokens", "at once"],
        [row_of(f"{count} at once", [*["1,234"] * 5, *["1234 ms"] * 9, *["256"] * 3]) for count in (1, 128)],
        caption="x",
    )  # fmt: skip
    page = render(replace(content, rows=rows)).replace("</main>", f"{levels}</main>")
    file.write_text(page.replace("<details>", "<details open>"), encoding="utf-8")
    browser.open(file, width=width)
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate(OUTSIDE) == []
    assert browser.evaluate(LEFT_OUT) == 0
    if width == 1400:
        assert browser.evaluate(HIDDEN) == []
        for drawing in ("pareto", "quality"):
            labels = f"[...document.querySelectorAll('#{drawing} .wide text')].map(text => text.textContent)"
            assert name in browser.evaluate(labels), drawing


def test_evil_names_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "evil.html"
    file.write_text(evil_page(), encoding="utf-8")
    browser.open(file, width=390)
    assert browser.complaints() == []
    assert browser.evaluate("document.scripts.length") == 0
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    assert "<script>alert('x')</script>" in browser.evaluate("document.querySelector('h1').textContent")


def test_on_paper(browser: Browser, page_file: Path) -> None:
    """Light, whatever the screen is, with the wide drawings."""
    browser.open(page_file, width=500, dark=True, media="print")
    assert list(colours(browser.screenshot()[3:4, 3:4])) == [PALETTE["surface"][0]]
    shown = "[...document.querySelectorAll('figure div')].filter(d => d.offsetWidth).map(d => d.className).join()"
    assert set(browser.evaluate(shown).split(",")) == {"wide"}


def test_a_bad_page_is_caught(browser: Browser, tmp_path: Path) -> None:
    """The checks above can fail: a page that logs, asks and scrolls is caught."""
    file = tmp_path / "bad.html"
    file.write_text("<p style='width:2000px'>x<img src='missing.png'><script>console.error('heard')</script>")
    browser.open(file, width=390)
    assert any("heard" in said for said in browser.complaints())
    assert len(browser.requests()) == 2
    assert browser.evaluate("document.documentElement.scrollWidth") > 390


def test_content_is_plain_data() -> None:
    assert json.loads(a_sweep().to_json())["rows"][0]["name"] == "gguf-q2_k"
