"""TensorEnv itself, with simulators of a few lines: restarts, limits, states from outside, keys, errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlstruct.core import DictTensor
from rlstruct.errors import DeviceMismatchError, ShapeMismatchError
from rlstruct.functional.random import child_key, randint, uniform
from rlstruct.sims import CartPole, CartPoleState, Pendulum, TensorEnv, make
from rlstruct.testing import check_vec_env, forbid_host_sync


@dataclass(frozen=True)
class Count:
    value: torch.Tensor


class Counter(TensorEnv[Count]):
    """Begins at 10 e for a random e from 0 to 99, adds the action, ends beyond 4 steps from there."""

    action_space = spaces.Discrete(4)
    observation_space = spaces.Box(0, 10**6, (), "int64")
    stochastic = False

    def initial(self, key):
        return Count(10 * randint(key, 100))

    def transition(self, state, action, key):
        value = state.value + action
        return Count(value), action.to(torch.float32), value % 10 >= 4

    def observe(self, state):
        return state.value


class Dice(TensorEnv[DictTensor]):
    """Throws a die per step, nested spaces, a state without its own class; six ends."""

    action_space = spaces.Dict(left=spaces.Discrete(2), right=spaces.Box(-1, 1, (2,)))
    observation_space = spaces.Dict(die=spaces.Discrete(7), pushed=spaces.Box(-1, 1, (2,)))

    def initial(self, key):
        return DictTensor({"die": torch.zeros_like(key), "pushed": torch.zeros(*key.shape, 2, device=key.device)})

    def transition(self, state, action, key):
        die = 1 + randint(key, 6)
        return DictTensor({"die": die, "pushed": action["right"]}), die.to(torch.float64), die == 6

    def observe(self, state):
        return {"die": state["die"], "pushed": state["pushed"]}


def act(*values: int) -> DictTensor:
    return DictTensor({"action": torch.tensor(values)})


def started(env: TensorEnv) -> TensorEnv:
    env.reset()
    return env


@pytest.mark.parametrize("auto_reset", [True, False])
def test_keeps_the_contract_with_plain_and_nested_spaces(auto_reset: bool) -> None:
    check_vec_env(lambda seed: Counter(5, seed, auto_reset=auto_reset), n_steps=60)
    check_vec_env(lambda seed: Dice(5, seed, auto_reset=auto_reset, time_limit=4), n_steps=60)


@pytest.mark.parametrize("high", [1.0, [1.0, 2.0]])  # one bound for all entries, or one each
@pytest.mark.parametrize("auto_reset", [True, False])
def test_actions_are_clipped_to_their_box_and_shown_as_chosen(auto_reset: bool, high: Any) -> None:
    class Bounded(Dice):
        right = spaces.Box(np.array([-1, -1], np.float32), np.broadcast_to(np.float32(high), 2))
        action_space = spaces.Dict(left=spaces.Discrete(2), right=right)

    env = started(Bounded(1, auto_reset=auto_reset))
    right = torch.tensor([[-3.0, 3.0]])
    (reached, _), _ = env.step(DictTensor({"action/left": torch.tensor([1]), "action/right": right}))
    torch.testing.assert_close(reached["frame/pushed"], torch.tensor([[-1.0, float(np.max(high))]]))
    torch.testing.assert_close(reached["last_action/right"], right)


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (spaces.Box(0, 1, (2,), np.bool_), torch.tensor([[True, False]])),
        (spaces.Box(-np.inf, np.inf, (2,)), torch.tensor([[-1e9, 1e9]])),
    ],
)
def test_actions_that_no_bound_can_clip_arrive_without_a_copy(space: spaces.Box, action: torch.Tensor) -> None:
    class Pushed(Counter):
        action_space = space

        def transition(self, state, action, key):
            arrived.append(action)
            return super().transition(state, action.sum(1).to(torch.int64), key)

    arrived: list[torch.Tensor] = []
    env = started(Pushed(1, auto_reset=False))
    env.step(DictTensor({"action": action}))
    assert arrived[-1] is action


def test_a_step_shows_the_final_state_and_restarts() -> None:
    env = Counter(2)
    env.reset(DictTensor({"state/value": torch.tensor([20, 33]), "weather": torch.zeros(2)}))
    (reached, ran), (current, running) = env.step(act(3, 1))
    assert reached["frame"].tolist() == [23, 34]
    assert reached["reward"].tolist() == [3.0, 1.0]
    assert reached["terminated"].tolist() == reached["done"].tolist() == [False, True]
    assert current["initial_state"].tolist() == [False, True]
    assert current["frame"][0] == 23
    assert current["frame"][1] % 10 == 0
    assert current["reward"].tolist() == [3.0, 0.0]
    assert current["last_action"].tolist() == [3, 0]
    assert ran.all()
    assert running.all()


def test_an_idle_environment_shows_its_end_until_reset() -> None:
    env = Counter(2, auto_reset=False, time_limit=2)
    env.reset(DictTensor({"state/value": torch.tensor([20, 33])}))
    (_, ran), (current, running) = env.step(act(0, 1))
    assert (ran.tolist(), running.tolist()) == ([True, True], [True, False])
    (_, ran), (current, running) = env.step(act(0, 2))
    assert (ran.tolist(), running.tolist()) == ([True, False], [False, False])
    assert current["frame"].tolist() == [20, 34]
    assert current["truncated"].tolist() == [True, False]
    assert current["terminated"].tolist() == [False, True]
    assert current["last_action"].tolist() == [0, 1]
    assert env.reset()[1].all()


@pytest.mark.parametrize("device", ["cpu", "sim:1"])
def test_a_loop_that_never_ends_is_told(device: str) -> None:
    env = Counter(2, auto_reset=False, time_limit=2, device=device)
    _, running = env.reset()
    action = act(0, 0).to(device)

    def count_by_size() -> None:  # as rlstructures taught
        still = running
        while still.size()[0] > 0:
            _, (_, still) = env.step(action)

    with forbid_host_sync(), pytest.raises(RuntimeError, match=r"Counter.*has run for 1000 steps.*running.any\(\)"):
        count_by_size()
    env.reset()
    assert env.step(action)[0][1].all()


def test_one_that_goes_on_from_an_earlier_carry_is_not_idle() -> None:
    env = Counter(1, auto_reset=False, time_limit=2)
    env.reset()
    begun = env.state_tensors()
    for _ in range(1500):
        env.set_state_tensors(begun)
        assert env.step(act(0))[0][1].all()


def test_without_a_time_limit_the_cpu_is_asked() -> None:
    env = Counter(1, auto_reset=False)
    env.reset(DictTensor({"state/value": torch.tensor([33])}))
    for _ in range(1999):
        env.step(act(1))  # the first step ends the episode
    with pytest.raises(RuntimeError, match="no environment has run for 1000 steps"):
        env.step(act(1))


def test_time_limit_counts_the_steps_of_each_episode() -> None:
    env = Counter(1, time_limit=3)
    env.reset(DictTensor({"state/value": torch.tensor([33])}))
    ends = []
    for action in (1, 0, 0, 0, 0, 0, 0):  # terminated at once, then truncated after three steps each
        (reached, _), _ = env.step(act(action))
        ends.append((bool(reached["terminated"]), bool(reached["truncated"])))
    cut, on = (False, True), (False, False)
    assert ends == [(True, False), on, on, cut, on, on, cut]


def test_both_ends_may_come_together() -> None:
    env = Counter(1, time_limit=1)
    env.reset(DictTensor({"state/value": torch.tensor([33])}))
    (reached, _), _ = env.step(act(1))
    assert reached["terminated"]
    assert reached["truncated"]


def test_states_go_out_and_come_back() -> None:
    env = started(Counter(4, seed=3))
    env.step(act(1, 1, 1, 1))
    state = env.get_state([2, 0])
    frames = env.step(act(0, 0, 0, 0))[0][0]["frame"]
    assert state.value.tolist() == [frames[2], frames[0]]
    current, running = env.set_state([1, 3], state)
    assert current["frame"].tolist() == [frames[0], frames[2], frames[2], frames[0]]
    assert current["initial_state"].tolist() == [False, True, False, True]
    assert running.all()
    state.value.fill_(-7)  # the simulation keeps copies
    assert env.get_state().value.tolist() == current["frame"].tolist()


def test_one_state_goes_into_many_environments() -> None:
    env = started(Counter(4))
    current, _ = env.set_state([3, 0, 1], Count(torch.tensor([20])))
    assert current["frame"][[3, 0, 1]].tolist() == [20, 20, 20]
    (reached, _), _ = env.step(act(1, 0, 0, 1))
    assert reached["frame"][[3, 0, 1]].tolist() == [21, 21, 20]  # each goes its own way from there


def test_episodes_begin_after_random_actions_that_no_other_environment_changes() -> None:
    def begin(n_envs: int, **settings: Any) -> tuple[TensorEnv, DictTensor]:
        env = Counter(n_envs, **settings)
        return env, env.reset(given(n_envs))[0]

    def given(n_envs: int) -> DictTensor:
        return DictTensor({"state/value": torch.full((n_envs,), 20), "initial_steps": torch.full((n_envs,), 8)})

    env, first = begin(200, time_limit=2)
    assert set(first["frame"].tolist()) == {20, 21, 22, 23}  # 24 ends an episode, which starts over
    assert first["initial_state"].all()
    assert not first["reward"].any()
    assert torch.equal(env.get_state().value, first["frame"])
    assert torch.equal(begin(50, seed=50)[1]["frame"], first["frame"][50:100])
    assert torch.equal(begin(200, auto_reset=False)[1]["frame"], first["frame"])
    (reached, _), _ = env.step(act(*[0] * 200))
    assert not reached["done"].any()  # the clock of the episode begins now
    again, _ = env.reset(given(200))
    assert not torch.equal(again["frame"], first["frame"])
    plain, _ = env.reset(given(200).truncate_key("state/").prepend_key("state/"))
    assert plain["frame"].eq(20).all()
    none, _ = env.reset(DictTensor({**dict(given(200).items()), "initial_steps": torch.zeros(200, dtype=torch.int64)}))
    assert none["frame"].eq(20).all()


def test_set_state_wakes_an_idle_environment_and_restarts_its_clock() -> None:
    env = Counter(2, auto_reset=False, time_limit=2)
    env.reset(DictTensor({"state/value": torch.tensor([33, 33])}))
    env.step(act(1, 0))
    current, running = env.set_state([0], Count(torch.tensor([50])))
    assert current["frame"].tolist() == [50, 33]
    assert current["done"].tolist() == [False, False]
    assert running.all()
    (reached, _), _ = env.step(act(0, 0))
    assert reached["truncated"].tolist() == [False, True]


def test_states_recorded_on_the_cpu_start_a_simulation_elsewhere() -> None:
    import rlstruct.testing.sim_device  # noqa: F401

    there = started(CartPole(3, device="sim:1"))
    current, _ = there.set_state([2, 0], started(CartPole(2, seed=9)).get_state())
    recorded = started(CartPole(2, seed=9)).reset()[0]
    assert current.device == torch.device("sim:1")
    here = CartPole(2, seed=9).reset()[0]["frame"]
    assert torch.equal(current["frame"].to("cpu")[[2, 0]], here)
    assert not torch.equal(recorded["frame"], here)  # a second reset is another episode


class Wide(CartPole):
    """A CartPole that begins anywhere, and so may fall at once."""

    def initial(self, key):
        return CartPoleState(*(symmetric * 8 for symmetric in super().initial(key).__dict__.values()))


class Blink(Counter):
    """Ends at every step."""

    def initial(self, key):
        return Count(randint(key, 2**31))

    def transition(self, state, action, key):
        return state, action.to(torch.float32), torch.ones_like(action, dtype=torch.bool)


class Clamping(Counter):
    """Clamps its action where it stands, as many simulators on GPUs do."""

    def transition(self, state, action, key):
        action.clamp_(0, 1)
        return super().transition(state, action, key)


class Advancing(Counter):
    """Moves its state where it stands."""

    def transition(self, state, action, key):
        state.value.add_(action)
        return state, action.to(torch.float32), state.value % 10 >= 4


@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize("device", ["cpu", "sim:1"])
@pytest.mark.parametrize(("cls", "key"), [(Clamping, "action"), (Advancing, "state's value")])
def test_a_transition_that_writes_to_its_arguments_is_refused(
    cls: type, key: str, device: str, auto_reset: bool
) -> None:
    env = started(cls(2, device=device, auto_reset=auto_reset))
    with pytest.raises(RuntimeError, match=rf"{cls.__name__}\.transition: wrote to ['\"]{key}['\"]"):
        env.step(act(3, 0).to(device))


class Counting(Counter):
    calls = 0

    def transition(self, state, action, key):
        self.calls += 1
        return super().transition(state, action, key)


class Keeping(Counter):
    def transition(self, state, action, key):
        self.last = action
        return super().transition(state, action, key)


class Caching(Counter):
    table = None

    def transition(self, state, action, key):
        if self.table is None:
            self.table = torch.arange(10, device=self.device)
        return super().transition(state, action, key)


@pytest.mark.parametrize("device", ["cpu", "sim:1"])
@pytest.mark.parametrize(("cls", "name"), [(Counting, "calls"), (Keeping, "last")])
def test_a_transition_that_sets_an_attribute_is_refused_and_a_table_is_not(cls: type, name: str, device: str) -> None:
    env = started(cls(2, device=device))
    with pytest.raises(RuntimeError, match=rf"{cls.__name__}\.transition: every call sets self\.{name}, expected"):
        env.step(act(3, 0).to(device))
    started(Caching(2, device=device)).step(act(3, 0).to(device))


@pytest.mark.parametrize("backend", ["torch", pytest.param("compile", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("cls", "at_least"), [(Wide, 500), (Blink, 1000)])
def test_every_restart_is_the_beginning_of_its_own_episode(cls: type, at_least: int, backend: str) -> None:
    B, T = 20, 50 if cls is Blink else 400
    env = started(cls(B, seed=3, backend=backend))
    restarts, episode = [], torch.zeros(B, dtype=torch.int64)
    for t in range(T):
        _, (current, _) = env.step(DictTensor({"action": torch.full((B,), t // 5 % 2)}))
        fresh = current["initial_state"]
        episode += fresh
        expected = env.observe(env.initial(child_key(child_key(torch.arange(3, 3 + B), 0x51D), episode)))
        torch.testing.assert_close(current["frame"][fresh], expected[fresh], rtol=0, atol=0)
        restarts += current["frame"][fresh].tolist()
    assert len(restarts) >= at_least
    assert len({str(state) for state in restarts}) == len(restarts)


def test_a_subclass_does_not_inherit_a_kernel_that_knows_nothing_of_it() -> None:
    pytest.importorskip("warp", reason="needs the extra warp")
    with pytest.raises(ValueError, match=r"kernel of CartPole, which ignores Wide\.initial"):
        Wide(2, backend="warp")


def test_one_constructor_for_all() -> None:
    assert CartPole(1).time_limit == 500
    assert CartPole(1, time_limit=None).time_limit is None
    assert Counter(1).time_limit is None
    assert CartPole(1, dtype=torch.float64).observation_space.dtype == "float64"


def test_a_simulation_goes_on_from_its_carry_bit_by_bit() -> None:
    one, other = started(Dice(8, seed=1)), Dice(8, seed=77)
    action = DictTensor({"action/left": torch.zeros(8, dtype=torch.int64), "action/right": torch.zeros(8, 2)})
    one.step(action)
    other.reset()
    other.set_state_tensors(one.state_tensors())
    for _ in range(20):
        (a, _), (b, _) = one.step(action), other.step(action)
        assert torch.equal(a[0]["frame/die"], b[0]["frame/die"])


def test_nobody_can_write_into_the_simulation() -> None:
    env = Counter(1)
    first, _ = env.reset(DictTensor({"state/value": torch.tensor([20])}))
    first["frame"].fill_(999)
    _, (current, _) = env.step(act(1))
    assert current["frame"].tolist() == [21]
    current["frame"].fill_(999)
    assert env.step(act(1))[0][0]["frame"].tolist() == [22]


def test_episodes_are_children_of_the_seed_and_steps_are_children_of_episodes() -> None:
    env = started(Dice(2, seed=40))
    action = DictTensor({"action/left": torch.zeros(2, dtype=torch.int64), "action/right": torch.zeros(2, 2)})
    key = child_key(child_key(torch.tensor([40, 41]), 0x51D), 0)
    alive = torch.ones(2, dtype=torch.bool)
    for t in range(3):
        (reached, _), (current, _) = env.step(action)
        thrown = 1 + randint(child_key(key, t), 6)
        assert torch.equal(reached["frame/die"][alive], thrown[alive])
        alive &= ~current["initial_state"]


def test_keys_are_uniform_and_independent() -> None:
    environments, episodes, steps = torch.meshgrid(torch.arange(64), torch.arange(16), torch.arange(64), indexing="ij")
    seeds = child_key(environments.flatten(), 0x51D)
    keys = child_key(child_key(seeds, episodes.flatten()), steps.flatten())
    assert len(keys.unique()) == len(keys)
    u = uniform(keys).double()
    # 65,536 numbers in 256 cells: chi-squared has mean 255 and deviation 22.6; 6 deviations are one case in 10^9.
    counts = torch.histc(u, 256, 0, 1)
    assert abs(((counts - 256) ** 2 / 256).sum() - 255) < 6 * 22.6
    cube = u.view(64, 16, 64)
    for axis in range(3):  # neighbours in environment, episode and step know nothing of each other
        a, b = cube.narrow(axis, 0, cube.shape[axis] - 1), cube.narrow(axis, 1, cube.shape[axis] - 1)
        correlation = 12 * ((a - 0.5) * (b - 0.5)).mean()
        assert abs(correlation) < 5 / a.numel() ** 0.5
    bits = (keys.unsqueeze(1) >> torch.arange(64)) & 1
    assert (bits.double().mean(0) - 0.5).abs().max() < 5 * 0.5 / 65_536**0.5


def test_drawing_without_saying_so_fails() -> None:
    class Sneaky(Counter):
        def transition(self, state, action, key):
            return Count(state.value + randint(key, 3)), action.to(torch.float32), action > 9

    with pytest.raises(RuntimeError, match="size"):
        started(Sneaky(2)).step(act(0, 0))


def test_errors_name_the_place_and_the_mend() -> None:
    with pytest.raises(ValueError, match="n_envs=0"):
        Counter(0)
    with pytest.raises(ValueError, match="backend='fast'"):
        CartPole(1, backend="fast")
    with pytest.raises(RuntimeError, match="Call reset first"):
        Counter(1).step(act(0))
    env = started(Counter(2))
    with pytest.raises(ShapeMismatchError, match=r"\[2, 1\].*expected \[2\]"):
        env.step(DictTensor({"action": torch.zeros(2, 1, dtype=torch.int64)}))
    with pytest.raises(ShapeMismatchError, match=r"torch.int32, expected"):
        env.step(DictTensor({"action": torch.zeros(2, dtype=torch.int32)}))
    with pytest.raises(DeviceMismatchError, match="is on meta, expected cpu"):
        env.step(DictTensor({"action": torch.zeros(2, dtype=torch.int64, device="meta")}))
    with pytest.raises(KeyError, match="action"):
        env.step(DictTensor({"move": torch.zeros(2, dtype=torch.int64)}))
    with pytest.raises(ShapeMismatchError, match=r"field 'value'.*expected \[1\]"):
        env.set_state([0], Count(torch.tensor([1, 2])))
    with pytest.raises(ShapeMismatchError, match=r"'initial_steps' is \[2\] torch.float32.*torch.int64"):
        env.reset(DictTensor({"initial_steps": torch.zeros(2)}))
    with pytest.raises(ValueError, match="'initial_steps' draws from Discrete actions, got Box"):
        Pendulum(1).reset(DictTensor({"initial_steps": torch.ones(1, dtype=torch.int64)}))
    with pytest.raises(KeyError, match=r"'state/' 'wings' is .*expected no such key.*expected are \['value'\]"):
        env.reset(DictTensor({"state/wings": torch.zeros(2)}))
    with pytest.raises(TypeError, match="expected a frozen dataclass"):
        env.set_state([0], torch.zeros(1))
    with pytest.raises(ValueError, match="Did you mean 'CartPole-v1'"):
        make("Cartpole-v1", 1)


@pytest.mark.parametrize("auto_reset", [False, True])
@pytest.mark.parametrize(
    ("odd", "found"),
    [
        (lambda value, reward, ended: (value[:1], reward, ended), r"'state/value' is \[1\].*expected \[2\]"),
        (lambda value, reward, ended: (value.float(), reward, ended), r"'state/value'.*float32, expected .*int64"),
        (lambda value, reward, ended: (value, reward.unsqueeze(1), ended), r"'reward' is \[2, 1\].*\[2\]"),
        (lambda value, reward, ended: (value, reward, ended.float()), r"'terminated'.*float32, expected .*torch.bool"),
    ],
)
def test_what_transition_returns_is_neither_repeated_nor_rounded(odd: Any, found: str, auto_reset: bool) -> None:
    class Wrong(Counter):
        def transition(self, state, action, key):
            state, *rest = super().transition(state, action, key)
            value, reward, terminated = odd(state.value, *rest)
            return Count(value), reward, terminated

    with pytest.raises(ShapeMismatchError, match=f"Wrong.transition: {found}"):
        started(Wrong(2, auto_reset=auto_reset)).step(act(0, 0))


@pytest.mark.parametrize(
    ("odd", "returned"),
    [
        (lambda state, reward, ended: (state, reward, ended, {}), r"\(Count, Tensor, Tensor, dict\)"),
        (lambda state, reward, ended: (state, 1.0, ended), r"\(Count, float, Tensor\)"),
        (lambda state, reward, ended: (state, reward, False), r"\(Count, Tensor, bool\)"),
        (lambda state, reward, ended: state, r"\(Count\)"),
    ],
)
def test_a_transition_returns_a_state_and_two_tensors(odd: Any, returned: str) -> None:
    class Wrong(Counter):
        def transition(self, state, action, key):
            return odd(*super().transition(state, action, key))

    with pytest.raises(TypeError, match=rf"Wrong.transition: returned {returned}, expected three: .* torch.zeros_like"):
        started(Wrong(2)).step(act(0, 0))


def test_a_frame_unlike_the_space_is_found_at_the_first_reset() -> None:
    class Wrong(Counter):
        observation_space = spaces.Box(0, 1, (3,))

    with pytest.raises(ShapeMismatchError, match=r"observe: 'frame'.*expected \[1, 3\]"):
        Wrong(1).reset()
    with pytest.raises(ShapeMismatchError, match=r"^Wrong.observe: 'frame'.*correct one of them\."):
        check_vec_env(Wrong, env_args={"n_envs": 4})  # env_info has nothing to do with it


def test_spaces_are_not_shared_between_environments() -> None:
    one, other = Counter(1), Counter(1)
    assert one.action_space is not other.action_space
    assert Counter.action_space is not one.action_space
