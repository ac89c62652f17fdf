"""The command line: ``lightning-dp fit --config recipe.yaml`` and the small calculators beside it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer

from lightning_dp import _validate
from lightning_dp._version import __version__
from lightning_dp.accounting import Ledger, Mechanism, mechanism_from_dict
from lightning_dp.accounting.adjacency import ADJACENCIES
from lightning_dp.accounting.calculator import calculate_privacy
from lightning_dp.errors import LedgerError, PrivacyError

LIGHTNING_COMMANDS = {
    "fit": "train, privately if the configuration says `strategy: private`",
    "validate": "evaluate on the validation records",
    "test": "evaluate on the test records",
    "predict": "predict",
}

_USAGE = """usage: lightning-dp [-h] [--version] COMMAND ...
       lightning-dp COMMAND --help

Differentially private training of unedited PyTorch Lightning modules.

Lightning commands (take `--config FILE.yaml`, and `--help` for every option):
{lightning}

Calculators:
{calculators}

Examples:
  lightning-dp fit --config recipes/digits/mlp_eps3.yaml
  lightning-dp epsilon --noise-multiplier 1 --sampling-rate 0.01 --updates 1000 --delta 1e-5
  lightning-dp epsilon --epsilon 3 --delta 1e-5 --batch-size 600 --num-records 60000 --epochs 10
"""


def add_epsilon_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``lightning-dp epsilon``."""
    budget = parser.add_argument_group("budget")
    budget.add_argument("--epsilon", type=float, metavar="E", help="of the run and all that was spent before, > 0")
    budget.add_argument("--delta", type=float, metavar="D", help="in (0, 1), well below one over the number of records")
    noise = parser.add_argument_group("noise")
    noise.add_argument(
        "--noise-multiplier", type=float, metavar="S", help="noise standard deviation over the clip norm, >= 0"
    )
    sampling = parser.add_argument_group("sampling (a rate, or a batch size with the number of records)")
    sampling.add_argument(
        "--sampling-rate", type=float, metavar="Q", help="chance of a record to be in an update, in (0, 1]"
    )
    sampling.add_argument("--batch-size", type=int, metavar="B", help="expected records in an update, >= 1")
    sampling.add_argument(
        "--num-records", type=int, metavar="N", help="records in the data set; a rate that is solved for is B/N then"
    )
    length = parser.add_argument_group("length (one of)")
    length.add_argument("--updates", type=int, metavar="T", help="number of noisy updates, >= 0")
    length.add_argument(
        "--epochs", type=float, metavar="K", help="passes over the data, of 1/Q updates each, rounded up"
    )
    reading = parser.add_argument_group("reading")
    reading.add_argument(
        "--adjacency", choices=ADJACENCIES, metavar="A", help="which data sets are neighbours (default: add_remove)"
    )
    reading.add_argument(
        "--spent",
        type=Path,
        metavar="FILE",
        help="JSON of what was released before: `Ledger.state_dict()` or `Mechanism.to_dict()`",
    )
    reading.add_argument("--json", action="store_true", help="print one JSON object with all digits")


def epsilon(options: argparse.Namespace) -> None:
    """Solve for epsilon, delta, noise, sampling rate or updates: give all but one of them.

    The answer is on the safe side, for updates with Poisson sampling and Gaussian noise. Epochs become updates, and
    batch sizes rates, first.
    """
    settings = calculate_privacy(
        epsilon=options.epsilon,
        delta=options.delta,
        noise_multiplier=options.noise_multiplier,
        sampling_rate=options.sampling_rate,
        batch_size=options.batch_size,
        num_records=options.num_records,
        num_updates=_validate.optional(_validate.integer, "num_updates", options.updates, minimum=0),
        epochs=options.epochs,
        spent=None if options.spent is None else _read_spent(options.spent),
        adjacency=options.adjacency,
    )
    print(json.dumps(settings.to_dict()) if options.json else settings)


def _read_spent(path: Path) -> Ledger | Mechanism:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LedgerError(f"`--spent {path}` cannot be read as JSON: {error}") from error
    if not isinstance(data, dict) or "entries" not in data:
        return mechanism_from_dict(data)
    kind = {name: data[name] for name in ("adjacency", "unit", "rows_per_unit") if name in data}
    ledger = Ledger(**kind)
    ledger.merge(data)
    return ledger


CALCULATORS = {"epsilon": (epsilon, add_epsilon_arguments)}
_CALCULATOR_USAGE = {
    "epsilon": """%(prog)s [--epsilon E] [--delta D] [--noise-multiplier S]
         [--sampling-rate Q | --batch-size B --num-records N] [--updates T | --epochs K]
         [--adjacency {add_remove,replace_one,zero_out}] [--spent FILE] [--json]"""
}


def main(args: Sequence[str] | None = None) -> None:
    """Runs one command.

    Args:
        args: The command line without the name of the program; that of the process if ``None``.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help"):
        print(_usage())
    elif command == "--version":
        print(f"lightning-dp {__version__}")
    elif command in CALCULATORS:
        _calculate(command, arguments[1:])
    elif command in LIGHTNING_COMMANDS:
        _lightning(None if args is None else arguments)
    else:
        raise SystemExit(f"lightning-dp: unknown command {command!r}.\n\n{_usage()}")


def _usage() -> str:
    def lines(commands: dict[str, str]) -> str:
        return "\n".join(f"  {name:<10}{text}" for name, text in commands.items())

    calculators = {name: (function.__doc__ or "").splitlines()[0] for name, (function, _) in CALCULATORS.items()}
    return _USAGE.format(lightning=lines(LIGHTNING_COMMANDS), calculators=lines(calculators))


def _calculate(command: str, arguments: list[str]) -> None:
    function, add_arguments = CALCULATORS[command]
    parser = argparse.ArgumentParser(
        prog=f"lightning-dp {command}",
        description=function.__doc__,
        allow_abbrev=False,
        usage=_CALCULATOR_USAGE[command],
    )
    add_arguments(parser)
    options = parser.parse_args(arguments)
    try:
        function(options)
    except PrivacyError as error:
        parser.exit(2, f"{parser.prog}: error: {_with_options(str(error), options)}\n")


def _with_options(message: str, options: argparse.Namespace) -> str:
    """A message about arguments of a Python function, with the names of the options instead."""
    names = {name: f"--{name.replace('_', '-')}" for name in vars(options)} | {"num_updates": "--updates"}
    return re.sub(r"`(\w+)`", lambda found: names.get(found[1], found[0]), message)


def _lightning(arguments: list[str] | None) -> None:
    if importlib.util.find_spec("jsonargparse") is None:
        raise SystemExit("`lightning-dp fit` needs jsonargparse. Install it with: pip install 'lightning-dp[cli]'")
    from lightning.pytorch.cli import LightningCLI, SaveConfigCallback

    class SaveConfigBesideLogs(SaveConfigCallback):
        """Leaves the folder in which the command runs alone when there is no logger to give a folder."""

        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            if trainer.loggers:
                super().setup(trainer, pl_module, stage)

    # A recipe names its classes by their path from the folder in which the command runs, as `python -m` would find it.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        LightningCLI(
            args=arguments,
            seed_everything_default=0,
            save_config_callback=SaveConfigBesideLogs,
            parser_kwargs={"prog": "lightning-dp"},
        )
    except PrivacyError as error:
        if error.__cause__ is not None:
            raise
        raise SystemExit(f"lightning-dp: {type(error).__name__}: {error}") from None
