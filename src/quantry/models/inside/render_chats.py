"""Renders chat templates in a process with limited memory and time: templates are programs of strangers.

    python render_chats.py BYTES SECONDS [FOLDER]

Every line of standard input is a request: `template`, `messages`, `variables`, `generation`, and `most`, the characters
that the text may have. Its answer is a line of standard output: `text`, `refused` with the template's reason, or
`limit`. The kernel ends a process that takes more than SECONDS of processor time for a request.

With a FOLDER of ONNX Runtime GenAI that library renders, with the template and the variables that it finds there.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

REASON = 160  # characters
Request = dict[str, Any]


def main(memory: int, seconds: float, folder: str | None = None) -> None:
    render = _genai(folder) if folder else _transformers()
    with suppress(ValueError, OSError):  # a system without this limit
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = _answer(render, json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)
        if answer.get("limit") == "memory":  # what is left of it may be unfit for more
            return


def _transformers() -> Callable[[Request], str]:
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(request: Request) -> str:
        library: Any = render_jinja_template  # its annotation forgets that it returns a pair
        (text,), _ = library(
            [request["messages"]],
            chat_template=request["template"],
            add_generation_prompt=request["generation"],
            **request["variables"],
        )
        return str(text)

    return render


def _genai(folder: str) -> Callable[[Request], str]:
    from onnxruntime_genai import Tokenizer  # type: ignore[import-not-found]

    tokenizer = Tokenizer(folder)

    def render(request: Request) -> str:
        messages = json.dumps(request["messages"])
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=request["generation"]))

    return render


def _answer(render: Callable[[Request], str], request: Request) -> dict[str, str]:
    try:
        text = render(request)
    except MemoryError:
        return {"limit": "memory"}
    except Exception as error:  # a template raises what it likes
        reason = str(error).strip() or type(error).__name__
        if reason.startswith("std::bad_alloc"):  # as ONNX Runtime GenAI words it
            return {"limit": "memory"}
        return {"refused": reason.splitlines()[0][:REASON]}
    return {"text": text} if len(text) <= request["most"] else {"limit": "text"}


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
