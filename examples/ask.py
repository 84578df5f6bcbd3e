"""Asks a GGUF file a question, in llama.cpp embedded in this process.

python examples/ask.py build/demo-q4_k_m/demo-Q4_K_M.gguf "What color is the sky?"
"""

import sys
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

from quantry.llamacpp.model import Model


def main(file: Path, question: str) -> None:
    with Model(file) as model:
        chat = [{"role": "user", "content": question}]
        made = render_jinja_template([chat], chat_template=model.chat_template, add_generation_prompt=True)
        answer = model.generate(model.tokenize(made[0][0], special=False), 64)
        print(f"{question}\n{model.detokenize(answer)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
