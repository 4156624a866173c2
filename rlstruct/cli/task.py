"""What is to be learnt, as the command line says it: the environment, and the kind of agent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rlstruct.cli.complaint import UserError
from rlstruct.sims.tensor_env import Backend


@dataclass(frozen=True, kw_only=True)
class Task:
    """An environment, and what the agent needs for it.

    Attributes:
        env: name of an environment of gymnasium (CartPole-v1, ALE/Pong-v5, my_module:MyEnv-v0) or of a bundled
            simulator (Breakout-MinAtar).
        env_options: further settings of the environment, each as KEY=VALUE, such as continuous=false.
        simulator: step the bundled simulator of this name, and how; None takes gymnasium's environment where it has
            one.
        recurrent: give the agent a memory, a gated recurrent unit.
        network: settings of the network, each as KEY=VALUE, such as hidden=[128,128].
    """

    env: str
    env_options: tuple[str, ...] = ()
    simulator: Backend | None = None
    recurrent: bool = False
    network: tuple[str, ...] = ()

    def settings(self) -> dict[str, Any]:
        """Return the options as keyword arguments; values are read as JSON where they can be.

        Raises:
            UserError: one has no ``=``.

        >>> Task(env="LunarLander-v3", env_options=("gravity=-5", "name=moon")).settings()
        {'gravity': -5, 'name': 'moon'}
        """
        return _read("--env-options", self.env_options, "continuous=false")

    def network_settings(self) -> dict[str, Any]:
        """Return the settings of the network as keyword arguments.

        Raises:
            UserError: one has no ``=``.
        """
        return _read("--network", self.network, "hidden=[128,128]")


def _read(option: str, words: tuple[str, ...], example: str) -> dict[str, Any]:
    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise UserError(f"{option} {word}: expected KEY=VALUE, such as {example}.")
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            settings[key] = value
    return settings
