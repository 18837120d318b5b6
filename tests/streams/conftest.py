"""Options of the tests on logical streams."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--drawn", type=int, help="how many programs of two ranks are drawn, and a quarter as many of four ranks")
