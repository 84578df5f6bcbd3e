"""Train the demo model's tokenizer: a byte-level BPE of 4096 tokens, with its chat template.

Every byte is in the initial alphabet, so any text can be encoded without loss. The splitting pattern is that of Qwen2,
which llama.cpp knows by name, so that the model can be converted to GGUF.

    python tokenizer.py text/train.jsonl --out model
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|eos|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
CONFIG = {
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<|bos|>",
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|eos|>",
    "model_max_length": 1024,
    "pad_token": "<|pad|>",
    "tokenizer_class": "PreTrainedTokenizerFast",
}


def texts(path: str) -> Iterator[str]:
    """Yield what users and the model say in the training text."""
    with Path(path).open(encoding="utf-8") as file:
        for line in file:
            document = json.loads(line)
            if document["user"]:
                yield document["user"]
            yield document["text"]


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train", help="train.jsonl, written by prepare.py")
    parser.add_argument("--out", default="model", help="folder to write")
    parser.add_argument("--vocab", type=int, default=4096, help="number of tokens")
    options = parser.parse_args()

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(options.train), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B", special_tokens=[("<|bos|>", 0)]
    )
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    print(f"{tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
