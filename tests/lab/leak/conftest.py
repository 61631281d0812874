"""A small model, once for all tests of the laboratory."""

import pytest

from tests.kit.leaks import make_begun_model
from tests.kit.model import SavedModel
from tsqp.lab.leak.public import PublicModel


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    return make_begun_model(tmp_path_factory.mktemp("begun"))


@pytest.fixture(scope="session")
def public(model: SavedModel) -> PublicModel:
    return PublicModel(model.directory)
