"""Load tests of a server, and the search for its best settings.

| file | holds |
|---|---|
| bench.py | `bench`: measures levels of load against any OpenAI endpoint |
| scenario.py, results.py, slo.py | the load of a level, its figures, limits on them |
| endpoint.py | the endpoint: its model, a first request, its tokenizer |
| guidellm_process.py | guidellm in a separate process; guidellm_script.py runs there |
| metrics.py | the engine's own counters: prefix-cache hits, accepted guesses, KV cache usage |
| page.py, tune_page.py | the results of both as a page |
| tune.py | `tune`: measures the switches of an engine one at a time, then together |
| switches.py, trials.py, choice.py | the settings to try, their measurement, the recommendation |
| prompts.py | what prompts share, and if a prefix cache can use it |
"""
