"""Options of the programs of training steps."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--drawn", type=int, help="how many programs streams draw for two ranks, and a quarter as many for four")
