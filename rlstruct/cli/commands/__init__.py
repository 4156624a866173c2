"""The commands, a module each with `run`; `rlstruct.cli.main` lists them."""
