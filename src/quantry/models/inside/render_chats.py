"""Renders chat templates in a process with limited memory and time: templates are programs of strangers.

    python render_chats.py BYTES SECONDS

Every line of standard input is a request: `template`, `messages`, `variables`, `generation`, and `most`, the characters
that the text may have. Its answer is a line of standard output: `text`, `refused` with the template's reason, or
`limit`. The kernel ends a process that takes more than SECONDS of processor time for a request.
"""

import json
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

REASON = 160  # characters


def main(memory: int, seconds: float) -> None:
    with suppress(ValueError, OSError):  # a system without this limit
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = _answer(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)
        if answer.get("limit") == "memory":  # what is left of it may be unfit for more
            return


def _answer(request: dict[str, Any]) -> dict[str, str]:
    render: Any = render_jinja_template  # its annotation forgets that it returns a pair
    try:
        (text,), _ = render(
            [request["messages"]],
            chat_template=request["template"],
            add_generation_prompt=request["generation"],
            **request["variables"],
        )
    except MemoryError:
        return {"limit": "memory"}
    except Exception as error:  # a template raises what it likes
        reason = str(error).strip() or type(error).__name__
        return {"refused": reason.splitlines()[0][:REASON]}
    return {"text": text} if len(text) <= request["most"] else {"limit": "text"}


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
