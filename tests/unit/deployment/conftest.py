"""What a test gets does not depend on the tests before it."""

import itertools

import pytest

from tests.unit.deployment import builders


@pytest.fixture(autouse=True)
def number_requests_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake executor's tokens depend on the number of the request."""
    monkeypatch.setattr(builders, "_ids", itertools.count())
