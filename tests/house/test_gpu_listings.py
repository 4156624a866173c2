"""Listings of the documentation that are meant for a GPU run as a graph on the simulated accelerator.

Every test takes the code from the page. Where a listing names a device that this machine lacks, the table says which
words of it are replaced, and fails if they are no longer there.
"""

from __future__ import annotations

import importlib.util
import pathlib
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from checkers import ROOT
from rlstruct import DictTensor, RL_Agent
from rlstruct.batchers import RL_Batcher
from rlstruct.cli.main import main
from rlstruct.functional.random import categorical
from rlstruct.sims import make
from rlstruct.vec_env import VecEnv

SIM = "sim:1"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIALS = sorted((ROOT / "tutorials").glob("[0-9]*.py"))
FOR_A_GPU = re.compile(r"cuda|pure = True|\(TensorEnv|MujocoWarpEnv|\"warp\"|\"ALE/|atari")
Steps = list[dict[str, torch.Tensor]]
Use = Callable[[dict[str, Any], "Graphs"], None]


def listings(page: pathlib.Path, language: str = "python") -> list[str]:
    """Return the listings of a page; a tutorial is one."""
    text = page.read_text()
    if page.suffix == ".py":
        return [text] if language == "python" else []
    return [found[2] for found in re.finditer(r"```(\w*)[^\n]*\n(.*?)```", text, re.DOTALL) if found[1] == language]


@dataclass
class Graphs:
    """Graphs of a test: executors of the batches on the simulated accelerator, and captures with their replays."""

    executors: list[str] = field(default_factory=list)
    replays: list[int] = field(default_factory=list)  # of each capture


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Note what runs as a graph."""
    found = Graphs()
    sim_device = importlib.import_module("rlstruct.testing.sim_device")  # older torch has no such device
    capture, get = sim_device.capture, RL_Batcher.get

    def noted(work: Callable[[], None]) -> Callable[[], None]:
        replay, i = capture(work), len(found.replays)
        found.replays.append(0)

        def counted() -> None:
            found.replays[i] += 1
            replay()

        return counted

    def watched(batcher: RL_Batcher, *args: Any, **settings: Any) -> Any:
        answer = get(batcher, *args, **settings)
        if batcher.device.type == "sim":
            found.executors += batcher.stats().executors
        return answer

    monkeypatch.setattr(sim_device, "capture", noted)
    monkeypatch.setattr(RL_Batcher, "get", watched)
    return found


class AnyAction(RL_Agent):
    """Draws one of n actions, a legal one where the environment says which are."""

    pure = True

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, state: DictTensor, observation: DictTensor, *_: Any) -> tuple[DictTensor, DictTensor]:
        rng = observation["rng"]
        logits = torch.zeros(len(rng), self.n, device=rng.device)
        if "frame/legal" in observation.keys():
            logits = torch.where(observation["frame/legal"], logits, -torch.inf)
        return DictTensor({"action": categorical(logits, rng)}), state


def collect(
    create_agent: Callable[..., RL_Agent], create_env: Callable[..., VecEnv], info: DictTensor, graph: bool
) -> Steps:
    """Collect four batches on the simulated accelerator; return their tensors on the CPU."""
    torch.manual_seed(0)
    args = {"n_envs": 4, "device": SIM}
    batches = []
    with RL_Batcher(6, create_agent, create_env, env_args=args, device=SIM, seed=3, graph=graph) as batcher:
        batcher.reset(agent_info=info)
        for _ in range(4):
            batcher.execute()
            batch, _ = batcher.get()
            batches.append(dict(batch.to("cpu").steps.items()))
    return batches


def check_collection(
    create_agent: Callable[..., RL_Agent],
    create_env: Callable[..., VecEnv],
    graphs: Graphs,
    info: DictTensor = DictTensor({}),  # noqa: B008 - immutable
) -> None:
    """All batches but the first are replays of one graph, and all equal those of single steps."""
    found = collect(create_agent, create_env, info, graph=True)
    assert graphs.executors == ["eager", "graph", "graph", "graph"]
    assert graphs.replays == [3]
    expected = collect(create_agent, create_env, info, graph=False)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for key, tensor in one.items():
            torch.testing.assert_close(tensor, other[key], rtol=0, atol=0, equal_nan=True, msg=key)


def simulator(name: str) -> Use:
    """A simulator of the listing, with an agent that plays at random."""

    def use(names: dict[str, Any], graphs: Graphs) -> None:
        game = names[name]
        check_collection(partial(AnyAction, int(game.action_space.n)), game, graphs)

    return use


def agent(name: str, **info: torch.Tensor) -> Use:
    """An agent of the listing, in CartPole; create_agent moves its network, as docs/devices.md says."""

    def use(names: dict[str, Any], graphs: Graphs) -> None:
        def create_agent() -> RL_Agent:
            found: RL_Agent = names[name]()
            for part in vars(found).values():
                if isinstance(part, torch.nn.Module):
                    part.to(SIM)
            return found

        check_collection(create_agent, partial(make, "CartPole-v1"), graphs, DictTensor(info))

    return use


def program(n_graphs: int) -> Use:
    """A listing that has run as a program, with its number of graphs: one of the batches, one of the updates."""

    def use(names: dict[str, Any], graphs: Graphs) -> None:
        assert graphs.executors[-1] == "graph"
        assert len(graphs.replays) == n_graphs
        assert min(graphs.replays) > 0

    return use


def function(name: str, *args: Any) -> Use:
    """A function of the listing that makes a batcher and collects."""

    def use(names: dict[str, Any], graphs: Graphs) -> None:
        names[name](*args)
        program(1)(names, graphs)

    return use


@dataclass(frozen=True)
class Listing:
    """A listing of a page.

    Attributes:
        page: file under docs, or another of the repository.
        words: occur in this listing of the page alone.
        use: collects with the listing's names and checks the graphs.
        edits: words of the listing, each with its replacement.
        runs: whether it runs as a program, and not as a module.
    """

    page: str
    words: str
    use: Use
    edits: tuple[tuple[str, str], ...] = ()
    runs: bool = False


ON_CUDA = ('"cuda:0" if torch.cuda.is_available() else "cpu"', f'"{SIM}"')
SHARED = ('"cuda:0" if torch.cuda.device_count() else "cpu"', f'"{SIM}"')
SHORT_EPISODES = ("500, PopulationAgent", "50, PopulationAgent")
GMI = ('"cuda" if torch.cuda.device_count() else "cpu"', f'"{SIM}"')
ONE_LEARNER = (("n_learners=2", "n_learners=1"), ('sharing="auto"', 'sharing="none"'))
# Batches of whole episodes differ in shape: AWR's updates are no graph, its batches are.
AWR = "n_env_steps=3_000, evaluation_episodes=4"
AWR_ON_SIM = f'n_env_steps=1_280, n_envs=8, n_timesteps=40, learner_device="{SIM}", batcher_device="{SIM}"'
AWR_ENV = ('"CartPole-v1", auto_reset=False', f'"CartPole-v1", auto_reset=False, device="{SIM}"')
LISTINGS = [
    Listing("README.md", "class MyAgent(RL_Agent)", agent("MyAgent")),
    Listing("docs/cheat_sheet.md", "class Agent(RL_Agent)", agent("Agent")),
    Listing("docs/fast_paths.md", "class Honest(Hasty)", agent("Honest", temperature=torch.ones(4))),
    Listing("docs/custom_game.md", "class TicTacToe(", simulator("TicTacToe")),
    Listing("docs/kernels.md", "class Walk(", simulator("Walk")),
    Listing("docs/coming_from_gmi_drl.md", "learner_group()", program(2), (GMI, *ONE_LEARNER), runs=True),
    Listing("docs/custom_algorithms.md", "class AWRLearner(", program(1), ((AWR, AWR_ON_SIM), AWR_ENV), runs=True),
    Listing("tutorials/02_your_own_agent.py", "class LinearAgent(", agent("LinearAgent")),
    Listing("tutorials/02_your_own_agent.py", "class GRUAgent(", agent("GRUAgent")),
    Listing("tutorials/09_write_a_simulator.py", "class Catch(", simulator("Catch")),
    Listing("tutorials/10_four_thousand_environments.py", "def collect(", function("collect", 8), (ON_CUDA,)),
    Listing("tutorials/17_sharing_a_gpu.py", "def speed(", function("speed", 0, 8), (SHARED,)),
    Listing("tutorials/20_evolution_strategies.py", "def evolve(", function("evolve", 8, 2), (ON_CUDA, SHORT_EPISODES)),
]


WARP = "a kernel of Warp, for CPU and CUDA alone; test_documentation_runs.py runs it on the CPU"
SHARING = "learners or workers that share a GPU with MPS or MIG, which the simulated accelerator has not"
PIECE = "a piece of a program, with `...` or names that the reader has"
NOT_A_GRAPH = {
    # page and words of a listing: why the simulated accelerator cannot run it as a graph
    ("docs/kernels.md", "n_timesteps=32,"): WARP,
    ("docs/atari.md", 'sims.make("ALE/Breakout-v5"'): WARP,
    ("docs/atari.md", "create_env = partial(sims.make"): WARP,
    ("docs/atari.md", 'open_consoles("seaquest"'): WARP,
    ("docs/coming_from_cule.md", "open_ale("): WARP,
    ("tutorials/14_a_thousand_pongs.py", "create_env"): WARP,
    ("tutorials/19_start_states.py", "create_env"): WARP,
    ("tutorials/17_sharing_a_gpu.py", "n_learners=4"): SHARING,
    ("tutorials/21_roles.py", "launch_roles("): "processes that share a GPU, which no simulated accelerator reaches",
    ("docs/jax_and_mujoco.md", "registry.load"): "JAX's own kernels, and a package that needs a GPU",
    ("docs/jax_and_mujoco.md", "class Balance"): "mujoco_warp's own kernels; test_mujoco_warp_env.py",
    ("docs/sharing_a_gpu.md", "n_processes=8"): PIECE + "; " + SHARING,
    ("docs/sharing_a_gpu.md", "with mps("): PIECE + "; " + SHARING,
    ("docs/fast_paths.md", "class MyAgent"): PIECE,
    ("docs/custom_algorithms.md", "class TD3Learner"): "environments of gymnasium, on the CPU",
    ("docs/questions.md", "class LSTMAgent"): PIECE,
    ("docs/action_masks.md", "class ShopAgent"): "environments of gymnasium, on the CPU",
    ("docs/devices.md", "class Forgetful"): "environments of the CPU, and a mistake, on sim:1",
    ("tutorials/04_moving_to_a_gpu.py", "class Agent("): "environments of the CPU; it runs on sim:1",
}


def key_of(page: pathlib.Path, code: str) -> list[tuple[str, str]]:
    """Return the entries of the tables above that a listing has."""
    name = str(page.relative_to(ROOT))
    entries = [*NOT_A_GRAPH, *((listing.page, listing.words) for listing in LISTINGS)]
    return [entry for entry in entries if entry[0] == name and entry[1] in code]


def test_every_listing_for_a_gpu_is_in_a_table() -> None:
    meant = [(page, code) for page in (*PAGES, *TUTORIALS) for code in listings(page) if FOR_A_GPU.search(code)]
    assert [(page.name, code) for page, code in meant if not key_of(page, code)] == []
    for (name, words), reason in NOT_A_GRAPH.items():
        (code,) = (code for code in listings(ROOT / name) if words in code)
        runs = name.startswith("tutorials") or f"<!-- run -->\n\n```python\n{code}" in spaced(ROOT / name)
        assert runs or reason != WARP, (name, words)


def spaced(page: pathlib.Path) -> str:
    """Return a page with one empty line after each mark "run"."""
    return re.sub(r"<!-- run -->\n+", "<!-- run -->\n\n", page.read_text())


def code_of(listing: Listing) -> str:
    (code,) = (code for code in listings(ROOT / listing.page) if listing.words in code)
    for was, now in listing.edits:
        assert code.count(was) == 1, f"{listing.page}: {was!r} is no longer there"
        code = code.replace(was, now)
    return code


@pytest.mark.slow
@pytest.mark.parametrize("listing", LISTINGS, ids=lambda listing: f"{listing.page}, {listing.words}")
def test_a_listing_for_a_gpu_runs_as_a_graph(
    listing: Listing, graphs: Graphs, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "import warp" in code_of(listing):
        pytest.importorskip("warp", reason="needs the extra: pip install 'rlstruct[warp]'")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "listing.py"  # Warp reads the source of its functions from a file
    file.write_text(code_of(listing))
    spec = importlib.util.spec_from_file_location("__main__" if listing.runs else "listing", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if not listing.runs:
        monkeypatch.setitem(sys.modules, "listing", module)
    spec.loader.exec_module(module)
    listing.use(vars(module), graphs)


FEW = "--evaluation-episodes 1 --evaluation-timesteps 4 --evaluation-processes 0 --no-progress --n-envs 2"
PONG = "--env-options max_num_frames_per_episode=200 --n-processes 0"
GAMES = (
    "--n-env-steps 32 --n-timesteps 4 --learning-starts 16 --batch-size 8 --n-simulations 4 --opponent-simulations 4"
)
GAMES += " --evaluation-episodes 2 --network layers=[[8,4,1]] n_features=8"
DQN = f"{FEW} {PONG} --n-timesteps 4 --n-env-steps 48 --learning-starts 16 --n-updates 1 --batch-size 4"
COMMANDS = {
    # page and words of a command: options that make it short
    ("docs/command_line.md", "--simulator torch"): f"{FEW} --n-env-steps 64 --n-timesteps 4",
    ("docs/algorithms/a2c.md", "a2c --env Breakout-MinAtar"): f"{FEW} --n-env-steps 64 --n-timesteps 4",
    ("docs/algorithms/dqn.md", "dqn --env ALE/Pong-v5"): f"{DQN} --replay-capacity 1000",
    ("docs/algorithms/alphazero.md", "alphazero --env ConnectFour-v0"): f"{FEW} {GAMES}",
    ("docs/atari.md", "a2c --env ALE/Pong-v5"): f"{FEW} {PONG} --n-env-steps 32 --n-timesteps 4",
    ("docs/atari.md", "dqn --env ALE/Pong-v5"): f"{DQN} --replay-capacity 1000",
}
OTHER_COMMANDS = {
    ("docs/sharing_a_gpu.md", "--n-processes 8"): SHARING,
    ("docs/sharing_a_gpu.md", "--learners 4"): SHARING,
    ("docs/tuning.md", "rlstruct tune"): "tune measures what a GPU can do",
}


def commands(page: pathlib.Path) -> list[str]:
    """Return the commands of a page that name a GPU."""
    code = "\n".join(listings(page, "sh") + listings(page, "bash")).replace("\\\n", " ")
    return [line for line in code.splitlines() if "cuda" in line]


def test_every_command_for_a_gpu_is_in_a_table() -> None:
    known = [*COMMANDS, *OTHER_COMMANDS]
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        for command in commands(page):
            assert len([words for where, words in known if where == name and words in command]) == 1, command
    for name, words in known:
        assert len([command for command in commands(ROOT / name) if words in command]) == 1, words


@pytest.mark.slow
@pytest.mark.parametrize(("page", "words"), COMMANDS)
def test_a_command_for_a_gpu_learns_by_a_graph(
    page: str, words: str, graphs: Graphs, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tyro", reason="needs the extra: pip install 'rlstruct[train]'")
    if "ALE/" in words:
        pytest.importorskip("ale_py", reason="needs the extra: pip install 'rlstruct[atari]'")
        pytest.importorskip("cv2", reason="needs the extra: pip install 'rlstruct[atari]'")
    monkeypatch.chdir(tmp_path)
    (command,) = (command for command in commands(ROOT / page) if words in command)
    arguments = shlex.split(command.replace("cuda:0", SIM), comments=True)
    assert main([*arguments[1:], *shlex.split(COMMANDS[page, words])]) == 0
    assert graphs.replays
    assert min(graphs.replays) > 0
