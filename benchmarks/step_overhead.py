"""What one private update costs beside one of plain Lightning.

Run: ``make bench``, or ``PYTHONPATH=. .venv/bin/python benchmarks/step_overhead.py --help``.

The same model, data and batch size are trained by a plain Trainer, by ``strategy="private"``, and by the same with a
``PrivacyMonitor``, which computes epsilon after every update. Variants take turns in every round. A round's figure is
the median time from one batch to the next, without set-up; ratios are formed inside a round, and the table shows the
medians over rounds. A wide range of ratios means that the machine was busy: measure again. Plain batches have a fixed
size, private ones vary around it.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import time
import warnings
from collections.abc import Callable

import lightning.pytorch as pl
import torch

import lightning_dp as ldp
from recipes.digits.plain import DigitsClassifier, DigitsData
from recipes.mnist.plain import MnistClassifier, MnistData

WARM_UP = 3

MODELS: dict[str, tuple[Callable[[], pl.LightningModule], Callable[[], pl.LightningDataModule]]] = {
    "digits MLP, batch 64": (DigitsClassifier, lambda: DigitsData(batch_size=64)),
    "MNIST CNN, batch 64": (MnistClassifier, lambda: MnistData(batch_size=64)),
}


class StepTimer(pl.Callback):
    """Notes the time at the end of every batch."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *_: object) -> None:
        """Called after each update."""
        self.times.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Median time between updates after the warm-up."""
        times = self.times[WARM_UP:]
        return statistics.median(after - before for before, after in itertools.pairwise(times))


def variants() -> dict[str, tuple[str | ldp.PrivateStrategy, list[pl.Callback]]]:
    """Strategy and callbacks of everything that is compared; the first one is the reference."""
    return {
        "plain": ("auto", []),
        "private": (ldp.PrivateStrategy(noise_multiplier=1.0), []),
        "private, epsilon shown": (
            ldp.PrivateStrategy(noise_multiplier=1.0),
            [ldp.PrivacyMonitor(delta=1e-5, statement=False)],
        ),
    }


def seconds_per_update(model: str, variant: str, updates: int) -> float:
    """Trains once and returns the median time of an update."""
    make_module, make_data = MODELS[model]
    strategy, callbacks = variants()[variant]
    timer = StepTimer()
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        callbacks=[*callbacks, timer],
        max_steps=updates,
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(make_module(), datamodule=make_data())
    return timer.seconds


def measure(model: str, *, rounds: int, updates: int) -> dict[str, list[float]]:
    """Seconds an update, by variant, one figure a round."""
    taken: dict[str, list[float]] = {variant: [] for variant in variants()}
    for _ in range(rounds):
        for variant, seconds in taken.items():
            seconds.append(seconds_per_update(model, variant, updates))
    return taken


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="how often each variant takes its turn")
    parser.add_argument("--updates", type=int, default=25, help="updates of each turn")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)

    print(f"torch {torch.__version__}, {options.threads} threads, {options.rounds} rounds of {options.updates} updates")
    print(f"{'model':<22}{'variant':<26}{'ms an update':>14}{'ratio':>8}{'range of ratios':>20}")
    for model in MODELS:
        taken = measure(model, rounds=options.rounds, updates=options.updates)
        for variant, seconds in taken.items():
            ratios = [mine / plain for mine, plain in zip(seconds, taken["plain"], strict=True)]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            milliseconds = 1000 * statistics.median(seconds)
            print(f"{model:<22}{variant:<26}{milliseconds:>14.2f}{statistics.median(ratios):>8.2f}{spread:>20}")


if __name__ == "__main__":
    main()
