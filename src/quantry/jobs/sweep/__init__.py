"""`quantry.sweep`: many artefacts of one model, each measured on the same text, in one table.

Every artefact is what `quantry quantize` writes into its folder, every figure what `quantry verify` measures. Jobs
share what they can: the statistics of calibration in their store, the probabilities of the 16-bit model in their cache.

DIR/sweep.json holds the table, and for each job what was asked (before it starts) and what was measured. So a killed
sweep continues: an artefact of the same request is kept, and anything else under its name is refused before the first
job starts.

| file | holds |
|---|---|
| sweep.py | `sweep`: the loop |
| specs.py | presets with options, as users write them |
| plan.py | the jobs of a sweep, and all checks before the first one |
| state.py | what is made and measured so far, in sweep.json; what is shown meanwhile |
| table.py | the rows, the frontier, the report |
"""
