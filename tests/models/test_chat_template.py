"""Chat templates: what transformers renders, in bounded time and memory whatever a model brings."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from depth import cases
from quantry.models.chat_template import ROOM, Renderer, TemplateLimitError, TemplateRefusalError, render
from quantry.models.reader import demo_folder
from quantry.models.tokenizer import load_tokenizer, render_chat, template_of
from tiny_tokenizers import write_tokenizer

TALK = [{"role": "user", "content": "What color is the sky?"}]
MEMORY = 512 << 20
HOSTILE = {
    "loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "takes more than 0.3 s",
    ),
    "a power": ("{{ 9 ** (9 ** 9) }}", "takes more than 0.3 s"),
    "doubling": (
        "{% set n = namespace(x='x') %}{% for _ in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
        "needs more than 512 MiB",
    ),
    "center": ("{{ 'x'.center(10 ** 10) }}", "needs more than 512 MiB"),
    "indent": ("{{ ('x\n' * 50) | indent(10 ** 8) }}", "(needs|takes) more than"),
    "a long text": ("{{ 'x' * 10 ** 7 }}", f"gives more than {ROOM:,}"[:-3]),
}


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    short = Renderer(seconds=0.3, memory=MEMORY)
    yield short
    short.close()


@pytest.fixture(scope="module")
def patient() -> Iterator[Renderer]:
    """A renderer whose time suffices to reach the limit of memory on a slow machine."""
    patient = Renderer(seconds=15, memory=MEMORY)
    yield patient
    patient.close()


@pytest.mark.parametrize("name", cases(HOSTILE, ("loops", "doubling", "a long text")))
def test_a_hostile_template_ends_at_a_limit(renderer: Renderer, patient: Renderer, name: str) -> None:
    template, words = HOSTILE[name]
    renderer = renderer if words.startswith("takes") else patient
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with pytest.raises(TemplateLimitError, match=words) as caught:
        renderer.render(template, TALK, {}, generation=False)
    assert "\n" not in str(caught.value)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert spent < 20, "the processor's seconds, of which the start of the process takes some"
    assert renderer.render("{{ messages[0].content }}", TALK, {}, generation=False) == TALK[0]["content"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% for %}", "Expected"),
        ("{{ messages[7].content.text }}", "no element 7"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_a_template_that_fails_is_one_line(renderer: Renderer, template: str, reason: str) -> None:
    with pytest.raises(TemplateRefusalError, match=reason) as caught:
        renderer.render(template, TALK, {}, generation=False)
    assert "\n" not in str(caught.value)


def test_a_chat_is_what_transformers_renders(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    talk = [*TALK, {"role": "assistant", "content": "Blau, größer 🙂"}, *TALK]
    for generation in (False, True):
        expected = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=generation)
        assert render_chat(load_tokenizer(demo_folder()), talk, generation=generation) == expected
    assert render("{{ bos_token }}{{ messages | length }}", talk, {"bos_token": "<s>"}) == "<s>3"


def test_of_several_templates_the_default_one_counts(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "bpe-qwen2")
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.chat_template = {"rag": "a", "default": "{{ messages[0].role }}"}
    assert render_chat(tokenizer, TALK) == "user"
    tokenizer.chat_template = {"rag": "a"}
    assert template_of(tokenizer) is None


def test_a_forked_process_has_a_renderer_of_its_own() -> None:
    assert render("{{ 1 }}", TALK, {}) == "1"
    child = os.fork()
    if child == 0:
        os._exit(0 if render("{{ 2 }}", TALK, {}) == "2" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert render("{{ 3 }}", TALK, {}) == "3"
