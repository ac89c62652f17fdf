"""The rules of the house that a reader relies on."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import lightning_dp

ROOT = Path(lightning_dp.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# A room may import itself and what stands after it; those with an underscore serve all.
ORDER = [
    "cli",
    "integrations",
    "callbacks",
    "strategies",
    "replacements",
    "gradients",
    "releases",
    "sampling",
    "accounting",
    "losses",
    "errors",
]
SERVANTS = {"_validate", "_version", "_compat", "_packages"}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms_import_only_to_their_right(path: Path) -> None:
    room = room_of(path)
    if room not in ORDER:
        return
    for name in imports_of(path):
        if name.startswith("lightning_dp."):
            other = name.split(".")[1]
            assert other in SERVANTS or ORDER.index(other) >= ORDER.index(room), f"{room} imports {name}"


def test_every_room_is_in_the_order() -> None:
    assert {room_of(path) for path in FILES} - SERVANTS - {"__init__", "__main__"} == set(ORDER)


@pytest.mark.parametrize(
    "path", [path for path in FILES if room_of(path) == "accounting"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_accounting_needs_numpy_and_scipy_only(path: Path) -> None:
    allowed = {"numpy", "scipy", "lightning_dp", *sys.stdlib_module_names}
    assert {name.split(".")[0] for name in imports_of(path)} <= allowed


def private_attributes(path: Path) -> list[str]:
    """Attributes with a leading underscore of anything but ``self``, and names with one from other packages."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-zA-Z]", node.attr):
            found += [] if ast.unparse(node.value) == "self" else [ast.unparse(node)]
    foreign = [name for name in imports_of(path) if not name.startswith("lightning_dp")]
    return found + [name for name in foreign if re.match(r"_[a-zA-Z]", name.rpartition(".")[2])]


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.name != "_compat.py"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_no_private_attribute_of_another_library_outside_compat(path: Path) -> None:
    own = {"record._fields", "Ledger._parse", "ledger._stamps", "other._stamps", "other._entries"}
    allowed = {"t._version"} | own
    assert [name for name in private_attributes(path) if name not in allowed] == []


def test_all_public_names_exist_and_are_documented() -> None:
    for name in lightning_dp.__all__:
        value = getattr(lightning_dp, name)
        if name != "__version__":
            assert value.__doc__, name


def test_every_error_is_a_privacy_error() -> None:
    for name, value in vars(lightning_dp.errors).items():
        if isinstance(value, type) and value.__module__ == lightning_dp.errors.__name__:
            assert issubclass(value, lightning_dp.errors.PrivacyError), name
