"""A small model, and nothing prepared in processes that take seconds to start."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kit.model import SavedModel
from tests.unit.tsqp.leak.leaks import Models, tiny
from tsqp.lab.bench import prepare


@pytest.fixture
def model(saved_model: Models) -> SavedModel:
    return tiny(saved_model)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare in this process: another one takes seconds to start."""

    def run_here(work: Callable[..., None], *arguments: object) -> None:
        work(*arguments)

    monkeypatch.setattr(prepare, "in_fresh_process", run_here)
