"""The server as it was planned, its first answer and its memory."""

import re
from dataclasses import replace
from pathlib import Path

from quantry.engines.contract.catalogue import engine_facts
from quantry.engines.contract.options import HOST, Options
from quantry.errors import QuantryError
from quantry.jobs.run.plan import RunPlan
from quantry.planning.option import Option
from quantry.serving.client import Answer, Server
from quantry.serving.prepare import ServerPlan
from quantry.serving.process import Running, check_port, free_port

ANSWER = 64  # tokens of the first answer at most, and of the text that measures the speed
ALL_LAYERS = 999  # how a plan says "all layers"


def server_options(plan: RunPlan) -> Options:
    """Returns the options of the planned server; with a plan for another machine, only those that the user gave."""
    assert plan.installed is not None
    candidate, layout, user = plan.candidate, plan.candidate.layout, plan.options
    given = Options(engine=candidate.engine, port=port_of(plan), engine_python=user.python, context=user.context)
    if user.gpu:
        return given
    on_gpu = plan.installed.platform != "cpu"
    facts = engine_facts(candidate.engine).plan
    splits = on_gpu and not facts.spreads_unasked
    layers, dtype = (_flag(candidate, name) for name in ("--n-gpu-layers", "--dtype"))
    cache_gib = max(1, -(-candidate.memory["kv_cache"] // (1 << 30)))
    return replace(
        given,
        context=plan.plan.workload["context"],
        parallel=max(1, layout["concurrency"] // layout["replicas"]),
        kv=None if candidate.kv_cache_type == "auto" else candidate.kv_cache_type,
        tensor_parallel=layout["tensor_parallel"] if splits else 1,
        pipeline_parallel=layout["pipeline_parallel"] if splits else 1,
        offload_layers=int(layers) if layers and on_gpu and int(layers) < ALL_LAYERS else None,
        cache_gib=cache_gib if "cache_gib" in facts.options and not on_gpu else None,
        dtype=dtype if "dtype" in facts.options else None,
    )


def port_of(plan: RunPlan) -> int:
    """Returns the port that the user gave, the engine's usual one, or a free one if that is in use."""
    if plan.options.port is not None:
        return plan.options.port or free_port(HOST)
    usual = engine_facts(plan.candidate.engine).server.port
    try:
        check_port(HOST, usual)
    except QuantryError:
        return free_port(HOST)
    return usual


def _flag(option: Option, name: str) -> str | None:
    words = option.commands["serve"]
    return words[words.index(name) + 1] if name in words[:-1] else None


def first_answer(running: Running, server_plan: ServerPlan, question: str) -> tuple[Answer, float | None]:
    """Asks a first question, as a chat if the model has a template for one; returns the answer and the tok/s.

    A short answer ends before its speed can be measured, so that is measured on one without end if the engine can.
    """
    checkpoint = server_plan.model.checkpoint
    chats = checkpoint is None or checkpoint.chat_template
    options = {"max_tokens": ANSWER, "temperature": 0}
    with Server(running.url, model=running.model) as server:
        chat = [{"role": "user", "content": question}]
        answer = (server.chat(chat, **options) if chats else server.complete(question, **options)).whole()
        if not engine_facts(running.engine).server.ignores_end:
            return answer, answer.tokens_per_s
        return answer, server.complete(question, **options, ignore_eos=True).whole().tokens_per_s


def measured_memory(running: Running, server_plan: ServerPlan) -> dict[str, int]:
    """Returns the memory that the engine reports, and of an engine in a single process all that the process holds."""
    facts = running.facts()
    is_single = engine_facts(running.engine).server.single_process and server_plan.serving.platform == "cpu"
    total = _resident(running.pid) if is_single else None
    parts = {"weights": facts.weights_bytes, "kv_cache": facts.kv_cache_bytes, "total": total}
    return {name: size for name, size in parts.items() if size}


def _resident(pid: int) -> int | None:
    """Returns the bytes of memory that a process holds; None if the system does not report them."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return None
    line = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    return int(line[1]) << 10 if line else None
