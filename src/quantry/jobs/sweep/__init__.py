"""`quantry.sweep`: many artefacts of one model, each proven on the same text, and one table of them.

Every artefact is what `quantry quantize` writes into a folder of its own, every figure what `quantry verify` measures.
Jobs share what they can: the statistics of calibration are in their store, what the 16-bit model says in its cache.

DIR/sweep.json has the table, and notes on each job: what was asked for, before it begins, and what was measured. So a
sweep that was killed goes on: what is there for the same request is taken as it is, and anything else in its place is
refused before the first job begins.
"""

from quantry.jobs.sweep.loop import sweep
from quantry.jobs.sweep.table import Outcome, Sweep

__all__ = ["Outcome", "Sweep", "sweep"]
