"""Whole episodes from batches: exactly N of them without bias, and the return and length of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from rlstruct.batchers.batcher import RL_Batcher
from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.device import accumulator_dtype
from rlstruct.errors import BadValueError, UsageError
from rlstruct.vec_env import TIME_LIMITS


@dataclass
class _Environment:
    """One environment: the episodes that it has played, and the steps of its current one."""

    quota: int  # number of episodes to play
    episodes: list[tuple[DictTensor, TemporalDictTensor]] = field(default_factory=list)  # info and steps, [1, T]
    pieces: list[TemporalDictTensor] = field(default_factory=list)  # steps of the current episode, from each batch
    info: DictTensor = field(default_factory=DictTensor)  # of the current episode
    state: DictTensor = field(default_factory=DictTensor)  # ``agent_state/…`` after the last reset
    n_steps: int = 0  # number of transitions since the last reset, without those that restarts take

    def unfinished(self) -> bool:
        """Return True while it must play more episodes."""
        return len(self.episodes) < self.quota

    def add(self, info: DictTensor, piece: TemporalDictTensor, begins: bool, ends: bool) -> None:
        """Add steps of one episode, which ``begins`` or ``ends`` with them, unless the quota is reached."""
        if self.unfinished():
            if begins or not self.pieces:  # the beginning may have been lost when a worker was restarted
                step = torch.full_like(info["environment"], self.n_steps)
                self.info, self.pieces = info + self.state + DictTensor({"step": step}), []
            self.pieces.append(piece if ends else piece.clone())  # a view would keep the whole batch in memory
            if ends:
                episode = {key: torch.cat([part[key] for part in self.pieces], dim=1) for key in piece.keys()}
                self.episodes.append((self.info, TemporalDictTensor(episode)))
                self.pieces = []
        self.n_steps += piece.n_steps()


def collect_episodes(
    batcher: RL_Batcher,
    n: int,
    *,
    agent_info: DictTensor | None = None,
    env_info: DictTensor | None = None,
    step_limit: int | None = 100_000,
) -> Trajectories:
    """Reset the batcher and collect exactly ``n`` whole episodes, without bias towards short ones.

    Each environment plays a fixed number of episodes: its first ``n // B``, and one more in the first ``n % B``
    environments. The first n episodes to end would contain too many short ones. Surplus episodes are dropped, so the
    slowest environment determines how long this takes.

    Args:
        batcher: a batcher of episodic or auto-resetting environments, without outstanding batches.
        n: the number of episodes.
        agent_info: see `RL_Batcher.reset`.
        env_info: see `RL_Batcher.reset`.
        step_limit: maximum number of steps per episode; None sets no limit.

    Returns:
        One row per episode, ordered by environment and time, padded to the longest. ``info`` is that of the batch in
        which the episode began, and its index within the environment as ``episode``. ``step`` counts the environment's
        transitions since its last reset, and ``agent_state`` is the agent's state after that reset.  [n, T, ...]

    Raises:
        ValueError: n is less than 1.
        RuntimeError: an episode has not ended after ``step_limit`` steps.
        BatcherStateError: a batch is being collected, or the batcher is closed.
    """
    if n < 1:
        raise BadValueError(f"collect_episodes: n is {n}, expected at least 1 episode.")
    B = batcher.n_envs()
    environments = [_Environment(n // B + (b < n % B)) for b in range(B)]
    n_running = 0
    while any(environment.unfinished() for environment in environments):
        if not n_running:
            batcher.reset(agent_info, env_info)
        batcher.execute()
        batch, n_running = batcher.get()
        _add_batch(environments, batch)
        played = [sum(piece.n_steps() for piece in environment.pieces) for environment in environments]
        endless = [b for b, steps in enumerate(played) if step_limit is not None and steps >= step_limit]
        if endless:
            more = f" and {len(endless) - 5} more" if endless[5:] else ""
            raise UsageError(
                f"collect_episodes: environments {endless[:5]}{more} had not ended their episode after "
                f"{max(played)} steps, expected an end within step_limit = {step_limit}. Give the environment "
                f"a time limit ({TIME_LIMITS}), or raise step_limit."
            )
    infos, episodes = zip(*(episode for environment in environments for episode in environment.episodes), strict=True)
    numbers = [i for environment in environments for i in range(environment.quota)]
    numbered = DictTensor({"episode": torch.tensor(numbers, dtype=torch.int64, device=batcher.device)})
    return Trajectories(DictTensor.cat(infos) + numbered, TemporalDictTensor.cat(episodes))


def _add_batch(environments: Sequence[_Environment], batch: Trajectories) -> None:
    """Cut a batch where episodes end, and add the pieces to their environments."""
    numbers = batch.info["environment"].tolist()  # sync: once per batch, cutting needs numbers
    lengths = batch.lengths.tolist()  # sync: once per batch
    begins = batch.steps["observation/initial_state"][:, 0].tolist()  # sync: once per batch
    after_reset = (batch.info["step"] == 0).tolist()  # sync: once per batch
    done = batch.steps["_observation/done"] & batch.steps.mask()
    stops: list[list[int]] = [[] for _ in numbers]
    for row, t in done.nonzero().tolist():  # sync: once per batch
        stops[row].append(t + 1)
    states = batch.info.truncate_key("agent_state/").prepend_key("agent_state/")
    info = batch.info.get([key for key in batch.info.keys() if key != "step" and not key.startswith("agent_state/")])
    for row, b in enumerate(numbers):
        environment, steps = environments[b], batch.steps.slice(row, row + 1)
        if after_reset[row]:
            environment.n_steps, environment.state = 0, states.slice(row, row + 1)
        for start, stop in pairwise([0, *stops[row], lengths[row]]):
            if start < stop:
                piece, first = steps.temporal_slice(start, stop), start > 0 or begins[row]
                environment.add(info.slice(row, row + 1), piece, begins=first, ends=stop in stops[row])


class EpisodeStatistics:
    """Return and length of every episode, summed up over batches.

    Computed from ``_observation/reward`` and ``_observation/done``, independently of the environment's ``info``. The
    sums start from zero whenever an environment is reset. Only `add` and `mean_return` wait for the device.

    Returns are sums of the rewards in the batch. Behind a wrapper that changes rewards, such as gymnasium's
    NormalizeReward or ClipReward, they are sums of the changed rewards. For those of the environment, put gymnasium's
    RecordEpisodeStatistics inside that wrapper, and carry its number: with ``GymEnvInf(envs, seed,
    info=["episode/r"])`` a batch has ``_observation/info/episode/r``, NaN except where an episode ends.

    Args:
        n_envs: B of the batcher.
        device: device of its trajectories.

    Attributes:
        open_return: sum of rewards in the current episode of each environment.  [B] float64; on mps float32, as are
            all returns
        open_length: number of steps in it.  [B] int64
    """

    def __init__(self, n_envs: int, device: torch.device | str = "cpu") -> None:
        wide = accumulator_dtype(device)
        self.open_return = torch.zeros(n_envs, dtype=wide, device=device)
        self.open_length = torch.zeros(n_envs, dtype=torch.int64, device=device)
        self._ended = torch.zeros(2, dtype=wide, device=device)  # for mean_return: sum of returns, and number

    def track(self, batch: Trajectories) -> DictTensor:
        """Process the next batch without waiting for the device.

        Args:
            batch: result of `RL_Batcher.get`. Between two resets no batch may be skipped.

        Returns:
            ``ended`` bool: whether an episode ended with this step; ``return`` float64 (undiscounted) and ``length``
            int64 of the episode up to and including this step.  [B, T] each
        """
        steps, environment = batch.steps, batch.info["environment"]
        mask, fresh = steps.mask(), steps["observation/initial_state"][:, 0]
        ended = steps["_observation/done"] & mask
        reward = torch.where(mask, steps["_observation/reward"], 0.0).to(self.open_return.dtype)
        times = torch.arange(mask.shape[1], device=mask.device)
        last_end = torch.where(ended, times, -1).cummax(1).values  # [B, T] up to and including this step
        before = torch.nn.functional.pad(last_end[:, :-1], (1, 0), value=-1)  # [B, T] before this step
        counted = {}
        for name, carried, added in (("return", self.open_return, reward), ("length", self.open_length, mask)):
            opening = torch.where(fresh, 0, carried[environment])  # [B]
            total = opening.unsqueeze(1) + added.cumsum(1)  # [B, T]
            counted[name] = total - torch.where(before >= 0, total.gather(1, before.clamp(min=0)), 0)
            carried[environment] = torch.where(ended[:, -1], 0, counted[name][:, -1])
        self._ended += torch.stack([torch.where(ended, counted["return"], 0.0).sum(), ended.sum()])
        return DictTensor({"ended": ended, **counted})

    def add(self, batch: Trajectories) -> DictTensor:
        """Process the next batch, and list the episodes that ended in it.

        Args:
            batch: see `track`.

        Returns:
            One row per episode that ended: ``environment`` int64, ``return`` float64 (undiscounted), ``length`` int64,
            ``terminated`` bool (else truncated).  [E]
        """
        counted = self.track(batch)
        row, t = counted["ended"].nonzero().unbind(1)  # sync: once per batch, the number of ended episodes is a shape
        return DictTensor(
            {
                "environment": batch.info["environment"][row],
                "return": counted["return"][row, t],
                "length": counted["length"][row, t],
                "terminated": batch.steps["_observation/terminated"][row, t],
            }
        )

    def mean_return(self, *, forget: bool = True) -> float | None:
        """Return the mean return of the episodes that ended since the last call, or None if there are none.

        Args:
            forget: leave these episodes out of the next call.
        """
        total, count = self._ended.tolist()  # sync: once per call, the answer is a Python number
        if forget:
            self._ended.zero_()
        return total / count if count else None

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint."""
        return {"open_return": self.open_return, "open_length": self.open_length, "ended": self._ended}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state from `state_dict`, whose tensors may be on any device."""
        for mine, theirs in zip(self.state_dict().values(), state.values(), strict=True):
            mine.copy_(theirs)
