"""Printing that leaves a progress bar whole: with Rich where it is installed, plain text elsewhere."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Statement:
    """Labelled facts, and what they do not say.

    Attributes:
        title: One line.
        facts: Pairs of a label and a value.
        not_covered: One line each.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    not_covered: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        width = max(len(label) for label, _ in self.facts)
        lines = [self.title, *(f"  {label:<{width}}  {value}" for label, value in self.facts)]
        if self.not_covered:
            lines += ["  Not covered:", *(f"    - {line}" for line in self.not_covered)]
        return "\n".join(lines)


def say(line: str) -> None:
    """Prints one line."""
    if not _has_rich():
        print(line)
        return
    from rich import get_console

    # The console of Lightning's progress bar, so that the bar is not torn.
    get_console().print(line)


def show(statement: Statement) -> None:
    """Prints a statement: a table where Rich is installed, plain text elsewhere."""
    if not _has_rich():
        print(f"\n{statement}\n")
        return
    from rich import get_console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for label, value in statement.facts:
        table.add_row(Text(label, style="bold"), Text(value))
    for number, line in enumerate(statement.not_covered):
        table.add_row(Text("not covered" if number == 0 else "", style="bold"), Text(line))
    get_console().print(Panel(table, title=statement.title, expand=False))


def _has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None
