"""One function per accountant: from phases ``(sampling_rate, noise_multiplier, updates)`` and delta to epsilon."""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

from accountants.exact import Phases

Method = Callable[[Phases, float], float]
_READ_BEFORE = 5  # updates after each of which a ledger has been read


def ours(phases: Phases, delta: float) -> float:
    """This library."""
    from lightning_dp.accounting import Composition, Gaussian, PoissonSampled

    return Composition(tuple((PoissonSampled(Gaussian(sigma), q), n) for q, sigma, n in phases)).epsilon(delta)


def ours_cold(phases: Phases, delta: float) -> float:
    """This library with nothing remembered; :func:`forget` is called before."""
    return ours(phases, delta)


def ours_ledger(phases: Phases, delta: float) -> Callable[[], float]:
    """A ledger that has been read after each of the last few updates: records the last one, and reads."""
    from lightning_dp.accounting import Gaussian, Ledger, PoissonSampled

    ledger = Ledger()
    *before, (q, sigma, n) = phases
    for rate, noise, updates in before:
        ledger.record(PoissonSampled(Gaussian(noise), rate), count=updates)
    step = PoissonSampled(Gaussian(sigma), q)
    ledger.record(step, count=n - _READ_BEFORE)

    def read() -> float:
        ledger.record(step)
        return ledger.epsilon(delta)

    for _ in range(_READ_BEFORE - 1):
        read()
    return read


def opacus_rdp(phases: Phases, delta: float) -> float:
    """Opacus, by Rényi orders."""
    from opacus.accountants import RDPAccountant

    return _opacus(RDPAccountant(), phases, delta)


def opacus_prv(phases: Phases, delta: float) -> float:
    """Opacus, by privacy loss random variables and FFT."""
    from opacus.accountants import PRVAccountant

    return _opacus(PRVAccountant(), phases, delta)


def _opacus(accountant: Any, phases: Phases, delta: float) -> float:
    accountant.history = [(sigma, q, n) for q, sigma, n in phases]
    return float(accountant.get_epsilon(delta))


def google_rdp(phases: Phases, delta: float) -> float:
    """dp_accounting, by Rényi orders."""
    from dp_accounting import rdp

    return _google(rdp.RdpAccountant(), phases, delta)


def google_pld(phases: Phases, delta: float, *, spacing: float) -> float:
    """dp_accounting, by discretised privacy losses and FFT."""
    from dp_accounting.pld import pld_privacy_accountant

    return _google(pld_privacy_accountant.PLDAccountant(value_discretization_interval=spacing), phases, delta)


def google_event(phases: Phases) -> Any:
    """The phases in the words of dp_accounting."""
    from dp_accounting import dp_event

    def step(q: float, sigma: float) -> dp_event.DpEvent:
        gaussian = dp_event.GaussianDpEvent(sigma)
        return gaussian if q == 1 else dp_event.PoissonSampledDpEvent(q, gaussian)

    return dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(step(q, sigma), n) for q, sigma, n in phases])


def _google(accountant: Any, phases: Phases, delta: float) -> float:
    return float(accountant.compose(google_event(phases)).get_epsilon(delta))


def opake(phases: Phases, delta: float) -> float:
    """opake-accounting at its default spacing of 1e-4, by discretised privacy losses and FFT in Rust."""
    native = opake_native()
    config = native.DiscretizationConfig()

    def step(q: float, sigma: float) -> Any:
        gaussian = native.gaussian_pld(sigma, config)
        return gaussian if q == 1 else native.poisson_pld(gaussian, q)

    composed = [step(q, sigma).self_compose(n) for q, sigma, n in phases]
    return float(functools.reduce(lambda left, right: left.compose(right), composed).epsilon_at(delta))


@functools.cache
def opake_native() -> ModuleType:
    """The compiled part, loaded by file: the package around it, 0.16.1, cannot be imported by Python 3.11.7.

    Raises:
        ModuleNotFoundError: If opake-accounting is not installed.
    """
    name = "opake_accounting"
    files = importlib.metadata.files("opake-accounting") or []
    path = next(file for file in files if file.stem.startswith(name) and file.suffix in {".so", ".pyd"}).locate()
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


METHODS: dict[str, Method] = {
    "ours cold": ours_cold,
    "ours ledger": lambda phases, delta: ours_ledger(phases, delta)(),
    "Opacus rdp": opacus_rdp,
    "Opacus prv": opacus_prv,
    "dp_acc. RDP": google_rdp,
    "PLD 1e-3": functools.partial(google_pld, spacing=1e-3),
    "PLD 1e-4": functools.partial(google_pld, spacing=1e-4),
    "opake": opake,
}
OURS = ("ours cold", "ours ledger")


def prepared(method: str, task: str, arguments: tuple[Any, ...]) -> Callable[[], float]:
    """The call whose time is taken; all that this library remembers is cleared before, others remember nothing.

    Args:
        method: One of :data:`METHODS`.
        task: ``"epsilon"`` or ``"calibrate"``.
        arguments: Phases and delta, or those of :func:`calibrate_ours`.
    """
    if method in OURS:
        forget()
    if task == "calibrate":
        return functools.partial(CALIBRATIONS[method], *arguments)
    return ours_ledger(*arguments) if method == "ours ledger" else functools.partial(METHODS[method], *arguments)


def forget() -> None:
    """Clears every cache of this library."""
    profile = importlib.import_module("lightning_dp.accounting.profile")
    if hasattr(profile, "clear_caches"):
        profile.clear_caches()
        return
    package = importlib.import_module("lightning_dp.accounting")
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for value in vars(importlib.import_module(found.name)).values():
            for member in (value, *(vars(value).values() if isinstance(value, type) else ())):
                if callable(clear := getattr(member, "cache_clear", None)):
                    clear()


def version_of(method: str) -> str | None:
    """The installed version of the package behind a method, or None."""
    packages = {"Opacus": "opacus", "dp_acc.": "dp-accounting", "PLD": "dp-accounting", "opake": "opake-accounting"}
    try:
        return importlib.metadata.version(packages.get(method.split()[0], "lightning-dp"))
    except importlib.metadata.PackageNotFoundError:
        return None


# Calibration: from a target to the noise multiplier of one phase, each by what its library offers for it.


def calibrate_ours(q: float, updates: int, epsilon: float, delta: float) -> float:
    """This library."""
    from lightning_dp.accounting import calibrate_noise_multiplier

    return calibrate_noise_multiplier(epsilon=epsilon, delta=delta, sampling_rate=q, num_updates=updates)


def calibrate_opacus(q: float, updates: int, epsilon: float, delta: float, *, accountant: str) -> float:
    """Opacus at its default tolerance."""
    from opacus.accountants.utils import get_noise_multiplier

    return float(
        get_noise_multiplier(
            target_epsilon=epsilon, target_delta=delta, sample_rate=q, steps=updates, accountant=accountant
        )
    )


def calibrate_google(q: float, updates: int, epsilon: float, delta: float, *, spacing: float | None) -> float:
    """dp_accounting at its default tolerance; ``spacing`` for PLD, None for RDP."""
    from dp_accounting import mechanism_calibration, rdp
    from dp_accounting.pld import pld_privacy_accountant

    def fresh() -> Any:
        if spacing is None:
            return rdp.RdpAccountant()
        return pld_privacy_accountant.PLDAccountant(value_discretization_interval=spacing)

    return float(
        mechanism_calibration.calibrate_dp_mechanism(
            fresh,
            lambda sigma: google_event(((q, sigma, updates),)),
            epsilon,
            delta,
            mechanism_calibration.LowerEndpointAndGuess(0.1, 1.0),
        )
    )


CALIBRATIONS: dict[str, Callable[[float, int, float, float], float]] = {
    "ours cold": calibrate_ours,
    "Opacus rdp": functools.partial(calibrate_opacus, accountant="rdp"),
    "Opacus prv": functools.partial(calibrate_opacus, accountant="prv"),
    "dp_acc. RDP": functools.partial(calibrate_google, spacing=None),
    "PLD 1e-3": functools.partial(calibrate_google, spacing=1e-3),
    "PLD 1e-4": functools.partial(calibrate_google, spacing=1e-4),
}
