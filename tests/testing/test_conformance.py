"""The conformance kits: right classes pass, and each way of being wrong is named by a class that is wrong in it."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from fake_agents import LinearAgent, StatefulAgent
from fake_envs import CountingEnv
from gymnasium import spaces
from random_env import RandomEnv
from torch import Tensor, nn

from rlstruct.agents import GaussianActorCritic, GaussianAgent
from rlstruct.core import DictTensor
from rlstruct.envs import GymEnv, GymEnvInf
from rlstruct.errors import DeviceMismatchError, ShapeMismatchError
from rlstruct.functional.masks import masked_dicttensor
from rlstruct.rl_agent import RL_Agent
from rlstruct.testing import ConformanceError, HostSyncError, check_agent, check_vec_env
from rlstruct.testing.conformance import fail
from rlstruct.vec_env import ObservationBuffer, StepResult

EMPTY = DictTensor()
B = 3


def test_the_error_carries_its_parts_and_survives_pickling() -> None:
    with pytest.raises(AssertionError) as raised:
        fail("MyEnv.step", "reward", "float64", "float32", "Convert it.")
    error: Any = raised.value
    assert str(error) == "MyEnv.step: tensor 'reward': got float64, expected float32. Convert it."
    twin = pickle.loads(pickle.dumps(error))
    assert (str(twin), twin.where, twin.key, twin.fix) == (str(error), "MyEnv.step", "reward", "Convert it.")


# --- Environments: a CountingEnv whose answers somebody changes -------------------------------------------------------


class Wrong(CountingEnv):
    """Counts, and lets the test change what it returns."""

    def __init__(
        self,
        seed: int = 0,
        *,
        on_reset: Callable[[DictTensor, Tensor], Any] | None = None,
        on_step: Callable[[tuple[Any, Any], DictTensor], Any] | None = None,
        auto_reset: bool = False,
    ) -> None:
        super().__init__(B, seed, auto_reset=auto_reset)
        self.on_reset, self.on_step = on_reset, on_step

    def reset(self, env_info=None):
        observation, running = super().reset(env_info)
        return (observation, running) if self.on_reset is None else self.on_reset(observation, running)

    def step(self, action):
        answer = super().step(action)
        return answer if self.on_step is None else self.on_step(answer, action)


def changed(observation: DictTensor, **columns: Any) -> DictTensor:
    """A copy in which some columns are other tensors, or gone where None is given."""
    merged = {**dict(observation.items()), **columns}
    return DictTensor({key: value for key, value in merged.items() if value is not None})


def at_reset(**change: Callable[[Tensor], Any]) -> dict[str, Any]:
    """Wrong after a reset, by a function of the right column."""
    return {"on_reset": lambda o, running: (changed(o, **{k: f(o[k]) for k, f in change.items()}), running)}


def at_reached(auto_reset: bool = False, **change: Callable[[Tensor], Any]) -> dict[str, Any]:
    """Wrong in what a step reached, and in what follows from it."""

    def on_step(answer, action):
        (reached, ran), (current, running) = answer
        wrong = changed(reached, **{k: f(reached[k]) for k, f in change.items()})
        return (wrong, ran), (current if auto_reset else wrong, running)

    return {"on_step": on_step, "auto_reset": auto_reset}


def at_current(auto_reset: bool, **change: Callable[[Tensor], Any]) -> dict[str, Any]:
    """Wrong in what is acted on next."""

    def on_step(answer, action):
        reached, (current, running) = answer
        return reached, (changed(current, **{k: f(current[k]) for k, f in change.items()}), running)

    return {"on_step": on_step, "auto_reset": auto_reset}


def masks(ran: Callable[[Tensor], Any], running: Callable[[Tensor], Any], auto_reset: bool = False) -> dict[str, Any]:
    """Wrong in the masks."""
    return {
        "on_step": lambda a, _: ((a[0][0], ran(a[0][1])), (a[1][0], running(a[1][1]))),
        "auto_reset": auto_reset,
    }


def right(value: Any) -> Any:
    return value


def write_to_the_action(answer: Any, action: DictTensor) -> Any:
    action["action"].fill_(0)
    return answer


WRONG_ENVS: dict[str, tuple[dict[str, Any], str | None, str]] = {
    # name: (how it is wrong, the key that is named, a piece of the message)
    "no pair from reset": ({"on_reset": lambda o, r: o}, None, "Return a tuple of two"),
    "no pair from step": ({"on_step": lambda a, _: a[0][0]}, None, "Return a tuple of two"),
    "a dict for an observation": ({"on_reset": lambda o, r: (dict(o.items()), r)}, None, "DictTensor({...})"),
    "observation elsewhere": ({"on_reset": lambda o, r: (o.to("meta"), r)}, "observation", "DeviceEnv"),
    "mask elsewhere": ({"on_reset": lambda o, r: (o, r.to("meta"))}, "mask", "got meta, expected cpu"),
    "mask of numbers": ({"on_reset": lambda o, r: (o, r.float())}, "mask/running", "expected [3] torch.bool"),
    "mask of another shape": ({"on_reset": lambda o, r: (o, r[:2])}, "mask/running", "got [2] torch."),
    "fewer rows": ({"on_reset": lambda o, r: (o.slice(0, 2), r)}, "reward", "got [2] torch."),
    "no truncated": (at_reset(truncated=lambda _: None), "truncated", "got missing, expected [3] torch.bool"),
    "no frame": (at_reset(frame=lambda _: None), "frame", "got missing"),
    "reward in double": (at_reset(reward=Tensor.double), "reward", "got [3] torch.float64, expected [3] torch.float32"),
    "reward not a number": (at_reached(reward=lambda t: t / 0 - t / 0), "reward", "finite"),
    "done as a number": (at_reset(done=Tensor.int), "done", "expected [3] torch.bool"),
    "frame in another dtype": (at_reset(frame=Tensor.float), "frame", "torch.float32, expected ["),
    "frame in another shape": (at_reset(frame=lambda t: t[:, :2]), "frame", "got [3, 2] torch.int64, expected"),
    "frame outside the space": (at_reached(frame=lambda t: t - 100), "frame", "inside Box"),
    "last_action in another dtype": (
        at_reset(last_action=Tensor.float),
        "last_action",
        "torch.float32, expected [3] torch.int64",
    ),
    "a key named rng": ({"on_reset": lambda o, r: (changed(o, rng=torch.zeros(B)), r)}, "rng", "another name"),
    "a key named chosen_action": (
        {"on_reset": lambda o, r: (changed(o, chosen_action=torch.zeros(B)), r)},
        "chosen_action",
        "another name",
    ),
    "a key more after a step": (
        {"on_step": lambda a, _: ((changed(a[0][0], lives=torch.ones(B)), a[0][1]), a[1])},
        "lives",
        "same keys in every call",
    ),
    "reward after a reset": (at_reset(reward=lambda t: t + 1), "reward", "got 1, expected 0"),
    "done after a reset": (at_reset(done=torch.ones_like), "done", "first observation"),
    "terminated after a reset": (at_reset(terminated=torch.ones_like), "terminated", "first observation"),
    "initial_state False after a reset": (at_reset(initial_state=torch.zeros_like), "initial_state", "expected True"),
    "last_action after a reset": (at_reset(last_action=lambda t: t + 1), "last_action", "got 1, expected 0"),
    "not all run after a reset": ({"on_reset": lambda o, r: (o, r & False)}, "mask/running", "After a reset all run"),
    "ran is who runs next": (
        {"on_step": lambda a, _: ((a[0][0], a[1][1]), a[1])},
        "mask/running",
        "environments that were stepped",
    ),
    "runs on when done": (masks(right, torch.ones_like), "mask/running", "until it is done"),
    "stops before it is done": (masks(right, torch.zeros_like), "mask/running", "until it is done"),
    "auto-resetting stops": (masks(right, torch.zeros_like, True), "mask/running", "always runs"),
    "done forgets truncated": (
        {"on_step": lambda a, _: tuple((changed(o, done=o["terminated"]), m) for o, m in a)},
        "done",
        "Compute it as terminated | truncated",
    ),
    "initial_state in reached": (at_reached(initial_state=torch.ones_like), "initial_state", "never reaches"),
    "last_action is not what was sent": (at_reached(last_action=lambda t: 1 - t), "last_action", "taken in this step"),
    "idle rows earn": (at_reached(reward=lambda t: t + 1), "reward", "repeats its last observation with reward 0"),
    "idle rows move": (
        {"on_step": lambda a, _: tuple((changed(o, frame=o["frame"] + (~a[0][1]).unsqueeze(1)), m) for o, m in a)},
        "frame",
        "repeats its last observation",
    ),
    "episodic current is another": (at_current(False, frame=lambda t: t + 1), "frame", "return reached itself"),
    "no restart": ({"on_step": lambda a, _: (a[0], (a[0][0], a[1][1])), "auto_reset": True}, "reward", "restarted"),
    "restart keeps the reward": (at_current(True, reward=lambda t: t + 1), "reward", "reward 0"),
    "restart is no initial state": (at_current(True, initial_state=torch.zeros_like), "initial_state", "restarted"),
    "restart keeps the action": (at_current(True, last_action=torch.ones_like), "last_action", "equals reached"),
    "current differs without a restart": (at_current(True, frame=lambda t: t + 1), "frame", "Without a restart"),
    "writes to the action": ({"on_step": write_to_the_action}, "action", "Do not write to the action"),
}


@pytest.mark.parametrize("name", WRONG_ENVS)
def test_a_wrong_environment_is_named(name: str) -> None:
    how, key, words = WRONG_ENVS[name]
    with pytest.raises(ConformanceError) as error:
        check_vec_env(Wrong(**how), n_steps=40)
    assert error.value.key == key
    assert error.value.where.startswith(("Wrong.reset", "Wrong.step"))
    assert words in str(error.value)


class Reusing(CountingEnv):
    """Returns the same memory in every call."""

    def step(self, action):
        (reached, ran), (_, running) = super().step(action)
        self.frame = getattr(self, "frame", reached["frame"]).copy_(reached["frame"])
        shown = changed(reached, frame=self.frame)
        return (shown, ran), (shown, running)


class ReusingItsMask(CountingEnv):
    def reset(self, env_info=None):
        observation, running = super().reset(env_info)
        self.mask = getattr(self, "mask", running).copy_(running)
        return observation, self.mask

    def step(self, action):
        reached, (current, running) = super().step(action)
        self.mask.copy_(running)
        return reached, (current, running)


class SettingItsObservation(CountingEnv):
    """Changes the structure that it returned, not the tensors inside."""

    def step(self, action):
        if self._current["frame"][0, 2] == 1:
            self._current.set("reward", self._current["reward"] + 1)
        return super().step(action)


@pytest.mark.parametrize(
    ("kind", "key"), [(Reusing, "frame"), (ReusingItsMask, "mask/running"), (SettingItsObservation, "reward")]
)
def test_results_that_change_later_are_found(kind: type[CountingEnv], key: str) -> None:
    with pytest.raises(ConformanceError, match=r"changed the result of .*Return fresh tensors") as error:
        check_vec_env(kind(B, lengths=(4, 5)))
    assert error.value.key == key


class Growing(CountingEnv):
    """Says something else whenever it is asked how many it is."""

    asked = 0

    def n_envs(self) -> int:
        self.asked += 1
        return B + (self.asked > 2)


class NoEnvs(CountingEnv):
    def n_envs(self) -> int:
        return 0


class WordForADevice(CountingEnv):
    device = "cpu"  # type: ignore[assignment]


class NumberForAutoReset(CountingEnv):
    def __init__(self, n_envs: int) -> None:
        super().__init__(n_envs)
        self.auto_reset = 1  # type: ignore[assignment]


class NoSpace(CountingEnv):
    def __init__(self, n_envs: int) -> None:
        super().__init__(n_envs)
        del self.action_space


class NeedsInfo(CountingEnv):
    def reset(self, env_info=None):
        if "length" not in env_info:
            raise KeyError("length")
        return super().reset(env_info)


class NeedsKeys(CountingEnv):
    def reset(self, env_info=None):
        if env_info is not None and "length" not in env_info:
            raise KeyError("length")
        return super().reset(env_info)


class ClosesOnce(CountingEnv):
    open = True

    def close(self) -> None:
        if not self.open:
            raise RuntimeError("already closed")
        self.open = False


@pytest.mark.parametrize(
    ("kind", "where", "words"),
    [
        (Growing, "Growing.reset", "B never changes"),
        (NoEnvs, "NoEnvs.n_envs", "at least 1"),
        (WordForADevice, "WordForADevice.device", "a torch.device with its index"),
        (NumberForAutoReset, "NumberForAutoReset.auto_reset", "got 1, expected a bool"),
        (NoSpace, "NoSpace.action_space", "got None, expected a Space"),
        (NeedsInfo, "NeedsInfo.reset(None)", "missing or empty"),
        (NeedsKeys, "NeedsKeys.reset(an empty env_info)", "missing or empty"),
        (ClosesOnce, "ClosesOnce.close (second call)", "already closed"),
    ],
)
def test_a_wrong_attribute_or_call_is_named(kind: type[CountingEnv], where: str, words: str) -> None:
    with pytest.raises(ConformanceError) as error:
        check_vec_env(kind(B), n_steps=5)
    assert error.value.where.startswith(where)
    assert words in str(error.value)


def test_a_space_without_a_shape_is_named() -> None:
    env = CountingEnv(B)
    env.observation_space = spaces.Dict(words=spaces.Text(3))
    with pytest.raises(TypeError, match=r"CountingEnv: space .frame/words. .* has no fixed shape"):
        check_vec_env(env)


def test_seeds_that_do_not_decide_are_found() -> None:
    def create(seed: int) -> CountingEnv:
        return CountingEnv(B, int(torch.randint(1000, ())))

    with pytest.raises(ConformanceError, match=r"made twice with seed=4, after reset.* 'frame'.*factory's seed"):
        check_vec_env(create, seed=4, n_steps=5)


class Broken(gymnasium.Env[Any, Any]):
    """A gymnasium environment whose second step is wrong in one way."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, **wrong: Any) -> None:
        self.wrong, self.count = wrong, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.count = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        right = {"frame": np.ones(2, np.float32), "reward": 1.0, "terminated": False, "truncated": False, "info": {}}
        return tuple((right | (self.wrong if self.count == 2 else {})).values())


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            {"frame": np.full(2, np.nan, np.float32)},
            ConformanceError,
            "'frame': got .nan, nan, nan., expected values inside",
        ),
        ({"reward": None}, ShapeMismatchError, "'reward': environment 0 gave None, expected one number"),
        ({"reward": float("nan")}, ConformanceError, "'reward': got .nan, nan, nan., expected finite"),
        ({"terminated": None}, ShapeMismatchError, "environment 0: 'terminated' is None, expected True or False"),
        ({"truncated": None}, ShapeMismatchError, "environment 0: 'truncated' is None, expected True or False"),
    ],
)
@pytest.mark.parametrize("kind", [GymEnv, GymEnvInf])
def test_bad_data_of_gymnasium_environments_is_found(
    kind: type[GymEnv], wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_vec_env(kind([Broken(**wrong) for _ in range(B)]))


def test_a_step_that_says_what_is_not_is_found() -> None:
    with pytest.raises(ConformanceError, match="Say restarted=False only where no environment restarted"):
        check_vec_env(Wrong(on_step=lambda right, action: StepResult(*right, restarted=False), auto_reset=True))


class WrongInPlace(GymEnvInf):
    """Steps right, but not into memory that it is given."""

    def __init__(self, change: Callable[[ObservationBuffer, ObservationBuffer], object], seed: int) -> None:
        super().__init__([gymnasium.make("CartPole-v1") for _ in range(B)], seed)
        self.change: Callable[..., object] | None = change

    def step(self, action: DictTensor) -> Any:
        change, self.change = self.change, None
        answer = super().step(action)
        self.change = change
        return answer

    def step_into(self, action: DictTensor, before: Any, out: Any, final: Any) -> Any:
        ended = super().step_into(action, before, out, final)
        if self.change is not None:
            self.change(out, final)
        return ended


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out, final: out.frames[0].fill(0), "write every key of `out`, in every row"),
        (lambda out, final: out.last_action[0].fill(7), r"WrongInPlace \(step_into\).*Return a copy of the action"),
        (lambda out, final: final.reward.fill(7), "Write to `final` only in rows that restart"),
    ],
)
def test_an_environment_that_shows_something_else_in_given_memory_is_found(change: Any, message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        check_vec_env(WrongInPlace, env_args={"change": change})
    check_vec_env(WrongInPlace, env_args={"change": lambda out, final: None})


class LosingTheFinalFrame(CountingEnv):
    """Shows no time in its frames, and at an episode's end the first frame of the next one."""

    def __init__(self, n_envs: int, seed: int = 0, **settings: Any) -> None:
        super().__init__(n_envs, seed, **settings)
        self.observation_space = spaces.Box(0, 1, (), np.int64)

    def _frame(self) -> Tensor:
        return (self._step > 0).long()

    def step(self, action: DictTensor) -> Any:
        (reached, ran), (current, running) = super().step(action)
        shown = reached.clone()
        shown.set("frame", torch.where(reached["done"], current["frame"], reached["frame"]))
        return (shown, ran), (current, running)


def test_a_lost_final_frame_is_found_though_frames_carry_no_time() -> None:
    env_args = {"n_envs": 3, "auto_reset": True}
    with pytest.raises(ConformanceError, match="tensor 'frame': got the first frame of the next episode at each of"):
        check_vec_env(LosingTheFinalFrame, env_args=env_args)
    check_vec_env(LosingTheFinalFrame, env_args=env_args, ends_as_it_begins=True)


class LateRestarts(CountingEnv):
    """Restarts on its own clock: a row is left out of the step after its episode's end, and begins anew in it."""

    restarts_take_steps = True

    def __init__(self, n_envs: int, seed: int = 0) -> None:
        super().__init__(n_envs, seed, lengths=(1, 2, 4))  # episodic: the rows that ended wait below
        self.auto_reset = True

    def _restart(self, reached: DictTensor, done: Tensor) -> None:
        """The step itself restarts, one later."""

    def step(self, action: DictTensor) -> Any:
        ran = self._running
        (reached, _), _ = super().step(action)
        self._running = ~(ran & reached["done"])
        self._episode = self._episode + ~ran
        self._step = torch.where(ran, self._step, 0)
        self._current = masked_dicttensor(self._first(), reached, ran)
        return (reached, ran), (self._current, self._running)


class SilentlyLate(LateRestarts):
    restarts_take_steps = False


class NeverBack(LateRestarts):
    def step(self, action: DictTensor) -> Any:
        (reached, ran), (current, running) = super().step(action)
        self._running = running & ran
        return (reached, ran), (current, self._running)


def test_an_environment_may_restart_on_its_own_clock() -> None:
    check_vec_env(LateRestarts, env_args={"n_envs": 3})
    with pytest.raises(ConformanceError, match="Where an auto-resetting environment restarted"):
        check_vec_env(SilentlyLate, env_args={"n_envs": 3})
    with pytest.raises(ConformanceError, match=r"'mask/running'.*restarts_take_steps is True may leave out the step"):
        check_vec_env(NeverBack, env_args={"n_envs": 3})


def test_bounds_can_be_left_out() -> None:
    def create(seed: int) -> CountingEnv:
        env = CountingEnv(B, seed)
        env.observation_space = spaces.Box(0, 3, (3,), "int64")
        return env

    with pytest.raises(ConformanceError, match="widen the space"):
        check_vec_env(create)
    check_vec_env(create, check_bounds=False)


def test_the_environment_is_closed_whatever_happens() -> None:
    class Closing(Wrong):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    good, bad = Closing(), Closing(**at_reset(done=torch.ones_like))
    check_vec_env(good, n_steps=3)
    assert good.closed == 2
    with pytest.raises(ConformanceError):
        check_vec_env(bad, n_steps=3)
    assert bad.closed == 1


# --- Agents: a linear policy with one fault ---------------------------------------------------------------------------


class Base(LinearAgent):
    """A right agent with a state; the wrong ones change one method of it."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(3, device=device)

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        return DictTensor({"h": torch.zeros(B, 2, device=self.model.weight.device)})

    def __call__(self, state, observation, agent_info, history=None):
        action, _ = super().__call__(state, observation, agent_info)
        fresh = observation["initial_state"].unsqueeze(1)
        return action, DictTensor({"h": torch.where(fresh, torch.zeros_like(state["h"]), state["h"]) + 1})


def with_action(change: Callable[[DictTensor, DictTensor], Any]) -> type[Base]:
    """An agent whose answer is changed: change(action, observation)."""

    class WrongAction(Base):
        def __call__(self, state, observation, agent_info, history=None):
            action, new_state = super().__call__(state, observation, agent_info)
            return change(action, observation), new_state

    return WrongAction


def with_state(
    change: Callable[[DictTensor], Any] = right, initial: Callable[[DictTensor, int], Any] = lambda state, B: state
) -> type[Base]:
    """An agent whose state is changed."""

    class WrongState(Base):
        def initial_state(self, agent_info, B):
            return initial(super().initial_state(agent_info, B), B)

        def __call__(self, state, observation, agent_info, history=None):
            action, new_state = super().__call__(state, observation, agent_info)
            return action, change(new_state)

    return WrongState


class SometimesMore(Base):
    """Returns another key every second time."""

    calls = 0

    def __call__(self, state, observation, agent_info, history=None):
        action, new_state = super().__call__(state, observation, agent_info)
        self.calls += 1
        return (changed(action, extra=torch.ones(B)) if self.calls == 2 else action), new_state


class WritesToObservation(Base):
    def __call__(self, state, observation, agent_info, history=None):
        answer = super().__call__(state, observation, agent_info)
        observation["reward"].add_(1)
        return answer


class WritesToState(Base):
    def __call__(self, state, observation, agent_info, history=None):
        state["h"].add_(1)
        return super().__call__(state, observation, agent_info)


class KeepsItsCounter(Base):
    """Remembers in itself what belongs in the state."""

    calls = 0

    def __call__(self, state, observation, agent_info, history=None):
        self.calls += 1
        action, new_state = super().__call__(state, observation, agent_info)
        return changed(action, calls=torch.full((len(action["action"]),), self.calls)), new_state


class ReplaysOtherwise(Base):
    def call_replay(self, trajectories, t, state):
        action, new_state = super().call_replay(trajectories, t, state)
        return changed(action, log_prob=action["log_prob"] + 0.1), new_state


class IgnoresWeights(Base):
    def update(self, info: Mapping[str, Tensor]) -> None:
        pass


class KeepsWeights(Base):
    def update(self, info: Mapping[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.data = info[name]


class TakesHalf(Base):
    def update(self, info: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self.model.weight.copy_(info["weight"])


def batch_mean(action: DictTensor, observation: DictTensor) -> DictTensor:
    return changed(action, value=observation["frame"].float().mean().expand(len(action["action"])).clone())


def row_number(action: DictTensor, observation: DictTensor) -> DictTensor:
    return changed(action, row=torch.arange(len(action["action"])))


WRONG_AGENTS: dict[str, tuple[type[RL_Agent], str, str]] = {
    # name: (the class, the key that is named, a piece of the message)
    "no action": (with_action(lambda a, _: changed(a, action=None)), "action", "got missing"),
    "action in another dtype": (
        with_action(lambda a, _: changed(a, action=a["action"].float())),
        "action",
        "torch.float32, expected [",
    ),
    "action in another shape": (
        with_action(lambda a, _: changed(a, action=a["action"].unsqueeze(1))),
        "action",
        "got [3, 1] torch.int64, expected [3] torch.int64",
    ),
    "action outside the space": (with_action(lambda a, _: changed(a, action=a["action"] + 2)), "action", "inside Disc"),
    "too few rows": (with_action(lambda a, _: a.slice(0, 2)), "action", "got [2] torch."),
    "keys come and go": (SometimesMore, "extra", "same keys, dtypes and shapes in each call"),
    "state loses a key": (with_state(lambda s: EMPTY), "h", "got missing, expected [3, 2]"),
    "state gains a key": (with_state(lambda s: changed(s, c=torch.zeros(B))), "c", "dtypes of initial_state"),
    "state changes its dtype": (with_state(lambda s: s.map(Tensor.double)), "h", "torch.float64, expected"),
    "state changes its shape": (with_state(lambda s: s.map(lambda t: t[:, :1])), "h", "got [3, 1] torch"),
    "initial state of one row": (with_state(initial=lambda s, B: s.slice(0)), "h", "expected [3, 2]"),
    "initial state knows one B": (with_state(initial=lambda s, _: s.index([0] * B)), "h", "expected [1, ...]"),
    "initial state of other keys": (
        with_state(initial=lambda s, B: changed(s, one=torch.zeros(1)) if B == 1 else s),
        "one",
        "for every B",
    ),
    "writes to the observation": (WritesToObservation, "reward", "Do not write to the arguments"),
    "writes to the state": (WritesToState, "h", "Do not write to the arguments"),
    "draws from elsewhere": (
        with_action(lambda a, _: changed(a, noise=torch.rand(len(a["action"])))),
        "action/noise",
        "observation['rng']",
    ),
    "remembers in itself": (KeepsItsCounter, "action/calls", "keep lasting values in the state"),
    "mean over the batch": (with_action(batch_mean), "action/value", "Row b of the output"),
    "depends on the row's place": (with_action(row_number), "action/row", "Row b of the output"),
    "replays otherwise": (ReplaysOtherwise, "log_prob", "Replay must act as collection did"),
    "ignores weights": (IgnoresWeights, "weight", "usually self.model.load_state_dict(info)"),
    "takes half of the weights": (TakesHalf, "bias", "usually self.model.load_state_dict(info)"),
    "keeps the weights it was lent": (KeepsWeights, "action/log_prob", "Copy the weights"),
}


class ForgetsToForget(Base):
    """The most frequent mistake in ports of recurrent agents: nothing resets its memory."""

    def __call__(self, state, observation, agent_info, history=None):
        h = state["h"] + 1.0
        action = torch.zeros(len(h), dtype=torch.int64, device=h.device)
        return DictTensor({"action": action, "memory": h[:, 0].clone()}), DictTensor({"h": h})


class ForgetsOneKey(ForgetsToForget):
    """Resets what it shows, but not what it returns as its new state."""

    def __call__(self, state, observation, agent_info, history=None):
        action, after = super().__call__(state, observation, agent_info)
        shown = torch.where(observation["initial_state"], 1.0, action["memory"])
        return changed(action, memory=shown), after


def _noise(draw):
    """Add a number from somewhere else than ``rng``."""
    return with_action(lambda a, _: changed(a, noise=torch.full((len(a["action"]),), float(draw()))))


class Capricious(Base):
    """Promises to be pure, and reads an attribute."""

    pure = True
    temperature = 2.0

    def __call__(self, state, observation, agent_info, history=None):
        action, after = super().__call__(state, observation, agent_info)
        return changed(action, heat=torch.full((len(action["action"]),), self.temperature)), after


PAGE_RULES: dict[str, tuple[type[RL_Agent], str]] = {
    # each rule of docs/your_own.md: ways to break it, and a piece of the message
    "rng: torch": (_noise(lambda: torch.rand(())), "Draw random numbers from observation"),
    "rng: numpy": (_noise(np.random.rand), "Draw random numbers from observation"),
    "rng: python": (_noise(random.random), "Draw random numbers from observation"),
    "rng: clock": (_noise(lambda: time.perf_counter() % 1.0), "Draw random numbers from observation"),
    "memory": (ForgetsToForget, "must forget the one before"),
    "memory of one key": (ForgetsOneKey, "must forget the one before"),
    "pure": (Capricious, "depends on Capricious.temperature"),
}


@pytest.mark.parametrize("name", PAGE_RULES)
def test_every_rule_of_the_page_on_custom_agents_is_tested(name: str) -> None:
    kind, words = PAGE_RULES[name]
    with pytest.raises(ConformanceError, match=words):
        check_agent(kind(), env_for_agents())


def test_an_agent_may_remember_on_purpose() -> None:
    check_agent(ForgetsToForget(), env_for_agents(), remembers=True)


def env_for_agents(device: str = "cpu") -> CountingEnv:
    return CountingEnv(B, auto_reset=True, device=device)


def test_the_right_agent_passes() -> None:
    check_agent(Base(), env_for_agents())
    check_agent(Base(), env_for_agents(), host_syncs=True)
    check_agent(Base("sim:1"), env_for_agents(), device="sim:1")


@pytest.mark.parametrize("name", WRONG_AGENTS)
def test_a_wrong_agent_is_named(name: str) -> None:
    kind, key, words = WRONG_AGENTS[name]
    with pytest.raises(ConformanceError) as error:
        check_agent(kind(), env_for_agents())
    assert error.value.key == key
    assert kind.__name__ in error.value.where
    assert words in str(error.value)


class Sampling(RL_Agent):
    """Draws from torch's generator, as rlstructures' agents do."""

    def __call__(self, state, observation, agent_info, history=None):
        return DictTensor({"action": torch.randint(2, observation["last_action"].shape)}), EMPTY


def test_an_agent_with_torchs_generator_needs_to_say_so() -> None:
    with pytest.raises(ConformanceError, match=r"same arguments, row .*draws_from_rng=False"):
        check_agent(Sampling(), env_for_agents(), n_steps=20)
    check_agent(Sampling(), env_for_agents(), n_steps=20, draws_from_rng=False)


class Misplaced(Base):
    """Forgets the device of its state."""

    def initial_state(self, agent_info, B):
        return DictTensor({"h": torch.zeros(B, 2)})


class Peeking(Base):
    def __call__(self, state, observation, agent_info, history=None):
        observation["reward"].sum().item()
        return super().__call__(state, observation, agent_info)


def test_misplaced_tensors_are_found_on_a_simulated_device() -> None:
    check_agent(Misplaced(), env_for_agents())
    with pytest.raises(DeviceMismatchError, match=r"Misplaced\.initial_state: result.* 'h' is on cpu, expected sim:1"):
        check_agent(Misplaced("sim:1"), env_for_agents("sim:1"), device="sim:1")


def test_an_agent_is_expected_where_its_environment_lives() -> None:
    check_agent(StatefulAgent(device="sim:1"), CountingEnv(B, 0, device="sim:1"))


def test_host_syncs_are_found_if_asked() -> None:
    check_agent(Peeking(), env_for_agents())
    with pytest.raises(HostSyncError, match="item"):
        check_agent(Peeking(), env_for_agents(), host_syncs=True)


def test_an_action_outside_its_space_is_told() -> None:
    box = spaces.Box(-1, 1, (3,))
    check_agent(LinearAgent(3), RandomEnv(box, spaces.Discrete(2)))
    with pytest.raises(ConformanceError, match=r"inside Discrete\(1\)"):
        check_agent(LinearAgent(3), RandomEnv(box, spaces.Discrete(1)))


def test_a_gaussian_agent_needs_clipped_actions() -> None:
    def create(wrap: Callable[[Any], Any]) -> GymEnvInf:
        return GymEnvInf([wrap(gymnasium.make("Pendulum-v1")) for _ in range(B)], 0)

    agent = GaussianAgent(GaussianActorCritic(3, 1))
    check_agent(agent, create(gymnasium.wrappers.ClipAction), executors=False)
    with pytest.raises(ConformanceError, match=r"inside Box\(-2.0.*gymnasium.wrappers.ClipAction"):
        check_agent(agent, create(lambda env: env))


def test_agent_info_is_given_to_the_agent() -> None:
    check_agent(StatefulAgent(), env_for_agents(), agent_info=DictTensor({"start": torch.arange(B)}))


class Twofold(RL_Agent):
    """Has two networks, so the kit cannot guess what `update` takes; the second one is never updated."""

    def __init__(self) -> None:
        self.policy, self.value = nn.Linear(3, 2), nn.Linear(3, 1)

    def __call__(self, state, observation, agent_info, history=None):
        frame = observation["frame"].float()
        return DictTensor({"action": self.policy(frame).argmax(1), "value": self.value(frame).squeeze(1)}), EMPTY

    def update(self, info: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self.value.weight.add_(info["weight"].mean())


def test_given_weights_are_used() -> None:
    check_agent(Twofold(), env_for_agents())
    with pytest.raises(ConformanceError, match="same weights must give the same outputs"):
        check_agent(Twofold(), env_for_agents(), weights={"weight": torch.ones(2)})


def test_an_agent_with_a_network_need_not_take_weights() -> None:
    class Frozen(LinearAgent):
        update = RL_Agent.update

    check_agent(Frozen(3, 2), env_for_agents())
    with pytest.raises(NotImplementedError, match="this agent takes no weights"):
        check_agent(Frozen(3, 2), env_for_agents(), weights={"weight": torch.zeros(2, 3)})


def test_weights_are_the_same_afterwards() -> None:
    agent = LinearAgent(3)
    before = {key: value.clone() for key, value in agent.model.state_dict().items()}
    check_agent(agent, env_for_agents())
    assert all(torch.equal(value, before[key]) for key, value in agent.model.state_dict().items())


CARTPOLE: Any = gymnasium.make("CartPole-v1")


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (lambda: check_agent(LinearAgent, env_for_agents()), "agent is the class LinearAgent, expected an RL_Agent"),
        (lambda: check_agent(LinearAgent(3), CARTPOLE), "env is a TimeLimit, expected a VecEnv. Wrap gymnasium"),
        (lambda: check_agent(LinearAgent(3), env_for_agents(), agent_info={}), "agent_info is a dict, expected a Dict"),
        (lambda: check_vec_env(CARTPOLE), "env is a TimeLimit, expected a VecEnv. Wrap gymnasium"),
        (lambda: check_vec_env(LinearAgent(3)), "env is a LinearAgent, expected a VecEnv"),
        (lambda: check_vec_env(lambda seed: CARTPOLE), "env returned a TimeLimit, expected a VecEnv"),
        (lambda: check_vec_env(lambda: CARTPOLE), r"env is called as env\(seed=…\), but .*it must take seed"),
    ],
)
def test_wrong_arguments_are_named(check: Any, words: str) -> None:
    with pytest.raises(TypeError, match=rf"check_\w+: {words}"):
        check()
