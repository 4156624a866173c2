"""`rlstruct tune` as users call it."""

from __future__ import annotations

import json
import pathlib

import pytest

from rlstruct.batchers import RL_Batcher
from rlstruct.cli.commands import tune as command
from rlstruct.cli.main import main
from rlstruct.cli.stored_run import load_settings
from rlstruct.sharing import Tuning
from rlstruct.sharing.tuning import measuring
from rlstruct.sharing.tuning.search import Candidate, Measured, Probe

for package in ("tyro", "tqdm", "tensorboard", "matplotlib", "PIL"):
    pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[train]'")

SMALL = ["--n-processes", "0", "--n-envs", "4", "8"]
OWN = """
import gymnasium
from gymnasium import spaces
from rlstruct.agents import RandomAgent
from rlstruct.envs import GymEnvInf

def create_agent(n_actions):
    return RandomAgent(spaces.Discrete(n_actions))

def create_env(n_envs, seed, name):
    return GymEnvInf([gymnasium.make(name) for _ in range(n_envs)], seed)
"""

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command runs in an empty folder, with short probes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(measuring, "TURN", 0.01)
    monkeypatch.setattr(measuring, "ROUND_SECONDS", 0.1)
    monkeypatch.setattr(measuring, "LONGEST_BATCH", (100.0, 0.0))


def test_a_training_is_tuned_and_repeated_with_the_answer(capsys: Capture) -> None:
    options = ["--n-timesteps", "4", "8", "--out", "runs/tuned"]
    assert main(["tune", "a2c", "--env", "CartPole-v1", "--learn", *SMALL, *options]) == 0
    said, bar = capsys.readouterr()
    assert bar == ""  # which is for terminals, and not for logs
    assert said.replace("FASTEST won when timed", "").count("FASTEST") == 1  # without the note that may explain it
    assert max(map(len, said.splitlines())) <= 80
    assert "collects and learns fastest" in said
    tuned = load_settings(pathlib.Path("runs/tuned"))  # as rlstruct train --config reads it
    config = tuned.config
    assert f"paste: --n-processes 0 --n-envs {config.n_envs} --n-timesteps {config.n_timesteps}" in said
    assert config.n_envs in (4, 8)
    assert config.n_timesteps in (4, 8)
    (pathlib.Path("runs/tuned") / "metrics.csv").touch()  # a training has begun there
    before = pathlib.Path("runs/tuned/config.json").read_bytes()
    assert main(["tune", "a2c", "--env", "CartPole-v1", *SMALL, *options]) == 2
    assert "it is the folder of a training, whose settings would be lost" in capsys.readouterr().err.replace("\n", " ")
    assert pathlib.Path("runs/tuned/config.json").read_bytes() == before
    # The same again is reported from the cache.
    assert main(["tune", "a2c", "--env", "CartPole-v1", "--learn", *SMALL, "--n-timesteps", "4", "8"]) == 0
    assert "from the cache" in capsys.readouterr().out
    assert main(["tune", "a2c", "--env", "CartPole-v1", *SMALL, "--n-timesteps", "4", "8", "--again"]) == 0
    assert "from the cache" not in capsys.readouterr().out
    # Measuring one task again keeps the answers of the others.
    assert main(["tune", "a2c", "--env", "CartPole-v1", "--learn", *SMALL, "--n-timesteps", "4", "8"]) == 0
    assert "from the cache" in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", ["dqn", "reinforce"])
def test_every_kind_of_algorithm_is_tuned(algorithm: str, capsys: Capture) -> None:
    options = ["--n-timesteps", "8", "--learn", "--n-envs", "4", "--n-processes", "0", "--no-progress"]
    assert main(["tune", algorithm, "--env", "CartPole-v1", *options]) == 0
    assert "collects and learns fastest: 4 environments x 8 steps (" in capsys.readouterr().out


def test_factories_are_tuned_by_name(tmp_path: pathlib.Path, capsys: Capture) -> None:
    (tmp_path / "of_my_own.py").write_text(OWN)
    arguments = ["--agent-args", "n_actions=2", "--env-args", "name=CartPole-v1", "--out", "tuned.json"]
    assert main(["tune", "of_my_own:create_agent", "of_my_own:create_env", *SMALL, *arguments]) == 0
    assert "to use it: RL_Batcher(" in capsys.readouterr().out
    import of_my_own  # type: ignore[import-not-found]

    preset = json.loads(pathlib.Path("tuned.json").read_text())
    preset["env_args"]["name"] = "CartPole-v1"
    with RL_Batcher(
        create_agent=of_my_own.create_agent, create_env=of_my_own.create_env, agent_args={"n_actions": 2}, **preset
    ) as batcher:
        assert batcher.n_envs() == preset["env_args"]["n_envs"]


def test_the_table_says_why_a_slower_row_may_show_a_higher_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for best, is_said in ((8, True), (16, False)):
        probes = tuple(
            Probe(Candidate(0, n_envs, 8), 0.0, Measured(rate=float(n_envs), ratio=1.0, noise=0.0, memory=0))
            for n_envs in (8, 16)
        )
        answer = Tuning(Candidate(0, best, 8), probes, {}, 1e9, 1.0, learns=False)
        monkeypatch.setattr(command, "tune", lambda *_, answer=answer, **__: answer)
        assert main(["tune", "ppo", "--env", "CartPole-v1"]) == 0
        printed = capsys.readouterr().out
        assert ("FASTEST won when timed in alternation" in printed) == is_said
        assert f"collects fastest: {best} environments x 8 steps (2 probes, 1 s)" in printed
        assert all(len(line) <= 80 for line in printed.splitlines())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pppo", "--env", "CartPole-v1"], "no algorithm 'pppo'"),
        (["a2c", "--env", "CartPol-v1"], "Did you mean 'CartPole-v1'?"),
        (["nowhere:f", "nowhere:g"], "there is no module 'nowhere'"),
        (["json:load", "json:dum"], "json has no function or class 'dum'. Did you mean 'dump'?"),
        (["json:load"], "name both factories"),
        (["a2c", "--env", "CartPole-v1", "--n-envs", "4", "2"], "n_envs is [4, 2], expected rising numbers"),
        (["a2c", "--env", "CartPole-v1", "--memory-limit", "0.001"], "is the limit. Pass a larger memory_limit"),
        (["a2c", "--env", "CartPole-v1", "--device", "cuda:9"], "--device cuda:9"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: Capture) -> None:
    assert main(["tune", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_help_shows_the_options(capsys: Capture) -> None:
    assert main(["tune"]) == 0
    assert "rlstruct tune ppo --env CartPole-v1" in capsys.readouterr().out
    assert main(["tune", "ppo", "--help"]) == 0
    assert "--memory-limit" in capsys.readouterr().out
