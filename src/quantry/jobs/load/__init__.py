"""Load: what a server does when many ask at once.

| file | holds |
|---|---|
| bench.py | `bench`: levels of load against any OpenAI endpoint, and what they are held to |
| endpoint.py | the endpoint: what it is called, whether it answers, which tokenizer its model has |
| guide.py | guidellm in an environment of its own; inside.py is what runs there |
| metrics.py | what the engine itself counts: prefix-cache hits, accepted guesses, the filling of the KV cache |
| page.py | the same as a page |
| tune.py | `tune`: the switches of an engine measured one at a time, then together |
| switches.py, trials.py, choice.py | what is tried, how it is measured, what is chosen and why |
| prompts.py | what prompts share, and whether a prefix cache can use it |
"""
