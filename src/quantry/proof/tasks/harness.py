"""Runs tasks of lm-evaluation-harness on a model.

A task is a YAML file of lm-evaluation-harness, or the name of one of its tasks (whose data it fetches from the hub).
The data of a YAML file can lie next to it:

    task: riddles
    dataset_path: json
    dataset_kwargs: {data_files: {test: riddles.jsonl}}
    test_split: test
    output_type: multiple_choice
    doc_to_text: "{{question}}"
    doc_to_choice: "{{choices}}"
    doc_to_target: "{{answer}}"

Texts become tokens as in the harness's own `hf` model, so that the numbers are comparable with published ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from quantry.errors import QuantryError, UnknownNameError
from quantry.proof.tasks.answers import Answers
from quantry.proof.tasks.significance import Paired, paired
from quantry.storage.temporary import temporary_folder
from quantry.types import Progress

SEED = 1234  # for the choice of examples; as in the harness
INSTALL = "pip install 'quantry[tasks]'"


@dataclass(frozen=True, slots=True)
class TaskSample:
    """One question of a task: the model's answer, and its value in each metric."""

    id: int
    target: str
    answer: list[Any]  # (log-probability, is it greedy) of every choice, or the generated text
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TaskResult:
    """A task's metrics by name, as the harness aggregates them, and every question."""

    task: str
    metrics: Mapping[str, float]
    higher_is_better: Mapping[str, bool]
    samples: tuple[TaskSample, ...]


@dataclass(frozen=True, slots=True)
class TaskComparison:
    """One metric of one task for both models; `paired` is None if the metric has no value per question."""

    task: str
    metric: str
    base: float
    quantized: float
    higher_is_better: bool
    paired: Paired | None


def evaluate(
    answers: Answers,
    tasks: Sequence[str | Path],
    *,
    limit: int | None = None,
    progress: Progress | None = None,
) -> list[TaskResult]:
    """Runs tasks; `limit` takes the first questions of each.

    Raises QuantryError if lm-evaluation-harness is not installed or cannot run a task, UnknownNameError for a task that
    it does not have.
    """
    check(tasks, limit)
    from lm_eval.evaluator import evaluate as run

    from quantry.proof.tasks.lm_eval_model import LmEvalModel

    model = LmEvalModel(answers, progress)
    with temporary_folder() as folder, _quiet():
        loaded = _load(tasks, folder)
        for task in loaded["tasks"].values():
            _set_examples(task)
        try:
            report = run(lm=model, task_dict=loaded, limit=limit, bootstrap_iters=0, log_samples=True)
        except QuantryError:
            raise
        except Exception as error:
            if model.failed:
                raise
            raise _unfit(", ".join(loaded["tasks"]), error) from error
    return [_result(name, report) for name in loaded["tasks"]]


def check(tasks: Sequence[str | Path], limit: int | None) -> None:
    """Raises QuantryError if the harness is not installed, does not know a task, or may ask nothing; loads no data."""
    if limit is not None and limit < 1:
        raise QuantryError(f"a limit of {limit} questions leaves nothing to ask", fix="give at least 1")
    _check_installed()
    with temporary_folder() as folder:
        _specs(tasks, folder)


def compare(base: Sequence[TaskResult], quantized: Sequence[TaskResult]) -> list[TaskComparison]:
    """Compares two models metric by metric. Raises QuantryError if they did not run the same tasks."""
    if [(result.task, len(result.samples)) for result in base] != [(r.task, len(r.samples)) for r in quantized]:
        raise QuantryError("the two models did not run the same tasks", fix="run both with the same tasks and limit")
    rows = []
    for first, second in zip(base, quantized, strict=True):
        for metric, value in first.metrics.items():
            pairs = _paired(first.samples, second.samples, metric)
            better = first.higher_is_better.get(metric, True)
            rows.append(TaskComparison(first.task, metric, value, second.metrics[metric], better, pairs))
    return rows


def _paired(base: Sequence[TaskSample], quantized: Sequence[TaskSample], metric: str) -> Paired | None:
    pairs = [
        (first.values[metric], second.values[metric])
        for first, second in zip(base, quantized, strict=True)
        if metric in first.values and metric in second.values
    ]
    return paired([first for first, _ in pairs], [second for _, second in pairs]) if pairs else None


def _check_installed() -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise QuantryError(f"lm-evaluation-harness is not installed ({error})", fix=INSTALL) from error


@contextmanager
def _quiet() -> Iterator[None]:
    import datasets
    from lm_eval.api import task

    bar, shown = task.tqdm, datasets.is_progress_bar_enabled()
    task.tqdm = lambda items, **_: items
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        task.tqdm = bar
        if shown:
            datasets.enable_progress_bars()


def _load(tasks: Sequence[str | Path], folder: Path) -> Any:
    """Loads the harness's tables of tasks and groups, merged over all tasks."""
    manager, specs = _specs(tasks, folder)
    loaded: dict[str, Any] = {}
    for task, spec in zip(tasks, specs, strict=True):
        try:
            tables = manager.load(spec)
        except Exception as error:
            raise _unfit(str(task), error) from error
        for table, members in tables.items():
            twice = sorted(set(loaded.setdefault(table, {})) & set(members))
            if twice:
                raise QuantryError(f"the task {twice[0]} is given twice", fix="name each task once")
            loaded[table].update(members)
    unsafe = [name for name, task in loaded["tasks"].items() if getattr(task, "UNSAFE_CODE", False)]
    if unsafe:
        raise QuantryError(f"the task {unsafe[0]} runs code that the model writes", fix="choose another task")
    return loaded


def _specs(tasks: Sequence[str | Path], folder: Path) -> tuple[Any, list[Any]]:
    """Returns the harness's index of tasks, and what it loads each task by: its name, or what its YAML file says."""
    if not tasks:
        raise QuantryError("no task is named", fix="give the name of a task or the path of its YAML file")
    files = [isinstance(task, Path) or task.endswith((".yaml", ".yml")) for task in tasks]
    manager = _manager(with_names=not all(files))
    specs = [
        _read(Path(task), folder) if file else _known(str(task), manager)
        for task, file in zip(tasks, files, strict=True)
    ]
    return manager, specs


@cache
def _manager(with_names: bool) -> Any:
    """Returns the harness's index of tasks; reading the thousands that it brings takes several seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=with_names)


def _known(name: str, manager: Any) -> str:
    if name not in manager.task_index:
        close = get_close_matches(name, manager.all_tasks, n=3)
        raise UnknownNameError(
            f"lm-evaluation-harness has no task {name}" + (f"; near to it: {', '.join(close)}" if close else ""),
            fix="give one of `lm-eval ls tasks`, or the path of a YAML file",
        )
    return name


def _read(path: Path, folder: Path) -> dict[str, Any]:
    """Reads a task's YAML and finds its data files next to it; the harness caches them in `folder`."""
    from lm_eval.tasks._yaml_loader import load_yaml

    if not path.is_file():
        raise QuantryError(f"there is no task file {path}", fix="give the path of a YAML file of lm-evaluation-harness")
    try:
        settings: dict[str, Any] = load_yaml(path)
    except Exception as error:
        raise _unfit(str(path), error) from error
    if not {"task", "group"} & set(settings):
        raise QuantryError(f"{path} names no task", fix="write `task: NAME` into it")
    data = settings.get("dataset_kwargs")
    if isinstance(data, dict) and "data_files" in data:
        files = _placed(data["data_files"], path.parent)
        settings["dataset_kwargs"] = {**data, "data_files": files, "cache_dir": str(folder)}
    return settings


def _placed(files: Any, folder: Path) -> Any:
    """Resolves paths of data files from the folder of the task's YAML; raises QuantryError if one is missing."""
    if isinstance(files, dict):
        return {split: _placed(each, folder) for split, each in files.items()}
    if isinstance(files, list | tuple):
        return [_placed(each, folder) for each in files]
    if "://" in str(files):
        return files
    path = folder / Path(str(files)).expanduser()
    if not path.is_file() and not any(folder.glob(str(files)) if not path.is_absolute() else ()):
        raise QuantryError(f"the task has no data file {path}", fix="correct data_files, relative to its YAML file")
    return str(path)


def _set_examples(task: Any) -> None:
    """Sets the seed of the examples before a question, and no examples for a task that does not say, as the harness."""
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=SEED)


def _unfit(task: str, error: Exception) -> QuantryError:
    words = str(error).strip().splitlines() or [""]
    return QuantryError(
        f"the task {task} cannot be run: {type(error).__name__}: {words[0]}",
        fix="check that its YAML and every line of its data have the same fields; without a network, use data files",
    )


def _result(name: str, report: Any) -> TaskResult:
    values = report["results"][name]
    keys = [key for key, value in values.items() if "," in key and isinstance(value, int | float)]
    names = {key: _metric(key) for key in keys if not key.partition(",")[0].endswith("_stderr")}
    better = report.get("higher_is_better", {}).get(name, {})
    return TaskResult(
        task=name,
        metrics={short: float(values[key]) for key, short in names.items()},
        higher_is_better={short: bool(better.get(key.partition(",")[0], True)) for key, short in names.items()},
        samples=_samples(report["samples"][name], set(names.values())),
    )


def _metric(key: str) -> str:
    """Returns the harness's key without the filter if there is none: "acc,none" becomes "acc"."""
    metric, _, filtered = key.partition(",")
    return metric if filtered == "none" else f"{metric},{filtered}"


def _samples(rows: Sequence[Mapping[str, Any]], metrics: set[str]) -> tuple[TaskSample, ...]:
    """Returns one sample per question; the harness has one per question and filter."""
    samples: dict[int, TaskSample] = {}
    for row in sorted(rows, key=lambda row: int(row["doc_id"])):
        names = {name: _metric(f"{name},{row['filter']}") for name in row["metrics"]}
        values = {
            short: float(row[name]) for name, short in names.items() if short in metrics and _is_number(row[name])
        }
        answer = [response if len(response) > 1 else response[0] for response in row["resps"]]  # before filters
        number = int(row["doc_id"])
        others = samples[number].values if number in samples else {}
        samples[number] = TaskSample(number, str(row["target"]), answer, {**others, **values})
    return tuple(samples.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) or getattr(value, "ndim", 1) == 0
