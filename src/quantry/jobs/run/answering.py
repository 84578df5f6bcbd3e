"""The last two steps: the server as it was planned, and the first answer it gives."""

import re
from dataclasses import replace
from pathlib import Path

from quantry.engines.contract.catalogue import engine
from quantry.engines.contract.options import HOST, Options
from quantry.errors import QuantryError
from quantry.jobs.run.decision import Job
from quantry.planning.plan import Option
from quantry.serving.client import Answer, Server
from quantry.serving.prepare import ServerPlan
from quantry.serving.process import Running, check_port, free_port

ANSWER = 64  # tokens of the first answer at most, and of the text that the pace is measured on
ALL_LAYERS = 999  # what a plan says for all of them


def server_options(job: Job) -> Options:
    """The server as it was planned; on another machine than the one of the plan only with the context asked for."""
    assert job.installed is not None
    option, layout = job.option, job.option.layout
    python = Path(job.asked.engine_python).expanduser() if job.asked.engine_python else None
    first = Options(engine=option.engine, port=port_of(job), engine_python=python, context=job.asked.context)
    if job.asked.gpu:
        return first
    on_gpu = job.installed.platform != "cpu"
    planned = engine(option.engine).plan
    cuts = on_gpu and not planned.spreads_unasked
    layers, dtype = (_flag(option, name) for name in ("--n-gpu-layers", "--dtype"))
    return replace(
        first,
        context=job.plan.workload["context"],
        parallel=max(1, layout["concurrency"] // layout["replicas"]),
        kv=None if option.kv_cache_type == "auto" else option.kv_cache_type,
        tensor_parallel=layout["tensor_parallel"] if cuts else 1,
        pipeline_parallel=layout["pipeline_parallel"] if cuts else 1,
        offload_layers=int(layers) if layers and on_gpu and int(layers) < ALL_LAYERS else None,
        cache_gib=max(1, -(-option.memory["kv_cache"] // (1 << 30)))
        if "cache_gib" in planned.options and not on_gpu
        else None,
        dtype=dtype if "dtype" in planned.options else None,
    )


def port_of(job: Job) -> int:
    """The one that was asked for, the engine's usual one, or one that is free where that is taken."""
    if job.asked.port is not None:
        return job.asked.port or free_port(HOST)
    usual = engine(job.option.engine).server.port
    try:
        check_port(HOST, usual)
    except QuantryError:
        return free_port(HOST)
    return usual


def _flag(option: Option, name: str) -> str | None:
    """What the planned command gives for a flag."""
    words = option.commands["serve"]
    return words[words.index(name) + 1] if name in words[:-1] else None


def first_answer(running: Running, prepared: ServerPlan, question: str) -> tuple[Answer, float | None]:
    """Through the API: as a chat if the model has a template for one, else as a text to go on with; and the pace.

    A short answer is over before its pace can be told, so where the engine can it is measured on one that does not end.
    """
    checkpoint = prepared.model.checkpoint
    chats = checkpoint is None or checkpoint.chat_template
    how = {"max_tokens": ANSWER, "temperature": 0}
    with Server(running.url, model=running.model) as server:
        chat = [{"role": "user", "content": question}]
        answer = (server.chat(chat, **how) if chats else server.complete(question, **how)).whole()
        if not engine(running.engine).server.ignores_end:
            return answer, answer.tokens_per_s
        return answer, server.complete(question, **how, ignore_eos=True).whole().tokens_per_s


def measured_memory(running: Running, prepared: ServerPlan) -> dict[str, int]:
    """What the engine says that it took, and of one that computes in its own process all that the process holds."""
    facts = running.facts()
    alone = engine(running.engine).server.single_process and prepared.serving.platform == "cpu"
    found = {
        "weights": facts.weights_bytes,
        "kv_cache": facts.kv_cache_bytes,
        "total": _resident(running.pid) if alone else None,
    }
    return {name: size for name, size in found.items() if size}


def _resident(pid: int) -> int | None:
    """Bytes of memory that a process holds; None where the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) << 10 if found else None
