"""Environments as VecEnv: lists of gymnasium environments and gymnasium vector environments. Layer 3."""
