"""Case 45: a summed loss would multiply every norm by the batch size and clip everything; it is noticed at set-up."""

import pytest
import torch
from fixtures import Lit, make_loader

from lightning_dp.errors import UnsupportedModelError


class LitWithSum(Lit):
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="sum")


class LitWithMeanOfRecords(Lit):
    def training_step(self, batch, batch_idx):
        return {"loss": torch.nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none").mean()}


class LitWithFactor(Lit):
    def training_step(self, batch, batch_idx):
        return 1000.0 * super().training_step(batch, batch_idx)


def test_summed_loss_is_refused_with_the_remedy(make_private_trainer):
    trainer = make_private_trainer()
    with pytest.raises(UnsupportedModelError, match=r"loss is a sum over records") as error:
        trainer.fit(LitWithSum(), make_loader())
    assert 'reduction="mean"' in str(error.value)
    assert trainer.strategy.ledger.num_updates == 0


@pytest.mark.parametrize("module", [Lit, LitWithMeanOfRecords, LitWithFactor])
def test_mean_is_accepted_whatever_its_scale(make_private_trainer, module):
    trainer = make_private_trainer()
    trainer.fit(module(), make_loader())
    assert trainer.strategy.ledger.num_updates == 8
