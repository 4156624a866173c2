"""Tuned settings of AlphaZero; `rlstruct.algos.training.presets.PRESETS` lists them."""

from rlstruct.algos.training.presets import Preset
from rlstruct.search.alphazero import AlphaZeroConfig

# Many updates for each move. Without strong noise all games become the same; it falls during a game. Half of each
# value target is the search's estimate, because the results of noisy games say little.
CONNECT_FOUR = Preset(
    AlphaZeroConfig(
        n_env_steps=450_000, n_envs=96, n_processes=3, overlap=True, n_timesteps=8, n_updates=40, batch_size=512,
        replay_capacity=300_000, learning_starts=10_000, gumbel_scale=4.0, exploring_moves=24,
        search_value_fraction=0.5, mirror=True, evaluation_interval=100_000, checkpoint_interval=100_000,
    ),
    {"n_features": 128, "layers": ((64, 4, 1), (64, 2, 1))},
)  # fmt: skip
