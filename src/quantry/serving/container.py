"""An engine from a container image: the same command, inside `docker run` or `podman run`.

It shares the network of this machine, so that it listens where it was asked to and nowhere else; the model is mounted
for reading at the path that it has outside: the command is the same. `docker run` stays in the foreground and passes
signals on.
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quantry.engines.contract.command import HERE, Command, Step
from quantry.errors import QuantryError

RUNTIMES = ("docker", "podman")
GPUS = {  # what gives a container the devices of a platform
    "cuda": ("--gpus", "all"),
    "rocm": ("--device", "/dev/kfd", "--device", "/dev/dri"),
    "xpu": ("--device", "/dev/dri"),
}


def runtime() -> str:
    """The program that runs containers here."""
    found = next((name for name in RUNTIMES if shutil.which(name)), None)
    if found is None:
        raise QuantryError(
            "there is neither docker nor podman to run an image with",
            fix="install one of them, or the engine itself and leave --image out",
        )
    return found


def contained(
    command: Command, image: str, *, program: str, name: str, platform: str, mounts: Sequence[Path]
) -> Command:
    """The command as it is run from an image, in a container called `name`; so are its steps on this machine."""
    if command.files or command.after:
        raise QuantryError(
            "this engine is set up with files or steps beside its server, and cannot be run from an image",
            fix="install the engine and leave --image out",
        )
    shared = [word for path in mounts for word in ("--volume", f"{path}:{path}:ro")]
    names = [word for one in command.env for word in ("--env", one)]  # values stay in the environment, unseen
    begin = (program, "run", "--rm", "--init", "--network=host", "--ipc=host", *GPUS.get(platform, ()), *shared, *names)

    def wrapped(argv: Sequence[str], *more: str) -> tuple[str, ...]:
        return (*begin, *more, "--entrypoint", argv[0], image, *argv[1:])

    steps = tuple(Step(wrapped(one.argv), one.why) if one.where == HERE else one for one in command.steps)
    return replace(command, argv=wrapped(command.argv, "--name", name), steps=steps)


def removal(program: str, name: str) -> tuple[str, ...]:
    """What ends a container whose `docker run` was killed."""
    return (program, "rm", "--force", name)
