"""The torch device that a job computes on, and the float type it computes in."""

import torch

from quantry.errors import RecipeError


def device(name: str) -> torch.device:
    """Returns the torch device of a name. Raises RecipeError if this machine lacks it."""
    try:
        usable = torch.device(name)
        torch.empty(1, device=usable)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise RecipeError(
            f"device {name!r} cannot be used ({reason})", fix="use cpu, or cuda on a machine with a GPU"
        ) from error
    return usable


def arithmetic(where: torch.device) -> torch.dtype:
    """Returns the type to run blocks in: bfloat16 where the hardware multiplies it fast, else float32.

    Gram matrices are summed in float32 either way. Statistics of the two differ in the third digit, so artefacts differ
    in their bytes.
    """
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.float32 if where.type == "cpu" and not fast else torch.bfloat16
