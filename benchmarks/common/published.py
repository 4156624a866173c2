"""Tables of returns after equally many frames as others have published, with their numbers. Layer 5.

Every entry has the settings of a task of `TASKS`, without a return at which the training ends. Each is trained with
four seeds that no settings were chosen with; ``runs/`` keeps what a training that was cut has learned.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import learning, reporting
from common.reporting import Row
from common.tasks import TASKS

from rlstruct.algos.training.callbacks import Callback, TrainingContext
from rlstruct.algos.training.run_folder import RunFolder
from rlstruct.batchers import EpisodeStatistics

SEEDS = (200, 201, 202, 203)
RUNS = Path(__file__).parents[2] / "runs"
SLM_LAB, _DOCUMENTED = "SLM-Lab", "CleanRL's documentation"
"""SLM-Lab's BENCHMARKS.md of 2026: the last 100 training episodes, mean of four seeds."""


@dataclass(frozen=True)
class Entry:
    """A task that is trained for as many steps as others have published.

    Attributes:
        task: its name in `TASKS`.
        n_env_steps: environment steps, which others call frames.
        others: mean returns that others have published, by who.
        greedy: evaluations take the most probable action, however the task does it.
        half_way: what it has to reach: half of the way from a random player's return to a published one.
        episodes: those of each evaluation.
    """

    task: str
    n_env_steps: int
    others: Mapping[str, float] = field(default_factory=dict)
    greedy: bool = False
    half_way: float | None = None
    episodes: int = 100

    @property
    def name(self) -> str:
        """Name of the file of its results."""
        return f"{self.task}_{self.n_env_steps // 1000}k"

    def settings(self) -> dict[str, Any]:
        """Return the settings that differ from the task's."""
        return {
            "n_env_steps": self.n_env_steps, "target_return": None, "evaluation_episodes": self.episodes,
            "evaluation_interval": self.n_env_steps // 10, "checkpoint_interval": self.n_env_steps // 20,
            **({"evaluation_stochastic": False} if self.greedy else {}),
        }  # fmt: skip


_CLASSIC: dict[str, dict[str, Any]] = {
    "reinforce_cartpole": {"n_env_steps": 200_000, "others": {SLM_LAB: 483.0}},
    "a2c_cartpole": {"n_env_steps": 200_000, "others": {SLM_LAB: 497.0}},
    "ppo_cartpole": {"n_env_steps": 200_000, "others": {SLM_LAB: 499.0}},
    "dqn_cartpole_steady": {"n_env_steps": 200_000, "others": {f"{SLM_LAB}, double DQN with priorities": 452.0}},
    "dqn_acrobot": {"n_env_steps": 300_000, "others": {f"{SLM_LAB}, double DQN with priorities": -84.0}},
    "a2c_acrobot": {"n_env_steps": 300_000, "others": {SLM_LAB: -84.0}},
    "ppo_acrobot": {"n_env_steps": 300_000, "others": {SLM_LAB: -81.0}},
    "ppo_pendulum": {"n_env_steps": 300_000, "others": {SLM_LAB: -175.0}},
    "sac_pendulum": {"n_env_steps": 300_000, "others": {SLM_LAB: -151.0, f"{SLM_LAB}, CrossQ": -146.0}},
    "dqn_lunar_lander": {"n_env_steps": 300_000, "others": {f"{SLM_LAB}, double DQN with priorities": 266.0}},
    "ppo_lunar_lander": {"n_env_steps": 300_000, "others": {SLM_LAB: 183.0}},
    "a2c_lunar_lander": {"n_env_steps": 300_000, "others": {SLM_LAB: 27.0}},
    "ppo_lunar_lander_continuous": {"n_env_steps": 300_000, "others": {SLM_LAB: 133.0}},
    "sac_lunar_lander_continuous": {"n_env_steps": 300_000, "others": {SLM_LAB: 125.0, f"{SLM_LAB}, CrossQ": 269.0}},
}
_GAMES = "breakout", "asterix", "freeway", "spaceinvaders", "seaquest"
_MUJOCO = "halfcheetah", "hopper", "walker2d", "ant", "swimmer", "inverteddoublependulum"
LIBRARIES = {"rejax": "rejax", "sb3": "stable-baselines3", "sbx": "sbx", "cleanrl": "CleanRL"}
"""Other libraries that are trained here, by the ending of the names of their results."""
# Mean returns of 500 episodes of gymnasium's in which every action is random (Acrobot: 100).
_RANDOM = {"cartpole": 23, "acrobot": -500, "pendulum": -1216, "lunar_lander": -182, "lunar_lander_continuous": -207}
_PUBLISHED: dict[str, dict[str, float]] = {
    "cartpole": {"reinforce": 483.0, "a2c": 497.0, "ppo": 499.0, "dqn": 452.0, "pqn": 452.0},
    "acrobot": {"a2c": -84.0, "ppo": -81.0, "dqn": -84.0, "pqn": -84.0},
    "lunar_lander": {"a2c": 27.0, "ppo": 183.0, "dqn": 266.0, "pqn": 266.0},
    "pendulum": {"ppo": -175.0, "sac": -146.0},
    "lunar_lander_continuous": {"ppo": 133.0, "sac": 269.0},
}
TABLES: dict[str, list[Entry]] = {
    "classic": [Entry(task, **words, greedy=True) for task, words in _CLASSIC.items()],
    "defaults": [
        Entry(
            f"{algorithm}_{name}_defaults",
            200_000 if name == "cartpole" else 300_000,
            {SLM_LAB: value},
            greedy=True,
            half_way=(_RANDOM[name] + value) / 2,
        )
        for name, values in _PUBLISHED.items()
        for algorithm, value in values.items()
    ],
    "minatar": [
        *(Entry(f"{algorithm}_{game}_plain", 5_000_000) for algorithm in ("ppo", "pqn") for game in _GAMES),
        *(Entry(f"a2c_{game}_plain", 5_000_000) for game in _GAMES[:2]),
        *(Entry(f"dqn_{game}_plain", 2_000_000) for game in _GAMES),
    ],
    "mujoco": [
        *(
            Entry(f"ppo_{name}", 1_000_000, {_DOCUMENTED: value} if value else {}, greedy=True)
            for name, value in zip(_MUJOCO, (1443.0, 2383.0, 2288.0, None, None, None), strict=True)
        ),
        *(Entry(f"sac_{name}", 300_000, greedy=True) for name in _MUJOCO[:3]),
    ],
    "atari": [Entry("ppo_atari_pong", 4_000_000, greedy=True, episodes=20)],
}


def peers_of(task: str) -> list[str]:
    """Return the libraries, of `LIBRARIES`, that can be trained on a task, too."""
    algorithm, _, name = task.partition("_")
    in_gymnax = [f"{game}_plain" for game in _GAMES if game != "seaquest"]
    if algorithm in ("ppo", "dqn", "pqn") and name in in_gymnax:
        return ["rejax"]
    if name in _MUJOCO:
        return {"sac": ["sb3", "sbx", "cleanrl"], "ppo": ["cleanrl"]}.get(algorithm, [])
    return []


class LastEpisodes(Callback):
    """Returns of the last 100 episodes of a training, whose mean is SLM-Lab's metric.

    Attributes:
        returns: oldest first.
    """

    def __init__(self) -> None:
        self.returns: deque[float] = deque(maxlen=100)
        self._statistics: EpisodeStatistics | None = None
        self._saved: Mapping[str, Any] = {}

    def on_update(self, context: TrainingContext) -> None:
        batch = context.batch
        if batch is None:  # unreachable in an update; narrows the type
            return
        if self._statistics is None:
            config: Any = context.config
            self._statistics = EpisodeStatistics(config.n_envs * max(1, config.n_processes), batch.device)
            if self._saved:
                self._statistics.load_state_dict(self._saved)
        self.returns += self._statistics.add(batch)["return"].tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"returns": [*self.returns], "open": {} if self._statistics is None else self._statistics.state_dict()}

    def load_state_dict(self, state: Any) -> None:  # noqa: ANN401 - what state_dict returned
        self.returns.extend(state["returns"])
        self._saved = state["open"]


def measure(entry: Entry, seed: int) -> Row:
    """Train with a seed, or go on where that was cut; ``last_100`` is the mean return of the last training episodes."""
    last = LastEpisodes()
    with _run_of(entry, seed) as run:
        row = learning.measure(TASKS[entry.task], {**entry.settings(), "run": run, "callbacks": [last]}, seed)
    return {**row, "last_100": round(statistics.fmean(last.returns), 1)}


def _run_of(entry: Entry, seed: int) -> RunFolder:
    """Return the run folder of a training of this commit, with its checkpoint if there is one."""
    root = RUNS / "published" / reporting.machine()["commit"] / entry.name / str(seed)
    settings: dict[str, Any] = {"progress": False, "loggers": ()}
    if checkpoints := sorted(root.glob("run-*/checkpoint.pt")):
        return RunFolder.resume(checkpoints[-1].parent, **settings)
    return RunFolder("run", entry, n_env_steps=entry.n_env_steps, root=root, **settings)
