"""A sealed model's key by attestation: `tsqp keyserver` and `tee-runner serve`, real processes."""

import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import openai
import pytest

from protocol.model.files import use_seal
from tests.e2e.conftest import Sealed
from tests.e2e.test_bad_input import refused
from tests.kit.evidence import policy_text
from tests.kit.service import ENVIRONMENT, TEE_ONLY, Forked, call, running_server
from tsqp.client import connect

WAIT_S = 60


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Those of a server that has the sealed model, but for its key; a manifest's path ends them."""
    manifest = str(tmp_path_factory.mktemp("manifest") / "manifest.json")
    assert call("tsqp", "manifest", "demo", "-o", manifest).returncode == 0
    return (*TEE_ONLY, "--attest", "simulated", "--manifest", manifest)


def written(path: Path, digests: dict[str, str]) -> Path:
    """Write a policy, for the key server and for clients."""
    claims = {name: [digest] for name, digest in digests.items()}
    path.write_text(policy_text("any", **claims, version="any", plugins=[], services=[]))
    return path


@contextmanager
def serving_keys(sealed: Sealed, policy: Path) -> Iterator[tuple[str, Forked]]:
    """Run `tsqp keyserver`, and give its address."""
    arguments = ("keyserver", str(sealed.key), "--policy", str(policy), "--listen", "127.0.0.1:0")
    process = Forked("tsqp", arguments, ENVIRONMENT)
    try:
        assert "Nothing is proved" in process.stderr.readline()
        ready = process.stderr.readline()
        assert ready.startswith("ready: http://127.0.0.1:")
        yield ready.split()[1], process
    finally:
        process.kill()


def test_a_model_opens_for_what_the_key_server_s_policy_names(
    sealed: Sealed, options: tuple[str, ...], tmp_path: Path
) -> None:
    model = sha256(Path(options[-1]).read_bytes()).hexdigest()
    anything = {"model": "00" * 32, "policy": "00" * 32, "settings": "00" * 32}
    policy = written(tmp_path / "other.toml", anything)
    with serving_keys(sealed, policy) as (url, key_server):
        arguments = ("serve", str(sealed.directory), *options, "--seal-key-server", url)
        process = Forked("tee-runner", arguments, ENVIRONMENT)
        _, said = process.communicate(WAIT_S)
        assert process.returncode == 2
        assert f"{url}: got a refusal: the step 'model' failed, expected a key" in said
        assert f"refused: model: got {model}, expected {'00' * 32}" in (
            key_server.stderr.readline()
        )
        key_server.send_signal(signal.SIGTERM)
        assert key_server.wait(WAIT_S) == 128 + signal.SIGTERM
    # What an operator reads off, and writes into the policy.
    digests = dict(re.findall(r"(\w+) ([0-9a-f]{64})", said))
    assert digests.keys() == anything.keys()
    assert digests["model"] == model
    policy = written(tmp_path / "appraisal.toml", digests)
    with serving_keys(sealed, policy) as (url, key_server):
        given = (*options, "--seal-key-server", url)
        with running_server(*given, model=str(sealed.directory)) as server:
            assert "released to simulated: model " in key_server.stderr.readline()
            # Clients are told the very digests.
            connection = connect(server.address, policy)
            client = openai.OpenAI(
                base_url=connection.base_url, http_client=connection.http_client, api_key="none"
            )
            with client:
                reply = client.completions.create(
                    model="sealed", prompt="Once", max_tokens=4, seed=7
                )
            assert reply.choices[0].text


def test_what_is_refused(sealed: Sealed, options: tuple[str, ...], tmp_path: Path) -> None:
    directory, config = tmp_path / "sealed", tmp_path / "settings.toml"
    shutil.copytree(sealed.directory, directory)
    shutil.copy(options[-1], directory)
    config.write_text('seal-key-server = "http://127.0.0.1:9"\n')
    server, inside = ("--seal-key-server", "http://127.0.0.1:9"), str(directory / "manifest.json")
    before = signal.getsignal(signal.SIGHUP)
    for arguments, said in (
        ((*TEE_ONLY, *server), "--seal-key-server: got no --attest, expected --attest: a key"),
        ((*options[:-2], *server), "--attest: got no --manifest"),
        ((*options[:-1], inside, *server), f"--manifest: got a file in {directory}, with"),
        ((*options, *server, "--seal-key", str(sealed.key)), "of the seal: got 2 options"),
        ((*options, *server[:1], "https://a"), "--seal-key-server: got another form"),
        # A settings file may say it, where the manifest pins that file.
        ((*options, "--config", str(config)), " does not pin"),
    ):
        result = call("tee-runner", "serve", str(directory), *arguments)
        # It says what it tells a key server, before it asks.
        result.stderr = re.sub("(?m)^a key server is asked.*\n", "", result.stderr)
        refused(result, said)
    signal.signal(signal.SIGHUP, before)
    use_seal(directory, None)
