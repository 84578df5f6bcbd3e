"""Where to compute, and in what: a device by its name, and the arithmetic that it does fast."""

import torch

from quantry.errors import RecipeError


def device(name: str) -> torch.device:
    """The device of a name, if this machine has it."""
    try:
        found = torch.device(name)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise RecipeError(
            f"device {name!r} cannot be used ({reason})", fix="use cpu, or cuda on a machine with a GPU"
        ) from error
    return found


def arithmetic(where: torch.device) -> torch.dtype:
    """What blocks are run in: bfloat16 where it is multiplied fast. Gram matrices are summed in float32 all the same.

    A CPU that only knows float32 gives statistics that differ in the third digit, and so other bytes.
    """
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.float32 if where.type == "cpu" and not fast else torch.bfloat16
