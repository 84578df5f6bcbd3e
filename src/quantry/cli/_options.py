"""Flags made of the fields of a dataclass."""

from collections.abc import Callable
from dataclasses import Field, fields
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any, get_args, get_type_hints

import typer

from quantry.cli._flags import TOKENS

TOKEN_COUNTS = frozenset({"context"})  # fields that may be written as 8k


def takes(options: type, *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command a flag for each field of a dataclass, in place of its parameter `options`.

    The command gets a dictionary of those that the user gave. With `names`, only these fields become flags, without
    their defaults.
    """
    hints = get_type_hints(options)
    chosen = [item for item in fields(options) if not names or item.name in names]
    flags = [_parameter(item, hints[item.name], defaults=not names) for item in chosen]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        whole = signature(command)
        before = [item for item in whole.parameters.values() if item.kind is Parameter.POSITIONAL_OR_KEYWORD]
        place = [item.name for item in before].index("options")

        @wraps(command)
        def called(**values: Any) -> None:
            given = {flag.name: values.pop(flag.name) for flag in flags}
            stated = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
            command(**values, options={name: value for name, value in stated.items() if value not in (None, ())})

        parameters = [*before[:place], *flags, *before[place + 1 :]]
        called.__signature__ = whole.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {item.name: item.annotation for item in parameters}
        return called

    return decorate


def _parameter(item: "Field[Any]", hint: Any, *, defaults: bool) -> Parameter:
    default = item.default if defaults else None
    details = {**item.metadata, **(TOKENS if item.name in TOKEN_COUNTS else {})}
    annotation: Any
    if item.default == ():
        annotation, default = Annotated[list[str] | None, typer.Argument(**details)], None
    else:
        plain = (get_args(hint) or (hint,))[0]
        annotation = Annotated[plain if default is not None else plain | None, typer.Option(*_flags(item), **details)]
    return Parameter(item.name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def _flags(item: "Field[Any]") -> tuple[str, ...]:
    """Returns one flag for a switch that is off, two for one that may be either; others are named as the field is."""
    flag = f"--{item.name.replace('_', '-')}"
    if item.default is False:
        return (flag,)
    return (f"{flag}/--no-{flag[2:]}",) if "bool" in str(item.type) else (flag,)
