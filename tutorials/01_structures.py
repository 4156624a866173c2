"""Tutorial 01: the three data structures.

Three classes hold all data: DictTensor (one time step), TemporalDictTensor (many time steps) and Trajectories (a
collected batch). B is the number of environments, T the number of time steps, and the batch axis always comes first.
"""

import torch

from rlstruct import DictTensor, Trajectories, masked_dicttensor
from rlstruct.core import TemporalDictTensor

# --- DictTensor: named tensors that share the batch axis and one device -----------------------------------------------
observation = DictTensor({"frame": torch.zeros(3, 84, 84, dtype=torch.uint8), "reward": torch.tensor([0.0, 1.0, 2.0])})
print("observation:", observation)
print("environments:", observation.n_elems(), "on", observation.device)
print("rewards:", observation["reward"].tolist())

# slice always keeps the batch axis; index takes rows in any order.
print("row 1 alone:", observation.slice(1)["reward"].tolist())
print("rows 2 and 0:", observation.index(torch.tensor([2, 0]))["reward"].tolist())

# Prefixes group keys, and + merges two structures.
stored = observation.prepend_key("observation/") + DictTensor({"action/action": torch.tensor([1, 0, 1])})
print("keys:", list(stored.keys()))
print("back again:", list(stored.truncate_key("observation/").keys()))

# The constructor rejects tensors that do not fit, and names the key.
try:
    DictTensor({"frame": torch.zeros(3, 4), "reward": torch.zeros(2)})
except ValueError as error:
    print("refused:", error)

# masked_dicttensor picks row by row: here environments 0 and 2 restart from a fresh state.
state = DictTensor({"hidden": torch.ones(3, 2)})
fresh = DictTensor({"hidden": torch.zeros(3, 2)})
restarted = masked_dicttensor(state, fresh, torch.tensor([True, False, True]))
print("hidden after the restart:", restarted["hidden"].tolist())

# --- TemporalDictTensor: [B, T, ...] with the true length of each row -------------------------------------------------
episodes = TemporalDictTensor({"reward": torch.ones(2, 5)}, lengths=torch.tensor([5, 3]))
print("mask:", episodes.mask().int().tolist())
print("returns:", (episodes["reward"] * episodes.mask()).sum(1).tolist())
print("last step of each row:", episodes.temporal_multi_index(episodes.lengths - 1)["reward"].tolist())

# --- Trajectories: what a batcher returns -----------------------------------------------------------------------------
# `info` has one value per row, `trajectories` one per step. The agent saw `observation` and chose `action`; the
# environment answered with `_observation`.
batch = Trajectories(
    DictTensor({"policy_version": torch.tensor([7, 7])}),
    TemporalDictTensor(
        {
            "observation/frame": torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 0.0]]),
            "action/action": torch.tensor([[1, 1, 0], [0, 1, 0]]),
            "_observation/frame": torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 0.0]]),
        },
        lengths=torch.tensor([3, 2]),
    ),
)
transitions = batch.transitions()  # all real steps in one flat batch, without padding
print("transitions:", transitions.n_elems())
assert torch.equal(transitions["_observation/frame"], transitions["observation/frame"] + 1)

# All tensors move in one call and keep their dtype: uint8 frames stay uint8.
print("moved:", batch.to("cpu").device)

# Next: 02 writes an agent that collects such batches.
