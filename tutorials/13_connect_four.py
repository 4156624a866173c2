"""Tutorial 13: Connect Four, from an untrained network to an opponent.

A tree search looks ahead in 32 games at once: each simulation is one call of the network with 32 positions. The search
plays against itself, the network learns what the search found, and the search with that network is stronger. The last
line says how to play against it.
"""

from functools import partial

import torch

from rlstruct import DictTensor
from rlstruct.agents import ConvolutionalActorCritic
from rlstruct.functional.random import child_key
from rlstruct.search import GameModel, RolloutModel, SearchAgent, SearchConfig, TreeSearch, alphazero
from rlstruct.search.alphazero import AlphaZeroConfig
from rlstruct.search.arena import RandomPlayer, play_match
from rlstruct.sims import ConnectFour

torch.set_num_threads(1)

# A search needs no network. Here one random game evaluates each position; "uct" is the classic method.
game = ConnectFour(1, auto_reset=False)
game.reset()
for column in (3, 3, 2, 2, 4):  # three in a row at the bottom, open on both sides
    game.step(DictTensor({"action": torch.tensor([column])}))
key = child_key(torch.arange(1), 0)
judge = RolloutModel(game, n_actions=7, n_moves=42)
search = TreeSearch(judge, SearchConfig(method="uct", n_simulations=100, temperature=0.0))
found = search(judge.begin(game.get_state(), key), key)
print("visits of each column:", found.visits[0].int().tolist())
print(f"the player to move expects {found.value.item():+.2f}: whatever it does, the other one wins\n")

# Shapes alone say how much memory a search needs, before it allocates anything.
n_bytes = search.memory_needed(judge.begin(game.get_state(), key), n_actions=7)
print(f"its tree takes {n_bytes / 2**10:.0f} KiB, those of 4,096 games {4096 * n_bytes / 2**20:.0f} MiB\n")

# AlphaZero: self-play, a replay buffer, a loss; sequential halving learns from few simulations. `rlstruct train
# alphazero --env ConnectFour-v0` does the same with a run folder, for some ten minutes rather than half a minute, and
# then beats UCT with 1,000 simulations: docs/algorithms/alphazero.md. On the CPU compile_agent=True makes long runs
# faster.
config = AlphaZeroConfig(
    n_env_steps=8_000,
    n_timesteps=16,
    n_envs=32,
    n_simulations=16,
    batch_size=256,
    n_updates=8,
    learning_starts=1_500,
    mirror=True,
    evaluation_episodes=20,
    evaluation_interval=8_000,
    opponent="random",
)
create_model = partial(ConvolutionalActorCritic, (2, 6, 7), 7, n_features=64, layers=[(32, 4, 1)])
result = alphazero.train(config, create_model, SearchAgent, ConnectFour)
print(f"{result.env_steps:,} moves of self-play in {result.seconds:.0f} s")
print("return against random play, from -1 to 1:", result.before.mean_return, "->", result.after.mean_return)
before, after = result.losses["value_loss"][0], result.losses["value_loss"][-1]
print(f"the loss of the values fell from {before:.2f} to {after:.2f}\n")

# The trained network plays the untrained one, both with 32 simulations; each starts half of the games.
strong, weak = (
    SearchAgent(model, create_simulator=ConnectFour, config=SearchConfig(n_simulations=32), stochastic=True)
    for model in (result.model, create_model())
)
games = partial(ConnectFour, 16, auto_reset=False)
first, _ = play_match(strong, weak, games(), seed=1)
second, _ = play_match(weak, strong, games(), seed=2)
points = torch.cat([first, -second])
print(f"against the untrained network: {int((points > 0).sum())} of {len(points)} games won")
lucky, _ = play_match(RandomPlayer(7), strong, games(), seed=3)
print(f"random play wins {int((lucky > 0).sum())} of {len(lucky)} games that it begins\n")

# The trained search chooses the first move.
board = ConnectFour(1)
board.reset()
trained = GameModel(board, result.model)
strongest = TreeSearch(trained, SearchConfig(n_simulations=200, gumbel_scale=0.0))
with torch.no_grad():
    found = strongest(trained.begin(board.get_state(), key), key)
print("policy of the first move:", [round(share, 2) for share in found.policy[0].tolist()])
print("play against it: rlstruct train alphazero --env ConnectFour-v0, then rlstruct play connect-four --run runs/…")
