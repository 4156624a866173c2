"""Purity is doubted for what rounding cannot explain, and for nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlstruct import DictTensor, RL_Agent
from rlstruct.batchers import RL_Batcher
from rlstruct.engine.executors import agent_runner
from rlstruct.engine.precision import EXACT, Precision
from rlstruct.engine.purity import PurityError, PurityProbe, check_equal
from rlstruct.engine.runner import Runner
from rlstruct.functional.random import categorical
from rlstruct.sims import make

CPU = torch.device("cpu")
AgentOutput = tuple[DictTensor, DictTensor]


@pytest.fixture
def tf32() -> Iterator[None]:
    """Let torch multiply in TF32 where it can, which no CPU of ours does."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def flipped(action: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """The same draws, but for n of them."""
    rows = torch.randperm(len(action), generator=generator)[:n]
    return action.index_put((rows,), 1 - action[rows])


def test_draws_that_rounding_flips_in_one_row_or_two_of_a_million_are_no_broken_promise() -> None:
    generator = torch.Generator().manual_seed(0)
    action = torch.randint(2, (1 << 20,), generator=generator)
    probe = PurityProbe()
    for n in (1, 1, 2, 1, 3, 1, 1):  # 0.2 are expected: all of these looks are rare, and they come in a row
        probe.compare({"action": action}, {"action": flipped(action, n, generator)})


@pytest.mark.parametrize("rows", [1, 2, 8, 999, 1999, 4096, 1 << 20])
def test_a_day_of_collection_raises_nothing(rows: int) -> None:
    """Rounding flips at most 1.6e-7 of the draws; here it is ten times as many."""
    looks = 165_000  # at 2^20 environments a day of 1e9 steps a second
    probe = PurityProbe()
    for n in np.random.default_rng(0).binomial(rows, 1.6e-6, looks).tolist():
        probe.check("action", n, rows)


@pytest.mark.parametrize("rows", [1, 2, 19, 399])
def test_coarse_numbers_may_flip_one_draw_in_fifty(rows: int) -> None:
    probe = PurityProbe()
    for n in np.random.default_rng(0).binomial(rows, 0.02, 50_000).tolist():
        probe.check("action", n, rows, eps=2.0**-7)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 1000, 1 << 20])
def test_a_difference_in_all_rows_is_found_soon(rows: int) -> None:
    probe, shown = PurityProbe(), torch.ones(rows)

    def look_often() -> None:
        for _ in range(2):
            probe.compare({"shown": shown}, {"shown": 2 * shown})

    with pytest.raises(PurityError, match="'shown' differs from the agent's eager result"):
        look_often()


def test_a_difference_in_one_row_of_a_hundred_is_found_at_the_second_look() -> None:
    generator = torch.Generator().manual_seed(0)
    action = torch.randint(2, (1 << 20,), generator=generator)
    probe = PurityProbe()
    probe.compare({"action": action}, {"action": flipped(action, len(action) // 100, generator)})
    with pytest.raises(PurityError, match="in 10485 of 1048576 rows"):
        probe.compare({"action": action}, {"action": flipped(action, len(action) // 100, generator)})


def as_tf32(x: Tensor) -> Tensor:
    """Round to ten bits of mantissa."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


class Coarse(RL_Agent):
    """Multiplies as a GPU does in TF32, and reads a gain that must not change."""

    pure = True
    gain = 1.0

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def logits(self, frame: Tensor, exact: bool) -> Tensor:
        for layer in self.model:
            if isinstance(layer, nn.Linear) and not exact:
                frame = as_tf32(frame) @ as_tf32(layer.weight).t() + layer.bias
            else:
                frame = layer(frame)
        return 8.0 * frame * self.gain

    def answer(self, observation: DictTensor, exact: bool) -> DictTensor:
        logits = self.logits(observation["frame"], exact)
        return DictTensor({"action": categorical(logits, observation["rng"]), "logits": logits})

    def __call__(self, state: DictTensor, observation: DictTensor, *_: Any) -> AgentOutput:
        return self.answer(observation, exact=False), state


@torch.no_grad()
def probe_often(agent: Coarse, runner: Runner[Any], times: int) -> int:
    """Compare the agent in TF32 with an executor that is exact and has a gain of 1; count the rows that differ."""
    n_different = 0
    for seed in range(times):
        generator = torch.Generator().manual_seed(seed)
        frame, rng = torch.randn(4096, 4, generator=generator), torch.randint(1 << 62, (4096,), generator=generator)
        observation, gain = DictTensor({"frame": frame, "rng": rng}), agent.gain
        agent.gain = 1.0
        executed = agent.answer(observation, exact=True)
        agent.gain = gain
        n_different += int((agent(DictTensor(), observation)[0]["action"] != executed["action"]).sum())
        runner.probe(executed, DictTensor(), observation, DictTensor())
    return n_different


def test_tf32_is_no_broken_promise_and_a_broken_one_is_still_found(tf32: None) -> None:
    agent = Coarse()
    runner = agent_runner(agent, CPU, compiled=False)
    assert probe_often(agent, runner, 40)  # draws are flipped
    agent.gain = 1.5
    with pytest.raises(PurityError, match="'logits' differs from"):
        probe_often(agent, runner, 8)


CUDA = torch.device("cuda", 0)  # nothing computes there: only torch's settings are read
CONVOLUTION, PRODUCT = (nn.Conv2d(1, 1, 3), torch.ones(1, 1, 4, 4)), (nn.Linear(4, 4), torch.ones(1, 4))


@pytest.mark.parametrize("allowed", [True, False])
def test_convolutions_alone_are_judged_as_tf32_which_is_how_cudnn_computes_them(allowed: bool) -> None:
    """Torch lets cuDNN do so by default. Differences are allowed for where they occur: on CUDA."""
    with torch.backends.cudnn.flags(allow_tf32=allowed):
        found = {}
        for name, (layer, x) in {"convolution": CONVOLUTION, "product": PRODUCT}.items():
            with Precision() as precision:
                layer(x)
            found[name] = precision.eps(CUDA), precision.eps(CPU)
    assert found == {"convolution": (2.0**-10 if allowed else EXACT, EXACT), "product": (EXACT, EXACT)}


class Half(RL_Agent):
    """An actor-critic in bfloat16, by its weights or by autocast; its answer may show nothing of that."""

    pure = True

    def __init__(self, way: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
        self.autocast = way == "autocast"
        if way == "weights":
            self.model.bfloat16()

    def __call__(self, state: DictTensor, observation: DictTensor, *_: Any) -> AgentOutput:
        frame = observation["frame"]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            numbers = self.model(frame if self.autocast else frame.bfloat16()).float() * 4.0
        action = categorical(numbers[:, :2], observation["rng"])
        return DictTensor({"action": action, "logits": numbers[:, :2], "value": numbers[:, 2]}), state


@pytest.mark.parametrize("way", ["weights", "autocast"])
@torch.no_grad()
def test_bfloat16_is_no_broken_promise(way: str) -> None:
    """Compiled code may keep in float32 what eager torch rounds to bfloat16."""
    agent, exact = Half(way), Half("weights")
    exact.model.load_state_dict(agent.model.state_dict())
    exact.model.float()
    runner, n_different = agent_runner(agent, CPU, compiled=False), 0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        frame, rng = torch.randn(4096, 4, generator=generator), torch.randint(1 << 62, (4096,), generator=generator)
        numbers = exact.model(frame.bfloat16().float()) * 4.0
        given = {"action": categorical(numbers[:, :2], rng), "logits": numbers[:, :2], "value": numbers[:, 2]}
        executed = DictTensor(given)
        observation = DictTensor({"frame": frame, "rng": rng})
        n_different += int((agent(DictTensor(), observation)[0]["action"] != executed["action"]).sum())
        runner.probe(executed, DictTensor(), observation, DictTensor())
    assert n_different > 40  # draws are flipped in every look


class Chaotic(RL_Agent):
    """Shows the last digits of a long sum: they depend on the order of the terms, which a compiler chooses."""

    pure = True

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(4, 5000)

    def __call__(self, state: DictTensor, observation: DictTensor, *_: Any) -> AgentOutput:
        frame = observation["frame"]
        shown = (frame.unsqueeze(-1) * self.weight).flatten(1).sum(-1).mul(1e6).remainder(1.0)
        return DictTensor({"action": torch.zeros(len(frame), dtype=torch.int64), "shown": shown}), state


def batches(agent: type[RL_Agent], arguments: dict[str, Any], compiled: bool, n: int = 6) -> list[DictTensor]:
    env_args = {"name": "CartPole-v1", "n_envs": 16}
    found = []
    with RL_Batcher(
        12, agent, make, agent_args=arguments, env_args=env_args, seed=5, compile_agent=compiled
    ) as batcher:
        batcher.reset()
        for _ in range(n):
            batcher.execute()
            trajectories, _ = batcher.get()
            assert trajectories is not None
            found.append(DictTensor({k: v for k, v in trajectories.steps.items() if v.dim()}))
    return found


@pytest.mark.slow  # a compiler runs
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["weights", "autocast"])
def test_an_agent_in_bfloat16_is_compiled(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlstruct.batchers.collector.STEPS_BETWEEN_PROBES", 12)
    batches(Half, {"way": way}, compiled=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_code_that_rounds_otherwise_is_left_out_with_one_warning() -> None:
    expected = batches(Chaotic, {}, compiled=False, n=2)
    with pytest.warns(UserWarning, match="'shown' differs in .* more than rounding explains") as told:
        found = batches(Chaotic, {}, compiled=True, n=2)
    assert len(told) == 1
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one["action/shown"], other["action/shown"])


def test_large_terms_that_cancel_are_judged_by_their_size() -> None:
    """A gradient of typical size 1,000 with one entry that cancels: its error is that of the terms."""
    expected = torch.tensor([[1000.0, -2000.0], [1500.0, 0.001]])
    check_equal({"gradient": expected}, {"gradient": expected + torch.tensor([[0.0, 0.0], [0.0, 0.002]])})
    with pytest.raises(PurityError, match="differs in 1 of 2 rows"):
        check_equal({"gradient": expected}, {"gradient": expected + torch.tensor([[0.0, 0.0], [0.0, 5.0]])})
    masked = torch.tensor([[1.0, -1e9], [2.0, 3.0]])  # what a mask puts there is no size
    with pytest.raises(PurityError, match="differs in 1 of 2 rows"):
        check_equal({"logits": masked}, {"logits": masked + torch.tensor([[0.1, 0.0], [0.0, 0.0]])})
