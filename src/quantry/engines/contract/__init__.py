"""What an engine consists of: a TOML file of facts, and a Python file that makes its command line.

The Python file has four functions; none of them starts anything:

| function | returns |
|---|---|
| `settings(serving)` | every flag with its value and its reason; `command` and `explain` are made of it |
| `command(serving)` | the words that start the engine, with environment, files and steps |
| `explain(serving)` | the same as rows of (words, reason) |
| `facts(lines)` | what its boot log says |

The TOML file beside it is read without importing the Python file. `name`, `about`, `formats` and one of `versions` are
required; everything else has the defaults of `catalogue.Engine`, so that a file states only what differs:

| table | says |
|---|---|
| top level | `name`, `about`, `formats` it loads, `usual_for` which of them, `rank` in lists of engines |
| `own_format` | a model format that only this engine has, and the file that marks a folder of it |
| `install` | the command that installs it, by platform; `any` for all others |
| `installation` | how an installed engine is found, and how its version is read |
| `server` | port, health path, names of models, and what else differs between running servers |
| `lacks` | options of a server that the engine has nothing for, with what to do instead |
| `metrics` | where its Prometheus page is, and the names of the figures that matter |
| `kv_cache`, `tune` | types of the KV cache and switches that other commands may use |
| `verify` | how `quantry verify` scores a model in it |
| `plan` | how it stands in the decision of `quantry plan`, and which options a plan gives it |
| `memory`, `speed` | constants of the memory model and of the speed model (planning/memory, planning/speed) |
| `outdated` | forms that older texts give, with what is written now and why |
| `versions` | a release whose sources or documents were read |
| `packages` | packages that extend the engine, and whether they are assumed to be installed |
| `cases` | a name for conditions that many rows share; a row asks for it with `is` |
| `refusals` | it will not load: reason and fix |
| `kernels` | in the engine's own order: which layers it is for (`when`), what it `needs`, and what stands in the way if it is no more than a fallback |
| `cautions` | it loads, but not as expected: a fallback with its reason |
| `notes` | worth knowing, but changes no verdict |
| `fixes` | what to do when a kernel's need for a fact is not met |
| `flags` | options of its command line: name(s), since, until, replacement |

A row holds from version `since` up to, but not including, version `until`. Conditions are tables over named facts; their grammar and
the facts are in planning/feasibility.py. Every row of knowledge has a source and a date.

Another package adds an engine with an entry point of the group `quantry.engines` that names its Python module; the TOML
file lies beside that module.
"""  # noqa: E501
