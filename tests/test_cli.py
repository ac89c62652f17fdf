"""The command line as a person meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser

import lightning_dp
from lightning_dp import Gaussian, Ledger, PoissonSampled
from lightning_dp.cli import main


def test_epsilon_prints_the_accountants_number(capsys: pytest.CaptureFixture[str]) -> None:
    main(["epsilon", "--noise-multiplier", "1", "--sampling-rate", "0.01", "--updates", "1000", "--delta", "1e-5"])
    assert capsys.readouterr().out.startswith("epsilon = 1.828237 at delta = 1e-05")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--noise-multiplier", "-1"), ("--sampling-rate", "1.5"), ("--updates", "-3"), ("--delta", "1")],
)
def test_epsilon_names_a_value_that_is_out_of_range(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"--noise-multiplier": "1", "--sampling-rate": "0.01", "--updates": "10", "--delta": "1e-5"}
    options[option] = value
    with pytest.raises(SystemExit) as stop:
        main(["epsilon", *(f"{key}={text}" for key, text in options.items())])
    assert stop.value.code == 2
    assert f"error: {option} " in capsys.readouterr().err


def run(line: str) -> None:
    main(line.split())


FIVE = {"--epsilon": "3", "--delta": "1e-5", "--noise-multiplier": "1", "--sampling-rate": "0.01", "--updates": "1000"}


@pytest.mark.parametrize(
    ("left_out", "line"),
    [
        ("--epsilon", "epsilon = 1.828237 at delta = 1e-05 (add_remove, 1,000 updates)"),
        ("--delta", "epsilon = 3.000000 at delta = 9.22209e-10 (add_remove, 1,000 updates)  <- delta solved for"),
        ("--noise-multiplier", "  noise multiplier  0.813587  <- solved for"),
        ("--sampling-rate", "  sampling rate     0.0157581  <- solved for"),
        ("--updates", "  updates           2,666 (26.66 epochs of 100)  <- solved for"),
    ],
)
def test_epsilon_solves_for_what_is_left_out(left_out: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["epsilon", *(f"{option}={value}" for option, value in FIVE.items() if option != left_out)])
    assert line in capsys.readouterr().out.splitlines()


def test_epsilon_takes_batches_and_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    run("epsilon --epsilon 3 --delta 1e-5 --batch-size 600 --num-records 60000 --epochs 10")
    shown = capsys.readouterr().out
    assert "batches of 600 of 60,000 records" in shown
    assert "1,000 (10 epochs of 100)" in shown


def test_epsilon_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    run("epsilon --epsilon 3 --delta 1e-5 --sampling-rate 0.01 --updates 1000 --adjacency replace_one --json")
    found = json.loads(capsys.readouterr().out)
    assert found["solved_for"] == "noise_multiplier"
    assert found["adjacency"] == "replace_one"
    updates = 1000 * PoissonSampled(Gaussian(found["noise_multiplier"]), 0.01)
    assert updates.epsilon(1e-5, adjacency="replace_one") == found["epsilon"]


def spent_files() -> dict[str, dict[str, Any]]:
    ledger = Ledger()
    mechanism = 500 * PoissonSampled(Gaussian(1.0), 0.01)
    ledger.record(mechanism)
    return {"ledger": ledger.state_dict(), "mechanism": mechanism.to_dict()}


@pytest.mark.parametrize("kind", ["ledger", "mechanism"])
def test_epsilon_adds_what_was_spent_before(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "spent.json"
    file.write_text(json.dumps(spent_files()[kind]))
    run(f"epsilon --noise-multiplier 1 --sampling-rate 0.01 --updates 500 --delta 1e-5 --spent {file}")
    shown = capsys.readouterr().out
    assert shown.startswith("epsilon = 1.828237 at delta = 1e-05 (add_remove, 500 updates)")
    assert "spent before      epsilon = 1.326" in shown


@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out"])
def test_epsilon_reads_the_ledgers_own_adjacency(
    adjacency: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "spent.json"
    file.write_text(json.dumps(Ledger(adjacency=adjacency, unit="user", rows_per_unit=2).state_dict()))
    run(f"epsilon --noise-multiplier 3 --sampling-rate 0.01 --updates 500 --delta 1e-5 --spent {file}")
    assert f"({adjacency}, 500 updates)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--epsilon 3 --delta 1e-5", "Leave out exactly one"),
        ("--epsilon 3 --delta 1e-5 --batch-size 5 --updates 7", "--num-records"),
        ("--epsilon 1 --delta 1e-5 --sampling-rate 1 --noise-multiplier 1", "Choose a target above 4.37718"),
        ("--delta 1e-5 --sampling-rate 1 --noise-multiplier 1 --updates 1 --spent missing.json", "missing.json"),
        ("--delta 1e-5 --sampling-rate 1 --noise-multiplier 1 --updates 1 --spent {list}", "kind"),
        ("--delta 1e-5 --sampling-rate 1 --noise-multiplier 1 --updates 1 --spent {text}", "JSON"),
    ],
)
def test_a_mistake_in_epsilon_is_one_line(
    options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "text.json").write_text("not json")
    with pytest.raises(SystemExit) as stop:
        main(["epsilon", *options.format(list=tmp_path / "list.json", text=tmp_path / "text.json").split()])
    shown = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in shown
    assert shown.count("\n") == 1


def test_epsilon_help_names_every_option_with_its_range(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["epsilon", "--help"])
    shown = capsys.readouterr().out
    options = [*FIVE, "--batch-size", "--num-records", "--epochs", "--adjacency", "--spent", "--json"]
    assert all(f"\n  {option}" in shown for option in options)
    assert "(0, 1]" in shown


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jsonargparse, as above
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("FlatClipping", {}),
        ("PerLayerClipping", {"weights": {"net.0": 2.0}}),
        ("AutomaticClipping", {"stability": 0.1}),
        ("AdaptiveClipping", {"quantile": 0.7, "learning_rate": 0.1, "count_share": 0.05}),
    ],
)
def test_clipping_rules_are_written_in_yaml(name: str, settings: dict[str, object]) -> None:
    parser = ArgumentParser()
    parser.add_argument("--strategy", type=lightning_dp.PrivateStrategy)
    rule = {"class_path": f"lightning_dp.{name}", "init_args": settings}
    strategy = {"class_path": "lightning_dp.PrivateStrategy", "init_args": {"clipping": rule}}
    config = parser.parse_object({"strategy": strategy})
    assert parser.instantiate_classes(config).strategy.clipping == getattr(lightning_dp, name)(**settings)
