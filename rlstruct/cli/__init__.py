"""The command line: `rlstruct train`, `evaluate`, `plot`, `play`, `devices`.

One module for each command; `rlstruct.cli.main` finds it. Needs the extra ``train``.
"""
