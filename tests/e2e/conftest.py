"""One real gpu-service with the demo model for all end-to-end tests, and its reference."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers

from protocol.model.files import use_seal
from tests.kit.service import Service, call, running_service
from tsqp.run.settings import model_directory

DEMO = model_directory("demo")


@pytest.fixture(scope="session")
def demo_service() -> Iterator[Service]:
    """A gpu-service process on loopback."""
    with running_service("demo", "tcp://127.0.0.1:*", "--threads", "1") as service:
        yield service


class Sealed(NamedTuple):
    """The demo model, sealed."""

    directory: Path
    key: Path
    digest: str


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sealed]:
    root = tmp_path_factory.mktemp("sealed")
    key, directory = root / "model.key", root / "sealed"
    assert call("tsqp", "seal", "new-key", str(key)).returncode == 0
    done = call("tsqp", "seal", "demo", "--to", str(key), "-o", str(directory))
    assert done.returncode == 0, done.stderr
    yield Sealed(directory, key, done.stdout.split()[-1])
    use_seal(directory, None)


@pytest.fixture(scope="session")
def reference() -> transformers.PreTrainedModel:
    """The demo model in transformers, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
