"""The command line's parts for agents that search: their choice, and their evaluation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from gymnasium import spaces

from rlstruct import agents
from rlstruct.cli.agents import AgentChoice, check_settings, count_actions, network_settings, try_network
from rlstruct.cli.messages import UserError, say
from rlstruct.cli.tasks import Task
from rlstruct.search import SearchAgent
from rlstruct.search.alphazero import arena

if TYPE_CHECKING:
    from rlstruct.cli.commands.evaluate import Evaluate
    from rlstruct.cli.stored_run import Trained


def choose(task: Task, observation: spaces.Space[Any], action: spaces.Space[Any]) -> AgentChoice:
    """Choose the agent of a two-player game, whose observation is a board and the legal actions."""
    n_actions = count_actions(action)
    shown = dict(observation.spaces) if isinstance(observation, spaces.Dict) else {}
    boards = [space.shape for name, space in shown.items() if name != "legal" and isinstance(space, spaces.Box)]
    if task.remembers() or "legal" not in shown or len(boards) != 1 or not isinstance(n_actions, int):
        raise UserError(
            "AlphaZero plays two-player games whose simulator shows a board and the legal actions, such as --env "
            "ConnectFour-v0, without a memory. To write another game, see rlstruct.sims.ConnectFour."
        )
    chosen = {name: value for name, value in task.network_settings().items() if name != "recurrent"}
    check_settings(chosen, network_settings(agents.ConvolutionalActorCritic))
    settings = {"n_features": 96, "layers": ((64, 4, 1),), **chosen}
    create_model = partial(agents.ConvolutionalActorCritic, boards[0], n_actions, **settings)
    try_network(create_model, task)
    return AgentChoice(create_model, SearchAgent, "tree search with a convolutional network")


def evaluate(trained: Trained, options: Evaluate) -> dict[str, object]:
    """Play games against the opponent of the training's evaluations; return the results for ``--out``."""
    if options.video is not None or options.actions is not None:
        raise UserError("two-player games are not filmed, and use the best actions: omit --video and --actions.")
    torch.set_num_threads(1)
    games = options.episodes + options.episodes % 2
    config: Any = trained.settings.config
    changes: dict[str, Any] = {"evaluation_episodes": games, "evaluation_processes": 0, "seed": options.seed}
    settings = replace(config, **changes, evaluation_device=options.device)
    judge = arena(settings, trained.choice.create_agent, trained.factory, trained.model, "test")
    judge.start(trained.model.state_dict(), env_steps=trained.env_steps, policy_version=0)
    returns = judge.wait().returns
    won, lost = (sum(value == result for value in returns) for result in (1.0, -1.0))
    against = "random play" if config.opponent == "random" else f"UCT with {config.opponent_simulations} simulations"
    say(f"alphazero on {trained.settings.task.env}, after {trained.env_steps:,} moves of self-play")
    say(f"{games} games against {against}: {won} won, {games - won - lost} drawn, {lost} lost")
    return {"returns": list(returns), "opponent": against}
