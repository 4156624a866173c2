"""Checks that a policy, and the file that it is exported to, act as the agent of a training does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trainings import Task

import rlstruct
from rlstruct import DictTensor, Policy, Trajectories
from rlstruct.algos.training.checkpoint import read_checkpoint
from rlstruct.batchers import RL_Batcher
from rlstruct.policies.exporting import exported

SEED = 7


def played(task: Task, run: Path, stochastic: bool, **settings: Any) -> Trajectories:
    """Let the agent of a training act in its environments, with a batcher; ``settings`` are the agent's."""
    model, saved = task.create_model(), read_checkpoint(run / "checkpoint.pt")
    model.load_state_dict(saved["model"])
    of_one = saved["policy"]["agent_info"] if stochastic else {}
    agent_info = DictTensor({key: value.expand(3) for key, value in of_one.items()}) if of_one else None
    settings |= {"model": model, "stochastic": stochastic}
    with RL_Batcher(
        30, task.create_agent, task.create_env, agent_args=settings, env_args={"n_envs": 3}, n_processes=0, seed=SEED
    ) as batcher:
        batcher.reset(agent_info)
        batcher.execute(agent_info)
        batch, _ = batcher.get()
    assert batch is not None
    return batch


def shown(batch: Trajectories, t: int) -> Any:
    """Return what three environments showed at step t, as gymnasium nests it."""
    seen = batch.steps.truncate_key("observation/").temporal_index(t)
    parts = dict(seen.truncate_key("frame/").items())
    return {key: part.numpy() for key, part in parts.items()} or seen["frame"].numpy()


def check_actions(batch: Trajectories, policy: Policy) -> None:
    """Compare a policy, seeded with SEED, with the agent that played a batch, observation by observation."""
    steps = batch.steps
    initial = steps["observation/initial_state"]
    for t in range(steps.n_steps()):
        if t:
            policy.reset(where=initial[:, t])
        expected = steps["action/action"][:, t].numpy()
        found = policy.act(shown(batch, t))
        assert isinstance(found, np.ndarray)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
        for key in ("value", "action_logits", "action_mean"):
            if key in policy.last:
                torch.testing.assert_close(policy.last[key], steps[f"action/{key}"][:, t])


def check_single_observations(batch: Trajectories, run: Path) -> None:
    """Compare the actions for one observation with those for a batch of them."""
    policy, one = rlstruct.load(run, stochastic=False), rlstruct.load(run, stochastic=False)
    for t in range(3):
        observation = shown(batch, t)
        first = {k: v[0] for k, v in observation.items()} if isinstance(observation, dict) else observation[0]
        of_all, of_one = policy.act(observation), one.act(first)
        assert np.shape(of_one) == of_all.shape[1:]
        np.testing.assert_allclose(of_one, of_all[0], rtol=1e-5)


def best_action(policy: Policy, frame: dict[str, Tensor]) -> Any:
    """Return the policy's best action."""
    parts = {key.removeprefix("frame/"): value for key, value in frame.items()}
    return policy.act(parts.get("frame", parts), stochastic=False)


def check_exported(run: Any, policy: Policy, expect: Callable[..., Any] = best_action) -> None:
    """Compare with the policy in a rollout of two environments, of which each begins anew now and then."""
    original = exported(policy)
    generator = torch.Generator().manual_seed(3)
    state = {key: value.clone() for key, value in original.begin(2).items()}
    for t in range(6):
        frame = {
            key: torch.randint(0, 2, (2, *spec.shape), generator=generator).to(spec.dtype)
            for key, spec in policy.specs.items()
        }
        where = torch.tensor([t % 3 == 0, t % 4 == 0])
        policy.reset(where=where) if t and state else policy.reset()
        if state:
            state["initial_state"] = where
        found = run({**frame, **state})
        np.testing.assert_allclose(found["action"], expect(policy, frame), rtol=1e-4, atol=1e-5)
        for key in state:
            if key != "initial_state":
                state[key] = torch.as_tensor(found[f"new_{key}"])


def onnx_file(file: Path) -> Callable[[dict[str, Tensor]], dict[str, Any]]:
    """Return a function that runs an .onnx file."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file)
    names = [one.name for one in session.get_outputs()]

    def run(inputs: dict[str, Tensor]) -> dict[str, Any]:
        assert {one.name for one in session.get_inputs()} == inputs.keys()
        return dict(zip(names, session.run(names, {k: v.numpy() for k, v in inputs.items()}), strict=True))

    return run
