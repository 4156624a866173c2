"""The command line: `rlstruct train`, `evaluate`, `plot`, `play`, `devices`. Layer 5: nobody imports it.

One module for each command; `rlstruct.cli.main` finds it. Needs the extra ``train``.
"""
