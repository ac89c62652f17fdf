"""What each clipping rule makes of the digits recipe at one epsilon, and how much a wrong clip norm costs it.

Run: ``make bench``, or ``PYTHONPATH=. .venv/bin/python benchmarks/clipping.py --help``.

The same perceptron is trained under (epsilon = 3, delta = 1e-5) with every rule from several clip norms, with one
learning rate for all, as by a person who does not know the right clip norm. Seeds do not reach the noise, so each
figure is the median of several runs, with the range. A clip norm that is found privately does not depend on the given.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import warnings

import lightning.pytorch as pl

import lightning_dp as ldp
from recipes.digits.plain import DigitsClassifier, DigitsData

EPSILON, DELTA, EPOCHS, BATCH = 3.0, 1e-5, 30, 719

RULES: dict[str, tuple[ldp.ClippingRule, list[pl.Callback]]] = {
    "FlatClipping": (ldp.FlatClipping(), []),
    "PerLayerClipping": (ldp.PerLayerClipping(), []),
    "AutomaticClipping": (ldp.AutomaticClipping(), []),
    "AdaptiveClipping": (ldp.AdaptiveClipping(), []),
    "FlatClipping, ClipNormCalibrator": (ldp.FlatClipping(), [ldp.ClipNormCalibrator()]),
}


def accuracy(rule: ldp.ClippingRule, callbacks: list[pl.Callback], max_norm: float, learning_rate: float) -> float:
    """Validation accuracy of one private run."""
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        strategy=ldp.PrivateStrategy(max_grad_norm=max_norm, clipping=rule),
        callbacks=[*callbacks, ldp.PrivacyBudget(EPSILON, DELTA, statement=False)],
        check_val_every_n_epoch=EPOCHS,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(DigitsClassifier(64, learning_rate), datamodule=DigitsData(BATCH))
    return float(trainer.callback_metrics["val_acc"])


def main() -> None:
    """Trains and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each (default: 3)")
    parser.add_argument(
        "--norms", type=float, nargs="+", default=[0.02, 0.2, 2.0, 20.0], help="clip norms to start from"
    )
    parser.add_argument("--learning-rate", type=float, default=1.0, help="of SGD (default: 1)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(f"Validation accuracy at epsilon = {EPSILON:g}, median (range) of {options.runs} runs\n")
    print(f"{'max_grad_norm':34}" + "".join(f"{norm:>22g}" for norm in options.norms))
    for name, (rule, callbacks) in RULES.items():
        cells = []
        for norm in options.norms:
            found = [accuracy(rule, callbacks, norm, options.learning_rate) for _ in range(options.runs)]
            cells.append(f"{statistics.median(found):.3f} ({min(found):.3f}-{max(found):.3f})")
        print(f"{name:34}" + "".join(f"{cell:>22}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
