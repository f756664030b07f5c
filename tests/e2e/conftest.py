"""The served tiny checkpoint, loaded once a session."""

from pathlib import Path

import pytest

from model.numerics import Numerics
from model.tiny import EMBEDDED_VARIANT, write_tiny_checkpoint
from tests.e2e.builders import LoadedModel, load_model


@pytest.fixture(scope="session")
def checkpoint_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the embedded checkpoint. Shared: a test that changes files copies it first."""
    directory = tmp_path_factory.mktemp("embedded") / "checkpoint"
    write_tiny_checkpoint(directory, EMBEDDED_VARIANT)
    return directory


@pytest.fixture(scope="session")
def model(checkpoint_directory: Path) -> LoadedModel:
    """The checkpoint as serving loads it: FP32 accumulation, BF16 expert activations."""
    return load_model(checkpoint_directory, Numerics())
