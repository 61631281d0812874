"""One real gpu-service with the demo model for all end-to-end tests, and its reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers

from tests.kit.service import Service, running_service
from tsqp.cli.program import model_directory

DEMO = model_directory("demo")


@pytest.fixture(scope="session")
def demo_service() -> Iterator[Service]:
    """A gpu-service process on loopback."""
    with running_service("demo", "tcp://127.0.0.1:*", "--threads", "1") as service:
        yield service


@pytest.fixture(scope="session")
def reference() -> transformers.PreTrainedModel:
    """The demo model in transformers, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
