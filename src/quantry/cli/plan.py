"""`quantry plan`: which precision, format, engine and flags, what it costs in memory and speed, and why."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantry.cli import _flags as flags
from quantry.cli._output import show, table, to_copy
from quantry.report.sizes import human, percent

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType
    from rich.text import Text

    from quantry.planning.alternatives import Near
    from quantry.planning.option import Option
    from quantry.planning.plan import Plan
    from quantry.planning.suggest import Suggestion

GROUP = "choose"
EXAMPLES = (
    'quantry plan llama-3.1-8b --gpu "RTX 4090"',
    "quantry plan ./my-model --for rag --context 32k",
    'quantry plan llama-3.1-70b --gpu "2x RTX 3090" --concurrency 8 -o plan.json',
)
BAR = 40  # characters of a full bar
SMALLER = "a smaller model"
SHOWN = 6  # options in the table
REFUSED = 3  # refusals that are shown
PARTS = (("weights", "cyan"), ("kv_cache", "green"), ("activations", "yellow"), ("overhead", "magenta"))


Model = Annotated[
    str | None,
    typer.Argument(help="A folder, a config.json, a hub id, the word demo or a well-known name: llama-3.1-8b."),
]
Gpu = Annotated[
    str | None, typer.Option("--gpu", help='The machine: "2x RTX 3090", "M2 16GB", "cpu"; this one if left out.')
]
Concurrency = Annotated[int | None, typer.Option(help="Sequences at the same time, 1 or more.")]
Engine = Annotated[str | None, typer.Option(help="Plan for this engine only: {engines}.")]
Budget = Annotated[str | None, typer.Option(help="Memory that may be used in all, such as 8GiB.")]
Suggest = Annotated[
    bool, typer.Option("--suggest", help="Without a model: which well-known models run well on the machine.")
]
Prompt = Annotated[int | None, typer.Option(help="Tokens of a usual prompt, 1 or more.", **flags.TOKENS)]
Answer = Annotated[int | None, typer.Option(help="Tokens of a usual answer, 1 or more.", **flags.TOKENS)]
Rate = Annotated[
    float | None, typer.Option("--requests-per-second", help="Requests a second that must be carried, above 0.")
]
Ttft = Annotated[float | None, typer.Option(help="Seconds to the first token at most; above 0, up to 3600.")]
Tpot = Annotated[float | None, typer.Option(help="Seconds for each further token at most; above 0, up to 60.")]
Images = Annotated[int | None, typer.Option(help="Pictures in a prompt, 1 to 1000.")]
Prefix = Annotated[
    int | None, typer.Option("--shared-prefix", help="Tokens of each prompt that all share, 1 or more.", **flags.TOKENS)
]
Trace = Annotated[Path | None, typer.Option(help="JSON lines with prompt, answer (tokens) and time (seconds).")]
Price = Annotated[float | None, typer.Option(help="USD an hour for the machine, above 0; the catalogue's if left out.")]
MaxCost = Annotated[float | None, typer.Option("--max-cost", help="USD an hour that may be spent, above 0.")]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="Write the JSON to this file, for `quantry quantize --plan`.")
]


def command(
    model: Model = None,
    gpu: Gpu = None,
    use: flags.Use = None,
    context: flags.Context = None,
    concurrency: Concurrency = None,
    engine: Engine = None,
    budget: Budget = None,
    prompt: Prompt = None,
    answer: Answer = None,
    requests_per_second: Rate = None,
    ttft: Ttft = None,
    tpot: Tpot = None,
    images: Images = None,
    shared_prefix: Prefix = None,
    trace: Trace = None,
    price: Price = None,
    max_cost: MaxCost = None,
    suggest: Suggest = False,
    json: flags.Json = False,
    output: Output = None,
) -> None:
    """Say which preset, format, engine and flags suit a model, a machine and a use, and why."""
    from json import dumps

    from quantry.errors import QuantryError
    from quantry.planning.plan import plan

    if suggest:
        _suggest(model, gpu, use, json)
        return
    if model is None:
        raise QuantryError("no model is named", fix="name one, or ask with --suggest which models run well here")
    best = plan(
        model, gpu=gpu, use=use, context=context, concurrency=concurrency, engine=engine, budget=budget,
        prompt=prompt, answer=answer, requests_per_second=requests_per_second, ttft=ttft, tpot=tpot, images=images,
        shared_prefix=shared_prefix, trace=trace, price=price, max_cost=max_cost,
    )  # fmt: skip
    if output is not None:
        _write(output, best.to_dict())
    if json:
        typer.echo(dumps(best.to_dict(), indent=2))
    else:
        show(picture(best))
    if not best.fits:
        raise typer.Exit(1)


def _suggest(model: str | None, gpu: str | None, use: str | None, as_json: bool) -> None:
    """Answers `--suggest`. Raises QuantryError if a model is named too, or neither."""
    from dataclasses import asdict
    from json import dumps

    from quantry.errors import QuantryError
    from quantry.planning.suggest import suggest

    if model is not None:
        raise QuantryError(f"--suggest is asked, and {model} is named", fix="leave one of them out")
    rows = suggest(gpu, use)
    if as_json:
        typer.echo(dumps({"schema": 1, "suggestions": [asdict(row) for row in rows]}, indent=2))
        return
    show(suggestions(rows) if rows else ["Nothing well-known runs well here."])


def suggestions(rows: "Iterable[Suggestion]") -> list["RenderableType"]:
    """Draws a table of models that run well."""
    right = ("billion", "memory", "tok/s", "first token")
    drop = ("first token", "billion", "quality", "engine")
    lines = table(("model", "preset", "engine", "quality", *right), right, drop=drop)
    for row in rows:
        lines.add_row(
            row.model, row.preset, row.engine, row.quality, f"{row.parameters:,.1f}", human(row.per_device),
            f"{row.tokens_per_s:,.0f}", f"{row.first_token_s:.2g} s",
        )  # fmt: skip
    return [lines]


def _write(path: Path, content: dict[str, Any]) -> None:
    """Writes a plan through no link, and without the user's home folder."""
    from json import dumps

    from quantry.errors import OutputError
    from quantry.jobs.output_folder import without_home
    from quantry.storage import write_named

    try:
        write_named(path, (dumps(without_home(content), indent=2) + "\n").encode())
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}", fix="give -o another file") from error


def picture(plan: "Plan") -> list["RenderableType"]:
    """Draws a plan: the best option in full, the others in a table."""
    from rich.text import Text

    notes = [Text(note, "yellow") for note in plan.notes]
    if not plan.options:
        return [_head(plan), "", *_nothing(plan), *notes]
    best = plan.options[0]
    lines: list[RenderableType] = [_head(plan), "", _title(best), *_bar(best), *_load(best), ""]
    lines += [Text(f"  + {reason}") for reason in best.reasons]
    lines += [Text(f"  ! {warning}", "yellow") for warning in best.warnings]
    lines += [
        "",
        *_commands(plan, best),
        *_speculation(best),
        "",
        _table(_different(plan.options)[:SHOWN]),
        *_refused(plan),
    ]
    return [*lines, *notes]


def _different(options: "tuple[Option, ...]") -> "tuple[Option, ...]":
    """Returns the best option of each scheme and engine: presets that differ only in how they round are twins."""
    first: dict[tuple[str, str], Option] = {}
    for option in options:
        first.setdefault((option.scheme, option.engine), option)
    return tuple(first.values())


def _refused(plan: "Plan") -> list["RenderableType"]:
    from rich.text import Text

    if not plan.refused:
        return []
    shown = plan.refused[:REFUSED]
    rows = [Text(f"  {row['engine']}, {', '.join(row['presets'][:3])}: {row['why']}", "dim") for row in shown]
    return ["", Text(f"refused, {len(shown)} of {len(plan.refused)} (--json has all):", "dim"), *rows]


def _head(plan: "Plan") -> "Text":
    from rich.text import Text

    load = plan.workload
    text = Text(plan.model["source"], "bold")
    text.append(f" ({plan.model['parameters'] / 1e9:,.2f} billion parameters) on {plan.hardware['name']}", "")
    sequences = f"{load['concurrency']} sequence{'s' if load['concurrency'] > 1 else ''}"
    lengths = f"prompts of {load['prompt']:,} tokens, answers of {load['answer']:,}, at most {load['context']:,}"
    text.append(f", {plan.use}: {sequences} at once, {lengths}", "not bold")
    return text


def _title(option: "Option") -> "Text":
    from rich.text import Text

    text = Text(f"{option.preset} in {option.engine} {option.version}", "bold green")
    text.append(f"  {option.quality}, {_speed(option)}{_cost(option)}", "not bold default")
    return text


def _speed(option: "Option") -> str:
    speed = option.speed
    measured = "" if speed["measured"] else f" (±{percent(speed['spread'])})"
    user, whole = speed["decode_tokens_per_s_per_user"], speed["decode_tokens_per_s"]
    in_all = f" for each user, {whole:,.0f} in all" if option.layout["concurrency"] > 1 else ""
    return f"{user:,.0f} tok/s{in_all}{measured}, first token after {speed['first_token_s']:.2g} s"


def _cost(option: "Option") -> str:
    cost = option.cost
    if cost["usd_per_hour"] is None:
        return ""
    return (
        f"; ${cost['usd_per_million_out']:,.2f} a million tokens out, ${cost['usd_per_million_in']:,.2f} in, "
        f"${cost['usd_per_month']:,.0f} a month"
    )


def _bar(option: "Option") -> list["Text"]:
    """Draws the memory of each part as its share of what all devices may hold."""
    from rich.text import Text

    memory, line, words = option.memory, Text("  "), Text("  ")
    whole = max(memory["limit"] * option.layout["devices"] + memory["host"], memory["total"])
    for name, style in PARTS:
        line.append("█" * max(round(BAR * memory[name] / whole), 1 if memory[name] else 0), style)
        words.append(f"{name.replace('_', ' ')} {human(memory[name])}  ", style)
    line.append("░" * max(0, BAR + 2 - len(line)), "dim")
    line.append(f" {human(memory['per_device'])} of {human(memory['limit'])}{_each(option.layout['devices'])}")
    return [line, words]


def _each(devices: int) -> str:
    return " on each device" if devices > 1 else ""


def _machines(plan: "Plan", near: "Near") -> int:
    """Returns the devices of a change: "2 x RTX 3090" has two, and a smaller model those that were asked for."""
    count, times, _ = near.change.partition(" x ")
    return int(count) if times and count.isdigit() else int(plan.hardware["count"]) if near.what == SMALLER else 1


def _load(option: "Option") -> list["Text"]:
    """Says what one machine carries, and how many a rate needs, where limits or a rate are given."""
    from rich.text import Text

    load, limits = option.load, [name for name in option.load["breaks"] if name != "memory"]
    if not limits and load["machines"] is None:
        return []
    words = f"  one machine carries {load['requests_per_s']:.3g} requests/s, {load['sequences']:,} at once"
    for name in limits:
        words += f"; --{name} breaks at {load['breaks'][name]['requests_per_s']:.3g} requests/s"
    full = load["breaks"]["memory"]
    words += f"; memory is full at {full['sequences']:,} at once"
    if load["machines"] is not None:
        words += f"; the rate needs {load['machines']:,} machine{'s' if load['machines'] > 1 else ''}"
    return [Text(words)]


def _speculation(option: "Option") -> list["Text"]:
    """Names the ways to guess ahead, with what is expected of them."""
    from rich.text import Text

    if not option.speculation:
        return []
    lines = ["", "guessing ahead (answers stay the same; --json has the commands; quantry tune measures them):"]
    for way in option.speculation:
        name = f"{way['method']} with {way['model']}" if way["model"] else way["method"]
        gain = f"{way['times']:.1f} times the tok/s if {percent(way['right'])} of the guesses are right"
        lines.append(f"  {name}: {gain}; {way['only']}")
    return [Text(line) for line in lines]


def _commands(plan: "Plan", option: "Option") -> list["Text"]:
    """Draws the commands to copy; the engine's own follows that of Quantry, which starts it."""
    from shlex import join

    from rich.text import Text

    ours = _serve_words(plan, option)
    lines = [to_copy(join(words)) for name, words in option.commands.items() if name != "serve"]
    if ours:
        lines += [to_copy(join(ours)), Text("in the engine's own words:", "dim")]
    return [*lines, to_copy(join(option.commands["serve"]))]


def _serve_words(plan: "Plan", option: "Option") -> list[str]:
    """Returns `quantry serve` for what is planned on one machine; empty where its flags do not say all of it."""
    layout = option.layout
    if "quantize" not in option.commands or layout["nodes"] > 1 or layout["replicas"] > 1 or option.memory["host"]:
        return []
    made = option.commands["quantize"]
    words = ["quantry", "serve", made[made.index("-o") + 1], "--engine", option.engine]
    words += ["--context", str(plan.workload["context"])]
    numbers = {"--parallel": layout["concurrency"], "--tensor-parallel": layout["tensor_parallel"]}
    numbers["--pipeline-parallel"] = layout["pipeline_parallel"]
    for flag, number in numbers.items():
        words += [flag, str(number)] if number > 1 else []
    return words if option.kv_cache_type == "auto" else [*words, "--kv", option.kv_cache_type]


def _table(options: "tuple[Option, ...]") -> "RenderableType":
    right = ("devices", "at once", "memory", "tok/s each")
    drop = ("devices", "KV", "at once", "quality")
    rows = table(("preset", "engine", "KV", "quality", *right), right, drop=drop)
    for option in options:
        rows.add_row(
            option.preset, option.engine, option.kv_cache_type, option.quality, _devices(option),
            str(option.layout["concurrency"]), human(option.memory["total"]),
            f"{option.speed['decode_tokens_per_s_per_user']:,.0f}",
        )  # fmt: skip
    return rows


def _devices(option: "Option") -> str:
    layout: dict[str, Any] = option.layout
    each = layout["devices"] // layout["replicas"]
    return f"{layout['replicas']} x {each}" if layout["replicas"] > 1 else str(each)


def _nothing(plan: "Plan") -> list["RenderableType"]:
    """Says that nothing fits, what would fit with a change, and why the nearest options were refused."""
    from rich.text import Text

    lines: list[RenderableType] = [Text("Nothing fits.", "bold red")]
    for near in plan.nearest:
        option = f"{near.preset} in {near.engine} ({human(near.per_device)}{_each(_machines(plan, near))})"
        lines.append(Text(f"  {near.what}: {near.change}, {option}", "green"))
    rows = sorted(plan.refused, key=lambda row: row["short"] or float("inf"))
    reasons = (f"  {row['engine']}, {', '.join(row['presets'])}: {row['why']}; {row['fix']}" for row in rows[:SHOWN])
    return [*lines, "", *(Text(reason, "dim") for reason in reasons)]
