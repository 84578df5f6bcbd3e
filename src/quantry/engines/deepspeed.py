"""DeepSpeed-MII: its OpenAI-compatible server, which starts the model and then answers for it."""

from collections.abc import Iterable

from quantry.engines.contract.boot_log import Facts
from quantry.engines.contract.command import Command, Setting, check, explained, maybe, several, started_by
from quantry.engines.contract.options import Serving


def settings(serving: Serving) -> list[Setting]:
    return [
        Setting("--model", serving.model, "the folder, in 16 bit"),
        Setting("--host", serving.host, "the address that it listens on; its own default is every address"),
        Setting("--port", serving.listening_port, "the port that it listens on"),
        *maybe("--deployment-name", serving.name, "what the deployment is called"),
        *maybe("--max-length", serving.context, "the longest sequence, prompt and answer"),
        *several("--tensor-parallel", serving.tensor_parallel, "every layer is cut into as many parts, one a device"),
        *several("--replica-num", serving.replicas, "copies of the model that share the requests"),
        *maybe("--api-keys", serving.api_key, "requests need this key; it can be seen in lists of processes"),
    ]


def command(serving: Serving) -> Command:
    check(serving)
    return started_by((serving.python, "-m", "mii.entrypoints.openai_api_server"), serving, settings(serving))


def explain(serving: Serving) -> list[tuple[str, str]]:
    return explained(serving, settings(serving))


def facts(lines: Iterable[str]) -> Facts:
    """Reads its log, which says little."""
    return Facts(warnings=tuple(dict.fromkeys(line.strip() for line in lines if "[WARNING]" in line)))
