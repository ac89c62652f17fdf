"""Mechanisms that the accountant knows by a discrete dominating pair."""

from __future__ import annotations

from abc import abstractmethod

from lightning_dp.accounting.adjacency import Adjacency, Direction
from lightning_dp.accounting.mechanisms.base import SingleMechanism
from lightning_dp.accounting.profile.atoms import AtomicPair
from lightning_dp.accounting.profile.losses import Loss

LEAST_EPSILON = 1e-12  # less is accounted as this
MOST_EPSILON = 1e6  # more is accounted as no privacy


class AtomicMechanism(SingleMechanism):
    """A release with a dominating pair that is discrete and whose reverse has the same profile."""

    @abstractmethod
    def pair(self, adjacency: Adjacency) -> AtomicPair:
        """The dominating pair: the same object for equal parameters.

        Args:
            adjacency: Which data sets are neighbours.

        Raises:
            IncomparableError: The mechanism's guarantee says nothing under this adjacency.
        """

    def loss(self, adjacency: Adjacency, direction: Direction) -> Loss:
        """See :meth:`SingleMechanism.loss`."""
        return self.pair(adjacency).loss

    def unsampled(self, adjacency: Adjacency) -> Adjacency:
        """The adjacency under which data with one record in a sample, and without it, are neighbours.

        A null record adds nothing, so under ``zero_out`` a record outside the sample is one.

        Args:
            adjacency: The adjacency under which the sampled mechanism is looked at.
        """
        return "add_remove" if adjacency == "replace_one" else adjacency
