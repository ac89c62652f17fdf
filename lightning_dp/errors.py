"""Every error that a user of ``lightning_dp`` can cause, in one place.

All of them are :class:`PrivacyError`. Those that Lightning's own settings, loaders or models cause are Lightning's
``MisconfigurationException`` too, so that existing handlers keep working. A message names the thing, its value,
the reason and the remedy.
"""

from lightning.fabric.utilities.exceptions import MisconfigurationException


class PrivacyError(Exception):
    """Base class of every error that this package raises on purpose."""


class InvalidValueError(PrivacyError, ValueError):
    """An argument has the wrong type or lies outside its range."""


class CalibrationError(PrivacyError, ValueError):
    """No admissible setting reaches the target; the message gives the reachable range."""


class IncomparableError(PrivacyError, ValueError):
    """Guarantees or mechanisms of different adjacency or unit cannot be composed, compared or converted."""


class TrainerSettingsError(PrivacyError, MisconfigurationException):
    """A setting of the Trainer, or an optimizer, cannot be combined with private training."""


class UnsupportedDataError(PrivacyError, MisconfigurationException):
    """A dataset or loader cannot be sampled privately."""


class UnsupportedModelError(PrivacyError, MisconfigurationException):
    """The gradient of one record cannot be separated or bounded in this model."""


class MixedRecordsError(UnsupportedModelError):
    """The gradient of one record depends on the others of its batch, or the module keeps something of them."""


class BudgetExceededError(PrivacyError):
    """The next release would spend more than the budget, or the budget is spent already."""


class LedgerError(PrivacyError):
    """A ledger is damaged, missing where privacy was spent, or cannot answer what it is asked."""


class PrivacyViolationError(PrivacyError, RuntimeError):
    """A run-time check of the mechanism failed; the update in question was not released."""
