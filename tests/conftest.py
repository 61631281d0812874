"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch

if TYPE_CHECKING:
    from tests.support import SavedModel

# The models are tiny: threads cost more than they bring, and one thread adds up in one order.
torch.set_num_threads(1)

# What a shell starts in the background, or nohup, ignores these, and so would every program that is
# started here, some of them to be interrupted.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        default = signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL
        signal.signal(_number, default)

# How long an example takes is not what these tests are about.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Inputs that a test draws by torch are the same in every run, and in any order of tests."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SavedModel]:
    """Return a function that makes a random model, once per kind and settings.

    Its directory is shared by all tests: copy it before changing a file.
    """
    from tests.support import SavedModel, make_model

    made: dict[str, SavedModel] = {}

    def get(kind: str = "llama", **overrides: Any) -> SavedModel:
        key = repr((kind, sorted(overrides.items())))
        if key not in made:
            directory = tmp_path_factory.mktemp(kind)
            made[key] = SavedModel(directory, make_model(directory, kind, **overrides))
        return made[key]

    return get
