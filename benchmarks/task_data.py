"""Public task sets on disk into task files of lm-evaluation-harness, scored as the harness's own tasks are.

    python benchmarks/task_data.py DATA_FOLDER OUT_FOLDER

Reads hellaswag_val_full.txt.bz2 (six lines a question: context, number of the right ending, four endings),
lambada_test.jsonl, piqa_valid.jsonl with piqa_valid-labels.lst, and arc-easy-test.json and arc-challenge-test.json (the
options are in the text of the instruction); writes a JSONL and a YAML of each. HellaSwag's contexts begin their last
sentence in lower case, as in this copy; the harness begins it with a capital, which it takes from a field this copy
lacks.
"""

import bz2
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class Set:
    """One task: its rows, how many there must be, and what the harness is told of them."""

    rows: Callable[[Path], Rows]
    count: int
    settings: dict[str, Any]


MEANS = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
PERPLEXITY = {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}
CHOICE = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "label", "metric_list": MEANS}
QUESTION = {**CHOICE, "doc_to_text": "Question: {{question}}\nAnswer:"}
OPTION = re.compile(r"Answer(\d+): ")


def hellaswag(folder: Path) -> Rows:
    lines = bz2.decompress((folder / "hellaswag_val_full.txt.bz2").read_bytes()).decode().splitlines()
    for start in range(0, len(lines), 6):
        context, label, *endings = lines[start : start + 6]
        yield {"query": context.strip(), "label": int(label), "choices": [ending.strip() for ending in endings]}


def lambada(folder: Path) -> Rows:
    for line in (folder / "lambada_test.jsonl").read_text(encoding="utf-8").splitlines():
        yield {"text": json.loads(line)["text"]}


def piqa(folder: Path) -> Rows:
    lines = (folder / "piqa_valid.jsonl").read_text(encoding="utf-8").splitlines()
    labels = (folder / "piqa_valid-labels.lst").read_text().split()
    for line, label in zip(lines, labels, strict=True):
        row = json.loads(line)
        yield {"question": row["goal"], "choices": [row["sol1"], row["sol2"]], "label": int(label)}


def arc(name: str) -> Callable[[Path], Rows]:
    def rows(folder: Path) -> Rows:
        for row in json.loads((folder / name).read_text(encoding="utf-8")):
            question, options, _ = row["instruction"].rsplit("\n\n", 2)
            question = question.removeprefix("Please choose the correct answer to the question: ")
            found = OPTION.split(options)
            numbers, choices = found[1::2], [choice.strip() for choice in found[2::2]]
            yield {
                "question": question,
                "choices": choices,
                "label": numbers.index(row["answer"].removeprefix("answer")),
            }

    return rows


SETS = {
    "hellaswag": Set(hellaswag, 10_042, {**CHOICE, "doc_to_text": "{{query}}"}),
    "lambada": Set(
        lambada,
        5_153,
        {
            "output_type": "loglikelihood",
            "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
            "doc_to_target": "{{' '+text.split(' ')[-1]}}",
            "metric_list": [PERPLEXITY, MEANS[0]],
        },
    ),
    "piqa": Set(piqa, 1_838, QUESTION),
    "arc_easy": Set(arc("arc-easy-test.json"), 2_376, QUESTION),
    "arc_challenge": Set(arc("arc-challenge-test.json"), 1_172, QUESTION),
}


def write(name: str, data: Path, out: Path) -> Path:
    """Writes the rows and the YAML of a task; the path of the YAML."""
    task = SETS[name]
    rows = list(task.rows(data))
    wrong = [
        row
        for row in rows
        if "choices" in row and not (0 <= row["label"] < len(row["choices"]) and all(row["choices"]))
    ]
    if len(rows) != task.count or wrong:
        raise SystemExit(
            f"{name}: {len(rows)} rows where {task.count} are known, and {len(wrong)} of them wrong: {wrong[:1]}"
        )
    out.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (out / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}}, "test_split": "test"}
    settings = {"task": name, **source, **task.settings, "metadata": {"version": 1.0}}
    file = out / f"{name}.yaml"
    file.write_text(json.dumps(settings, indent=2), encoding="utf-8")  # JSON is YAML
    return file


def main(data: Path, out: Path) -> None:
    for name in SETS:
        print(write(name, data, out))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
