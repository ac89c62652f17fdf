"""One update by plain PyTorch and by other private libraries, each used as its documentation says.

Batches have a fixed size here, which spares the peers their Poisson loaders and the upkeep of their accountants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

NOISE, NORM = 1.0, 1.0

Step = Callable[[Tensor, Tensor], None]
MakeStep = Callable[[nn.Module, torch.optim.Optimizer, int], Step]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> Step:
    """PyTorch without privacy."""

    def step(inputs: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def opacus(mode: str) -> MakeStep:
    """Opacus' engine in one of its modes."""

    def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> Step:
        from opacus import PrivacyEngine

        # Only its length is used: the expected size of a batch is the number of records over that of batches.
        data = DataLoader(TensorDataset(torch.zeros(64 * batch, 1)), batch_size=batch)
        made: tuple[Any, ...] = PrivacyEngine().make_private(
            module=model.train(),
            optimizer=optimizer,
            data_loader=data,
            criterion=nn.CrossEntropyLoss(),
            noise_multiplier=NOISE,
            max_grad_norm=NORM,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        private, private_optimizer = made[:2]
        criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()

        def step(inputs: Tensor, labels: Tensor) -> None:
            private_optimizer.zero_grad()
            criterion(private(inputs), labels).backward()
            private_optimizer.step()

        return step

    return make_step


def opake(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> Step:
    """The clipped gradient and the noise of opake, and the optimizer of PyTorch."""
    from opake.dpsgd.clipping import clipped_grad
    from opake.dpsgd.noise import gaussian_noise
    from opake.random import key

    trained, loss = _functional(model)
    clipped, clip_state = clipped_grad(loss, clipping_norm=NORM, batch_argnums=(1, 2), normalize_by=batch)
    noisy, noise_state = gaussian_noise(noise_multiplier=NOISE, key=key(0))

    def step(inputs: Tensor, labels: Tensor) -> None:
        nonlocal clip_state, noise_state
        gradients, clip_state = clipped({k: p.detach() for k, p in trained.items()}, inputs, labels, state=clip_state)
        released, noise_state = noisy(gradients, noise_state)
        for name, parameter in trained.items():
            parameter.grad = released.pytree[name]
        optimizer.step()

    return step


def vectorized(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> Step:
    """The gradient of every record by PyTorch's own function transforms, then a dozen lines by hand."""
    trained, loss = _functional(model)
    rows_of = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")

    def step(inputs: Tensor, labels: Tensor) -> None:
        rows = rows_of({name: parameter.detach() for name, parameter in trained.items()}, inputs, labels)
        norms = torch.stack([row.flatten(1).norm(dim=1) for row in rows.values()]).norm(dim=0)
        weights = (NORM / norms).clamp(max=1.0)
        for name, parameter in trained.items():
            total = torch.einsum("n,n...->...", weights, rows[name])
            parameter.grad = (total + NOISE * NORM * torch.randn_like(total)) / batch
        optimizer.step()

    return step


def _functional(model: nn.Module) -> tuple[dict[str, nn.Parameter], Callable[..., Tensor]]:
    """What is trained, and the loss of one record as a function of it."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    def loss(parameters: dict[str, Tensor], inputs: Tensor, label: Tensor) -> Tensor:
        scores = functional_call(model, parameters, (inputs.unsqueeze(0),))
        return cross_entropy(scores, label.unsqueeze(0))

    return trained, loss
