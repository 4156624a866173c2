"""Settings that both contenders of ``recurrent_ppo.py`` share; imports neither library."""

HIDDEN = 128
"""Width of the layer below the recurrent cell, with tanh, and size of its state."""
SETTINGS = {"n_epochs": 4, "n_minibatches": 4}
