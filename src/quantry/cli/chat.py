"""`quantry chat`: a conversation with a running server, in the terminal."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantry.engines.contract.options import API_KEY

if TYPE_CHECKING:
    from quantry.serving.client import Server

GROUP = "serve"
EXAMPLES = (
    "quantry chat http://127.0.0.1:8080",
    'quantry chat http://127.0.0.1:8080 --system "Answer in one sentence."',
)
NEW = "/new"

Url = Annotated[str, typer.Argument(help="The server's address.")]
Model = Annotated[str | None, typer.Option(help="The model to ask; the first that the server lists if left out.")]
ApiKey = Annotated[str | None, typer.Option(envvar=API_KEY, help="The server's key; better in the environment.")]
System = Annotated[str | None, typer.Option(help="The system prompt.")]
MaxTokens = Annotated[int | None, typer.Option(help="Tokens of an answer at most.")]
Temperature = Annotated[
    float | None, typer.Option(help="0 always takes the likeliest token; the server's default if left out.")
]


def command(
    url: Url = "http://127.0.0.1:8080",
    model: Model = None,
    api_key: ApiKey = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
) -> None:
    """Talk to a running server and read answers as they are made; /new starts over, Ctrl-D or Ctrl-C ends."""
    from quantry.serving.client import Server
    from quantry.serving.template import template_warning

    options = {"max_tokens": max_tokens, "temperature": temperature}
    with Server(url, key=api_key, model=model) as server:
        if warning := template_warning(url, api_key):
            typer.echo(f"warning: {warning}", err=True)
        typer.echo(f"{server.model} at {server.url}; {NEW} starts over, Ctrl-D ends", err=True)
        try:
            _talk(server, system, {name: value for name, value in options.items() if value is not None})
        except (EOFError, KeyboardInterrupt):
            typer.echo(err=True)


def _talk(server: "Server", system: str | None, options: dict[str, Any]) -> None:
    """Answers line after line; at a terminal a refused line is dropped and the conversation goes on."""
    from quantry.errors import QuantryError

    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while True:
        line = _read()
        if line == NEW:
            messages = list(opening)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                messages.append({"role": "assistant", "content": _answer(server, messages, options)})
            except QuantryError as error:
                if not sys.stdin.isatty():
                    raise
                messages.pop()
                typer.echo(f"error: {error}", err=True)


def _read() -> str:
    if sys.stdin.isatty():
        import readline  # noqa: F401 - arrows and history at the prompt

    return input("> " if sys.stdin.isatty() else "").strip()


def _answer(server: "Server", messages: list[dict[str, str]], options: dict[str, Any]) -> str:
    """Prints an answer piece by piece, thoughts in grey, and returns its text."""
    terminal = sys.stdout.isatty()
    answer = server.chat(messages, **options)
    for piece in answer:
        typer.echo(typer.style(piece.text, dim=True) if piece.thought and terminal else piece.text, nl=False)
        sys.stdout.flush()
    typer.echo()
    return answer.answer.text
