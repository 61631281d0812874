"""A server that proves what it runs, and clients that ask it: real processes, simulated TEE."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from click.testing import CliRunner, Result

from tests.kit.evidence import policy_text
from tests.kit.service import ENVIRONMENT, TEE_ONLY, Forked, Server, running_server
from tsqp.cli.main import command
from tsqp.client import NotAttestedError, connect

CHAT: Any = [{"role": "user", "content": "Tell me a story about a fox."}]
OPTIONS: Any = {"model": "demo", "seed": 7, "max_tokens": 16}


def tsqp(*arguments: str) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(command, arguments, env={"COLUMNS": "160"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the manifest is."""
    made = tmp_path_factory.mktemp("attested")
    assert tsqp("manifest", "demo", "-o", str(made / "manifest.json")).exit_code == 0
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """An attested server."""
    manifest = str(folder / "manifest.json")
    with running_server(*TEE_ONLY, "--attest", "simulated", "--manifest", manifest) as running:
        assert running.address.startswith("https://")
        yield running


@pytest.fixture(scope="module")
def appraisal(folder: Path, server: Server) -> Path:
    """What the server passes: what it said of itself at its start."""
    (line,) = (line for line in server.log if "attested by simulated" in line)
    claims = {name: [digest] for name, digest in re.findall(r"(\w+) ([0-9a-f]{64})", line)}
    path = folder / "appraisal.toml"
    path.write_text(policy_text("any", **claims, version="any", plugins=[], services=[]))
    return path


def test_openai_s_client_gets_the_same_over_the_verified_channel(
    server: Server, appraisal: Path
) -> None:
    connection = connect(server.address, appraisal)
    client = openai.OpenAI(
        base_url=connection.base_url, http_client=connection.http_client, api_key="none"
    )
    with client:
        whole = client.chat.completions.create(messages=CHAT, **OPTIONS)
        streamed = client.chat.completions.create(messages=CHAT, stream=True, **OPTIONS)
        pieces = [chunk.choices[0].delta.content or "" for chunk in streamed]
    assert len(pieces) > 5
    assert "".join(pieces) == whole.choices[0].message.content


def test_verify_shows_what_differs(server: Server, appraisal: Path, folder: Path) -> None:
    other = folder / "other.toml"
    other.write_text(re.sub(r'model = \["..', 'model = ["00', appraisal.read_text()))
    shown = tsqp("verify", server.address, "--policy", str(other))
    assert shown.exit_code == 1
    assert "FAIL  model: got " in shown.stdout
    assert shown.stdout.splitlines()[-1].startswith("NOT verified: certificate: model: got ")
    with pytest.raises(NotAttestedError, match="certificate: model"):
        connect(server.address, other)
    strict = ("--policy", str(appraisal), "--mode", "production")
    assert "expected development" in str(tsqp("verify", server.address, *strict).exception)


def test_any_program_goes_through_the_proxy(server: Server, appraisal: Path) -> None:
    arguments = ("proxy", server.address, "--policy", str(appraisal), "--listen", "127.0.0.1:0")
    process = Forked("tsqp", arguments, ENVIRONMENT)
    try:
        ready = ""
        while "ready: " not in ready:
            ready = process.stderr.readline()
            assert ready
        address = ready.split("ready: ")[1].split()[0]
        client = openai.OpenAI(base_url=address, api_key="none")
        with client, client.chat.completions.create(messages=CHAT, stream=True, **OPTIONS) as chat:
            assert sum(1 for _ in chat) > 5
    finally:
        process.kill()
