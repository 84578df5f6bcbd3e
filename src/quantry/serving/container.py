"""An engine from a container image: the same command, inside `docker run` or `podman run`.

The container shares the network of this machine, so that the engine listens on the given address only. The model is
mounted read-only at its own path, so that the command stays the same. `docker run` stays in the foreground and passes
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
    """Returns the program that runs containers here; raises QuantryError if there is none."""
    program = next((name for name in RUNTIMES if shutil.which(name)), None)
    if program is None:
        raise QuantryError(
            "neither docker nor podman is installed, and an image needs one of them",
            fix="install one of them, or the engine itself and leave --image out",
        )
    return program


def contained(
    command: Command, image: str, *, program: str, name: str, platform: str, mounts: Sequence[Path]
) -> Command:
    """Returns the command as run from an image in a container called `name`, with its steps on this machine."""
    if command.files or command.after:
        raise QuantryError(
            "this engine needs files or steps before its server, and cannot be run from an image",
            fix="install the engine and leave --image out",
        )
    shared = [word for path in mounts for word in ("--volume", f"{path}:{path}:ro")]
    names = [word for variable in command.env for word in ("--env", variable)]  # values stay in the environment, unseen
    begin = (program, "run", "--rm", "--init", "--network=host", "--ipc=host", *GPUS.get(platform, ()), *shared, *names)

    def wrapped(argv: Sequence[str], *more: str) -> tuple[str, ...]:
        return (*begin, *more, "--entrypoint", argv[0], image, *argv[1:])

    steps = tuple(Step(wrapped(step.argv), step.why) if step.where == HERE else step for step in command.steps)
    return replace(command, argv=wrapped(command.argv, "--name", name), steps=steps)
