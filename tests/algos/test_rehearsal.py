from __future__ import annotations

import pathlib

import pytest
from resume_tasks import create_network, create_sim

from rlstruct.agents import ActorCriticAgent, QAgent, QNetwork
from rlstruct.algos import a2c, dqn
from rlstruct.algos.config import TrainingConfig
from rlstruct.algos.learner import GradientLearner
from rlstruct.algos.rehearsal import rehearsal
from rlstruct.profiling import profile
from rlstruct.profiling.events import load

KINDS: dict[str, tuple[type[GradientLearner], TrainingConfig]] = {
    "a2c": (a2c.Learner, a2c.A2CConfig(n_envs=2, n_timesteps=4, n_processes=1, evaluation_interval=1)),
    "dqn": (dqn.Learner, dqn.DQNConfig(n_envs=2, n_timesteps=4, n_updates=2, batch_size=4, learning_starts=40)),
}


@pytest.mark.parametrize("name", KINDS)
def test_an_iteration_collects_and_learns_and_does_nothing_else(name: str, tmp_path: pathlib.Path) -> None:
    kind, config = KINDS[name]
    create_model = create_network if name == "a2c" else lambda: QNetwork(n_inputs=4, n_actions=2)
    create_agent = ActorCriticAgent if name == "a2c" else QAgent
    prepared = rehearsal(kind, config, create_model, create_agent, create_sim)
    with prepared as iterate, profile(tmp_path, window=60, operators=False):
        for _ in range(3):
            iterate()
    (found,) = load(tmp_path)  # no worker
    named = [found.paths[i] for i in found.spans.path]
    assert named.count(("iteration",)) == 3
    assert {path[0] for path in named} == {"iteration"}
    assert {path[-1] for path in named} >= {"environment", "agent", "loss", "backward", "optimiser"}
    assert not {"evaluation", "checkpoint"} & {name for path in named for name in path}
