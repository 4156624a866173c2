"""Parts of the simulated accelerator; `rlstruct.testing.sim_device` is the one to import."""
