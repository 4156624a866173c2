"""Order between the collector's stream and the caller's, and the memory that passes between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlstruct import RL_Agent
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.engine import streams
from rlstruct.sims import make


class Stream:
    """Notes what is asked of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> Event:
        self.log.append(f"event on {self.name}")
        return Event(self.name)

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for the event on {event.name}")


class Event:
    def __init__(self, name: str) -> None:
        self.name = name

    def query(self) -> bool:
        return False


class Block:
    """Stands for a CUDA tensor."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record_stream(self, stream: Stream) -> None:
        self.log.append(f"kept for {stream.name}")


def test_the_order_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    caller = Stream("caller", log)

    class Entered:
        def __init__(self, stream: Stream) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            log.append(f"on {self.stream.name}")

        def __exit__(self, *error: object) -> None:
            log.append("off")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("own", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: caller)
    monkeypatch.setattr(torch.cuda, "stream", Entered)
    stream = streams.CudaStream(torch.device("cuda", 0))
    assert stream.ready()
    with stream.work():
        log.append("collects")
    block: Any = Block(log)
    stream.to_caller([block])
    assert not stream.ready()
    assert log == [
        "own waits for caller",  # weights and settings are there
        *("on own", "collects", "off", "event on own"),
        "caller waits for the event on own",  # the batch is there
        "kept for caller",  # and its memory is not used again before the caller's work is done
    ]


def create_agent(device: str) -> RL_Agent:
    torch.manual_seed(0)
    return ActorCriticAgent(ActorCritic(4, 2), device=device)


def create_env(seed: int, device: str, n_envs: int = 64) -> Any:
    return make("CartPole-v1", n_envs=n_envs, seed=seed, device=device)


def on_gpu(graph: bool = True, n_steps: int = 128) -> RL_Batcher:
    where = {"device": "cuda:0"}
    return RL_Batcher(
        n_steps, create_agent, create_env, agent_args=where, env_args=where, seed=1, graph=graph, device="cuda:0"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False])
def test_a_whole_batch_is_collected_and_handed_over_without_a_wait(graph: bool) -> None:
    with on_gpu(graph) as batcher:
        batcher.reset()
        for _ in range(3):
            batcher.execute()
            batcher.get()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                batcher.execute()
                batcher.get()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [True, False])
def test_a_slow_learner_and_a_slow_collector_never_mix_up_batches(graph: bool) -> None:
    def run(delay: bool) -> list[float]:
        sums = []
        with on_gpu(graph, n_steps=16) as batcher:
            batcher.reset()
            batcher.execute()
            for i in range(200):
                batch = batcher.get()[0]
                assert batch is not None
                batcher.execute()  # runs while the learner still reads the last batch
                if delay and i % 3 == 0:
                    torch.cuda._sleep(2_000_000)
                frames = batch.steps["_observation/frame"].double()
                sums.append((frames * torch.arange(1, 17, device="cuda:0").view(1, 16, 1)).sum())
                for value in batch.steps.values():
                    value.zero_()
        return torch.stack(sums).tolist()

    assert run(delay=True) == run(delay=False)


@pytest.mark.gpu
def test_weights_may_be_changed_as_soon_as_update_returns() -> None:
    model = ActorCritic(4, 2).to("cuda:0")
    with on_gpu(n_steps=8) as batcher:
        batcher.reset()
        for version in range(6):
            torch.cuda._sleep(2_000_000)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.fill_(0.01 * (version + 1))
            batcher.update(model.state_dict())
            with torch.no_grad():
                for weight in model.parameters():
                    weight.fill_(torch.nan)
            batcher.execute()
            batch = batcher.get()[0]
            assert batch is not None
            assert batch.steps["action/action_logits"].isfinite().all()


@pytest.mark.gpu
def test_execute_returns_before_the_work_is_done() -> None:
    with on_gpu(n_steps=8) as batcher:
        batcher.reset()
        for _ in range(2):
            batcher.execute()
            batcher.get()
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # about 0.1 s on the caller's stream, which the batch comes after
        batcher.execute()
        assert batcher.get(blocking=False) == (None, None)
        batch = batcher.get()[0]
        assert batch is not None
        assert batch.steps["observation/frame"].isfinite().all()
