"""RL_Agent_CheckDevice: finds every misplaced tensor, says all about it, and changes nothing else.

The meta device is the wrong place: a structure gets there without the values, which no test looks at.
"""

from __future__ import annotations

import copy
import pathlib
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from fake_agents import LinearAgent, StatefulAgent
from torch import Tensor

from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.errors import DeviceMismatchError
from rlstruct.replay import replay_agent
from rlstruct.rl_agent import RL_Agent, RL_Agent_CheckDevice
from rlstruct.testing import HostSyncError, forbid_host_sync

B = 2
META = torch.device("meta")
EMPTY = DictTensor()


def one(key: str, device: object = "cpu") -> DictTensor:
    return DictTensor({key: torch.zeros(B, device=device)})


def one_history(device: object = "cpu") -> TemporalDictTensor:
    return TemporalDictTensor({"observation/frame": torch.zeros(B, 3, device=device)})


def some_trajectories(device: object = "cpu", info_key: str = "agent_state/h") -> Trajectories:
    steps = TemporalDictTensor({"observation/frame": torch.zeros(B, 3, device=device)})
    return Trajectories(one(info_key, device), steps)


class Placed(RL_Agent):
    """Returns what it was given, and remembers what it was asked."""

    def __init__(self, state: DictTensor = EMPTY, action: DictTensor = EMPTY, new_state: DictTensor = EMPTY) -> None:
        self.answers = {"state": state, "action": action, "new_state": new_state}
        self.calls: list[tuple[str, object]] = []
        self.epsilon = 0.5

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        return self.answers["state"]

    def __call__(self, state, observation, agent_info, history=None):
        self.calls.append(("__call__", (state, observation, agent_info, history)))
        return self.answers["action"], self.answers["new_state"]

    def update(self, info: Mapping[str, Tensor]) -> None:
        self.calls.append(("update", info))

    def seed(self, seed: int) -> None:
        self.calls.append(("seed", seed))

    def require_history(self) -> bool:
        return True

    def close(self) -> None:
        self.calls.append(("close", None))

    def greet(self, name: str) -> str:
        return f"hello {name}"


class OwnReplay(Placed):
    """Replays in its own way."""

    def call_replay(self, trajectories, t, state):
        self.calls.append(("call_replay", (trajectories, t, state)))
        return self.answers["action"], self.answers["new_state"]


class KnownStates(Placed):
    """Tells its states without acting."""

    def states_at(self, trajectories, steps=None):
        self.calls.append(("states_at", (trajectories, steps)))
        return self.answers["state"]


class OnItsDevice(Placed):
    agent_info_on_device = True


def watch(agent: RL_Agent | None = None, device: str = "cpu", **settings: object) -> RL_Agent_CheckDevice:
    return RL_Agent_CheckDevice(Placed() if agent is None else agent, device, **settings)  # type: ignore[arg-type]


Misplace = Callable[[], object]
WRONG: dict[str, tuple[Misplace, str, str, str]] = {
    # name: (what to do, where and role, key, the fix)
    "agent_info of initial_state": (
        lambda: watch().initial_state(one("epsilon", META), B),
        "Placed.initial_state: argument agent_info",
        "epsilon",
        "Keep it on the CPU, or set agent_info_on_device = True on the agent.",
    ),
    "initial state": (
        lambda: watch(Placed(state=one("h", META))).initial_state(EMPTY, B),
        "Placed.initial_state: result initial state",
        "h",
        "Create it with device='cpu', or move the agent's model with .to('cpu').",
    ),
    "agent_info": (
        lambda: watch()(EMPTY, one("frame"), one("epsilon", META)),
        "Placed.__call__: argument agent_info",
        "epsilon",
        "Keep it on the CPU, or set agent_info_on_device = True on the agent.",
    ),
    "state": (
        lambda: watch()(one("h", META), one("frame"), EMPTY),
        "Placed.__call__: argument state",
        "h",
        "Move it with .to('cpu'), or move the agent's model to where it is.",
    ),
    "observation": (
        lambda: watch()(EMPTY, one("frame", META), EMPTY),
        "Placed.__call__: argument observation",
        "frame",
        "Move it with .to('cpu'), or wrap the environment in DeviceEnv(env, 'cpu').",
    ),
    "history": (
        lambda: watch()(EMPTY, one("frame"), EMPTY, one_history(META)),
        "Placed.__call__: argument history",
        "observation/frame",
        "Move it with .to('cpu'), or move the agent's model to where it is.",
    ),
    "action": (
        lambda: watch(Placed(action=one("action", META)))(EMPTY, one("frame"), EMPTY),
        "Placed.__call__: result action",
        "action",
        "Create it with device='cpu', or move the agent's model with .to('cpu').",
    ),
    "new state": (
        lambda: watch(Placed(new_state=one("h", META)))(EMPTY, one("frame"), EMPTY),
        "Placed.__call__: result new_state",
        "h",
        "Create it with device='cpu', or move the agent's model with .to('cpu').",
    ),
    "trajectories in call_replay": (
        lambda: watch().call_replay(Trajectories(EMPTY, some_trajectories(META).steps), 0, None),
        "Placed.call_replay: argument trajectories",
        "observation/frame",
        "Move it with .to('cpu'), or move the agent's model to where it is.",
    ),
    "trajectories in replay_agent": (
        lambda: replay_agent(watch(), some_trajectories(META)),
        "Placed.call_replay: argument trajectories.info",
        "agent_state/h",
        "Move it with .to('cpu'), or move the agent's model to where it is.",
    ),
    "trajectories in the replay in one call": (
        lambda: replay_agent(watch(LinearAgent(1)), Trajectories(EMPTY, some_trajectories(META).steps)),
        "LinearAgent.call_replay: argument trajectories",
        "observation/frame",
        "Move it with .to('cpu'), or move the agent's model to where it is.",
    ),
    "known states": (
        lambda: watch(KnownStates(one("h", META))).states_at(some_trajectories()),
        "KnownStates.states_at: result states",
        "h",
        "Create it with device='cpu', or move the agent's model with .to('cpu').",
    ),
    "env_info in replay": (
        lambda: replay_agent(watch(), some_trajectories(META, "env_info/gravity")),
        "Placed.call_replay: argument trajectories.info",
        "env_info/gravity",
        "Move it with .to('cpu'), or move the agent's model to where it is.",
    ),
    "state in replay": (
        lambda: watch().call_replay(some_trajectories(), 1, one("h", META)),
        "Placed.__call__: argument state",
        "h",
        "Move it with .to('cpu'), or move the agent's model to where it is.",
    ),
    "action in replay": (
        lambda: watch(Placed(action=one("action", META))).call_replay(some_trajectories(), 1, None),
        "Placed.__call__: result action",
        "action",
        "Create it with device='cpu', or move the agent's model with .to('cpu').",
    ),
    "state in an own replay": (
        lambda: watch(OwnReplay()).call_replay(some_trajectories(), 1, one("h", META)),
        "OwnReplay.call_replay: argument state",
        "h",
        "Move it with .to('cpu'), or move the agent's model to where it is.",
    ),
    "action of an own replay": (
        lambda: watch(OwnReplay(action=one("action", META))).call_replay(some_trajectories(), 1, None),
        "OwnReplay.call_replay: result action",
        "action",
        "Create it with device='cpu', or move the agent's model with .to('cpu').",
    ),
    "new state of an own replay": (
        lambda: watch(OwnReplay(new_state=one("h", META))).call_replay(some_trajectories(), 1, None),
        "OwnReplay.call_replay: result new_state",
        "h",
        "Create it with device='cpu', or move the agent's model with .to('cpu').",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_placement_is_named_in_full(name: str) -> None:
    misplace, where, key, fix = WRONG[name]
    message = f"{where}: tensor {key!r} is on meta, expected cpu. {fix}"
    with pytest.raises(DeviceMismatchError) as caught:
        misplace()
    assert str(caught.value) == message


def test_agent_info_that_is_wanted_on_the_device_is_expected_there() -> None:
    agent = watch(OnItsDevice(), "meta")
    agent(EMPTY, one("frame", META), one("epsilon", META))
    with pytest.raises(DeviceMismatchError, match=r"'epsilon' is on cpu, expected meta\. .*on_device = True: move it"):
        agent(EMPTY, one("frame", META), one("epsilon"))


def test_another_index_of_the_same_kind_is_another_device() -> None:
    agent = watch(device="sim:1")
    agent(EMPTY, one("frame", "sim:1"), EMPTY)
    with pytest.raises(DeviceMismatchError, match="observation: tensor 'frame' is on sim:2, expected sim:1"):
        agent(EMPTY, one("frame", "sim:2"), EMPTY)


@pytest.mark.parametrize("device", ["cpu", "meta", "sim:1"])
def test_right_placement_passes_and_reaches_the_agent_untouched(device: str) -> None:
    inner = Placed(one("h", device), one("action", device), one("h", device))
    agent = watch(inner, device)
    state, observation, agent_info = one("h", device), one("frame", device), one("epsilon")
    history = one_history(device)
    assert agent.initial_state(agent_info, B) is inner.answers["state"]
    action, new_state = agent(state, observation, agent_info, history)
    assert action is inner.answers["action"]
    assert new_state is inner.answers["new_state"]
    ((_, arguments),) = inner.calls
    assert all(got is sent for got, sent in zip(arguments, (state, observation, agent_info, history), strict=True))


def test_empty_structures_are_on_any_device() -> None:
    agent = watch(Placed(action=one("action", META)), "meta")
    assert agent.initial_state(EMPTY, B).empty()
    assert agent(EMPTY, EMPTY, EMPTY, TemporalDictTensor({}))[1].empty()


def test_an_own_replay_is_asked_with_the_same_arguments() -> None:
    inner = OwnReplay(action=one("action"))
    trajectories, state = some_trajectories(), one("h")
    assert watch(inner).call_replay(trajectories, 2, state)[0] is inner.answers["action"]
    ((_, arguments),) = inner.calls
    assert all(got is sent for got, sent in zip(arguments, (trajectories, 2, state), strict=True))


def test_states_are_told_by_the_agent() -> None:
    inner = KnownStates(one("h"))
    trajectories, steps = some_trajectories(), torch.tensor([1, 0])
    assert watch(inner).states_at(trajectories, steps) is inner.answers["state"]
    assert inner.calls == [("states_at", (trajectories, steps))]
    assert watch(OwnReplay()).states_at(Trajectories(EMPTY, trajectories.steps)) is None


def test_everything_else_is_forwarded() -> None:
    inner = Placed()
    agent = watch(inner)
    weights = {"w": torch.ones(1)}
    agent.update(weights)
    agent.seed(7)
    agent.close()
    assert inner.calls == [("update", weights), ("seed", 7), ("close", None)]
    assert inner.calls[0][1] is weights
    assert agent.require_history() is True
    assert agent.greet("you") == "hello you"
    assert agent.epsilon == 0.5
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = agent.nothing_of_that_name


def test_an_attribute_is_set_on_the_agent() -> None:
    inner = Placed()
    agent = watch(inner)
    agent.epsilon = 0.1
    assert inner.epsilon == 0.1
    assert agent.epsilon == 0.1


def test_a_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="Devices here: cpu"):
        watch(device="gpu")


class CopiesItself(Placed):
    def __deepcopy__(self, memo: dict[int, object]) -> CopiesItself:
        return CopiesItself()


@pytest.mark.parametrize("inner", [Placed(), CopiesItself(), StatefulAgent(), LinearAgent(1)])
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda agent: pickle.loads(pickle.dumps(agent))])
def test_a_copy_still_watches(inner: RL_Agent, again: Callable[[RL_Agent_CheckDevice], RL_Agent_CheckDevice]) -> None:
    twin = again(watch(inner, host_syncs=forbid_host_sync))
    assert type(twin) is RL_Agent_CheckDevice
    assert type(twin.agent) is type(inner)
    with pytest.raises(DeviceMismatchError, match="argument observation"):
        twin(EMPTY, one("frame", META), EMPTY)


class Peeking(Placed):
    """Looks at the values of its observation."""

    def __call__(self, state, observation, agent_info, history=None):
        if observation["frame"].sum().item() > 1e9:
            raise OverflowError
        return one("action"), EMPTY


class PeekingInReplay(Placed):
    def call_replay(self, trajectories, t, state):
        trajectories.info["agent_state/h"].tolist()
        return one("action"), EMPTY


def test_host_syncs_inside_the_agent_are_found_if_asked() -> None:
    watch(Peeking())(EMPTY, one("frame"), EMPTY)
    agent = watch(Peeking(), host_syncs=forbid_host_sync)
    with pytest.raises(HostSyncError, match="item"):
        agent(EMPTY, one("frame"), EMPTY)
    one("frame")["frame"].sum().item()  # the guard is gone again
    with pytest.raises(HostSyncError, match="item"):
        agent.call_replay(some_trajectories(), 0, None)
    with pytest.raises(HostSyncError, match="tolist"):
        watch(PeekingInReplay(), host_syncs=forbid_host_sync).call_replay(some_trajectories(), 0, None)


def test_the_librarys_own_copy_of_agent_info_in_replay_is_no_host_sync_of_the_agent() -> None:
    # The trajectories hold agent_info on the agent's device, and the agent wants it on the CPU.
    steps = TemporalDictTensor({"observation/initial_state": torch.zeros(B, 3, dtype=torch.bool, device="sim:0")})
    start = {"agent_info/start": torch.tensor([4, 6], device="sim:0")}
    state = {f"agent_state/{key}": torch.zeros(B, dtype=torch.int64, device="sim:0") for key in ("steps", "start")}
    agent = watch(StatefulAgent(device="sim:0"), "sim:0", host_syncs=forbid_host_sync)
    replayed = replay_agent(agent, Trajectories(DictTensor(start | state), steps))
    assert replayed["steps"].to("cpu").tolist() == [[0, 1, 2]] * B


def test_checks_survive_python_without_asserts(tmp_path: pathlib.Path) -> None:
    code = """
        import torch
        from rlstruct import DeviceMismatchError, DictTensor, RL_Agent_CheckDevice
        from fake_agents import FixedAgent
        assert False, "asserts must be off"
        agent = RL_Agent_CheckDevice(FixedAgent(), "cpu")
        meta = DictTensor({"last_action": torch.zeros(2, device="meta")})
        for state, observation in ((DictTensor(), meta), (meta, meta.map(lambda t: torch.zeros(2)))):
            try:
                agent(state, observation, DictTensor())
            except DeviceMismatchError as error:
                print(error)
    """
    command = [sys.executable, "-O", "-c", textwrap.dedent(code)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=True)
    assert [line.partition(" is on")[0] for line in run.stdout.splitlines()] == [
        "FixedAgent.__call__: argument observation: tensor 'last_action'",
        "FixedAgent.__call__: argument state: tensor 'last_action'",
    ]


class Answering(Placed):
    """Returns what it was made with."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer

    def __call__(self, state, observation, agent_info, history=None):
        return self.answer


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (one("action"), "a DictTensor"),
        ({"action": torch.zeros(B)}, "a dict"),
        (({"action": torch.zeros(B)}, EMPTY), r"\(dict, DictTensor\)"),
        ((one("action"), None), r"\(DictTensor, NoneType\)"),
        ((one("action"), EMPTY, EMPTY), "a tuple"),
    ],
)
def test_an_answer_that_is_no_pair_of_structures_is_named(answer: object, got: str) -> None:
    with pytest.raises(
        TypeError, match=rf"Answering\.__call__: returned {got}, expected the pair .* Return DictTensor"
    ):
        watch(Answering(answer))(EMPTY, one("frame"), EMPTY)


def test_an_agent_may_decide_later_where_it_wants_agent_info() -> None:
    inner = Placed()
    agent = watch(inner, "sim:1")
    inner.agent_info_on_device = True
    assert agent.agent_info_on_device
    agent.initial_state(one("epsilon", "sim:1"), B)
    with pytest.raises(DeviceMismatchError, match=r"'epsilon' is on cpu, expected sim:1.*agent_info_on_device = True"):
        agent.initial_state(one("epsilon"), B)


def test_defaults_of_the_contract() -> None:
    class Least(RL_Agent):
        def __call__(self, state, observation, agent_info, history=None):
            return one("action"), EMPTY

    agent = Least()
    assert agent.initial_state(EMPTY, B).empty()
    assert agent.require_history() is False
    assert agent.agent_info_on_device is False
    agent.seed(1)
    agent.close()
    with pytest.raises(NotImplementedError, match=r"Least\.update: this agent takes no weights\. Define update"):
        agent.update({})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((Placed, "cpu"), r"agent is the class Placed, expected an RL_Agent\. Create one: Placed\("),
        ((torch.nn.Linear(1, 1), "cpu"), r"agent is a Linear, expected an RL_Agent\. Put the model into a class"),
    ],
)
def test_only_an_agent_is_watched(arguments: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"RL_Agent_CheckDevice: {words}"):
        RL_Agent_CheckDevice(*arguments)


@pytest.mark.parametrize(("guard", "kind"), [(True, "bool"), (forbid_host_sync(), "_GeneratorContextManager")])
def test_a_guard_that_cannot_be_entered_in_each_call_is_refused(guard: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=f"host_syncs is a {kind}, .* Pass forbid_host_sync .*without calling it"):
        RL_Agent_CheckDevice(Placed(), "cpu", host_syncs=guard)


@pytest.mark.parametrize("state", [None, torch.zeros(B, 3)])
def test_an_initial_state_that_is_no_structure_is_refused(state: Any) -> None:
    agent = RL_Agent_CheckDevice(Placed(state), "cpu")
    with pytest.raises(TypeError, match=r"Placed\.initial_state: returned a \w+, expected a DictTensor\. .*empty one"):
        agent.initial_state(EMPTY, B)
