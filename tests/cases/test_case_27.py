"""Case 27: the trained module is the user's own: it loads where this library is unknown, pickles and copies."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fixtures import Lit, attributes_of, make_loader, make_records

FIXTURES = Path(__file__).parents[1]

PLAIN_PROCESS = """
import sys
import torch
import lightning.pytorch as pl
from fixtures import Lit, make_records, make_loader

checkpoint, predictions = sys.argv[1:]
module = Lit.load_from_checkpoint(checkpoint).eval()
with torch.no_grad():
    torch.save(module(make_records().tensors[0]), predictions)
for package in ("lightning_dp", "opacus"):
    assert package not in sys.modules, package
"""


@pytest.fixture(scope="module")
def trained(make_private_trainer, tmp_path_factory):
    module, trainer = Lit(), make_private_trainer()
    trainer.fit(module, make_loader())
    path = tmp_path_factory.mktemp("case_27") / "private.ckpt"
    trainer.save_checkpoint(path)
    return module, path


def predict(module):
    with torch.no_grad():
        return module.eval()(make_records().tensors[0])


def test_checkpoint_loads_in_a_process_that_never_imported_us(trained, tmp_path):
    module, checkpoint = trained
    output = tmp_path / "predictions.pt"
    command = [sys.executable, "-c", PLAIN_PROCESS, str(checkpoint), str(output)]
    done = subprocess.run(command, cwd=FIXTURES, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(output), predict(module))


def test_checkpoint_holds_plain_values_only(trained):
    content = torch.load(trained[1], weights_only=True)
    assert list(content["state_dict"]) == list(Lit().state_dict())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_duplicate_is_equal_and_trains_on(trained, duplicate, make_private_trainer, make_trainer):
    module, _ = trained
    twin = duplicate(module)
    assert attributes_of(twin) == attributes_of(Lit())
    assert torch.equal(predict(twin), predict(module))
    for trainer in (make_trainer(), make_private_trainer()):
        before = predict(twin)
        trainer.fit(twin.train(), make_loader())
        assert not torch.equal(predict(twin), before)


def test_saved_module_holds_no_record(trained, tmp_path):
    torch.save(trained[0], tmp_path / "whole.pt")
    content = (tmp_path / "whole.pt").read_bytes() + trained[1].read_bytes() + pickle.dumps(trained[0])
    assert not any(record.numpy().tobytes() in content for record in make_records().tensors[0])


def test_module_saved_while_training_holds_no_record(make_private_trainer):
    import lightning.pytorch as pl

    class Save(pl.Callback):
        content = b""

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            for layer in pl_module.net:
                self.content += b"".join(
                    value.numpy().tobytes()
                    for name, values in vars(layer).items()
                    if isinstance(values, list)
                    for value in values
                    if isinstance(value, torch.Tensor)
                )
                assert not hasattr(layer, "activations")

    save = Save()
    make_private_trainer(callbacks=[save]).fit(Lit(), make_loader())
    assert not any(record.numpy().tobytes() in save.content for record in make_records().tensors[0])
