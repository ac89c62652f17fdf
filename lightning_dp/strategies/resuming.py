"""Resumes a checkpoint that was written in the middle of an update."""

from __future__ import annotations

from lightning.pytorch import Trainer


def restart_update(trainer: Trainer, num_chunks: int) -> None:
    """Takes Lightning's batch counters back to the last whole update.

    The physical batches of an update that was not released are gone with the process that drew them. Nothing of them
    was spent, so the update starts over with a new draw.

    Args:
        trainer: A Trainer that is about to train.
        num_chunks: Physical batches of one update.
    """
    loop = trainer.fit_loop.epoch_loop
    if not trainer.fit_loop.restarting:
        return
    current, total = loop.batch_progress.current, loop.batch_progress.total
    # Lightning counts the batch as completed when it restarts a loop that was saved in `on_train_batch_end`.
    completed = current.completed + (1 if loop.restarted_on_train_batch_end else 0)
    for progress in (current, total):
        for name in ("ready", "started", "processed", "completed"):
            # Below zero for a moment where Lightning is about to count the batch as completed.
            setattr(progress, name, getattr(progress, name) - completed % num_chunks)
