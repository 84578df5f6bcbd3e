"""The one family of errors a user sees: a line that says what was found, what is allowed and how to mend it.

The command line prints the message without a traceback and exits with `exit_code`. Anything else that escapes is a bug.
"""


class QuantryError(Exception):
    """Base of all errors caused by input or environment rather than by a bug."""

    exit_code = 2

    def __init__(self, problem: str, *, fix: str) -> None:
        self.problem = " ".join(problem.split())
        self.fix = " ".join(fix.split())
        super().__init__(f"{self.problem}; {self.fix}")


class ModelNotFoundError(QuantryError):
    """The model argument names nothing that can be read."""


class CheckpointError(QuantryError):
    """A checkpoint file is damaged, inconsistent or of a kind that is not read."""


class ConfigError(QuantryError):
    """A `config.json` (or the metadata of a GGUF) is unreadable or lacks what is needed."""


class UnknownNameError(QuantryError):
    """A name is not among the choices."""


class HubError(QuantryError):
    """The model hub refused or could not be reached."""


class RecipeError(QuantryError):
    """A preset, recipe or combination of options that cannot be carried out."""


class OutputError(QuantryError):
    """The output cannot be written: in use, not empty, no room, no permission."""


class WeightError(QuantryError):
    """A tensor whose values or shape do not suit what is asked for."""
