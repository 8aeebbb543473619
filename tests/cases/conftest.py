"""The cases are small numbers with known results, so all of them run in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers import double_precision


@pytest.fixture(autouse=True)
def in_double_precision() -> Iterator[None]:
    with double_precision():
        yield
