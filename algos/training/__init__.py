"""The training loop and everything around it: settings, evaluation, callbacks, run folders, loggers, presets."""

from rlstruct import renamed

__getattr__ = renamed.attributes(__name__)
