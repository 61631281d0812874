"""README's worked example does what it says: its commands, and its Python against their server."""

import re
import shlex
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from tests.kit.service import ENVIRONMENT, Forked, call, running_server, running_service

ROOT = Path(__file__).parents[2]
BIND, BASE_URL = "tcp://10.0.0.5:5555", "http://127.0.0.1:8000/v1"
FILES = ("service.key", "service.pub", "runner.key", "runner.pub")


def blocks(title: str = "Your own model in five commands") -> list[str]:
    """Return the indented blocks of a section."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    found = re.findall(r"(?:^    .*\n(?:\n(?=    ))*)+", section, re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in found]


def test_the_worked_example(tmp_path: Path) -> None:
    def here(text: str, *, gpu: str = "", api: str = "") -> str:
        """Put in this machine's places."""
        for file in FILES:
            text = text.replace(file, str(tmp_path / file))
        # One answer in eighty is about something else.
        text = text.replace("stream=True", "stream=True, seed=1")
        return text.replace("MODEL", "demo").replace(BIND, gpu).replace(BASE_URL, api)

    commands = [
        shlex.split(line, comments=True)
        for block in blocks()
        for line in block.replace("\\\n", " ").splitlines()
    ]
    python = [block for block in blocks() if block.startswith("from ")]
    assert len(python) == 2

    def arguments(*program: str, gpu: str = "") -> list[str]:
        (found,) = (one for one in commands if tuple(one[: len(program)]) == program)
        return [here(word, gpu=gpu) for word in found[len(program) :]]

    for name in ("service", "runner"):
        assert arguments("tsqp", "keys", "new", name) == []
        made = call("tsqp", "keys", "new", str(tmp_path / name))
        assert made.returncode == 0, made.stderr
    model, *options = arguments("gpu-service", gpu="tcp://127.0.0.1:*")
    assert options[:2] == ["--bind", "tcp://127.0.0.1:*"]
    with running_service(model, options[1], *options[2:]) as service:
        gpu = service.endpoint
        checked = call("tsqp", "doctor", *arguments("tsqp", "doctor", gpu=gpu))
        assert checked.returncode == 0, checked.stdout + checked.stderr
        model, *options = arguments("tee-runner", "serve", gpu=gpu)
        with running_server(*options, model=model) as server:
            texts = [run_python(here(code, gpu=gpu, api=server.base_url)) for code in python]
    assert "fox" in texts[0]
    assert len(texts[1].split()) > 30


@pytest.mark.slow  # what it does is proved by test_attested.py
def test_the_proof_before_the_prompt(tmp_path: Path) -> None:
    (both,) = blocks("Proof before the prompt")
    commands, code = both.split("\n\n", 1)
    gpu, manifest, serve, verify = (shlex.split(line) for line in commands.splitlines())
    socket, pins = str(tmp_path / "gpu.sock"), str(tmp_path / "manifest.json")

    def here(words: list[str]) -> list[str]:
        """Put in this test's folder."""
        return [
            word.replace("/tmp/gpu.sock", socket).replace("manifest.json", pins) for word in words
        ]

    assert (gpu[0], gpu[2], serve[:2]) == ("gpu-service", "--bind", ["tee-runner", "serve"])
    assert call(*here(manifest)).returncode == 0
    with (
        running_service(gpu[1], here(gpu)[3], *gpu[4:]),
        running_server(*here(serve)[3:], model=serve[2]) as server,
    ):
        shown = call(*[server.address if "://" in word else word for word in verify])
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.endswith("\nverified\n")
        opened = "from openai import OpenAI\n" + code
        said = run_python(opened.replace("https://127.0.0.1:8000", server.address))
    assert len(said.split()) > 4


def run_python(code: str) -> str:
    with TemporaryFile("w+") as output:
        before = f"{code}\nraise SystemExit"
        done = Forked("tsqp", [], ENVIRONMENT, stdout=output.fileno(), before=before)
        said = done.stderr.read()
        assert done.wait() == 0, said
        done.kill()
        output.seek(0)
        return output.read()
