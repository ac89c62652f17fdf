"""Case 16: a weighted sampler cannot be kept, and is never dropped in silence."""

import pytest
from fixtures import Lit, make_loader
from torch.utils.data import WeightedRandomSampler

from lightning_dp.errors import UnsupportedDataError


@pytest.mark.parametrize("replacement", [True, False])
def test_weighted_sampler_is_refused_with_the_remedies(make_private_trainer, replacement):
    sampler = WeightedRandomSampler([1.0] * 32 + [5.0] * 32, num_samples=64, replacement=replacement)
    trainer = make_private_trainer()
    with pytest.raises(UnsupportedDataError) as error:
        trainer.fit(Lit(), make_loader(shuffle=False, sampler=sampler))
    message = str(error.value)
    assert "`WeightedRandomSampler`" in message
    assert "class weights in a per-record loss" in message
    assert "sampling_rate=" in message
    assert trainer.strategy.ledger.num_updates == 0


def test_the_remedy_works(make_private_trainer):
    trainer = make_private_trainer(strategy={"sampling_rate": 0.5})
    trainer.fit(Lit(), make_loader())
    assert trainer.strategy.ledger.entries[0].mechanism.sampling_rate == 0.5
