"""Recorder of the processes of a training, and analysis of its profile; public names: `rlstruct.profiling`."""
