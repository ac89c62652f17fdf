"""Case 14: a module with a batch size built in is refused at set-up, since batch sizes vary."""

import lightning.pytorch as pl
import pytest
import torch
from fixtures import Lit, make_loader
from opacus.layers import DPGRU
from torch import nn

from lightning_dp.errors import UnsupportedModelError


class Memory(nn.Module):
    """A cell whose initial state is made for 32 records."""

    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(8, 16)
        self.state = torch.zeros(1, 32, 16)

    def forward(self, features):
        return torch.tanh(self.cell(features) + self.state[0])


class LitWithMemory(Lit):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential()
        self.net.memory = Memory()
        self.net.head = nn.Linear(16, 3)


class LitWithRecurrence(Lit):
    def __init__(self):
        super().__init__()
        self.gru = DPGRU(8, 16, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, features):
        _, state = self.gru(features[:, None, :], torch.zeros(1, 32, 16))
        return self.head(state[0])


class Touched(pl.Callback):
    batches = 0

    def on_train_batch_start(self, *_):
        self.batches += 1


@pytest.mark.parametrize(("module", "path"), [(LitWithMemory, "net.memory"), (LitWithRecurrence, "gru")])
def test_refused_at_set_up_with_the_modules_path_and_the_reason(make_private_trainer, module, path):
    touched = Touched()
    trainer = make_private_trainer(callbacks=[touched])
    with pytest.raises(UnsupportedModelError, match=r"(?s)number of records.* varies") as error:
        trainer.fit(module(), make_loader(batch_size=32))
    assert f"`{path}" in str(error.value)
    assert touched.batches == trainer.strategy.ledger.num_updates == 0
