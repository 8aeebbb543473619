"""The command line: the same as train(), and one line with exit code 2 for what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from koila_rl.cli import _called, main
from koila_rl.memory.limits import current_limits

QUICK = "--total-timesteps 300 --n-envs 2 --n-steps 16 --batch-size 32 --n-epochs 1 --no-progress"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_train_then_evaluate(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"train CartPole-v1 {QUICK} --memory 64MiB --run-dir a --learning-rate linear:1e-3"
    assert main([*line.split(), "--net-arch=16,8"]) == 0
    assert "koila-rl evaluate a" in capsys.readouterr().out
    config = json.loads(Path("a/config.json").read_text())
    assert config["memory"] == "64MiB"
    assert config["hyperparameters"]["learning_rate"] == {"linear": [1e-3, 0.0]}
    assert config["hyperparameters"]["net_arch"] == [16, 8]
    assert main(["evaluate", "a", "--episodes", "3"]) == 0
    assert "CartPole-v1: 3 episodes: mean return" in capsys.readouterr().out


def test_what_to_call_next_can_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [".venv/bin/koila-rl", "train"])
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert _called() == ".venv/bin/koila-rl"
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert _called() == "koila-rl"


def test_a_fixed_microbatch_is_in_the_plan() -> None:
    assert main(f"train CartPole-v1 {QUICK} --microbatch 8 --run-dir a".split()) == 0
    assert "8" in Path("a/plan.txt").read_text()


def test_tuning_and_compiling_are_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []

    def train(*_: object, tune: bool, **__: object) -> SimpleNamespace:
        seen.append((tune, current_limits().compile))
        return SimpleNamespace(run_dir="a")

    monkeypatch.setattr("koila_rl.train", train)
    assert main(["train", "CartPole-v1"]) == 0
    assert main(["train", "CartPole-v1", "--tune", "--compile"]) == 0
    assert seen == [(False, False), (True, True)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train CartPol-v1", "did you mean CartPole-v1"),
        ("train CartPole-v1 --lerning-rate 3", "did you mean --learning-rate"),
        ("train CartPole-v1 --total-timestep 3", "did you mean --total-timesteps"),
        ("train CartPole-v1 --learning-rate", "--learning-rate needs a value"),
        ("train CartPole-v1 --learning-rate fast", "learning_rate is 'fast'"),
        ("train CartPole-v1 --learning-rate 1..2", "--learning-rate is '1..2'"),
        ("train CartPole-v1 --clip-range 0", "clip_range is 0 but must be above 0"),
        ("train CartPole-v1 --features-extractor resnet", "'resnet' but must be nature or impala"),
        ("train CartPole-v1 --memory 64bananas", "64bananas"),
        ("train CartPole-v1 --microbatch 0", "microbatch"),
        ("train CartPole-v1 --agent pp", "did you mean ppo"),
        ("train CartPole-v1 --n-steps 1 --n-envs 1", "= 1"),
        ("train CartPole-v1 --batch-size 257", "batch_size is 257"),
        ("evaluate nowhere", "nowhere is not the folder of a run"),
        ("evaluate nowhere --gamma 1", "evaluate takes no hyperparameters"),
    ],
)
def test_bad_input_is_one_line_exit_code_2_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    short = ["--total-timesteps", "64"] if arguments.startswith("train") else []
    assert main([*arguments.split(), *short]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert error.startswith("koila-rl: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", ["", "play CartPole-v1", "train X --total-timesteps many"])
def test_what_does_not_parse_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: str
) -> None:
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("koila-rl: ")
    assert captured.err.count("\n") == 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"koila-rl {version('koila-rl')}\n"


def test_another_agents_hyperparameters_are_flags_too(capsys: pytest.CaptureFixture[str]) -> None:
    line = "train CartPole-v1 --agent dqn --total-timesteps 60 --train-freq 4 --learning-starts 16"
    more = "--gradient-steps 1 --double True --no-progress --run-dir a --net-arch 8,8"
    assert main([*line.split(), *more.split()]) == 0
    config = json.loads(Path("a/config.json").read_text())
    assert config["hyperparameters"]["double"] is True
    assert main(["train", "CartPole-v1", "--agent", "dqn", "--clip-range", "0.1"]) == 2
    assert "dqn has no hyperparameter 'clip_range'" in capsys.readouterr().err


def test_help_names_the_hyperparameters(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--help"])
    assert caught.value.code == 0
    help_text = capsys.readouterr().out
    assert "--gae-lambda" in help_text
    assert "--target-update-interval" in help_text


def test_module_and_installed_command_are_the_same() -> None:
    command = str(Path(sys.executable).with_name("koila-rl"))
    for program in ([command], [sys.executable, "-m", "koila_rl"]):
        done = subprocess.run([*program, "evaluate", "x"], capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.startswith("koila-rl: x is not the folder of a run")
