"""Pure functions of tensors: random numbers, masks, returns, losses. Layer 1: no device argument, no host sync."""
