"""Whole batches of trajectories in one kernel: simulator, network and random draws together. Part of rlstruct.sims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.functional.random import step_keys
from rlstruct.sims._state import Tensors
from rlstruct.sims.tensor_env import TensorEnv

if TYPE_CHECKING:
    from rlstruct.sims.kernels import WarpStepper


class PolicyRollout:
    """Collects as ``RL_Batcher(n_processes=0)`` does with an `ActorCriticAgent`, T steps in one launch.

    The agent is evaluated inside the kernel (``backend="warp"``) and draws from the same keys, so that trajectories are
    those of the batcher with the same seeds, up to rounding. Where rounding flips a draw, an environment goes another
    way from there on: once in some million draws.

    Args:
        env: with ``backend="warp"``, ``auto_reset=True``, Discrete actions and frames that are vectors of float32.
            It is reset here, and belongs to the collection from then on.
        model: has two networks, ``actor`` and ``critic``, as `rlstruct.agents.ActorCritic` does: linear layers with
            Tanh or ReLU between them, all hidden layers of the same width. Weights are copied, see `update`.
        n_timesteps: T.
        seed: environment j draws actions from ``seed + j``.

    Raises:
        ValueError: the environment or the model is not of this kind.
    """

    def __init__(self, env: TensorEnv[Any], model: nn.Module, *, n_timesteps: int, seed: int = 0) -> None:
        """Compile the kernel, or find it in the cache, and reset the environments."""
        if env.backend != "warp" or not env.auto_reset or not isinstance(env.action_space, spaces.Discrete):
            raise ValueError(
                f"PolicyRollout: got backend={env.backend!r}, auto_reset={env.auto_reset}, {env.action_space}, "
                "expected 'warp', True and Discrete actions. Make the environment so, or collect with RL_Batcher."
            )
        if n_timesteps < 1:
            raise ValueError(f"PolicyRollout: got n_timesteps={n_timesteps}, expected at least 1.")
        self._env, self._T, self._seed = env, n_timesteps, seed
        self._version = self._episode = -1
        self._step = 0
        self._stepper: WarpStepper = env._make_stepper(pooled=False)  # type: ignore[assignment]  # checked above
        self._networks = [_Network.of(model, name) for name in ("actor", "critic")]
        self._launch = self._record(int(env.action_space.n))
        self.update(model.state_dict())
        self.reset()

    def reset(self) -> None:
        """Begin a new episode in every environment, as `RL_Batcher.reset` does."""
        observation, _ = self._env.reset()
        self._observation = observation
        self._carry = self._env.carry()
        self._stepper.forget()
        self._episode += 1
        self._step = 0

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Take over new weights; later batches carry a higher ``policy_version``.

        Args:
            weights: a state_dict of the model, on any device.
        """
        device = self._env.device
        actor, critic = (network.pack(weights, device) for network in self._networks)
        self._critic_at = actor.shape[0]
        self._weights = torch.cat([actor, critic])  # [N, 4]
        self._version += 1

    @torch.no_grad()
    def collect(self) -> Trajectories:
        """Take T steps in every environment, in one launch; nothing waits for the device.

        Returns:
            What `RL_Batcher.get` returns, with the same keys: ``observation/``, ``_observation/``, ``action/action``,
            ``action/action_logits``, ``action/log_probability`` and ``action/value``.  [B, T]
        """
        env, T, B, device = self._env, self._T, self._env.n_envs(), self._env.device
        environment = torch.arange(B, dtype=torch.int64, device=device)
        times = torch.arange(self._step, self._step + T + 1, dtype=torch.int64, device=device)
        rng = step_keys(self._seed + environment, self._episode, times)  # [T + 1, B]
        before = self._observation
        stream = {
            "frame": _behind(before["frame"].t(), T),  # [T + 1, D, B]
            "reward": _behind(before["reward"], T),
            "last": _behind(before["last_action"], T),
        }
        seen = self._stepper.allocate((T,), ("reached",)) | {f"current_{key}": v[1:] for key, v in stream.items()}
        said = {
            "logits": torch.empty((T, self._n_actions, B), dtype=torch.float32, device=device),
            "log_probability": torch.empty((T, B), dtype=torch.float32, device=device),
            "value": torch.empty((T, B), dtype=torch.float32, device=device),
        }
        by = self._launch.params[2]
        by.critic = self._critic_at
        self._point(by, {"rng": rng, "weights": self._weights, **said})
        self._carry = self._stepper.launch(self._launch, self._carry, T, seen)
        env.set_carry(self._carry)
        steps, self._observation = _named(seen, stream, said, rng, before["initial_state"])
        info = {
            "environment": environment,
            "env_seed": environment + self._seed,
            "step": torch.full_like(environment, self._step),
            "policy_version": torch.full_like(environment, self._version),
        }
        self._step += T
        return Trajectories(DictTensor(info), TemporalDictTensor(steps))

    def _record(self, n_actions: int) -> Any:  # noqa: ANN401 - Warp's launch
        """Make the kernel of this game with this kind of network, and record its launch."""
        from rlstruct.sims.kernels.policy import make_policy_launch, point

        widths = {width for network in self._networks for width in network.widths[1:-1]}
        kinds = {network.activation for network in self._networks}
        depths = {len(network.widths) for network in self._networks}
        ends = [(network.widths[0], network.widths[-1]) for network in self._networks]
        n_inputs = (self._env.observation_space.shape or (0,))[0]
        if len(widths) != 1 or len(kinds) != 1 or len(depths) != 1 or ends != [(n_inputs, n_actions), (n_inputs, 1)]:
            raise ValueError(
                f"PolicyRollout: got networks of {[network.widths for network in self._networks]} with "
                f"{sorted(kinds)}, expected {n_inputs} inputs, hidden layers that are all of one width and activation, "
                f"{n_actions} logits and one value. Collect with RL_Batcher instead."
            )
        width = -(-widths.pop() // 4) * 4
        self._n_actions, self._point = n_actions, point
        return make_policy_launch(
            self._env.kernel(), self._stepper, n_actions, width, depths.pop() - 2, kinds.pop(), self._env.device
        )


@dataclass(frozen=True)
class _Network:
    """Which entries of a state_dict make a perceptron.

    Attributes:
        names: of its linear layers.
        widths: of its inputs, hidden layers and outputs.
        activation: the class between two layers.
    """

    names: list[str]
    widths: list[int]
    activation: str

    @staticmethod
    def of(model: nn.Module, name: str) -> _Network:
        """Find the perceptron ``model.<name>``."""
        part = getattr(model, name, None)
        leaves = [] if part is None else [(key, leaf) for key, leaf in part.named_modules() if not any(leaf.children())]
        kinds = [type(leaf).__name__ for _, leaf in leaves]
        n_hidden = (len(leaves) - 1) // 2
        if n_hidden < 1 or kinds[1] not in ("Tanh", "ReLU") or kinds != ["Linear", kinds[1]] * n_hidden + ["Linear"]:
            raise ValueError(
                f"PolicyRollout: {type(model).__name__}.{name} consists of {kinds}, expected Linear layers with Tanh "
                "or ReLU between them. Collect with RL_Batcher instead."
            )
        layers = [leaf for _, leaf in leaves if isinstance(leaf, nn.Linear)]
        names = [f"{name}.{key}" for key, leaf in leaves if isinstance(leaf, nn.Linear)]
        return _Network(names, [layers[0].in_features, *(layer.out_features for layer in layers)], kinds[1])

    def pack(self, weights: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """Put the layers into the order that the kernel reads, [n, 4] float32."""
        packed = []
        for name in self.names:
            weight, bias = (weights[f"{name}.{part}"].detach().to(device, torch.float32) for part in ("weight", "bias"))
            missing = -weight.shape[0] % 4  # outputs come in groups of four
            rows = torch.cat([bias.unsqueeze(1), weight], dim=1)  # [outputs, 1 + inputs]
            rows = nn.functional.pad(rows, (0, 0, 0, missing)).view(-1, 4, rows.shape[1])
            packed.append(rows.transpose(1, 2).reshape(-1, 4))
        return torch.cat(packed)


def _behind(first: Tensor, n_steps: int) -> Tensor:
    """Memory for a first value and K more, [K + 1, ...]."""
    memory = first.new_empty((n_steps + 1, *first.shape))
    memory[0].copy_(first)
    return memory


def _named(
    seen: Tensors, stream: Tensors, said: Tensors, rng: Tensor, initial_state: Tensor
) -> tuple[Tensors, DictTensor]:
    """Name what a launch wrote as the batcher does, [B, T, ...], and the observation after it, [B, ...]."""
    terminated, truncated, done = seen["flags"].unbind(1)  # [T, B]
    no = torch.zeros_like(done)
    current = {
        "frame": stream["frame"].transpose(1, 2),
        "reward": stream["reward"],
        **dict.fromkeys(("terminated", "truncated", "done"), no),
        "initial_state": torch.cat([initial_state.unsqueeze(0), done]),
        "last_action": stream["last"],
        "rng": rng,
    }
    reached = {
        "frame": seen["reached_frame"].transpose(1, 2),
        "reward": seen["reached_reward"],
        "terminated": terminated,
        "truncated": truncated,
        "done": done,
        "initial_state": no,
        "last_action": seen["reached_last"],
        "rng": rng[1:],
    }
    actions = {
        "action": seen["reached_last"],
        "action_logits": said["logits"].transpose(1, 2),
        "log_probability": said["log_probability"],
        "value": said["value"],
    }
    T = done.shape[0]
    steps = {f"observation/{key}": value[:T].transpose(0, 1) for key, value in current.items()}
    steps |= {f"action/{key}": value.transpose(0, 1) for key, value in actions.items()}
    steps |= {f"_observation/{key}": value.transpose(0, 1) for key, value in reached.items()}
    return steps, DictTensor._trusted({key: value[-1] for key, value in current.items() if key != "rng"})
