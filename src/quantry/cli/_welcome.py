"""What `quantry` alone says: the commands that matter with an example each, in the order of their use."""

from quantry import __version__

TITLES = {
    "choose": "Choose: what fits, and what it will cost",
    "make": "Make: write quantized files",
    "prove": "Prove: what was lost",
    "serve": "Serve: start, talk to it, load it",
}  # groups of commands, in the order of help
FIRST = {
    "run": "all of it: plan, quantize, prove, serve, a first answer",
    "plan": "which preset, engine and flags suit a model and a machine",
    "quantize": "write a quantized model",
    "verify": "measure what it lost; the exit code is a gate for CI",
    "serve": "start the engine that suits it, with an OpenAI API",
    "chat": "talk to it",
}


def welcome(groups: dict[str, str], examples: dict[str, tuple[str, ...]]) -> str:
    """Returns the text; `groups` and `examples` are those of the commands."""
    lines = [f"Quantry {__version__}: from a 16-bit LLM to a quantized model that its engine is proven to serve.", ""]
    for group, title in TITLES.items():
        lines += [f"{title}"]
        for name, about in FIRST.items():
            if groups[name] == group:
                lines += [f"  {examples[name][0]}", f"      {about}"]
        lines.append("")
    lines.append("All commands: quantry --help    Options of one: quantry plan --help")
    return "\n".join(lines)
