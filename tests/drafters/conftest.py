"""Fixtures of the contract tests: a target is made once, a drafter for every test."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from drafters.contract import FAMILIES, Case, Target

from paceline.drafters.base import Drafter

Kind = Callable[[Path], Target]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Target]:
    """The target that a function of `contract` makes."""
    return cache(lambda kind: kind(tmp_path_factory.mktemp(kind.__name__)))


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES)
def target(request: pytest.FixtureRequest, made: Callable[[Kind], Target]) -> Target:
    return made(request.param)


@pytest.fixture
def drafter(target: Target, case: Case) -> Drafter:
    return target.drafter(case)
