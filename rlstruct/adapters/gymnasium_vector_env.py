"""GymnasiumVectorEnv: a VecEnv as a `gymnasium.vector.VectorEnv`, for training loops that expect one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from rlstruct.core import DictTensor
from rlstruct.engine.validity import StepChecks, unchecked
from rlstruct.errors import BadTypeError, BadValueError, ShapeMismatchError, UsageError, kind_of
from rlstruct.options import check_seed
from rlstruct.spaces import Element, Leaf, as_tensor, leaves, nest
from rlstruct.vec_env import VecEnv


class GymnasiumVectorEnv(VectorEnv[Element, Element, Any]):
    """An auto-resetting VecEnv as a gymnasium vector environment.

    ``metadata`` declares the autoreset mode SAME_STEP: when an episode ends, the observation is the first one of the
    next episode, and the true final one is in ``info["final_obs"]``, with the mask ``info["_final_obs"]``. For
    environments that spend a step on a restart (`VecEnv.restarts_take_steps`), such as gymnasium's numpy CartPole, the
    mode is NEXT_STEP.

    Actions are copied, and all results are copies: you may overwrite both, and no later call changes them.

    By default, everything is numpy, and ``final_obs`` is an array of B objects, each an observation or None, as in
    gymnasium. With ``tensors``, everything is a tensor [B, ...] on the VecEnv's device, the host never waits, and
    ``final_obs`` has all B rows, of which the mask selects the valid ones.

    Args:
        create_env: returns an auto-resetting VecEnv, as for `RL_Batcher`. Called as ``create_env(**env_args, seed=…)``
            now, and again by each ``reset(seed=…)``.
        env_args: the other arguments of ``create_env``.
        seed: environment j draws from ``seed + j``, until ``reset(seed=…)`` sets another seed.
        tensors: take and return tensors instead of numpy arrays.
        listed_info: add ``info["final_info"]``, a list of B entries: ``{"episode": {"r": …, "l": …}}`` for an episode
            that ended in this step, else None. CleanRL reads this form, which is gymnasium 0.29's. Only with numpy.

    Raises:
        TypeError: ``create_env`` does not return a VecEnv.
        ValueError: the VecEnv does not reset itself, or ``listed_info`` is combined with ``tensors``.
    """

    def __init__(
        self,
        create_env: Callable[..., VecEnv],
        env_args: Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
        tensors: bool = False,
        listed_info: bool = False,
    ) -> None:
        if listed_info and tensors:
            raise BadValueError(
                "GymnasiumVectorEnv: listed_info=True needs numpy, because making lists waits for the device at each "
                "step. Leave out tensors=True."
            )
        self._create, self._env_args, self._seed = create_env, dict(env_args or {}), seed
        self._tensors, self._listed_info = tensors, listed_info
        self.env = self._made()
        self._fresh = True  # no reset since the environments were created
        self._begun = False
        self.num_envs = self.env.n_envs()
        self.single_observation_space, self.single_action_space = self.env.observation_space, self.env.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._mode = AutoresetMode.NEXT_STEP if self.env.restarts_take_steps else AutoresetMode.SAME_STEP
        self.metadata = {"autoreset_mode": self._mode}
        self._checks = StepChecks("GymnasiumVectorEnv", self.env)
        self._running: Tensor | None = None  # rows that the next step steps; None for all
        self._frames = leaves(self.single_observation_space, "frame")
        self._actions = leaves(self.single_action_space, "action")
        self._returns, self._lengths = np.zeros(self.num_envs), np.zeros(self.num_envs, np.int64)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Element, dict[str, Any]]:
        """Start a new episode in every environment.

        Args:
            seed: an int creates the environments again, and environment j draws from ``seed + j``. None continues
                their random streams.
            options: numbers, which every environment gets, or arrays [B, ...] with an entry for each; see ``env_info``
                of `VecEnv.reset`.

        Returns:
            ``(observation, info)``, where info is empty.

        Raises:
            TypeError: the seed is not an int, such as a list of seeds; or an option is not made of numbers.
            ValueError: the options ask for a reset of some environments, or an array has too few or too many entries.
        """
        if options is not None and "reset_mask" in options:
            raise BadValueError(
                "GymnasiumVectorEnv.reset: options['reset_mask'] asks for a reset of some environments, but each "
                f"restarts by itself (autoreset mode {self._mode.name}). Leave it out."
            )
        if seed is not None:
            seed = check_seed("GymnasiumVectorEnv.reset", "seed", seed, self.num_envs)
        self._checks.read()
        super().reset(seed=seed)
        if seed is not None and not (self._fresh and seed == self._seed):
            self.env.close()
            self._seed = seed
            self.env = self._made()
        self._fresh, self._begun = False, True
        self._returns[:], self._lengths[:] = 0, 0
        info = {key: self._option(key, value) for key, value in (options or {}).items()}
        with unchecked():  # checked here, also for a VecEnv that checks nothing
            observation, self._running = self.env.reset(DictTensor(info))
        self._checks.observation(observation)
        return self._observation(observation), {}

    def step(self, actions: Element) -> tuple[Element, Any, Any, Any, dict[str, Any]]:
        """Take one step in every environment.

        Args:
            actions: one action for each environment, nested like ``action_space``; numpy arrays or tensors, which are
                copied.

        Returns:
            ``(observation, reward, terminated, truncated, info)``: reward [B] float32, flags [B] bool. In mode
            NEXT_STEP a row that restarts has reward 0 and both flags False. Arrays are copies, which no later call
            changes.

        Raises:
            ShapeMismatchError: an action has the wrong shape, or numbers that its space's dtype cannot hold.
            ValueError: an action is not in its space, or a frame or reward is NaN. In a Box only NaN is an error.
                With ``tensors`` on an accelerator, the next `reset` or `close` raises it.
        """
        if not self._begun:
            raise UsageError("GymnasiumVectorEnv.step: there is nothing to step. Call reset() first.")
        sent = DictTensor({key: self._column(leaf, leaf.get(actions)) for key, leaf in self._actions.items()})
        self._checks.action(sent, self._running)
        with unchecked():
            answer = self.env.step(sent)
        (reached, ran), (current, self._running) = self._checks.step(answer)
        running = self._running
        if not self._tensors:
            self._checks.read()  # the host waits below, too
        reward = torch.where(ran, reached["reward"], 0.0)
        terminated, truncated, ended = (reached[key] & ran for key in ("terminated", "truncated", "done"))
        if self._mode is AutoresetMode.SAME_STEP:
            info = self._info(reached, ended)
        elif bool((ended & running).any()):  # sync: only in this mode, which CPU environments have
            raise UsageError(
                f"GymnasiumVectorEnv.step: {type(self.env).__name__} restarted in the step that ended an episode, but "
                "has restarts_take_steps=True, so mode NEXT_STEP was declared. Set restarts_take_steps = False in it."
            )
        else:
            info = {}
        if self._listed_info:
            self._count(reward, ran, ended, info)
        return (self._observation(current), *(self._out(value) for value in (reward, terminated, truncated)), info)

    def close_extras(self, **kwargs: Any) -> None:  # noqa: ANN401 - gymnasium's signature
        """Close the VecEnv."""
        self.env.close()
        self._checks.read()

    def _made(self) -> VecEnv:
        env = self._create(**self._env_args, seed=self._seed)
        if not isinstance(env, VecEnv):
            raise BadTypeError(
                f"GymnasiumVectorEnv: create_env returned {kind_of(env)}, expected a VecEnv. "
                "Pass the factory that RL_Batcher takes, such as one that returns rlstruct.sims.make(...)."
            )
        if not env.auto_reset:
            env.close()
            raise BadValueError(
                f"GymnasiumVectorEnv: {type(env).__name__} idles after an episode's end, expected environments that "
                "restart by themselves. Use GymEnvInf instead of GymEnv, GymVectorEnv without episodic=True, or a "
                "simulator with auto_reset=True."
            )
        return env

    def _option(self, name: str, value: Element) -> Tensor:
        """Return the entries of an option of a reset, [B, ...]."""
        try:
            tensor = as_tensor(value).to("cpu")
        except (TypeError, ValueError) as error:
            raise BadTypeError(
                f"GymnasiumVectorEnv.reset: options[{name!r}] is {value!r}, expected a number or an array of numbers. "
                "Pass anything else to the environments when you create them, such as in env_args."
            ) from error
        if tensor.dim() == 0:
            return tensor.expand(self.num_envs)
        if tensor.shape[0] != self.num_envs:
            raise ShapeMismatchError(
                f"GymnasiumVectorEnv.reset: options[{name!r}] is {list(tensor.shape)}, expected one number, or an "
                f"entry for each of {self.num_envs} environments. Repeat what all of them should get: np.tile."
            )
        return tensor

    def _column(self, leaf: Leaf, values: Element) -> Tensor:
        column = as_tensor(values)
        if column.shape != (expected := (self.num_envs, *leaf.shape)):
            raise ShapeMismatchError(
                f"GymnasiumVectorEnv.step: {leaf.key!r} has shape {list(column.shape)}, expected {list(expected)}: "
                "one action for each environment."
            )
        own = column.to(self.env.device, leaf.torch_dtype, copy=True)  # the VecEnv may keep or change it
        floats = column.is_floating_point(), leaf.torch_dtype.is_floating_point
        # Integers of another dtype are compared where that makes nothing wait.
        if floats == (True, False) or (floats == (False, False) and column.is_cpu and not _equal(own, column)):
            raise ShapeMismatchError(
                f"GymnasiumVectorEnv.step: {leaf.key!r} is {column.dtype} with numbers that {leaf.torch_dtype} cannot "
                f"hold, expected elements of {leaf.space}. Convert the actions where you choose them."
            )
        return own

    def _out(self, tensor: Tensor) -> Any:  # noqa: ANN401 - a tensor or an array
        return tensor if self._tensors else tensor.cpu().numpy()  # sync: numpy was asked for, every step

    def _observation(self, observation: DictTensor) -> Element:
        values = {key: self._out(observation[key].clone()) for key in self._frames}
        return nest(self.single_observation_space, values, "frame")

    def _info(self, reached: DictTensor, ended: Tensor) -> dict[str, Any]:
        """Return the true final observations of the environments that restarted."""
        mask = self._out(ended)
        if self._tensors:
            return {"final_obs": self._observation(reached), "_final_obs": mask}
        if not mask.any():
            return {}
        final = np.full(self.num_envs, None, dtype=object)
        frames = {key: self._out(reached[key].clone()) for key in self._frames}
        for row in mask.nonzero()[0]:  # sync: of an array, in steps that end an episode
            final[row] = nest(
                self.single_observation_space, {key: value[row] for key, value in frames.items()}, "frame"
            )
        return {"final_obs": final, "_final_obs": mask}

    def _count(self, reward: Tensor, ran: Tensor, ended: Tensor, info: dict[str, Any]) -> None:
        """Add a step to the running returns, and list the returns of episodes that ended."""
        self._returns += self._out(reward)
        self._lengths += self._out(ran)
        done = self._out(ended)
        if done.any():
            counts = zip(done, self._returns, self._lengths, strict=True)
            info["final_info"] = [{"episode": {"r": float(r), "l": int(n)}} if end else None for end, r, n in counts]
            self._returns[done], self._lengths[done] = 0, 0


def _equal(converted: Tensor, original: Tensor) -> bool:
    """Return True if a conversion of integers on the CPU has changed none of them."""
    if converted.dtype == original.dtype:
        return True
    # torch does not compare wide unsigned integers with others.
    return torch.equal(converted.to("cpu", torch.int64), original.to(torch.int64))  # sync: of CPU memory
