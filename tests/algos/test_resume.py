"""A training that goes on from its checkpoint equals one that was never interrupted, bit by bit."""

from __future__ import annotations

import csv
import dataclasses
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from resume_tasks import TASKS, config_of, create_network, create_sim, train

import rlstruct
from rlstruct.agents import ActorCriticAgent
from rlstruct.algos import Algorithm, run_training
from rlstruct.algos.a2c import A2CConfig, A2CLearner
from rlstruct.algos.training import compiling
from rlstruct.algos.training.checkpoint import read_checkpoint
from rlstruct.algos.training.config import check_resumed, load_config
from rlstruct.algos.training.evaluation import Evaluation, Evaluator, TrainingResult
from rlstruct.algos.training.loop import TrainingLoop
from rlstruct.algos.training.run_folder import RunFolder, read_lines
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnvInf
from rlstruct.errors import BatcherStateError

for package in ("tqdm", "tensorboard", "matplotlib"):
    pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[train]'")

CLOCKS = ("seconds", "steps_per_second", "evaluation/seconds")


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlstruct.algos.training.run_folder.draw_learning_curve", lambda *args, **settings: None)


class Killed(Exception):
    pass


def new_folder(root: Path, name: str, **changes: Any) -> RunFolder:
    config = dataclasses.replace(config_of(name), **changes)
    return RunFolder("test", config, n_env_steps=config.n_env_steps, root=root, progress=False)


def metrics(path: Path) -> list[dict[str, str]]:
    with (path / "metrics.csv").open() as file:
        return [{key: value for key, value in row.items() if key not in CLOCKS} for row in csv.DictReader(file)]


def without_clocks(result: TrainingResult) -> tuple[Any, ...]:
    evaluations = [(e.env_steps, e.policy_version, e.returns, e.lengths) for e in result.evaluations]
    weights = {name: weight.tolist() for name, weight in result.model.state_dict().items()}
    return evaluations, result.losses, result.env_steps, weights


def train_until(monkeypatch: pytest.MonkeyPatch, env_steps: int, name: str, run: RunFolder, **changes: Any) -> None:
    """Train, and die in the middle of the loop once so many steps were collected."""
    iterate = TrainingLoop.iterate

    def die(self: TrainingLoop) -> None:
        if self.env_steps >= env_steps:
            raise Killed
        iterate(self)

    with monkeypatch.context() as patch, run:
        patch.setattr(TrainingLoop, "iterate", die)
        with pytest.raises(Killed):
            train(name, run, **changes)


SLOW = {"dqn, prioritised", "ppo, recurrent"}  # three seconds each


@pytest.mark.parametrize(
    "name",  # the normalised PPO is PPO and more
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in sorted(TASKS.keys() - {"ppo"})],
)
def test_a_resumed_training_equals_one_without_a_break(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = resumes_bit_for_bit(name, tmp_path, monkeypatch)
    ended, lines = torch.load(path / "checkpoint.pt", weights_only=True)["model"], metrics(path)
    with RunFolder.resume(path, progress=False) as run:
        again = train(name, run, n_env_steps=480)  # nothing is left to do
    assert {key: weight.tolist() for key, weight in again.model.state_dict().items()} == {
        key: weight.tolist() for key, weight in ended.items()
    }
    assert metrics(path) == lines


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo, normalised", pytest.param("dqn", marks=pytest.mark.exhaustive)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own imports
def test_so_does_one_that_is_compiled(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "SECONDS", dict.fromkeys(compiling.SECONDS, 0.0))
    path = resumes_bit_for_bit(name, tmp_path, monkeypatch, breaks=(200,))
    monkeypatch.undo()  # the checkpoint remembers
    with RunFolder.resume(path, progress=False) as run:
        assert run.checkpoint is not None
        assert [run.checkpoint["config"][option] for option in compiling.SECONDS] == [True, True, True]


def resumes_bit_for_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: tuple[int, ...] = (200, 340)
) -> Path:
    """Train, and train with breaks; return the folder of the second training."""
    less = {"n_env_steps": 480}
    with new_folder(tmp_path, name, **less) as whole:
        expected = train(name, whole, **less)
    run = new_folder(tmp_path, name, **less)
    for env_steps in breaks:
        train_until(monkeypatch, env_steps, name, run, **less)
        run = RunFolder.resume(run.path, progress=False)
        torch.manual_seed(env_steps)  # as another process would find its generator
    with run:
        result = train(name, run, **less)
    assert result.env_steps == expected.env_steps >= 480
    assert without_clocks(result) == without_clocks(expected)
    assert metrics(run.path) == metrics(whole.path)
    return run.path


def test_a_training_that_died_in_its_last_evaluation_is_completed_with_its_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Evaluator.start

    def die(self: Evaluator, weights: Mapping[str, Any], *, env_steps: int, policy_version: int) -> None:
        if env_steps:
            raise Killed
        start(self, weights, env_steps=env_steps, policy_version=policy_version)

    last = {"n_env_steps": 200, "checkpoint_interval": 40}
    with monkeypatch.context() as patch, new_folder(tmp_path, "a2c", **last) as run:
        patch.setattr(Evaluator, "start", die)
        with pytest.raises(Killed):
            train("a2c", run, **last)
    with RunFolder.resume(run.path, progress=False) as run:
        assert run.checkpoint is not None
        assert run.checkpoint["env_steps"] == 200  # no batch is left to collect
        train("a2c", run, **last)
    assert rlstruct.load(run.path).act(torch.zeros(4)).shape == ()


def test_the_seconds_of_a_training_that_had_ended_do_not_include_its_last_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = Evaluator.wait

    def wait_long(self: Evaluator) -> Evaluation:
        time.sleep(0.5)
        return wait(self)

    monkeypatch.setattr(Evaluator, "wait", wait_long)
    with new_folder(tmp_path, "a2c", n_env_steps=80) as run:
        seconds = train("a2c", run, n_env_steps=80).seconds
    with RunFolder.resume(run.path, progress=False) as run:
        assert train("a2c", run, n_env_steps=80).seconds == pytest.approx(seconds, abs=0.25)


def test_a_folder_takes_one_training_with_its_settings(tmp_path: Path) -> None:
    with new_folder(tmp_path, "a2c", n_env_steps=80) as run:
        with pytest.raises(ValueError, match=r"n_env_steps is 120 in config, but 80 in .*config.json. .*save_config"):
            train("a2c", run, n_env_steps=120)
        train("a2c", run, n_env_steps=80)
        with pytest.raises(RuntimeError, match=r"to which another training has written.*RunFolder.resume\(run"):
            train("a2c", run, n_env_steps=80)
    with pytest.raises(RuntimeError, match=r"RunFolder.begin: .* is closed.*RunFolder.resume\(path\)"):
        train("a2c", run, n_env_steps=80)


def test_the_folder_of_an_interrupted_training_is_closed_and_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: TrainingLoop) -> None:
        raise KeyboardInterrupt

    run = new_folder(tmp_path, "a2c", n_env_steps=80)
    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "iterate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train("a2c", run, n_env_steps=80)
    with pytest.raises(
        RuntimeError, match=r"close this folder \(run.close\(\)\) and pass run=RunFolder.resume\(run.path\)"
    ):
        train("a2c", run, n_env_steps=80)
    run.close()
    with RunFolder.resume(run.path, progress=False) as again:
        assert train("a2c", again, n_env_steps=80).env_steps >= 80


def test_a_training_without_a_train_checks_its_folder_as_well(tmp_path: Path) -> None:
    parts: Any = A2CLearner, config_of("a2c"), create_network, ActorCriticAgent, create_sim
    with pytest.raises(TypeError, match="run is 'runs', expected a RunFolder, or None"):
        run_training(*parts, run="runs")
    with (
        new_folder(tmp_path, "a2c", n_env_steps=80) as run,
        pytest.raises(ValueError, match=r"n_env_steps is \d+ in config, but 80 in .*config.json"),
    ):
        run_training(*parts, run=run)


def test_a_folder_has_the_settings_from_before_the_algorithm_adjusts_them(tmp_path: Path) -> None:
    def arrange(config: A2CConfig, create_agent: Any, create_env: Any) -> tuple[A2CConfig, Any, None]:
        return dataclasses.replace(config, seed=7), create_agent, None

    adjusting = Algorithm(A2CLearner, "with another seed", arrange=arrange)
    config: Any = dataclasses.replace(config_of("a2c"), n_env_steps=80)
    with new_folder(tmp_path, "a2c", n_env_steps=80) as run:
        adjusting(config, create_network, ActorCriticAgent, create_sim, run=run)
    assert read_checkpoint(run.path / "checkpoint.pt")["config"]["seed"] == 7


# What SAC and PPO had in 0.3.0.
SETTINGS_OF_0_3 = """
    n_env_steps n_timesteps n_envs n_processes compile_agent compile_update graph discount reward_scale
    learning_rate final_learning_rate_fraction adam_epsilon max_gradient_norm evaluation_episodes
    evaluation_processes evaluation_interval evaluation_timesteps evaluation_stochastic evaluation_step_limit
    checkpoint_interval target_return log_interval threads learner_device batcher_device evaluation_device
    sharing thread_percentage cluster seed batch_size n_updates overlap critic_learning_rate replay_capacity
    replay_device learning_starts target_update_rate target_entropy n_epochs n_minibatches trace_decay
    value_coefficient entropy_coefficient clip value_clip whiten_advantages target_kl
""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", ["sac", "ppo"])
def test_checkpoints_from_before_a_setting_existed_are_resumed(name: str) -> None:
    config = TASKS[name][1]
    older = {key: value for key, value in dataclasses.asdict(config).items() if key in SETTINGS_OF_0_3}
    kept = ("format", "model", "optimizer", "policy_version", "training", "run")
    checkpoint = {**dict.fromkeys(kept), "config": older, "env_steps": 0}
    check_resumed(checkpoint, config)
    with pytest.raises(ValueError, match=r"weight_decay is 0\.1, but 0\.0 in the checkpoint"):
        check_resumed(checkpoint, dataclasses.replace(config, weight_decay=0.1))


@pytest.mark.slow
def test_a_resumed_training_with_worker_processes_equals_one_without_a_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, workers = "a2c, recurrent, overlap", {"n_processes": 2, "n_envs": 2, "n_env_steps": 400}
    killed, save = tmp_path / "killed", RunFolder.save_checkpoint

    def save_and_copy(folder: RunFolder, state: Mapping[str, object]) -> None:
        save(folder, state)
        if int(str(state["env_steps"])) >= 160 and not killed.exists():
            shutil.copytree(folder.path, killed)  # what a SIGKILL at this moment leaves

    with monkeypatch.context() as patch, new_folder(tmp_path, name, **workers) as whole:
        patch.setattr(RunFolder, "save_checkpoint", save_and_copy)
        expected = train(name, whole, **workers)
    torch.manual_seed(240)
    with RunFolder.resume(killed, progress=False) as run:
        assert run.checkpoint is not None
        assert len(run.checkpoint["training"]["batcher"]["collectors"]) == 2
        assert 160 <= run.checkpoint["env_steps"] < 400
        result = train(name, run, **workers)
    assert without_clocks(result) == without_clocks(expected)
    assert metrics(run.path) == metrics(whole.path)


def test_environments_of_gymnasium_begin_new_episodes_and_counters_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = []

    def create_gym(n_envs: int, seed: int) -> GymEnvInf:
        starts.append(seed)
        return GymEnvInf([gymnasium.make("CartPole-v1", max_episode_steps=60) for _ in range(n_envs)], seed)

    run = new_folder(tmp_path, "dqn")
    train_until(monkeypatch, 480, "dqn", run, create_env=create_gym)
    before = metrics(run.path)
    saved = torch.load(run.path / "checkpoint.pt", weights_only=True)
    n_lines, env_steps = saved["run"]["n_lines"], saved["env_steps"]
    assert env_steps == 384  # pieces of 32 steps, a checkpoint after 100 at least
    assert saved["training"]["batcher"]["collectors"][0]["environment"] is None
    with RunFolder.resume(run.path, progress=False) as run:
        result = train("dqn", run, create_env=create_gym)
    assert len(set(starts)) == 4  # collection and evaluation, each with its own seeds before and after
    after = metrics(run.path)
    assert after[:n_lines] == before[:n_lines]
    assert result.env_steps == 800 == int(after[-1]["env_steps"])
    steps = [int(row["env_steps"]) for row in after if not row["evaluation/mean_return"]]
    assert steps == sorted(set(steps))  # no line twice; one update after each 32 steps, from step 160 on
    assert steps == list(range(steps[0], 801, 32))
    assert torch.load(run.path / "checkpoint.pt", weights_only=True)["training"]["resumptions"] == 1


def test_other_settings_are_refused_and_harmless_ones_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_folder(tmp_path, "a2c")
    train_until(monkeypatch, 200, "a2c", run)
    with (
        RunFolder.resume(run.path, progress=False) as run,
        pytest.raises(ValueError, match=r"A2CConfig: discount is 0\.5, but 0\.99 in the checkpoint\..*load_config"),
    ):
        train("a2c", run, discount=0.5)
    with (
        RunFolder.resume(run.path, progress=False) as run,
        pytest.raises(ValueError, match=r"DQNConfig: average_rate is .* but missing in the checkpoint"),
    ):
        train("dqn", run)
    with RunFolder.resume(run.path, progress=False) as run:
        assert train("a2c", run, n_env_steps=400, log_interval=1).env_steps == 400
    with (
        RunFolder.resume(run.path, progress=False) as run,
        pytest.raises(ValueError, match=r"n_env_steps is 399, but 400 were collected .* Leave it at 400, or raise it"),
    ):
        train("a2c", run, n_env_steps=399)
    with RunFolder.resume(run.path, progress=False) as run:
        assert train("a2c", run, n_env_steps=600).env_steps == 600  # a training that had ended goes on


def test_a_loop_of_the_users_own_continues_from_its_checkpoint_and_no_training_does(tmp_path: Path) -> None:
    network, config = create_network(), config_of("a2c")
    own = {"model": network.state_dict(), "count": 3}
    with RunFolder("own", config, n_env_steps=9, root=tmp_path, progress=False, loggers=()) as run:
        run.log(5, 1, {"loss": 0.5}, at=0.0)
        run.save_checkpoint(own)
        run.log(6, 2, {"loss": 0.25}, at=0.0)  # after the checkpoint: dropped
    with RunFolder.resume(run.path, progress=False, loggers=()) as again:
        assert again.checkpoint is not None
        assert again.checkpoint["count"] == 3
        assert [line["train/loss"] for line in read_lines(run.path / "metrics.csv")] == [0.5]
        with pytest.raises(ValueError, match=r"written by a loop of your own.* it has \['count', 'model', 'run'\], wi"):
            train("a2c", again)
    with pytest.raises(ValueError, match=r"checkpoint\.pt was written by a loop of your own.* without format, optimi"):
        read_checkpoint(run.path / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"does not say which network it has.* Pass create_model="):
        rlstruct.load(run.path)
    space = gymnasium.spaces.Box(-1, 1, (4,))
    policy = rlstruct.load(
        run.path, create_model=create_network, create_agent=ActorCriticAgent, observation_space=space
    )
    assert all(torch.equal(policy.model.state_dict()[name], value) for name, value in network.state_dict().items())


def test_what_cannot_be_resumed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"is not a run folder: it has no config\.json\. Pass the folder"):
        RunFolder.resume(tmp_path)
    run = new_folder(tmp_path, "a2c")
    train_until(monkeypatch, 200, "a2c", run)
    file = run.path / "checkpoint.pt"
    whole = file.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"something else"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"checkpoint\.pt is not a checkpoint of a training, or is damaged: "):
            RunFolder.resume(run.path)
    torch.save({"model": {}}, file)
    with pytest.raises(ValueError, match=r"is not a checkpoint of a training: it has \['model'\], without run\. "):
        RunFolder.resume(run.path)
    torch.save([1.0], file)
    with pytest.raises(ValueError, match=r"is not a checkpoint of a training: it has list, without run\. Pass the"):
        RunFolder.resume(run.path)
    file.write_bytes(whole)
    torch.save({**torch.load(file, weights_only=True), "format": 99}, file)
    with pytest.raises(ValueError, match=r"has format 99, expected 2"):
        RunFolder.resume(run.path)
    file.write_bytes(whole)
    lines = (run.path / "metrics.csv").read_text().splitlines(keepends=True)
    (run.path / "metrics.csv").write_text(lines[0])
    with pytest.raises(ValueError, match=r"metrics\.csv has 0 lines, expected at least \d+"):
        RunFolder.resume(run.path)


def test_without_a_checkpoint_everything_begins_anew(tmp_path: Path) -> None:
    with new_folder(tmp_path, "a2c") as run:
        run.log(10, 1, {"loss": 1.0}, at=0.0)
    with RunFolder.resume(run.path, progress=False) as again:
        assert again.checkpoint is None
        assert metrics(again.path) == []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled(A2CConfig):
    scales: tuple[float, ...] = (1.0, 2.0)


def test_settings_are_read_back(tmp_path: Path) -> None:
    for name in TASKS:
        with new_folder(tmp_path, name) as run:
            assert load_config(run.path, type(config_of(name))) == config_of(name)
    file = tmp_path / "config.json"
    file.write_text('{"algorithm": "a2c", "task": {}, "config": {"n_envs": 3}}')  # of `rlstruct train`
    assert load_config(tmp_path, A2CConfig) == A2CConfig(n_envs=3)
    file.write_text('{"scales": [1.0, 3.0]}')
    assert load_config(file, Scaled) == Scaled(scales=(1.0, 3.0))
    file.write_text('{"n_envs": 2, "n_env_step": 5}')
    with pytest.raises(ValueError, match=r"A2CConfig: there is no setting 'n_env_step'\. Did you mean 'n_env_steps'"):
        load_config(file, A2CConfig)
    file.write_text('{"n_envs"')
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        load_config(tmp_path, A2CConfig)
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist\. Pass the folder of a run"):
        load_config(tmp_path / "nothing" / "config.json", A2CConfig)


def test_evaluations_to_come_are_those_of_the_evaluator_that_was_saved() -> None:
    def evaluator() -> Evaluator:
        args = {"model": create_network(), "device": "cpu", "stochastic": True, "copy_model": True}
        return Evaluator(RL_Batcher(10, ActorCriticAgent, create_sim, agent_args=args, env_args={"n_envs": 4}, seed=3))

    torch.manual_seed(0)
    weights = create_network().state_dict()
    first, other = evaluator(), evaluator()
    first.start(weights, env_steps=0, policy_version=0)
    with pytest.raises(BatcherStateError, match="an evaluation is running"):
        first.state_dict()
    first.wait()
    other.load_state_dict(first.state_dict())
    for one in (first, other):
        one.start(weights, env_steps=70, policy_version=7)
    found, expected = other.wait(), first.wait()
    assert (found.returns, found.env_steps, found.policy_version) == (expected.returns, 70, 7)
