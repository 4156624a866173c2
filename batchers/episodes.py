"""Whole episodes out of batches: exactly N of them without bias, and what each was worth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from rlstruct.batchers.batcher import RL_Batcher
from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.errors import BadValueError, UsageError


def collect_episodes(
    batcher: RL_Batcher,
    n: int,
    *,
    agent_info: DictTensor | None = None,
    env_info: DictTensor | None = None,
    step_limit: int | None = 100_000,
) -> Trajectories:
    """Reset the batcher and play exactly ``n`` whole episodes, short and long ones in their true proportion.

    How many episodes each environment plays is fixed beforehand: its first ``n // B``, and one more in the first
    ``n % B`` environments. Taking the first n that end, as they come, would prefer the short ones. What environments
    play beyond their share is thrown away, so the last environment to finish decides how long this takes.

    Args:
        batcher: no batch may be in flight. Environments of either kind, episodic or auto-resetting.
        n: the number of episodes.
        agent_info: see `RL_Batcher.reset`.
        env_info: likewise.
        step_limit: an episode longer than this is an error; None waits until it ends.

    Returns:
        One row per episode, by environment and then in order; shortened to the longest. ``info`` is that of the batch
        in which the episode began, with its number in the environment as ``episode``. ``step`` counts the environment's
        transitions since its last reset, and ``agent_state`` is what the agent had after that.  [n, T, ...]

    Raises:
        ValueError: n is less than 1.
        RuntimeError: an episode goes on after ``step_limit`` steps.
        BatcherStateError: a batch is being collected, or the batcher is closed.
    """
    if n < 1:
        raise BadValueError(f"collect_episodes: n is {n}, expected at least 1 episode.")
    B = batcher.n_envs()
    missing = {b: n // B + (b < n % B) for b in range(B)}
    begun: dict[int, list[TemporalDictTensor]] = {b: [] for b in range(B)}
    first: dict[int, DictTensor] = {}
    taken = dict.fromkeys(missing, 0)  # transitions since the last reset; a batch counts the steps of restarts, too
    states: list[DictTensor] = []  # of each environment's agent after a reset
    found: list[tuple[int, int, DictTensor, TemporalDictTensor]] = []
    n_running = 0
    while any(missing.values()):
        if not n_running:
            batcher.reset(agent_info, env_info)
            states = []
        batcher.execute()
        batch, n_running = batcher.get()
        kept = batch.info.truncate_key("agent_state/").prepend_key("agent_state/")
        states = states or [kept.slice(b, b + 1) for b in range(B)]  # all take part in the first batch, in order
        for b, begins, info, stretch, ended in _stretches(batch, taken):
            if not missing[b]:
                continue
            if begins or not begun[b]:  # what had begun before was lost with a worker that was started again
                first[b], begun[b] = info, []
            begun[b].append(stretch)
            if ended:
                episode = n // B + (b < n % B) - missing[b]
                whole = {key: torch.cat([part[key] for part in begun[b]], dim=1) for key in stretch.keys()}
                found.append((b, episode, first[b] + states[b], TemporalDictTensor(whole)))
                begun[b], missing[b] = [], missing[b] - 1
        played = {b: sum(stretch.n_steps() for stretch in stretches) for b, stretches in begun.items()}
        endless = [b for b, steps in played.items() if step_limit is not None and steps >= step_limit]
        if endless:
            more = f" and {len(endless) - 5} more" if endless[5:] else ""
            raise UsageError(
                f"collect_episodes: environments {endless[:5]}{more} had not ended their episode after "
                f"{max(played.values())} steps, expected an end within step_limit = {step_limit}. Give the environment "
                "a time limit, such as gymnasium.make(..., max_episode_steps=...), or raise step_limit."
            )
    found.sort(key=lambda one: one[:2])
    device = batcher.device
    numbers = torch.tensor([episode for _, episode, _, _ in found], dtype=torch.int64, device=device)
    info = DictTensor.cat([info for _, _, info, _ in found]) + DictTensor({"episode": numbers})
    return Trajectories(info, TemporalDictTensor.cat([steps for _, _, _, steps in found]))


def _stretches(
    batch: Trajectories, taken: dict[int, int]
) -> Iterator[tuple[int, bool, DictTensor, TemporalDictTensor, bool]]:
    """Cut a batch where episodes end: environment, whether one begins, info, steps [1, t], and whether it ends."""
    environments = batch.info["environment"].tolist()  # sync: once per batch, cutting needs numbers
    lengths = batch.lengths.tolist()  # sync: once per batch
    begins = batch.trajectories["observation/initial_state"][:, 0].tolist()  # sync: once per batch
    fresh = (batch.info["step"] == 0).tolist()  # sync: once per batch
    done = batch.trajectories["_observation/done"] & batch.trajectories.mask()
    stops: list[list[int]] = [[] for _ in environments]
    for row, t in done.nonzero().tolist():  # sync: once per batch
        stops[row].append(t + 1)
    kept = [key for key in batch.info.keys() if not key.startswith("agent_state/")]
    info = batch.info.get(kept)
    for row, b in enumerate(environments):
        steps, row_info = batch.trajectories.slice(row, row + 1), info.slice(row, row + 1)
        taken[b] = 0 if fresh[row] else taken[b]
        for start, stop in pairwise([0, *stops[row], lengths[row]]):
            if start < stop:
                numbered = row_info + DictTensor()
                numbered.set("step", torch.full_like(row_info["step"], taken[b]))
                yield b, start > 0 or begins[row], numbered, steps.temporal_slice(start, stop), stop in stops[row]
                taken[b] += stop - start


class EpisodeStatistics:
    """Sums of rewards and steps over batches, which give the return and length of each episode when it ends.

    It reads ``_observation/reward`` and ``_observation/done``, whatever the environment's own ``info`` says, and starts
    again from zero wherever an environment was reset. Only `add` and `mean_return` wait for the device.

    Args:
        n_envs: B of the batcher.
        device: where its trajectories are.

    Attributes:
        open_return: rewards so far of the episode that each environment is in.  [B] float64
        open_length: its steps so far.  [B] int64
    """

    def __init__(self, n_envs: int, device: torch.device | str = "cpu") -> None:
        self.open_return = torch.zeros(n_envs, dtype=torch.float64, device=device)
        self.open_length = torch.zeros(n_envs, dtype=torch.int64, device=device)
        self._ended = torch.zeros(2, dtype=torch.float64, device=device)  # sum of returns and number, see mean_return

    def track(self, batch: Trajectories) -> DictTensor:
        """Take in the next batch without waiting for the device.

        Args:
            batch: as `RL_Batcher.get` returned it; none may be left out between two resets.

        Returns:
            ``ended`` bool: whether an episode ended with this step; ``return`` float64 (undiscounted) and ``length``
            int64 of the episode up to and including this step.  [B, T] each
        """
        steps, environment = batch.trajectories, batch.info["environment"]
        mask, fresh = steps.mask(), steps["observation/initial_state"][:, 0]
        ended = steps["_observation/done"] & mask
        reward = torch.where(mask, steps["_observation/reward"], 0.0).to(torch.float64)
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
        """Take in the next batch, and list the episodes that ended in it.

        Args:
            batch: see `track`.

        Returns:
            One row for each episode that ended in it: ``environment`` int64, ``return`` float64 (undiscounted),
            ``length`` int64, ``terminated`` bool (else truncated).  [E]
        """
        counted = self.track(batch)
        row, t = counted["ended"].nonzero().unbind(1)  # sync: once per batch, the number of ended episodes is a shape
        return DictTensor(
            {
                "environment": batch.info["environment"][row],
                "return": counted["return"][row, t],
                "length": counted["length"][row, t],
                "terminated": batch.trajectories["_observation/terminated"][row, t],
            }
        )

    def mean_return(self) -> float | None:
        """Return the mean return of the episodes that ended since the last call; None if none did."""
        total, count = self._ended.tolist()  # sync: once per call, the answer is a Python number
        self._ended.zero_()
        return total / count if count else None

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs."""
        return {"open_return": self.open_return, "open_length": self.open_length, "ended": self._ended}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on where `state_dict` was called; the tensors may be on any device, and are copied."""
        for mine, theirs in zip(self.state_dict().values(), state.values(), strict=True):
            mine.copy_(theirs)
