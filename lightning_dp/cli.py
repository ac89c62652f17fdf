"""The command line: ``lightning-dp fit --config recipe.yaml`` and the small calculators beside it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

from lightning.pytorch import LightningModule, Trainer

from lightning_dp import _validate
from lightning_dp._version import __version__
from lightning_dp.accounting import Gaussian, PoissonSampled
from lightning_dp.accounting.guarantee import format_epsilon
from lightning_dp.errors import PrivacyError

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
"""


def add_epsilon_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``lightning-dp epsilon``."""
    parser.add_argument("--noise-multiplier", type=float, required=True, help="noise std over the clip norm, >= 0")
    parser.add_argument("--sampling-rate", type=float, required=True, help="chance of a record to be drawn, in (0, 1]")
    parser.add_argument("--updates", type=int, required=True, help="number of updates, >= 0")
    parser.add_argument("--delta", type=float, required=True, help="delta of the guarantee, in (0, 1)")


def epsilon(options: argparse.Namespace) -> None:
    """Print the exact epsilon of a number of Poisson-sampled Gaussian updates (add/remove adjacency)."""
    updates = _validate.integer("updates", options.updates, minimum=0)
    run = updates * PoissonSampled(Gaussian(options.noise_multiplier), options.sampling_rate)
    shown = format_epsilon(run.epsilon(options.delta), decimals=6)
    print(f"epsilon = {shown} at delta = {options.delta:g} (add_remove, {updates:,} updates)")


CALCULATORS = {"epsilon": (epsilon, add_epsilon_arguments)}


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
    parser = argparse.ArgumentParser(prog=f"lightning-dp {command}", description=function.__doc__)
    add_arguments(parser)
    try:
        function(parser.parse_args(arguments))
    except PrivacyError as error:
        parser.error(str(error))


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
