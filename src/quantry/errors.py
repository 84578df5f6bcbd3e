"""The errors that a user sees: one line with the value, the limit and the fix.

The command line prints the message without a traceback and exits with `exit_code`. Any other escaping exception is a
bug.
"""

STOPS = (KeyboardInterrupt, SystemExit, GeneratorExit)  # what `except BaseException` must let pass


class QuantryError(Exception):
    """Base of all errors caused by input or environment, not by a bug."""

    exit_code = 2

    def __init__(self, problem: str, *, fix: str) -> None:
        self.problem = " ".join(problem.split())
        self.fix = " ".join(fix.split())
        super().__init__(f"{self.problem}; {self.fix}")


class ModelNotFoundError(QuantryError):
    """The model argument does not name a readable model."""


class CheckpointError(QuantryError):
    """A checkpoint file is damaged, inconsistent or of an unsupported kind."""


class ConfigError(QuantryError):
    """A `config.json`, or the metadata of a GGUF, is unreadable or incomplete."""


class UnknownNameError(QuantryError):
    """A name is not among the choices."""


class HubError(QuantryError):
    """The model hub refused a request or could not be reached."""


class RecipeError(QuantryError):
    """A preset, recipe or combination of options cannot be carried out."""


class OutputError(QuantryError):
    """The output cannot be written: in use, not empty, no room, no permission."""


class WeightError(QuantryError):
    """A tensor has values or a shape that the job cannot use."""
