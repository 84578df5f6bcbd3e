"""`quantry.run`, the main job in one call: plan, quantize, verify, serve, a first answer, and what it cost.

Everything is in one folder: plan.json, the artefact with its card and proof in its own folder, the engine's log,
and run.json with the summary and the request of each artefact. An interrupted run continues: an artefact that was
finished for the same request is kept, and so is a proof that was measured in the same way. Everything that can be
refused is refused before anything is written.

| file | holds |
|---|---|
| run.py | `run`: the steps in their order |
| plan.py | the options, the candidate, the engine and the fallbacks, before anything is written |
| steps.py | each step, and what it leaves in run.json |
| server.py | the server as planned, its first answer and its memory |
| result.py | what `run` returns |
"""
