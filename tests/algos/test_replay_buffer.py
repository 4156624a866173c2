from __future__ import annotations

import itertools
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from fake_agents import RngAgent
from fake_envs import counting_length, create_counting_env
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlstruct import DeviceMismatchError, DictTensor, ShapeMismatchError, TemporalDictTensor, Trajectories
from rlstruct.algos import prioritised_replay, replay_buffer
from rlstruct.algos.prioritised_replay import PrioritisedReplayBuffer, running_maximum
from rlstruct.algos.replay_buffer import ReplayBuffer
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnvInf
from rlstruct.testing import allow_host_sync, forbid_host_sync

LENGTHS = (3, 1, 4, 2, 6)


def create_batcher(n_envs: int, n_timesteps: int, device: str = "cpu", seed: int = 0) -> RL_Batcher:
    env_args = {"n_envs": n_envs, "auto_reset": True, "device": device}
    return RL_Batcher(n_timesteps, RngAgent, create_counting_env, env_args=env_args, seed=seed, device=device)


def collect(batcher: RL_Batcher) -> Trajectories:
    batcher.execute()
    trajectories, _ = batcher.get()
    assert trajectories is not None
    return trajectories


def check_counting_batch(batch: DictTensor, n_step: int, discount: float, newest: dict[int, tuple[int, int]]) -> None:
    """Compare a batch of CountingEnv with arithmetic. ``newest``: environment to (episode, step) of its head."""
    batch = batch.to("cpu")
    number, episode, step = batch["observation/frame"].unbind(1)  # [K] each
    length = torch.tensor(LENGTHS)[(number + episode) % len(LENGTHS)]
    head_episode = torch.tensor([newest[n][0] for n in number.tolist()])
    head_step = torch.tensor([newest[n][1] for n in number.tolist()])
    known = torch.where(episode == head_episode, head_step, length)  # steps of that episode that were taken
    m = torch.minimum(torch.full_like(step, n_step), known - step)
    assert m.min().item() >= 1
    following = torch.stack([number, episode, step + m], dim=1)
    assert torch.equal(batch["_observation/frame"], following)
    assert batch["_observation/frame"].dtype == torch.int64
    ended = (step + m == length) & ((number + episode) % 2 == 0)
    assert torch.equal(batch["terminated"], ended)
    # Step k is rewarded with k: step + 1, step + 2, … for m of them.
    reward = sum(torch.where(i < m, (step + 1 + i) * discount**i, 0.0) for i in range(n_step))
    torch.testing.assert_close(batch["reward"], torch.as_tensor(reward).float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(batch["discount"], (discount ** m.double()).float(), rtol=1e-6, atol=1e-6)


def heads(trajectories: Trajectories) -> dict[int, tuple[int, int]]:
    last = trajectories.to("cpu").steps["_observation/frame"][:, -1]
    return {number: (episode, step) for number, episode, step in last.tolist()}


@pytest.mark.parametrize("prioritised", [False, True])
def test_next_observations_of_100_000_rows_are_exact_around_the_ring_and_at_every_end(prioritised: bool) -> None:
    kind = PrioritisedReplayBuffer if prioritised else ReplayBuffer
    n_step, discount = 3, 0.9
    buffer = kind(500, n_step=n_step, discount=discount)
    with create_batcher(n_envs=5, n_timesteps=7) as batcher:
        batcher.reset()
        for _ in range(50):  # 350 steps of each environment, in rings of 100 slots
            trajectories = collect(batcher)
            buffer.extend(trajectories)
            with forbid_host_sync():
                batch = buffer.sample(2000)
            check_counting_batch(batch, n_step, discount, heads(trajectories))


@settings(max_examples=40)
@given(
    n_envs=st.integers(1, 4),
    T=st.integers(1, 6),
    n_step=st.integers(1, 5),
    slack=st.integers(0, 20),
    n_pieces=st.integers(1, 12),
    prioritised=st.booleans(),
)
def test_exact_for_all_sizes(n_envs: int, T: int, n_step: int, slack: int, n_pieces: int, prioritised: bool) -> None:
    kind = PrioritisedReplayBuffer if prioritised else ReplayBuffer
    buffer = kind(n_envs * (2 * T + 1 + slack), n_step=n_step, discount=0.5)
    with create_batcher(n_envs, T, seed=3) as batcher:
        batcher.reset()
        for _ in range(n_pieces):
            buffer.extend(trajectories := collect(batcher))
        check_counting_batch(buffer.sample(300), n_step, 0.5, heads(trajectories))


def test_a_whole_number_may_be_a_float() -> None:
    buffer = ReplayBuffer(1e2, n_step=2.0)  # type: ignore[arg-type]
    with create_batcher(n_envs=5, n_timesteps=7) as batcher:
        batcher.reset()
        buffer.extend(collect(batcher))
    assert len(buffer.sample(3)["index"]) == 3


@pytest.mark.parametrize("prioritised", [False, True])
def test_all_that_the_agent_returned_is_kept(prioritised: bool) -> None:
    buffer = (PrioritisedReplayBuffer if prioritised else ReplayBuffer)(500)
    known = {}
    with create_batcher(n_envs=5, n_timesteps=7) as batcher:
        batcher.reset()
        for _ in range(3):
            buffer.extend(trajectories := collect(batcher))
            steps = trajectories.steps
            frames, drawn = steps["observation/frame"].flatten(0, 1), steps["action/drawn"].flatten()
            known |= dict(zip(map(tuple, frames.tolist()), drawn.tolist(), strict=True))
    batch = buffer.sample(300)
    assert batch["action/drawn"].tolist() == [known[tuple(frame)] for frame in batch["observation/frame"].tolist()]


def test_a_batch_without_a_key_of_the_first_one_is_refused() -> None:
    buffer = ReplayBuffer(500)
    with create_batcher(n_envs=5, n_timesteps=7) as batcher:
        batcher.reset()
        buffer.extend(collect(batcher))
        batch = collect(batcher)
    steps = {key: value for key, value in batch.steps.items() if key != "action/drawn"}
    with pytest.raises(KeyError, match="action/drawn"):
        buffer.extend(Trajectories(batch.info, TemporalDictTensor(steps, batch.lengths)))


@pytest.mark.parametrize("prioritised", [False, True])
def test_rows_of_different_lengths_go_on_where_they_stopped(prioritised: bool) -> None:
    n_envs, T = 3, 4
    with create_batcher(n_envs, 200) as batcher:
        batcher.reset()
        whole = collect(batcher)
    buffer = (PrioritisedReplayBuffer if prioritised else ReplayBuffer)(n_envs * 25, n_step=2, discount=0.5)
    start = torch.zeros(n_envs, dtype=torch.int64)
    for piece in range(40):
        lengths = torch.randint(0, T + 1, (n_envs,))
        at = start.unsqueeze(1) + torch.arange(T)  # behind its length a row holds steps that have not happened yet
        steps = {k: v[torch.arange(n_envs).unsqueeze(1), at] for k, v in whole.steps.items()}
        info = DictTensor({"step": torch.full((n_envs,), piece * T)})
        buffer.extend(Trajectories(info, TemporalDictTensor(steps, lengths)))
        start += lengths
        if (start == 0).any():
            continue
        last = whole.steps["_observation/frame"][torch.arange(n_envs), start - 1]
        newest = {number: (episode, step) for number, episode, step in last.tolist()}
        check_counting_batch(buffer.sample(200), 2, 0.5, newest)
    expected = sum(len(expected_steps(int(start[b]), b, 25)) for b in range(n_envs))
    assert buffer.n_transitions() == expected


def expected_steps(n_taken: int, seed: int, ring: int) -> set[tuple[int, int]]:
    """The (episode, step) that a ring of slots keeps of an environment that took so many steps: the slow way."""
    slots: list[tuple[int, int] | None] = []
    taken = 0
    for episode in itertools.count():
        length = counting_length(seed, episode)
        for step in range(length):
            slots.append((episode, step))
            taken += 1
            if taken == n_taken:
                slots.append(None)  # where it stands now
                if step == length - 1:
                    slots.append(None)  # the head is one slot further, and empty
                return {slot for slot in slots[-ring:] if slot is not None}
        slots.append(None)  # the final observation
    raise AssertionError


@pytest.mark.parametrize("n_pieces", [1, 3, 4, 20])
def test_exactly_the_latest_steps_are_drawn_and_each_as_often(n_pieces: int) -> None:
    n_envs, T, ring = 3, 5, 21
    buffer = ReplayBuffer(n_envs * ring)
    with create_batcher(n_envs, T) as batcher:
        batcher.reset()
        for _ in range(n_pieces):
            buffer.extend(collect(batcher))
    expected = {(b, *step) for b in range(n_envs) for step in expected_steps(n_pieces * T, b, ring)}
    assert buffer.n_transitions() == len(expected)
    n_drawn = 400 * len(expected)
    found, counts = buffer.sample(n_drawn)["observation/frame"].unique(dim=0, return_counts=True)
    assert {tuple(row) for row in found.tolist()} == expected
    assert chi_square(counts, torch.full((len(expected),), 400.0)) < 2 * len(expected) + 10


def chi_square(counts: Tensor, expected: Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_a_reset_or_a_batch_left_out_cuts_the_episode() -> None:
    buffer = ReplayBuffer(1000, n_step=4, discount=1.0)
    with create_batcher(2, 5) as batcher:
        batcher.reset()
        collect(batcher)  # never seen by the buffer, which sets in within an episode
        buffer.extend(collect(batcher))
        collect(batcher)
        buffer.extend(collect(batcher))
        batcher.reset()
        buffer.extend(collect(batcher))
    batch = buffer.sample(2000)
    before, after = batch["observation/frame"], batch["_observation/frame"]
    assert torch.equal(before[:, :2], after[:, :2])
    m = after[:, 2] - before[:, 2]
    # With discount 1 the reward is the sum of step + 1 … step + m.
    torch.testing.assert_close(batch["reward"], (m * before[:, 2] + m * (m + 1) // 2).float())
    assert buffer.n_transitions() == 2 * 15


def test_observations_are_kept_once_in_their_own_dtype() -> None:
    n_envs, ring = 4, 300
    buffer = ReplayBuffer(n_envs * ring)
    with create_batcher(n_envs, 20) as batcher:
        batcher.reset()
        for _ in range(30):
            buffer.extend(collect(batcher))
    sizes = {name: column.nbytes for name, column in buffer.columns.items()}
    observations = sizes.pop("observation/frame")
    frame = 3 * 8  # three int64
    ends = sum(1 for b in range(n_envs) for _, step in expected_steps(600, b, ring) if step == 0)
    assert observations <= 1.05 * (buffer.n_transitions() + ends) * frame
    assert observations == n_envs * (ring + 1) * frame
    assert sum(sizes.values()) == n_envs * (ring + 1) * (8 + 4 + 4 + 1 + 1 + 8 + 8 + 8)


class PixelEnv(gymnasium.Env[Any, Any]):
    """Shows a picture that was never shown before, for episodes of 1 to 9 steps."""

    observation_space = spaces.Box(0, 255, (2, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self, number: int) -> None:
        self.number, self.shown = number, 0

    def _picture(self) -> Any:
        self.shown += 1
        return np.full((2, 3), [self.shown % 256, self.shown // 256, self.number], np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 10))
        return self._picture(), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return self._picture(), 1.0, self.left == 0 and self.shown % 2 == 0, self.left == 0, {}


def collected_singly(trajectories: Trajectories) -> Trajectories:
    """The same steps, as if only the newest image had been shown."""
    steps = dict(trajectories.steps.items())
    newest = {key: steps[key][:, :, -1:] for key in ("observation/frame", "_observation/frame")}
    return Trajectories(trajectories.info, TemporalDictTensor({**steps, **newest}, trajectories.lengths))


def create_stacked_env(n_envs: int, seed: int, padding: str) -> GymEnvInf:
    return GymEnvInf([FrameStackObservation(PixelEnv(b), 4, padding_type=padding) for b in range(n_envs)], seed=seed)


@pytest.mark.parametrize("skip_first", [False, True])
@pytest.mark.parametrize("prioritised", [False, True])
@pytest.mark.parametrize("padding", ["reset", "zero"])
def test_stacks_are_rebuilt_as_the_environment_makes_them(padding: Any, prioritised: bool, skip_first: bool) -> None:
    kind = PrioritisedReplayBuffer if prioritised else ReplayBuffer
    buffer = kind(2 * 60, n_stack=4, stack_padding=padding)
    truth: dict[bytes, tuple[Tensor, Tensor]] = {}
    env_args = {"n_envs": 2, "padding": padding}
    with RL_Batcher(5, RngAgent, create_stacked_env, env_args=env_args, seed=0) as batcher:
        batcher.reset()
        if skip_first:
            collect(batcher)
        for i in range(20):
            trajectories = collect(batcher)
            steps = trajectories.transitions()
            pairs = zip(steps["observation/frame"], steps["_observation/frame"], strict=True)
            truth |= {bytes(before[-1].flatten().tolist()): (before, after) for before, after in pairs}
            buffer.extend(collected_singly(trajectories) if i % 2 else trajectories)
            batch = buffer.sample(50)
            assert batch["observation/frame"].dtype == torch.uint8
            for before, after in zip(batch["observation/frame"], batch["_observation/frame"], strict=True):
                expected = truth[bytes(before[-1].flatten().tolist())]
                assert torch.equal(before, expected[0])
                assert torch.equal(after, expected[1])
    assert buffer.columns["observation/frame"].shape == (2 * 61, 2, 3)


class ClockEnv(gymnasium.Env[Any, Any]):
    """Shows the number of the step; episodes do not end."""

    observation_space, action_space = spaces.Box(0, 255, (1,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.now = 0
        return np.float32([0]), {}

    def step(self, action: Any) -> Any:
        self.now += 1
        return np.float32([self.now]), 1.0, False, False, {}


def create_stacked_clock(n_envs: int, seed: int) -> GymEnvInf:
    return GymEnvInf([FrameStackObservation(ClockEnv(), 4) for _ in range(n_envs)], seed=seed)


@pytest.mark.parametrize("kind", [ReplayBuffer, PrioritisedReplayBuffer])
def test_nothing_is_drawn_before_a_stack_is_whole(kind: Any) -> None:
    with RL_Batcher(1, RngAgent, create_stacked_clock, env_args={"n_envs": 1}, seed=0) as batcher:
        batcher.reset()
        pieces = [collect(batcher) for _ in range(5)]
    from_reset, within = kind(30, n_stack=4, n_step=3), kind(30, n_stack=4, n_step=3)
    from_reset.extend(pieces[0])
    assert from_reset.sample(2)["_observation/frame"].shape == (2, 4, 1)  # padded, as the environment does
    for piece in pieces[1:4]:  # steps 1 to 3 of the episode
        within.extend(piece)
        words = r"Buffer\.sample: 0 steps can be sampled, expected at least 1.*n_stack is 4, so its first 3 steps lack"
        with pytest.raises(ValueError, match=words):
            within.sample(2)
    within.extend(pieces[4])
    assert within.n_transitions() == 1
    assert within.sample(2)["observation/frame"].flatten(1).tolist() == [[1, 2, 3, 4]] * 2


@pytest.mark.parametrize("accelerator", ["sim:0", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("prioritised", [False, True])
def test_the_same_steps_on_a_device_of_its_own_without_a_wait(prioritised: bool, accelerator: str) -> None:
    kind = PrioritisedReplayBuffer if prioritised else ReplayBuffer
    batches = []
    for device in ("cpu", accelerator):
        buffer = kind(120, device=device, n_step=2, seed=5)
        with create_batcher(3, 4) as batcher:
            batcher.reset()
            for _ in range(8):
                trajectories = collect(batcher).to(device)
                with forbid_host_sync():
                    buffer.extend(trajectories)
                    batch = buffer.sample(64)
                    if isinstance(buffer, PrioritisedReplayBuffer):
                        buffer.update_priorities(batch["index"], batch["reward"])
        assert batch.device == torch.device(device)
        batches.append(batch.to("cpu"))
    for key in batches[0].keys():
        assert torch.equal(batches[0][key], batches[1][key]), key


def test_another_seed_draws_other_steps_and_every_call_its_own() -> None:
    drawn = []
    for seed in (0, 0, 1):
        buffer = ReplayBuffer(400, seed=seed)
        with create_batcher(4, 10) as batcher:
            batcher.reset()
            buffer.extend(collect(batcher))
        drawn.append((buffer.sample(30)["index"], buffer.sample(30)["index"]))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert not torch.equal(drawn[0][0], drawn[2][0])
    assert not torch.equal(drawn[0][0], drawn[0][1])


@pytest.mark.parametrize("prioritised", [False, True])
def test_a_restored_buffer_goes_on_as_if_nothing_had_happened(prioritised: bool) -> None:
    kind = PrioritisedReplayBuffer if prioritised else ReplayBuffer
    buffer, restored = kind(90), kind(90)
    with create_batcher(3, 4) as batcher:
        batcher.reset()
        for _ in range(9):
            buffer.extend(collect(batcher))
        buffer.sample(10)
        state = buffer.state_dict()
        restored.load_state_dict(state)
        trajectories = collect(batcher)
        for one in (buffer, restored):
            one.extend(trajectories)
    first, second = buffer.sample(50), restored.sample(50)
    assert all(torch.equal(first[key], second[key]) for key in first.keys())
    assert buffer.columns["ready"].data_ptr() != restored.columns["ready"].data_ptr()


def test_a_buffer_in_use_refuses_the_state_of_another_number_of_environments() -> None:
    buffers = [ReplayBuffer(90), ReplayBuffer(90)]
    for buffer, n_envs in zip(buffers, (3, 2), strict=True):
        with create_batcher(n_envs, 4) as batcher:
            batcher.reset()
            buffer.extend(collect(batcher))
    before = {name: column.clone() for name, column in buffers[0].columns.items()}
    with pytest.raises(ShapeMismatchError, match=r"ready \[92\].* expected .*ready \[93\].* Load it into a new buffer"):
        buffers[0].load_state_dict(buffers[1].state_dict())
    assert all(torch.equal(column, before[name]) for name, column in buffers[0].columns.items())


@pytest.mark.parametrize("capacity", [60, 200])
def test_a_buffer_of_another_capacity_refuses_the_state_before_its_first_step_too(capacity: int) -> None:
    saved = ReplayBuffer(90)
    with create_batcher(3, 4) as batcher:
        batcher.reset()
        saved.extend(collect(batcher))
    words = rf"room for 30 observations of each of 3 environments, expected {capacity // 3}: the capacity is {capacity}"
    with pytest.raises(ShapeMismatchError, match=words):
        ReplayBuffer(capacity).load_state_dict(saved.state_dict())
    empty = ReplayBuffer(capacity)
    empty.load_state_dict(ReplayBuffer(90).state_dict())  # which has no form yet
    assert empty.n_transitions() == 0


@pytest.mark.parametrize("kind", [ReplayBuffer, PrioritisedReplayBuffer])
@pytest.mark.parametrize("most_bytes", [1 << 26, 1 << 10])  # all at once, or a few at a time
def test_samples_are_those_of_as_many_calls(kind: Any, most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_buffer, "MOST_BYTES", most_bytes)
    with create_batcher(3, 20) as batcher:
        batcher.reset()
        together, singly = (kind(150, n_step=2) for _ in range(2))
        for _ in range(3):
            batch = collect(batcher)
            for buffer in (together, singly):
                buffer.extend(batch)
            for found in together.samples(7, 5):
                expected = singly.sample(7)
                assert found.keys() == expected.keys()
                for key, value in expected.items():
                    assert torch.equal(found[key], value), key
                if kind is PrioritisedReplayBuffer:
                    for buffer in (together, singly):
                        buffer.update_priorities(found["index"], found["reward"])
    with pytest.raises(ValueError, match="the buffer is empty"):
        next(kind(40).samples(7, 5))


@pytest.mark.parametrize(("most_bytes", "k"), [(1 << 26, 6), (5000, 3), (1, 1)])
def test_stacks_are_equally_large_samples(most_bytes: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_buffer, "MOST_BYTES", most_bytes)
    with create_batcher(3, 20) as batcher:
        batcher.reset()
        stacked, singly, batch = ReplayBuffer(150), ReplayBuffer(150), collect(batcher)
    for buffer in (stacked, singly):
        buffer.extend(batch)
    stacks = list(stacked.stacks(7, 6))
    assert [len(stack["reward"]) for stack in stacks] == [k] * (6 // k)
    for stack in stacks:
        for i in range(k):
            for key, value in singly.sample(7).items():
                assert torch.equal(stack[key][i], value), key


@pytest.mark.parametrize("name", ["sample", "samples"])
def test_a_buffer_that_samples_in_its_own_way_is_not_passed_over(name: str) -> None:
    own = type("Own", (ReplayBuffer,), {name: lambda self, *sizes: getattr(ReplayBuffer, name)(self, *sizes)})
    assert ReplayBuffer(10).draws_uniformly()
    assert not own(10).draws_uniformly()
    assert not PrioritisedReplayBuffer(10).draws_uniformly()


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="ReplayBuffer: n_step is 0, expected at least 1"):
        ReplayBuffer(10, n_step=0)
    buffer = ReplayBuffer(30)
    with pytest.raises(ValueError, match=r"ReplayBuffer.sample: the buffer is empty. Call extend\(\) first"):
        buffer.sample(1)
    assert buffer.n_transitions() == 0
    with create_batcher(2, 4) as batcher:
        batcher.reset()
        trajectories = collect(batcher)
    with pytest.raises(ShapeMismatchError, match="may take 18 slots, and the capacity is 10"):
        ReplayBuffer(10).extend(trajectories)
    with pytest.raises(DeviceMismatchError, match=r"are on cpu, expected sim:0. Move them with .to\('sim:0'\)"):
        ReplayBuffer(30, device="sim:0").extend(trajectories)
    buffer.extend(trajectories)
    with pytest.raises(ShapeMismatchError, match="have 1 rows, expected 2 as before"):
        buffer.extend(trajectories.slice(0))
    with pytest.raises(ValueError, match="exponent is -1"):
        PrioritisedReplayBuffer(10, exponent=-1.0)


def test_empty_slots_are_never_drawn_whatever_is_rounded() -> None:
    buffer = PrioritisedReplayBuffer(4000, exponent=1.0, epsilon=1e-12)
    with create_batcher(4, 20) as batcher:
        batcher.reset()
        for _ in range(30):
            buffer.extend(collect(batcher))
    index = buffer.columns["ready"].nonzero().squeeze(1)
    assert len(index) < len(buffer.priority)
    buffer.update_priorities(index, torch.rand(len(index)) * 10.0 ** torch.randint(-9, 9, (len(index),)))
    assert (buffer.priority[buffer.sample(50_000)["index"]] > 0).all()


def test_the_largest_random_number_draws_a_step_in_float32_too(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 1.0 - 2.0**-24
    monkeypatch.setattr(prioritised_replay, "accumulator_dtype", lambda device: torch.float32)
    monkeypatch.setattr(prioritised_replay.random, "uniform", lambda key, **_: torch.full(key.shape, largest))
    buffer = PrioritisedReplayBuffer(400)
    with create_batcher(4, 20) as batcher:
        batcher.reset()
        buffer.extend(collect(batcher))
    index = buffer.sample(256)["index"]  # (255 + largest) / 256 is 1 in float32
    assert bool((buffer.priority[index] > 0).all())


def test_steps_are_drawn_in_proportion_to_their_priority() -> None:
    buffer = PrioritisedReplayBuffer(400, exponent=0.5, correction=1.0, epsilon=1e-9)
    with create_batcher(4, 20) as batcher:
        batcher.reset()
        buffer.extend(collect(batcher))
    index = buffer.columns["ready"].nonzero().squeeze(1)
    error = torch.rand(len(index)) * 5 + 0.1
    buffer.update_priorities(index, -error)
    counts = torch.zeros(len(buffer.columns["ready"]))
    n_drawn = 0
    for _ in range(50):
        drawn = buffer.sample(1000)
        counts += torch.bincount(drawn["index"], minlength=len(counts))
        n_drawn += 1000
    probability = error.sqrt() / error.sqrt().sum()
    assert counts.sum().item() == counts[index].sum().item() == n_drawn
    # 79 degrees of freedom: above 138 once in 10,000 times.
    assert chi_square(counts[index], probability * n_drawn) < 138
    at = torch.searchsorted(index, drawn["index"])
    weight = 1.0 / (len(index) * probability[at])
    torch.testing.assert_close(drawn["weight"], weight / weight.max(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "sim:0", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("error", [torch.nan, torch.inf])
def test_errors_that_are_not_finite_leave_indices_in_range(error: float, device: str) -> None:
    """On CUDA an index out of range ends all work, before the training can say that its loss is NaN."""
    buffer = PrioritisedReplayBuffer(400, exponent=1.0, epsilon=1e-9, device=device)
    with create_batcher(4, 20) as batcher:
        batcher.reset()
        buffer.extend(collect(batcher).to(device))
    index = buffer.columns["ready"].to("cpu").nonzero().squeeze(1)[:4].to(device)
    buffer.update_priorities(index, torch.tensor([2.0, error, 5.0, -error], device=device))
    assert buffer.priority[index].to("cpu").tolist() == pytest.approx([2.0, 1.0, 5.0, 1.0])  # the largest before was 1
    drawn = buffer.sample(2000)["index"].to("cpu").tolist()
    assert set(drawn) <= set(range(len(buffer.priority)))
    buffer.update_priorities(index[2:3], torch.tensor([3.0], device=device))
    buffer.update_priorities(index[1:2], torch.tensor([error], device=device))
    assert buffer.priority[index[1:2]].to("cpu").tolist() == pytest.approx([5.0])  # of all so far, not of those kept


def test_new_steps_come_first_and_overwritten_ones_keep_their_place_empty() -> None:
    buffer = PrioritisedReplayBuffer(2 * 12)
    with create_batcher(2, 4) as batcher:
        batcher.reset()
        buffer.extend(collect(batcher))
        old = buffer.sample(32)["index"]
        buffer.update_priorities(old, torch.full((32,), 7.0))
        for _ in range(3):
            buffer.extend(collect(batcher))
        ready = buffer.priority > 0
        assert int(ready.sum()) == buffer.n_transitions()
        torch.testing.assert_close(buffer.priority[ready].max().item(), 7.000001**0.6)
        buffer.update_priorities(torch.arange(26), torch.ones(26))
    assert torch.equal(buffer.priority > 0, ready)
    with allow_host_sync():
        assert not (buffer.sample(500)["index"] % 13 == 12).any()  # the spare slots


@pytest.mark.parametrize("accelerator", ["sim:0", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("n", [1, 7, 1024, 1025, 5000])
def test_a_running_maximum_in_rows_is_that_of_the_whole(n: int, accelerator: str) -> None:
    generator = torch.Generator().manual_seed(n)
    for values in (torch.randn(n, generator=generator), -torch.rand(n, generator=generator).cumsum(0)):
        expected = values.cummax(0).values
        assert torch.equal(running_maximum(values), expected)
        assert torch.equal(running_maximum(values.to(accelerator)).to("cpu"), expected)


@pytest.mark.parametrize("accelerator", ["sim:0", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_no_maximum_is_taken_of_one_long_row(monkeypatch: pytest.MonkeyPatch, accelerator: str) -> None:
    longest, cummax = [], Tensor.cummax
    buffer = PrioritisedReplayBuffer(20_000, device=accelerator)
    with create_batcher(4, 10) as batcher:
        batcher.reset()
        buffer.extend(collect(batcher).to(accelerator))
    monkeypatch.setattr(Tensor, "cummax", lambda x, dim: longest.append(x.shape[dim]) or cummax(x, dim))
    buffer.sample(8)
    assert longest
    assert max(longest) <= 1024  # a GPU takes a row in one block


def test_a_buffer_that_does_not_fit_into_memory_says_what_it_takes() -> None:
    with create_batcher(1, 4) as batcher:
        batcher.reset()
        steps = collect(batcher)
    said = r"^ReplayBuffer: \d+ transitions take [\d,]+\.\d GiB on cpu for \[.*\] \w+ alone, .* Lower the capacity"
    with pytest.raises(MemoryError, match=said):
        ReplayBuffer(2**50).extend(steps)
