"""The space matrix: every space that has a shape, in and out, with its own dtype, in every wrapper."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from echo import Echo
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from rlstruct.core import DictTensor
from rlstruct.envs import GymEnv, GymEnvInf, GymVectorEnv
from rlstruct.errors import DeviceMismatchError, ShapeMismatchError
from rlstruct.vec_env import VecEnv

B = 3
FLOATS = (np.float16, np.float32, np.float64)
INTEGERS = (np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16, np.uint32, np.uint64)
NESTED = spaces.Dict(
    {
        "where": spaces.Box(-1, 1, (2, 3), np.float64),
        "inventory": spaces.Dict({"count": spaces.Discrete(5, start=2), "flags": spaces.MultiBinary((2, 2))}),
        "pair": spaces.Tuple((spaces.MultiDiscrete([3, 4]), spaces.Box(0, 255, (4,), np.uint8))),
    }
)
NUMBERS = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Tuple((spaces.Discrete(3), spaces.Discrete(4)))})
MATRIX: dict[str, spaces.Space[Any]] = {
    **{f"box-{np.dtype(t).name}": spaces.Box(-2, 2, (2, 3), t) for t in FLOATS},
    **{f"box-{np.dtype(t).name}": spaces.Box(0, 100, (5,), t) for t in INTEGERS},
    "box-bool": spaces.Box(0, 1, (3,), np.bool_),
    "box-scalar": spaces.Box(0, 1, (), np.float32),
    "discrete": spaces.Discrete(4),
    "discrete-start": spaces.Discrete(4, start=-7),
    "discrete-int32": spaces.Discrete(4, dtype=np.int32),
    "multi-discrete": spaces.MultiDiscrete([3, 4, 5]),
    "multi-discrete-2d": spaces.MultiDiscrete([[3, 4], [5, 6]]),
    "multi-binary": spaces.MultiBinary(6),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.Tuple((spaces.MultiBinary(2),)))),
    "nested": NESTED,
}


def flat(prefix: str, element: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The oracle: names and values of an element, written as plainly as can be."""
    if isinstance(element, dict):
        return {name: value for key, part in element.items() for name, value in flat(f"{prefix}/{key}", part).items()}
    if isinstance(element, tuple):
        return {name: value for i, part in enumerate(element) for name, value in flat(f"{prefix}/{i}", part).items()}
    return {prefix: np.asarray(element)}


def make(kind: str, space: spaces.Space[Any]) -> tuple[VecEnv, list[Echo] | None]:
    if kind == "async":
        vec: Any = AsyncVectorEnv([functools.partial(Echo, space)] * B, context="spawn")
        return GymVectorEnv(vec, seed=0), None
    if kind == "sync":
        vec = SyncVectorEnv([functools.partial(Echo, space)] * B, autoreset_mode=AutoresetMode.SAME_STEP)
        return GymVectorEnv(vec, seed=0), vec.envs
    # Copies of the space: each has its own random stream.
    envs = [Echo(copy.deepcopy(space)) for _ in range(B)]
    return {"list": GymEnv, "list-inf": GymEnvInf}[kind](envs, seed=0), envs


def batch(space: spaces.Space[Any], names: str) -> tuple[DictTensor, list[Any]]:
    space.seed(5)
    elements = [space.sample() for _ in range(B)]
    rows = [flat(names, element) for element in elements]
    return DictTensor({key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}), elements


def assert_same(got: DictTensor, want: DictTensor) -> None:
    for key in want.keys():
        assert got[key].dtype == want[key].dtype, key
        assert got[key].shape == want[key].shape, key
        np.testing.assert_array_equal(got[key].numpy(), want[key].numpy(), err_msg=key)


@pytest.mark.parametrize("kind", ["list", "list-inf", "sync"])
@pytest.mark.parametrize("name", MATRIX)
def test_values_dtypes_and_shapes_are_exact_both_ways(kind: str, name: str) -> None:
    space = MATRIX[name]
    env, inside = make(kind, space)
    assert inside is not None
    observation, _ = env.reset()
    for time in range(2):
        wanted = [flat("frame", one.seen[time]) for one in inside]
        assert {key for key in observation.keys() if key.startswith("frame")} == set(wanted[0])
        for j, row in enumerate(wanted):
            for key, value in row.items():
                np.testing.assert_array_equal(observation[key][j].numpy(), value)
                assert observation[key].numpy().dtype == value.dtype
        actions, elements = batch(space, "action")
        (observation, _), _ = env.step(actions)
        for one, element in zip(inside, elements, strict=True):
            for key, value in flat("action", element).items():
                np.testing.assert_array_equal(flat("action", one.actions[-1])[key], value)
        assert_same(observation.truncate_key("last_"), actions)
    env.close()


def test_processes_give_what_the_list_gives() -> None:
    for name in ("nested", "box-uint8", "discrete-start"):
        far, _ = make("async", MATRIX[name])
        near, _ = make("list", MATRIX[name])
        ours, theirs = far.reset()[0], near.reset()[0]
        assert list(ours.keys()) == list(theirs.keys())
        assert_same(ours, theirs)
        actions, _ = batch(MATRIX[name], "action")
        assert_same(far.step(actions)[0][0], near.step(actions)[0][0])
        far.close()


def step_with(space: spaces.Space[Any], **tensors: torch.Tensor) -> None:
    env, _ = make("list", space)
    env.reset()
    env.step(DictTensor({key.replace("__", "/"): tensor for key, tensor in tensors.items()}))


def test_wrong_actions_say_key_found_expected_and_mend() -> None:
    discrete, box = spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)
    with pytest.raises(ShapeMismatchError, match=r"no key 'action', only \['choice'\].*torch.int64 \(3,\)"):
        step_with(discrete, choice=torch.zeros(B, dtype=torch.int64))
    with pytest.raises(ShapeMismatchError, match=r"action 'action' is \[3, 1\] .*expected \[3\] torch.int64"):
        step_with(discrete, action=torch.zeros(B, 1, dtype=torch.int64))
    with pytest.raises(
        ShapeMismatchError, match=r"is \[3\] torch.float32, expected \[3\] torch.int64.*\.to\(torch.int64\)"
    ):
        step_with(discrete, action=torch.zeros(B))
    with pytest.raises(
        ShapeMismatchError, match=r"is \[3, 3\] torch.float32, expected \[3\] torch.int64\. Give one row"
    ):
        step_with(discrete, action=torch.zeros(B, 3))  # logits
    with pytest.raises(ShapeMismatchError, match=r"is \[3, 2\] torch.int64, expected \[3, 2\] torch.float32"):
        step_with(box, action=torch.zeros(B, 2, dtype=torch.int64))
    with pytest.raises(ShapeMismatchError, match=r"is \[3\] torch.bool, expected \[3\] torch.int64"):
        step_with(discrete, action=torch.zeros(B, dtype=torch.bool))
    with pytest.raises(ShapeMismatchError, match=r"no key 'action/inventory/count'"):
        step_with(spaces.Dict({"inventory": spaces.Dict({"count": discrete})}), action=torch.zeros(B))
    with pytest.raises(DeviceMismatchError, match=r"is on meta, expected cpu.*DeviceEnv"):
        step_with(discrete, action=torch.zeros(B, dtype=torch.int64, device="meta"))


def test_float_widths_and_smaller_integers_are_cast() -> None:
    half, ones = torch.full((B, 2), 0.5), torch.ones(B, dtype=torch.int32)
    for space, action, reached in (
        (spaces.Box(-1, 1, (2,), np.float64), half, half.double()),
        (spaces.Box(-1, 1, (2,), np.float32), half.double().requires_grad_(), half),
        (spaces.Discrete(3), ones, ones.long()),
    ):
        env, inside = make("list", space)
        env.reset()
        last = env.step(DictTensor({"action": action}))[0][0]["last_action"]
        torch.testing.assert_close(last, reached, rtol=0, atol=0)  # the dtypes too
        assert inside is not None
        for one in inside:
            assert one.actions[-1].dtype == space.dtype
            np.testing.assert_array_equal(one.actions[-1], reached[0].numpy())


def test_the_environment_cannot_change_our_tensors_through_its_action() -> None:
    class Greedy(Echo):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            action += 1
            return super().step(action - 1)

    env = GymEnv([Greedy(spaces.Box(-1, 1, (2,), np.float32))])
    env.reset()
    action = DictTensor({"action": torch.zeros(1, 2)})
    (reached, _), _ = env.step(action)
    assert not action["action"].any()
    assert not reached["last_action"].any()
    action["action"].fill_(9)  # nor is the caller's tensor kept
    assert not reached["last_action"].any()


class Liar(Echo):
    """Declares its space and returns something else."""

    def __init__(self, answer: Any, space: spaces.Space[Any]) -> None:
        super().__init__(space)
        self.answer = answer

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.answer, {}


@pytest.mark.parametrize(
    ("answer", "space", "message"),
    [
        (np.zeros(1, np.float32), spaces.Box(0, 1, (4,)), r"environment 1 gave 'frame' as float32 \(1,\).*\(4,\)"),
        (np.zeros(4), spaces.Box(0, 9, (4,), np.uint8), r"'frame' as float64 \(4,\).*declares uint8"),
        (
            {"a": 1},
            spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Discrete(2)}),
            r"frame/b: .*without the entry 'b'",
        ),
    ],
)
def test_an_observation_outside_its_space_is_refused_at_reset(
    answer: Any, space: spaces.Space[Any], message: str
) -> None:
    honest = Liar(space.sample(), space)
    with pytest.raises(ShapeMismatchError, match=message):
        GymEnv([honest, Liar(answer, space)]).reset()


@pytest.mark.parametrize(
    ("honest", "answer", "space"),
    [
        (np.ones(4, np.float32), np.ones(1, np.float32), spaces.Box(0, 1, (4,))),
        (np.ones(4, np.float32).view(np.memmap), np.ones(1, np.float32).view(np.memmap), spaces.Box(0, 1, (4,))),
        (np.ones(4, np.float64), np.float64(1), spaces.Box(0, 1, (4,))),
        (np.ones(4, np.float32), 1, spaces.Box(0, 1, (4,))),
        (np.ones(4, np.float32), np.ones((1, 4), np.float32), spaces.Box(0, 1, (4,))),
        (np.ones(4, np.uint8), np.full(4, 0.5), spaces.Box(0, 9, (4,), np.uint8)),
        (np.full(4, 200), np.full(4, 256), spaces.Box(0, 255, (4,), np.uint8)),
        (np.full(4, 200), np.array([0, 1, -1, 2], np.int16), spaces.Box(0, 255, (4,), np.uint8)),
        (3, 300, spaces.Discrete(5, dtype=np.int8)),
        (3, np.array([3]), spaces.Discrete(5)),
        (np.int64(3), 2.5, spaces.Discrete(5)),
        ({"a": 1, "b": (2, 3)}, {"a": 1.5, "b": (2, 3)}, NUMBERS),
        ({"a": 1, "b": (2, 3)}, {"a": 1, "b": (2, np.array([3]))}, NUMBERS),
        ({"a": 1, "b": (2, 3)}, {"a": 1, "b": (2,)}, NUMBERS),
    ],
)
@pytest.mark.parametrize("at", [2, 3, 4])  # mid-episode, a final observation, that of a restart
def test_an_observation_outside_its_space_is_refused_in_every_step(
    honest: Any, answer: Any, space: spaces.Space[Any], at: int
) -> None:
    class LaterLiar(Liar):
        """Lies in its observation number ``at``; its first episode has 3 steps."""

        n_shown = -1

        def _show(self) -> Any:
            self.n_shown += 1
            return self.answer if self.n_shown == at else honest

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return self._show(), {}

        def step(self, action: Any) -> Any:
            frame = self._show()
            return frame, 1.0, self.n_shown == 3, False, {}

    env = GymEnvInf([LaterLiar(honest, space), LaterLiar(answer, space)])
    env.reset()
    action, _ = batch(space, "action")
    action = action.index(torch.arange(2))
    for _ in range(min(at, 3) - 1):
        env.step(action)
    with pytest.raises(ShapeMismatchError, match=r"environment 1 gave 'frame|frame/.*the environment gave"):
        env.step(action)
