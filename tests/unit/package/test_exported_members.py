"""Every module says what it is for and what it exports, and what it exports exists."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import pytest

import fthsdp
import fthsdp_operator

MODULES = [
    found.name
    for package in (fthsdp, fthsdp_operator)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]


def test_all_modules_are_found() -> None:
    assert {"fthsdp.coordinator.__main__", "fthsdp.ftar.engine", "fthsdp_operator.local.session"} <= set(MODULES)


@pytest.mark.parametrize("name", ["fthsdp", "fthsdp_operator", *MODULES])
def test_a_module_says_what_it_is_for_and_exports_what_exists(name: str) -> None:
    module = import_module(name)
    assert module.__doc__
    exported = getattr(module, "__all__", [])
    assert exported or hasattr(module, "__path__")  # a package may be there only for its modules
    assert [each for each in exported if not hasattr(module, each)] == []


def test_a_name_that_the_package_does_not_export_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = fthsdp.nonsense
