"""Case 39: a loss scaler is refused; bfloat16 works, with sums and noise in float32."""

import pytest
import torch
from fixtures import Lit, Recorder, make_loader, sum_of_clipped
from lightning.pytorch.plugins import MixedPrecision
from scipy import stats
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.errors import TrainerSettingsError

FALSE_ALARM = 1e-6


def scaled():
    # What `precision="16-mixed"` chooses on an accelerator; on a CPU the Trainer turns that string into bfloat16.
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))


def test_mixed_float16_is_refused_with_the_reason(make_private_trainer):
    trainer = make_private_trainer(plugins=[scaled()])
    with pytest.raises(TrainerSettingsError, match=r"precision='16-mixed'.*scales the loss.*skips updates") as error:
        trainer.fit(Lit(), make_loader())
    assert "bf16-mixed" in str(error.value)


def test_true_float16_is_refused(make_private_trainer):
    trainer = make_private_trainer(precision="16-true")
    with pytest.raises(TrainerSettingsError, match="precision='16-true'"):
        trainer.fit(Lit(), make_loader())


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_other_precisions_train(make_private_trainer, precision):
    module, trainer = Lit(), make_private_trainer(precision=precision)
    before = module.net[0].weight.detach().clone()
    trainer.fit(module, make_loader())
    assert trainer.strategy.ledger.num_updates == 8
    assert not torch.equal(module.net[0].weight.to(before.dtype), before)


def test_mixed_bfloat16_adds_clipped_gradients_and_noise_in_float32(make_private_trainer):
    recorder, clip = Recorder(), 0.4
    settings = {"noise_multiplier": 50.0, "max_grad_norm": clip, "insecure_seed": 39}
    trainer = make_private_trainer(precision="bf16-mixed", callbacks=[recorder], strategy=settings)
    trainer.fit(Lit(), make_loader())

    replica, noise = Lit(), []
    for update, (state, applied) in enumerate(zip(recorder.states, recorder.gradients, strict=True)):
        replica.load_state_dict(state)
        features, labels = recorder.records_of_update(update)
        clean = sum_of_clipped(replica, features, labels, clip)
        for name, gradient in applied.items():
            assert gradient.dtype == torch.float32
            # A value of bfloat16 has 16 zero bits at its end; sums and noise of float32 do not.
            assert bool((gradient.view(torch.int32) & 0xFFFF).any())
            # What autocast rounds, under 1 % of C per record, is far below the noise.
            noise.append(((gradient - clean[name] / 16) / (50 * clip / 16)).flatten().double())
    values = torch.cat(noise)
    total = float((values**2).sum())
    tail = min(stats.chi2(len(values)).cdf(total), stats.chi2(len(values)).sf(total))
    assert 2 * tail > FALSE_ALARM


def test_true_bfloat16_adds_up_chunks_in_float32(make_private_trainer):
    # 384 equal records, one by one: in bfloat16 the sum would stand still at 256 times the first.
    count, recorder = 384, Recorder()
    one = make_loader(count=1).dataset.tensors
    dataset = TensorDataset(one[0].expand(count, -1), one[1].expand(count))
    trainer = make_private_trainer(
        precision="bf16-true",
        max_steps=1,
        accumulate_grad_batches=count,
        callbacks=[recorder],
        strategy={"noise_multiplier": 0.0, "max_grad_norm": 1e3},
    )
    module = Lit()
    trainer.fit(module, DataLoader(dataset, batch_size=1, shuffle=True))

    single = {}
    replica = Lit().bfloat16()
    replica.load_state_dict(recorder.states[0])
    loss = torch.nn.functional.cross_entropy(replica(one[0].bfloat16()), one[1])
    for (name, _), gradient in zip(
        replica.named_parameters(), torch.autograd.grad(loss, list(replica.parameters())), strict=True
    ):
        single[name] = gradient
    for name, gradient in recorder.gradients[0].items():
        torch.testing.assert_close(gradient, single[name], rtol=0.02, atol=1e-3)
