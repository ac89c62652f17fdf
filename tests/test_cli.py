"""The command line as a person meets it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lightning_dp
from lightning_dp.cli import main


def test_epsilon_prints_the_accountants_number(capsys: pytest.CaptureFixture[str]) -> None:
    main(["epsilon", "--noise-multiplier", "1", "--sampling-rate", "0.01", "--updates", "1000", "--delta", "1e-5"])
    assert capsys.readouterr().out.startswith("epsilon = 1.828237 at delta = 1e-05")


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("--noise-multiplier", "-1", "noise_multiplier"),
        ("--sampling-rate", "1.5", "sampling_rate"),
        ("--updates", "-3", "updates"),
        ("--delta", "1", "delta"),
    ],
)
def test_epsilon_names_a_value_that_is_out_of_range(
    option: str, value: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"--noise-multiplier": "1", "--sampling-rate": "0.01", "--updates": "10", "--delta": "1e-5"}
    options[option] = value
    with pytest.raises(SystemExit) as stop:
        main(["epsilon", *(f"{key}={text}" for key, text in options.items())])
    assert stop.value.code == 2
    assert f"`{name}`" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    shown = capsys.readouterr().out
    assert all(f"  {command}" in shown for command in ("fit", "validate", "test", "predict", "epsilon"))


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out.strip() == f"lightning-dp {lightning_dp.__version__}"


def test_an_unknown_command_is_named() -> None:
    with pytest.raises(SystemExit, match="unknown command 'train'"):
        main(["train"])


def test_the_module_runs_as_the_program_does() -> None:
    command = [sys.executable, "-m", "lightning_dp", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == f"lightning-dp {lightning_dp.__version__}"


def test_a_mistake_in_a_recipe_is_one_line(tmp_path: object) -> None:
    options = "--model recipes.digits.plain.DigitsClassifier --data recipes.digits.plain.DigitsData"
    command = (
        f"-m lightning_dp fit {options} --trainer.strategy private --trainer.logger false --trainer.accelerator cpu"
    )
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "lightning-dp: TrainerSettingsError: Private training has neither" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jsonargparse, about how Lightning calls it
@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_a_recipe_serves_every_lightning_command(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(lightning_dp.__file__).parent.parent
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "argv", ["lightning-dp", command, "--config", "recipes/digits/mlp_eps3.yaml"])
    main()
    shown = capsys.readouterr().out
    assert command == "predict" or "val_acc" in shown
    assert "Private training" not in shown
