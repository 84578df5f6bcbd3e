"""`quantry chat`: a conversation with a running server, in the terminal."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantry.cli._first import check_at_least
from quantry.engines.contract.options import API_KEY

if TYPE_CHECKING:
    from quantry.serving.client import Server

GROUP = "serve"
EXAMPLES = (
    "quantry chat http://127.0.0.1:8080",
    'quantry chat http://127.0.0.1:8080 --system "Answer in one sentence."',
)
HELP = '''/new         start over
/save FILE   write the conversation as JSON lines that `quantry quantize --data` reads
/bye         leave, as Ctrl-D does
"""          begin a message of several lines, and end it
Ctrl-C       stop an answer; at the prompt it leaves'''
QUOTES = '"""'
LEAVE = ("/bye", "/exit", "/quit")

Url = Annotated[str, typer.Argument(help="The server's address.")]
Model = Annotated[str | None, typer.Option(help="The model to ask; the first that the server lists if left out.")]
ApiKey = Annotated[str | None, typer.Option(envvar=API_KEY, help="The server's key; better in the environment.")]
System = Annotated[str | None, typer.Option(help="The system prompt.")]
MaxTokens = Annotated[int | None, typer.Option(help="Tokens of an answer at most, 1 or more.")]
Temperature = Annotated[
    float | None, typer.Option(help="0 or more; 0 always takes the likeliest token; the server's default if left out.")
]


def command(
    url: Url = "http://127.0.0.1:8080",
    model: Model = None,
    api_key: ApiKey = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
) -> None:
    """Talk to a running server and read answers as they are made; /help lists what can be typed."""
    check_at_least(1, max_tokens=max_tokens)
    check_at_least(0, temperature=temperature)
    from quantry.serving.client import Server
    from quantry.serving.template import template_warning

    options = {"max_tokens": max_tokens, "temperature": temperature}
    with Server(url, key=api_key, model=model) as server:
        _check_model(server, model)
        if warning := template_warning(url, api_key):
            typer.echo(f"warning: {warning}", err=True)
        typer.echo(f"{server.model} at {server.url}; /help lists what can be typed, Ctrl-D ends", err=True)
        given = {name: value for name, value in options.items() if value is not None}
        try:
            Conversation(server, system, given).hold()
        except (EOFError, KeyboardInterrupt):
            typer.echo(err=True)


def _check_model(server: "Server", asked: str | None) -> None:
    """Raises UnknownNameError if the server lists models, and not the one that is asked for."""
    from quantry import registry

    listed = server.models() if asked else ()
    if asked and listed:
        registry.check("model", asked, listed)


class Conversation:
    """Messages to a server and its answers; a line that begins with a slash is a command."""

    def __init__(self, server: "Server", system: str | None, options: dict[str, Any]) -> None:
        self._server, self._options = server, options
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)

    def hold(self) -> None:
        """Answers message after message until the input ends."""
        while (message := _read()) not in LEAVE:
            if message == "/new":
                self._messages = list(self._opening)
            elif message == "/help":
                typer.echo(HELP, err=True)
            elif message.split()[:1] == ["/save"]:
                self._save(message.removeprefix("/save").strip())
            elif message.startswith("/") and "\n" not in message and len(message.split()) == 1:
                typer.echo(f"there is no {message[:40]}; /help lists what there is", err=True)
            elif message:
                self._say(message)

    def _say(self, message: str) -> None:
        """Sends a message; at a terminal one that is refused is dropped and the conversation goes on."""
        from quantry.errors import QuantryError

        self._messages.append({"role": "user", "content": message})
        try:
            self._messages.append({"role": "assistant", "content": self._answer()})
        except QuantryError as error:
            if not sys.stdin.isatty():
                raise
            self._messages.pop()
            typer.echo(f"error: {error}", err=True)

    def _answer(self) -> str:
        """Prints an answer piece by piece, thoughts in grey, and returns its text; Ctrl-C stops it there."""
        terminal = sys.stdout.isatty()
        answer = self._server.chat(self._messages, **self._options)
        pieces = iter(answer)
        try:
            for piece in pieces:
                typer.echo(typer.style(piece.text, dim=True) if piece.thought and terminal else piece.text, nl=False)
                sys.stdout.flush()
        except KeyboardInterrupt:
            answer.close()  # the server stops too
            typer.echo(" [stopped]", nl=False, err=True)
        typer.echo()
        return answer.answer.text

    def _save(self, name: str) -> None:
        """Adds the conversation to a file, as a line that is a chat."""
        from json import dumps

        if not name:
            typer.echo("/save needs the name of a file", err=True)
            return
        try:
            with Path(name).expanduser().open("a", encoding="utf-8") as file:
                file.write(dumps({"messages": self._messages}, ensure_ascii=False) + "\n")
        except OSError as error:
            typer.echo(f"{name} cannot be written: {error.strerror}", err=True)
        else:
            typer.echo(f"added to {name}", err=True)


def _read() -> str:
    """Reads a message: a line, or the lines between two marks of three quotes."""
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401 - arrows and history at the prompt

    line = input("> " if terminal else "").strip()
    if not line.startswith(QUOTES):
        return line
    lines = [line.removeprefix(QUOTES)]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(input(". " if terminal else ""))
    return "\n".join(lines).rstrip().removesuffix(QUOTES).strip()
