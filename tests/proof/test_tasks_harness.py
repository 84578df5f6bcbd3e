"""lm-evaluation-harness on local data: the demo model in torch, in llama.cpp, and in the harness's own class."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_artefacts import gguf_in, quantized_demo
from depth import deep
from quantry.errors import QuantryError, UnknownNameError
from quantry.llamacpp.model import LlamaModel
from quantry.models.reader import demo_folder
from quantry.proof.tasks import harness
from quantry.proof.tasks.answers import Answers, LlamaAnswers, TorchAnswers
from quantry.proof.tasks.harness import TaskResult, compare, evaluate
from quantry.proof.tasks.significance import paired

ROWS = [
    ("Once upon a", ["time", "banana", "seven of the"], 0),
    ("The opposite of hot is", ["cold", "a very long story", "elephant"], 0),
    ("One day, a little girl named Lily went to the", ["park", "purple", "ran"], 0),
    ("The capital of France is", ["dog", "Paris", "run quickly"], 1),
    ("Fish live in the", ["sky and the moon", "book", "ocean"], 2),
    ("He was very happy and", ["xylophone", "played", "the of"], 2),  # a wrong key: not all is to be right
    ("The sky is", ["blue", "Tuesday", "hungry hungry"], 0),
    ("She said, 'Thank", ["table", "green", "you"], 2),
]
ASKED = [
    ("What color is the sky?", "blue"),
    ("What is the capital of France?", "Paris"),
    ("Where do fish live?", "ocean"),
]
LINES = ("Once upon a time there was a dog.", "The sky is blue.\nFish live in the ocean. " * 30, "Lily smiled.")
ACC = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}, {"metric": "acc_norm"}]


def write_task(folder: Path, name: str, rows: list[dict[str, Any]], **settings: Any) -> Path:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    written = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
        "test_split": "test",
        **settings,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(written))  # JSON is YAML
    return folder / f"{name}.yaml"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("yaml")
    return {
        "choices": write_task(
            folder,
            "choices",
            [{"text": text, "choices": choices, "gold": gold} for text, choices, gold in ROWS],
            output_type="multiple_choice",
            doc_to_text="{{text}}",
            doc_to_choice="{{choices}}",
            doc_to_target="{{gold}}",
            metric_list=ACC,
        ),
        "words": write_task(
            folder,
            "words",
            [{"text": text, "word": choices[gold]} for text, choices, gold in ROWS],
            output_type="loglikelihood",
            doc_to_text="{{text}}",
            doc_to_target=" {{word}}",
            metric_list=[
                {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
                {"metric": "acc"},
            ],
        ),
        "questions": write_task(
            folder,
            "questions",
            [{"question": question, "answer": answer} for question, answer in ASKED],
            output_type="generate_until",
            doc_to_text="<|user|>\n{{question}}<|eos|>\n<|assistant|>\n",
            doc_to_target="{{answer}}",
            generation_kwargs={"until": [".", "\n"], "max_gen_toks": 24, "do_sample": False},
            filter_list=[
                {"name": "last", "filter": [{"function": "regex", "regex_pattern": r"(\w+)$"}, {"function": "take_first"}]},
                {"name": "none", "filter": [{"function": "take_first"}]},
            ],
            metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        ),
        "texts": write_task(
            folder,
            "texts",
            [{"text": text} for text in LINES],
            output_type="loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="{{text}}",
            metric_list=[{"metric": "byte_perplexity"}, {"metric": "word_perplexity"}],
        ),
    }  # fmt: skip


@pytest.fixture(scope="module")
def module() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32)


@pytest.fixture(scope="module")
def decoded(module: Any) -> TorchAnswers:
    return TorchAnswers(module, AutoTokenizer.from_pretrained(demo_folder()), context=256)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaAnswers]:
    with LlamaModel(gguf_in(quantized_demo(tmp_path_factory, "gguf-f16")), context=256, threads=1) as opened:
        yield LlamaAnswers(opened)


@pytest.fixture(scope="module")
def found(tasks: dict[str, Path], decoded: TorchAnswers) -> dict[str, TaskResult]:
    return {result.task: result for result in evaluate(decoded, list(tasks.values()))}


def test_the_harness_own_class_gives_the_same_numbers(
    tasks: dict[str, Path], module: Any, found: dict[str, TaskResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tasks["choices"].parent)  # it finds data files from where it is run
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    own = HFLM(pretrained=module, tokenizer=tokenizer, max_length=256, batch_size=2)
    results = simple_evaluate(
        own,
        tasks=[str(path) for path in tasks.values()],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    assert results is not None
    for name, result in found.items():
        theirs = {key: value for key, value in results["results"][name].items() if "," in key and "_stderr" not in key}
        assert {key.removesuffix(",none") for key in theirs} == set(result.metrics)
        for key, value in theirs.items():
            assert result.metrics[key.removesuffix(",none")] == pytest.approx(value, rel=1e-4), (name, key)
        rows = {(row["doc_id"], row["filter"]): row for row in results["samples"][name]}
        for (number, chosen), row in rows.items():
            sample = result.samples[number]
            assert sample.id == number
            for metric in row["metrics"]:
                short = metric if chosen == "none" else f"{metric},{chosen}"
                if short in sample.values:
                    assert sample.values[short] == pytest.approx(row[metric], rel=1e-4), (name, number, metric)


def test_llama_cpp_on_the_16_bit_file_gives_the_same_answers(
    tasks: dict[str, Path], found: dict[str, TaskResult], served: LlamaAnswers
) -> None:
    for result in evaluate(served, list(tasks.values())):
        in_torch = found[result.task]
        assert set(result.metrics) == set(in_torch.metrics)
        for metric, value in result.metrics.items():
            tolerance = 0 if metric.startswith(("acc", "exact_match")) else 0.01
            assert value == pytest.approx(in_torch.metrics[metric], rel=tolerance), (result.task, metric)
        if result.task == "questions":
            assert [sample.answer for sample in result.samples] == [sample.answer for sample in in_torch.samples]


def test_what_is_right_is_counted_right(found: dict[str, TaskResult]) -> None:
    choices = found["choices"]
    for sample, (_, texts, gold) in zip(choices.samples, ROWS, strict=True):
        scores = [float(score) for score, _ in sample.answer]
        lengths = [len(text) for text in texts]
        assert sample.values["acc"] == (max(range(3), key=scores.__getitem__) == gold)
        best = max(range(3), key=lambda index: scores[index] / lengths[index])
        assert sample.values["acc_norm"] == (best == gold)
    assert 0.5 < choices.metrics["acc"] < 1
    assert choices.metrics["acc"] == sum(sample.values["acc"] for sample in choices.samples) / 8
    assert choices.higher_is_better == {"acc": True, "acc_norm": True}
    assert found["words"].higher_is_better["perplexity"] is False
    assert set(found["questions"].metrics) == {"exact_match", "exact_match,last"}
    assert found["questions"].metrics["exact_match,last"] == 1.0
    assert found["questions"].metrics["exact_match"] == 0.0
    assert found["questions"].samples[1].target == "Paris"
    assert found["questions"].samples[1].answer == ["The capital of France is Paris"]
    assert json.loads(json.dumps(asdict(choices)))["task"] == "choices"


def test_a_limit_takes_the_first_questions(tasks: dict[str, Path], decoded: TorchAnswers) -> None:
    (few,) = evaluate(decoded, [tasks["choices"]], limit=3)
    assert [sample.id for sample in few.samples] == [0, 1, 2]
    with pytest.raises(QuantryError, match="limit of 0"):
        evaluate(decoded, [tasks["choices"]], limit=0)


def test_questions_that_do_not_fit_lose_their_start(tasks: dict[str, Path], module: Any, served: LlamaAnswers) -> None:
    narrow = TorchAnswers(module, AutoTokenizer.from_pretrained(demo_folder()), context=6)
    with pytest.raises(QuantryError, match="asks for 24 tokens in a context of 6"):
        evaluate(narrow, [tasks["questions"]])
    wide = TorchAnswers(module, AutoTokenizer.from_pretrained(demo_folder()), context=32)
    (result,) = evaluate(wide, [tasks["questions"]])
    for sample, (question, _) in zip(result.samples, ASKED, strict=True):
        prompt = wide.encode(f"<|user|>\n{question}<|eos|>\n<|assistant|>\n")[-8:]  # what 24 tokens leave of 32
        text = wide.decode(wide.generate([prompt], 24)[0])
        assert sample.answer == [text.split(".")[0].split("\n")[0]]


def test_two_models_are_compared_question_by_question(
    tasks: dict[str, Path], found: dict[str, TaskResult], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with LlamaModel(gguf_in(quantized_demo(tmp_path_factory, "gguf-q2_k")), context=256, threads=1) as opened:
        coarse = evaluate(LlamaAnswers(opened), list(tasks.values()))
    rows = {(row.task, row.metric): row for row in compare(list(found.values()), coarse)}
    acc = rows["choices", "acc"]
    base, quantized = ([sample.values["acc"] for sample in result.samples] for result in (found["choices"], coarse[0]))
    assert acc.paired == paired(base, quantized)
    assert (acc.base, acc.quantized) == (found["choices"].metrics["acc"], coarse[0].metrics["acc"])
    perplexity = rows["words", "perplexity"]
    assert perplexity.quantized > perplexity.base
    assert not perplexity.higher_is_better
    assert perplexity.paired is not None
    assert perplexity.paired.difference.value < 0  # each question's value is its log-probability
    assert rows["texts", "byte_perplexity"].paired is None  # (log-probability, bytes): there is no one number
    with pytest.raises(QuantryError, match="did not run the same"):
        compare(list(found.values())[1:], coarse)


def broken(folder: Path, text: str) -> Path:
    (folder / "broken.yaml").write_text(text)
    return folder / "broken.yaml"


DATA = "dataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
CHOICE = "output_type: multiple_choice\ndoc_to_target: 0\ndoc_to_choice: '{{choices}}'\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("task: [unclosed", "cannot be run: ParserError"),
        ("- a\n- b", "cannot be run: ValueError"),
        ("dataset_path: json", "names no task"),
        (f"task: broken\n{DATA.replace('rows', 'none')}{CHOICE}doc_to_text: a", "has no data file"),
        (f"task: broken\n{DATA}{CHOICE}doc_to_text: '{{{{nothing.at.all}}}}'", "cannot be run: UndefinedError"),
        (f"task: broken\n{DATA}{CHOICE}doc_to_text: '{{{{'", "cannot be run: TemplateSyntaxError"),
        (f"task: broken\n{DATA.replace('test_split: test', 'test_split: dev')}{CHOICE}doc_to_text: a", "cannot be run: KeyError"),
        (f"task: broken\n{DATA}output_type: dance\ndoc_to_text: a", "cannot be run"),
        ("task: broken\ndataset_path: none/here-at-all\ntest_split: test\noutput_type: multiple_choice\ndoc_to_text: a", "cannot be run"),
    ],
)  # fmt: skip
def test_a_task_that_cannot_be_run_says_why(
    decoded: TorchAnswers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    (tmp_path / "rows.jsonl").write_text('{"choices": ["a", "b"]}\n')
    with pytest.raises(QuantryError) as caught:
        evaluate(decoded, [broken(tmp_path, text)])
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value) or "broken" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_line_of_data_that_is_no_json(decoded: TorchAnswers, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"choices": ["a", "b"]}\n{"choices":\n')
    with pytest.raises(QuantryError, match="cannot be run"):
        evaluate(decoded, [broken(tmp_path, f"task: broken\n{DATA}{CHOICE}doc_to_text: a")])


@deep
def test_a_name_that_the_harness_does_not_have(decoded: TorchAnswers) -> None:
    """Its index of tasks alone takes it 7 seconds."""
    with pytest.raises(UnknownNameError, match="no task hellaswagg; near to it: .*hellaswag"):
        evaluate(decoded, ["hellaswagg"])


def test_names_that_are_none(decoded: TorchAnswers, tmp_path: Path, tasks: dict[str, Path]) -> None:
    with pytest.raises(QuantryError, match="no task file"):
        evaluate(decoded, [tmp_path / "none.yaml"])
    with pytest.raises(QuantryError, match="no task is named"):
        evaluate(decoded, [])
    with pytest.raises(QuantryError, match="choices is given twice"):
        evaluate(decoded, [tasks["choices"], tasks["choices"]])


def test_a_task_that_samples_is_refused(decoded: TorchAnswers, tmp_path: Path) -> None:
    sampled = write_task(
        tmp_path, "sampled", [{"question": "a", "answer": "b"}], output_type="generate_until",
        doc_to_text="{{question}}", doc_to_target="{{answer}}", metric_list=[{"metric": "exact_match"}],
        generation_kwargs={"until": ["\n"], "do_sample": True, "temperature": 0.8},
    )  # fmt: skip
    with pytest.raises(QuantryError, match="a task that samples"):
        evaluate(decoded, [sampled])


def test_an_error_of_the_model_is_not_taken_for_one_of_the_task(tasks: dict[str, Path], module: Any) -> None:
    class Failing(TorchAnswers):
        def loglikelihoods(self, *_: Any) -> Any:
            raise RuntimeError("out of memory")

    failing: Answers = Failing(module, AutoTokenizer.from_pretrained(demo_folder()))
    with pytest.raises(RuntimeError, match="out of memory"):
        evaluate(failing, [tasks["choices"]])


def test_without_the_harness_the_command_that_installs_it_is_said(
    tasks: dict[str, Path], decoded: TorchAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(QuantryError, match=r"pip install 'quantry\[tasks\]'"):
        harness.evaluate(decoded, [tasks["choices"]])
