"""Pure functions of tensors: random numbers, masks, returns, losses. They take no device argument and never sync."""
