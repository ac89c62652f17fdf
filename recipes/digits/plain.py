"""Handwritten digits in plain Lightning: nothing here knows about privacy."""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class DigitsClassifier(pl.LightningModule):
    """A perceptron with one hidden layer.

    Args:
        hidden: Width of the hidden layer.
        learning_rate: Learning rate of SGD.
    """

    def __init__(self, hidden: int = 64, learning_rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self(images), labels)
        self.log("val_acc", self.accuracy, prog_bar=True)

    test_step = validation_step

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["learning_rate"])


class DigitsData(pl.LightningDataModule):
    """1,797 images of 8x8 pixels that ship inside scikit-learn: 1,437 to train on, 360 to validate.

    Args:
        batch_size: Records of one physical batch.
        num_workers: Worker processes of the loaders.
    """

    def __init__(self, batch_size: int = 32, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size, self.num_workers = batch_size, num_workers

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        parts = train_test_split(images / 16.0, labels, test_size=360, random_state=0, stratify=labels)
        train_x, val_x, train_y, val_y = (torch.as_tensor(part) for part in parts)
        self.train = TensorDataset(train_x.float(), train_y)
        self.val = TensorDataset(val_x.float(), val_y)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=360, num_workers=self.num_workers)

    test_dataloader = predict_dataloader = val_dataloader
