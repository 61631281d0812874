"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import os
import random
import secrets
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch

from protocol import native

if TYPE_CHECKING:
    from tests.kit.model import SavedModel
    from tests.kit.service import FreshPython

# The models are tiny: threads cost more than they bring, and one thread adds up in one order.
torch.set_num_threads(1)
native.set_threads(1)

# Triton reads it when it is imported, by us or by transformers: kernels run in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

# What a shell starts in the background, or nohup, ignores these, and so would every program that is
# started here, some of them to be interrupted.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        default = signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL
        signal.signal(_number, default)

# How long an example takes is not what these tests are about. The same examples in every run: a
# change that fails is to blame. `--hypothesis-profile others` draws others.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.register_profile("others", deadline=None)
hypothesis.settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --kernels, for runs of the same tests with other kernels."""
    parser.addoption("--kernels", default=native.AUTO, help="torch, or an instruction set")


def pytest_configure(config: pytest.Config) -> None:
    """Use the kernels that --kernels names, in each of xdist's processes."""
    native.use(config.getoption("--kernels"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Inputs that a test draws by torch are the same in every run, and in any order of tests."""
    torch.manual_seed(0)
    # A runner in this process takes all cores, and leaves them so to the tests that follow.
    if native.threads() > 1:
        native.set_threads(1)


@pytest.fixture
def same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the program draws from the operating system is the same in every run."""
    draw = random.Random(0)
    monkeypatch.setattr(os, "urandom", draw.randbytes)
    monkeypatch.setattr(secrets, "token_bytes", draw.randbytes)


@pytest.fixture
def patient_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients in this process wait for signs of life for longer than a machine pauses."""
    monkeypatch.setattr("protocol.liveness._ANSWER_WITHIN_S", 60.0)


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SavedModel]:
    """Return a function that makes a random model, once per kind and settings.

    Its directory is shared by all tests: copy it before changing a file.
    """
    from tests.kit.model import SavedModel, make_model

    made: dict[str, SavedModel] = {}

    def get(kind: str = "llama", **overrides: Any) -> SavedModel:
        key = repr((kind, sorted(overrides.items())))
        if key not in made:
            directory = tmp_path_factory.mktemp(kind)
            made[key] = SavedModel(directory, make_model(directory, kind, **overrides))
        return made[key]

    return get


@pytest.fixture(scope="session")
def fresh_python() -> Iterator[FreshPython]:
    """Run Python programs with nothing of ours imported."""
    from tests.kit.service import FreshPython

    with FreshPython() as python:
        yield python


@pytest.fixture
def torch_kernels() -> Iterator[None]:
    """Run without compiled kernels, for tests of what torch does in their place."""
    from tests.kit.kernels import using_kernels

    with using_kernels("torch"):
        yield
