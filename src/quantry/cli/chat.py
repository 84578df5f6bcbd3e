"""`quantry chat`: a conversation with a running server, in the terminal."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from quantry.serving.client import Server

KEY = "QUANTRY_API_KEY"
NEW = "/new"


def command(
    url: Annotated[str, typer.Argument(help="Where the server is.")] = "http://127.0.0.1:8080",
    model: Annotated[str | None, typer.Option(help="The model to ask; the first that the server names.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar=KEY, help="The key that the server asks for; better in the environment.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before all else.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer at most.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 for the likeliest words; the server's if left out.")
    ] = None,
) -> None:
    """Talk to a running server, answers as they come; /new begins anew, Ctrl-D or Ctrl-C ends it."""
    from quantry.serving.client import Server

    options = {"max_tokens": max_tokens, "temperature": temperature}
    with Server(url, key=api_key, model=model) as server:
        typer.echo(f"{server.model} at {server.url}; {NEW} begins anew, Ctrl-D ends", err=True)
        try:
            _talk(server, system, {name: value for name, value in options.items() if value is not None})
        except (EOFError, KeyboardInterrupt):
            typer.echo(err=True)


def _talk(server: "Server", system: str | None, options: dict[str, Any]) -> None:
    """Turn after turn; what the server refuses is told, and at a terminal one may say something else."""
    from quantry.errors import QuantryError

    first = [{"role": "system", "content": system}] if system else []
    said = list(first)
    while True:
        words = _read()
        if words == NEW:
            said = list(first)
        elif words:
            said.append({"role": "user", "content": words})
            try:
                said.append({"role": "assistant", "content": _answer(server, said, options)})
            except QuantryError as error:
                if not sys.stdin.isatty():
                    raise
                said.pop()
                typer.echo(f"error: {error}", err=True)


def _read() -> str:
    """The next line of the user's; a prompt is shown to people only."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - arrows and history at the prompt

    return input("> " if sys.stdin.isatty() else "").strip()


def _answer(server: "Server", said: list[dict[str, str]], options: dict[str, Any]) -> str:
    """Shows an answer as it comes, thoughts in grey, and gives it back whole."""
    grey = sys.stdout.isatty()
    answer = server.chat(said, **options)
    for piece in answer:
        typer.echo(typer.style(piece.text, dim=True) if piece.thought and grey else piece.text, nl=False)
        sys.stdout.flush()
    typer.echo()
    return answer.answer.text
