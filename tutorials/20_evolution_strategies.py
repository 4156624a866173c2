"""Tutorial 20: evolution strategies, with one network per row of the batch.

A batch of many environments need not be samples of one policy: here every row acts with weights that differ from those
of all others, and the return of its episode is all that is learned from. This is OpenAI's evolution strategy (Salimans
et al., "Evolution Strategies as a Scalable Alternative to Reinforcement Learning", 2017). It needs no gradients, value
function or discount, and each row adds one sample to the estimate of the best direction. CartPole takes half a minute.
"""

import time

import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.utils import parameters_to_vector

from rlstruct import DictTensor, RL_Agent
from rlstruct.batchers import RL_Batcher
from rlstruct.sims import make
from rlstruct.testing import check_agent

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
N = 512  # rows: environments, networks and episodes of a generation
SIGMA, STEP_SIZE = 0.2, 1.5  # standard deviation of the perturbations, and size of an update


def create_env(n_envs, seed):
    """Create CartPoles that idle after their episode: a row is one episode, then padding."""
    return make("CartPole-v1", n_envs, seed, device=DEVICE, auto_reset=False)


# --- One network per row ----------------------------------------------------------------------------------------------
torch.manual_seed(0)
NETWORK = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))  # its layers, and the first centre
SHAPES = {name: weight.shape for name, weight in NETWORK.named_parameters()}
D = sum(shape.numel() for shape in SHAPES.values())  # 114 weights


def logits(weights, frame):
    """Return the logits [2] of the network with weights [D] for a frame [4]."""
    parts = weights.split([shape.numel() for shape in SHAPES.values()])
    named = {name: part.view(shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}
    return functional_call(NETWORK, named, frame)


class Population(nn.Module):
    """N networks with the same layers; row i of ``weights`` [N, D] has all weights of network i."""

    def __init__(self, n):
        super().__init__()
        self.register_buffer("weights", torch.zeros(n, D))

    def forward(self, number, frame):
        """Return the logits [B, 2] of networks [B] for frames [B, 4]: vmap turns B small layers into one product."""
        return vmap(logits)(self.weights[number], frame)


class PopulationAgent(RL_Agent):
    """Acts for each environment with the network that `agent_info` names. The perturbed weights are the exploration."""

    pure = True  # depends only on its weights and its arguments
    agent_info_on_device = True  # it is used in every step

    def __init__(self, n):
        self.model = Population(n).to(DEVICE)

    def __call__(self, state, observation, agent_info, history=None):
        return DictTensor({"action": self.model(agent_info["network"], observation["frame"]).argmax(-1)}), state

    def update(self, info):
        self.model.load_state_dict(info)


# --- The evolution strategy -------------------------------------------------------------------------------------------
def play(batcher, weights):
    """Play one episode with each row of the weights [N, D] and return the return of each [N]."""
    batcher.update({"weights": weights.cpu()})
    batcher.reset(agent_info=DictTensor({"network": torch.arange(len(weights))}))
    batcher.execute()
    trajectories, _ = batcher.get()  # N whole episodes: [N, T]
    return (trajectories.steps["_observation/reward"] * trajectories.mask()).sum(1)


def shaped(fitness):
    """Return the centred ranks [N] of the fitness [N], from -0.5 to 0.5; equal fitness has equal rank.

    With ranks the scale of rewards does not matter, and no single lucky row determines the direction.
    """
    return (fitness.unsqueeze(1) - fitness).sign().mean(1) / 2


def evolve(n, n_generations):
    """Run the strategy with n rows; return the learned weights [D] and the mean return that they reach."""
    generator = torch.Generator().manual_seed(0)
    centre = parameters_to_vector(NETWORK.parameters()).detach().to(DEVICE)  # [D]
    with RL_Batcher(
        500, PopulationAgent, create_env, agent_args={"n": n}, env_args={"n_envs": n}, seed=0, device=DEVICE
    ) as batcher:
        for generation in range(n_generations):
            # Antithetic perturbations: what one row adds, another subtracts, so their common luck cancels.
            half = torch.randn(n // 2, D, generator=generator).to(DEVICE)  # equal on every device
            noise = torch.cat([half, -half])  # [N, D]
            fitness = play(batcher, centre + SIGMA * noise)
            centre = centre + STEP_SIZE / n * (shaped(fitness) @ noise)  # towards the rows that did well
            if generation % 3 == 0:
                print(f"generation {generation:2}: mean return {fitness.mean():3.0f}, best {fitness.max():3.0f}")
        return centre, float(play(batcher, centre.expand(n, D)).mean())  # n other episodes, without perturbations


if __name__ == "__main__":
    torch.set_num_threads(1)
    # The batcher may divide the rows among processes: each row brings the number of its network.
    check_agent(PopulationAgent(4), create_env(n_envs=4, seed=0), agent_info=DictTensor({"network": torch.arange(4)}))

    start = time.perf_counter()
    centre, mean_return = evolve(N, n_generations=16)
    seconds = time.perf_counter() - start
    print(f"{D} learned weights, unperturbed: mean return {mean_return:.0f} over {N} episodes, after {seconds:.0f} s")
    assert mean_return > 475  # gymnasium's threshold; 500 is the maximum

# Next: 21 gives processes roles.
