"""Flags that several commands share, word for word."""

from pathlib import Path
from typing import Annotated

import typer

Extra = Annotated[
    list[str] | None, typer.Argument(metavar="[-- ENGINE FLAGS]", help="Words for the engine itself, after `--`.")
]
PromptTokens = Annotated[
    str, typer.Option(help="Tokens of a prompt: 256, or a distribution as 256,stdev=64,min=16,max=512.")
]
AnswerTokens = Annotated[str, typer.Option(help="Tokens of an answer, in the same way.")]
Dataset = Annotated[str | None, typer.Option(help="Prompts from a file (JSON lines, CSV, parquet, text) or a hub id.")]
Tokenizer = Annotated[
    str | None, typer.Option(help="A folder, .gguf file or hub id to count with; else as the server tells.")
]
Chat = Annotated[bool, typer.Option("--chat", help="Ask for chats rather than completions.")]
GuidellmPython = Annotated[
    Path | None, typer.Option(help="The python of the environment that guidellm is installed in.")
]
Context = Annotated[int | None, typer.Option(help="Tokens a sequence may reach.")]
Threads = Annotated[int | None, typer.Option(help="Threads on the processor; its free physical cores if left out.")]
Utilization = Annotated[float | None, typer.Option(help="Share of a device's memory that may be filled.")]
CacheGib = Annotated[int | None, typer.Option(help="GiB of the KV cache (vllm on a processor).")]
EnginePython = Annotated[
    Path | None, typer.Option(help="The python of the environment that the engine is installed in.")
]
EngineBin = Annotated[Path | None, typer.Option(help="The engine's program, such as a llama-server of yours.")]
Image = Annotated[str | None, typer.Option(help="Run the engine from this container image.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
