"""Tutorial 08: evaluate, save, resume and plot a training.

To measure how good an agent is, play enough whole episodes on seeds that it was not trained on. A training writes a
folder with everything you need to do this later, on the command line or in a few lines of Python. It needs the extra
`train`.
"""

import contextlib
import csv
import dataclasses
import io
import pathlib
import tempfile

import gymnasium
import torch

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos.a2c import A2CConfig, train
from rlstruct.algos.seeds import seed_range
from rlstruct.algos.training.config import load_config
from rlstruct.algos.training.evaluation import Evaluator
from rlstruct.algos.training.learning_curve import Curve, draw_panels
from rlstruct.algos.training.run_folder import RunFolder
from rlstruct.batchers import RL_Batcher
from rlstruct.cli.main import main as rlstruct
from rlstruct.envs import GymEnv, GymEnvInf


def create_env(n_envs, seed):
    return GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)


def create_episodic_env(n_envs, seed):
    return GymEnv([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)


def create_model():
    return ActorCritic(n_inputs=4, n_actions=2)


def train_two_seeds(root):
    """Run two trainings, each with its own folder."""
    folders = []
    for seed in range(2):
        config = A2CConfig(
            n_env_steps=15_000, evaluation_interval=3_000, evaluation_processes=0, evaluation_episodes=10, seed=seed
        )
        # During the training the folder gets metrics.csv, the TensorBoard log and, at every evaluation, a checkpoint.
        # It replaces the last one atomically: a program that reads it never sees half a file.
        with RunFolder("a2c", config, n_env_steps=config.n_env_steps, root=root, progress=False) as run:
            result = train(config, create_model, ActorCriticAgent, create_env, run=run)
        curve = [f"{evaluation.mean_return:.0f}" for evaluation in result.evaluations]
        print(f"seed {seed}: evaluations {' '.join(curve)}; files:", sorted(f.name[:16] for f in run.path.iterdir()))
        folders.append(run.path)
    return folders


def evaluate_a_checkpoint(folder):
    """Load weights into a new network, and play 50 whole episodes, one in each environment."""
    # weights_only=True: the file holds tensors and plain values, and loading it runs no code from it.
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    model = create_model()
    model.load_state_dict(checkpoint["model"])
    means = {}
    for stochastic in (True, False):
        agent_args, seed = {"model": model, "stochastic": stochastic}, seed_range("test", 0)[0]
        with RL_Batcher(
            100, ActorCriticAgent, create_episodic_env, agent_args=agent_args, env_args={"n_envs": 50}, seed=seed
        ) as batcher:
            # The first episode of each environment counts: the first 50 episodes to end would mostly be short ones.
            evaluator = Evaluator(batcher)
            evaluator.start(model.state_dict(), env_steps=checkpoint["env_steps"], policy_version=0)
            result = evaluator.wait()
        means[stochastic] = result.mean_return
        error = result.std_return / len(result.returns) ** 0.5
        print(f"sampled actions: {stochastic}, return {result.mean_return:.1f} ± {error:.1f} (standard error)")
    return means


def go_on(folder):
    """Resume a training that has used up its 15,000 steps, and train 5,000 more."""
    # RunFolder.resume loads the checkpoint: weights, optimiser, counters, random states, and the states of environments
    # that can be saved (those of rlstruct.sims). Gymnasium's environments start new episodes.
    # What determines the result must be unchanged; devices, intervals and the target may change, too. Inside this
    # block, no other process can resume the folder.
    config = dataclasses.replace(load_config(folder, A2CConfig), n_env_steps=20_000)
    with RunFolder.resume(folder, n_env_steps=config.n_env_steps, progress=False) as run:
        began = run.checkpoint["env_steps"]
        result = train(config, create_model, ActorCriticAgent, create_env, run=run)
    print(f"resumed after {began} environment steps, ended after {result.env_steps}")
    assert began < result.env_steps


def draw(folders, path):
    """Draw curves from metrics.csv: the evaluations of all seeds, their mean, and their spread."""
    curves = []
    for folder in folders:
        with (folder / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["evaluation/mean_return"]]
        # Two evaluations may measure the same weights. The last one counts: it was not used to select anything.
        points = {int(row["env_steps"]): float(row["evaluation/mean_return"]) for row in rows}
        curves.append(Curve(list(points), list(points.values())))
    draw_panels({"CartPole-v1": {"A2C": curves}}, path, metric="return of the evaluations")
    print(f"{path.name}: {path.stat().st_size} bytes")
    return curves


def on_the_command_line(root):
    """Do the same without Python. `rlstruct train` also stores the environment and the network: you rebuild neither.

    In a shell: rlstruct train a2c --env CartPole-v1 …; rlstruct evaluate RUN --video film.gif; rlstruct plot RUN …
    """
    settings = "--n-env-steps 15000 --evaluation-processes 0 --evaluation-episodes 20 --no-progress"
    assert rlstruct(["train", "a2c", "--env", "CartPole-v1", *settings.split(), "--runs", str(root)]) == 0
    (folder,) = root.glob("a2c-CartPole-v1-*")
    assert rlstruct(["evaluate", str(folder), "--episodes", "20", "--video", str(root / "film.gif")]) == 0
    assert rlstruct(["plot", str(folder), "--out", str(root / "one.png")]) == 0
    # A mistake is reported in one line that says how to fix it, and the exit status is 2.
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert rlstruct(["train", "a2c", "--env", "CartPol-v1"]) == 2
    print(said.getvalue().strip()[:60], "…")
    assert "Did you mean 'CartPole-v1'?" in said.getvalue()


if __name__ == "__main__":
    root = pathlib.Path(tempfile.mkdtemp(prefix="tutorial_08_", dir="."))  # kept: look at the pictures in it
    folders = train_two_seeds(root / "by_hand")
    means = evaluate_a_checkpoint(folders[0])
    curves = draw(folders, root / "curves.png")
    assert min(means.values()) > 2 * curves[0].values[0]  # both ways to act are better than before training
    go_on(folders[0])
    on_the_command_line(root)
    print("curves.png, one.png and film.gif are in", root)

# Next: 09; docs/policies.md loads and exports what you have trained.
