"""An environment that a command cannot use is one clear sentence, and the exit status is 2."""

from __future__ import annotations

import json
import pathlib
import shutil
import sys

import odd_envs
import pytest

from rlstruct.cli.main import main

for package in ("tyro", "tqdm", "tensorboard", "matplotlib", "PIL"):
    pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[train]'")

Capture = pytest.CaptureFixture[str]
SMALL = ["--n-env-steps", "16", "--n-timesteps", "4", "--n-envs", "2", "--n-processes", "0", "--no-progress"]
SMALL += ["--evaluation-processes", "0", "--evaluation-episodes", "2"]
NO_SHAPE = "which has no fixed shape. Only Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of them"
NO_AGENT = "the bundled agents choose one of A actions, several such choices at once, or a vector of"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(pathlib.Path(odd_envs.__file__).parent))


def refused(words: list[str], capsys: Capture) -> str:
    """Run a command that must fail, and return its message."""
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"rlstruct {words[0]}: ")
    return said


def assert_one_sentence(said: str) -> None:
    lines = [line for line in said.splitlines() if not line.startswith("To read more: rlstruct explain ")]
    assert len(lines) == 1, said


ANYWHERE = {  # refused by train and play
    "odd_envs:SeesGraph": f"space 'frame' is Graph(Box(-1.0, 1.0, (2,), float32), None), {NO_SHAPE}",
    "odd_envs:SeesSequence": f"space 'frame' is Sequence(Box(-1.0, 1.0, (2,), float32), stack=False), {NO_SHAPE}",
    "odd_envs:SeesMission": "space 'frame/mission' is ",
    "odd_envs:SeesEmpty": "space 'frame' is Dict(), which holds nothing",
    "odd_envs:NoSpace": "a NoSpace, declares no observation_space",
    "odd_envs:NoSpaces": "a NoSpaces, declares no observation_space",
    "odd_envs:TakesGraph": "space 'action' is Graph(",
    "odd_envs:TakesSequence": "space 'action' is Sequence(",
    "odd_envs:TakesText": "space 'action' is Text(",
    "odd_envs:TakesOneOf": "space 'action' is OneOf(",
    "odd_envs:TakesEmpty": "space 'action' is Dict(), which holds nothing",
    "odd_envs:Required": "cannot be created: Required.__init__() missing 1 required positional argument: 'size'. Give",
    "odd_envs:OddRequired-v0": "missing 1 required positional argument: 'size'. Give it a default value, or pass",
    "odd_envs:VectorReward": "environment 0 gave an array of shape (2,), expected one number",
    "odd_envs:FourValues": "returned 4 values, (ndarray, float, bool, dict), expected gymnasium's five values",
    "odd_envs:OddFourValues-v0": "a FourValues, was asked by gymnasium's wrappers for five values, (observation,",
    "odd_envs:OldReset": "returned a ndarray, expected gymnasium's two values, (observation, info)",
    "odd_envs:NoSeed": "unexpected keyword argument 'seed'. Gymnasium passes both: write def reset(self, *, seed=None",
    "odd_envs:WrongShape": "gave 'frame' as float32 (3,), its space declares float32 (2,)",
    "odd_envs:OddAbsent-v0": "cannot be created: AttributeError: module 'odd_envs' has no attribute 'Absent'",
    "odd_envs:OddPackage-v0": "cannot be created: No module named 'no_such_package'.",
    "odd_envs:Nothing-v0": "no environment is called 'odd_envs:Nothing-v0'",
    "odd_envs:OddRequire-v1": "called 'odd_envs:OddRequire-v1'. Did you mean 'odd_envs:OddRequired-v0'? Pass",
    "odd_envs:Absent": "odd_envs has no function or class 'Absent'",
    "odd_envs:constant": "odd_envs:constant is an int, expected a function or a class",
    "odd_envs:not_an_env": "returned an int, expected a VecEnv or a gymnasium environment",
    "no_such_module:Env": "there is no module 'no_such_module' in the current folder or on PYTHONPATH",
    "no_such_module:Env-v0": "there is no module 'no_such_module' in the current folder or on PYTHONPATH",
    "CartPole-v9": "no environment is called 'CartPole-v9'. Did you mean 'CartPole-v1'?",
}


@pytest.mark.filterwarnings("ignore:.*written in old step API")
@pytest.mark.parametrize("command", ["train", "play"])
@pytest.mark.parametrize(("env", "says"), ANYWHERE.items())
def test_an_environment_that_cannot_be_used(command: str, env: str, says: str, capsys: Capture) -> None:
    words = ["train", "ppo", "--env", env, *SMALL, "--n-minibatches", "1"]
    said = refused(words if command == "train" else ["play", env, "--steps", "2"], capsys)
    assert says in said
    assert_one_sentence(said)


@pytest.mark.parametrize(
    ("algorithm", "env", "says"),
    [
        *(("ppo", f"Takes{space}", NO_AGENT) for space in ("Dict", "Grid", "Number", "Nothing", "Integers", "Bytes")),
        ("sac", "TakesIntegers", NO_AGENT),
        ("sac", "TakesBytes", NO_AGENT),
        ("sac", "TakesConstant", "the bounds are [-1.0, 1.0] and [1.0, 1.0], expected finite ones with low < high"),
        ("sac", "TakesInfinite", "SAC needs bounded continuous actions"),
        ("dqn", "TakesConstant", "DQN chooses one action at a time"),
        ("sac", "TakesMany", "2 2]): use ppo or a2c."),
        ("sac", "Base", "here they are Discrete(2): use dqn, pqn, ppo or a2c."),
        ("ppo", "TakesText", "for example with gymnasium.wrappers.TransformAction."),
        ("ppo", "TakesHuge", "out of memory: you tried to allocate "),
    ],
)
def test_actions_that_no_bundled_agent_chooses(algorithm: str, env: str, says: str, capsys: Capture) -> None:
    said = refused(["train", algorithm, "--env", f"odd_envs:{env}", *SMALL], capsys)
    assert says in said
    assert_one_sentence(said)


def test_an_environment_that_cannot_be_drawn(capsys: Capture) -> None:
    said = refused(["play", "odd_envs:NotDrawn", "--steps", "2"], capsys)
    assert "odd_envs:NotDrawn cannot be drawn: it does not accept render_mode='rgb_array'. Let its constructor" in said
    assert_one_sentence(said)
    assert refused(["play", "odd_envs:Plain", "--steps", "2"], capsys) == said.replace("NotDrawn", "Plain")
    said = refused(["play", "odd_envs:OddNoModes-v0", "--steps", "2"], capsys)
    assert "cannot be drawn: name 'rgb_array' in its metadata['render_modes']." in said
    assert_one_sentence(said)
    said = refused(["play", "odd_envs:TakesNothing", "--steps", "2"], capsys)
    assert "space 'action' is Box([], [], (0,), float32), which holds nothing. Leave it out." in said
    assert_one_sentence(said)


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (["play", "odd_envs:Raises"], "odd_envs:Raises raised RuntimeError: no licence", "in step"),
        (["train", "ppo", "--env", "odd_envs:Raises", *SMALL], "RuntimeError: no licence", "in step"),
        (["play", "odd_envs:NotCreated"], "cannot be created: RuntimeError: no licence", "in __init__"),
        (["play", "module_that_raises:Env"], "importing module_that_raises raised ZeroDivisionError", "in <module>"),
        (["play", "module_that_raises:Env-v0"], "importing module_that_raises raised ZeroDivisionError", "in <module>"),
        (
            ["play", "module_that_lacks:Env"],
            "importing module_that_lacks raised ModuleNotFoundError",
            "in <module>",
        ),
    ],
)
def test_an_exception_of_the_users_code_is_a_line_and_its_own_traceback(
    words: list[str], says: str, code: str, capsys: Capture
) -> None:
    pathlib.Path("module_that_raises.py").write_text("1 / 0\n")
    pathlib.Path("module_that_lacks.py").write_text("import no_such_package\n")
    first, *others = refused(words, capsys).splitlines()
    assert says in first
    rest = "\n".join(others)
    assert rest.count("Traceback (most recent call last)") == 1
    assert code in rest
    assert "rlstruct/cli" not in rest


@pytest.mark.parametrize("env", ["odd_envs:not_an_env", "CartPole-v1"])
def test_an_option_of_environments_that_the_command_passes(env: str, capsys: Capture) -> None:
    simulator = [] if ":" in env else ["--simulator", "torch"]
    words = ["train", "ppo", "--env", env, *simulator, "--env-options", "n_envs=3", *SMALL]
    said = refused(words, capsys)
    assert "--env-options n_envs=3: the command passes n_envs itself. Pass --n-envs." in said
    assert_one_sentence(said)


def test_a_training_that_does_not_begin_leaves_no_folder(capsys: Capture) -> None:
    assert "no licence" in refused(["train", "ppo", "--env", "odd_envs:Raises", *SMALL], capsys)
    words = ["train", "ppo", "--env", "odd_envs:Base", *SMALL, "--n-minibatches", "1", "--n-learners", "3"]
    assert "n_envs is 2, expected a multiple of the 3 learners" in refused(words, capsys)
    assert not list(pathlib.Path("runs").iterdir())


def test_a_module_with_a_syntax_error_is_one_sentence(capsys: Capture) -> None:
    pathlib.Path("module_with_a_typo.py").write_text("def f(:\n")
    said = refused(["train", "ppo", "--env", "module_with_a_typo:f", *SMALL], capsys)
    assert "importing module_with_a_typo raised SyntaxError: invalid syntax (module_with_a_typo.py, line 1)" in said
    assert_one_sentence(said)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return the folder of a run in an environment of two numbers and two actions."""
    folder = tmp_path_factory.mktemp("trained")
    sys.path.insert(0, str(pathlib.Path(odd_envs.__file__).parent))
    try:
        words = ["train", "ppo", "--env", "odd_envs:Base", *SMALL, "--n-minibatches", "1", "--runs", str(folder)]
        assert main(words) == 0
    finally:
        sys.path.pop(0)
    return next(folder.iterdir())


@pytest.mark.parametrize("command", ["evaluate", "play"])
@pytest.mark.parametrize(
    "env",
    ["SeesGraph", "TakesSequence", "NoSpace", "Required", "VectorReward", "FourValues", "OldReset", "WrongShape"],
)
def test_a_run_whose_environment_can_no_longer_be_used(
    command: str, env: str, trained: pathlib.Path, capsys: Capture
) -> None:
    run = pathlib.Path(shutil.copytree(trained, "run"))
    settings = json.loads((run / "config.json").read_text())
    settings["task"]["env"] = f"odd_envs:{env}"
    (run / "config.json").write_text(json.dumps(settings))
    said = refused([command, str(run)], capsys)
    assert ANYWHERE[f"odd_envs:{env}"] in said
    assert_one_sentence(said)


def test_an_evaluation_whose_film_is_impossible_plays_no_episode(trained: pathlib.Path, capsys: Capture) -> None:
    run = pathlib.Path(shutil.copytree(trained, "run"))
    settings = json.loads((run / "config.json").read_text())
    settings["task"]["env"] = "odd_envs:NotDrawn"
    (run / "config.json").write_text(json.dumps(settings))
    assert main(["evaluate", str(run), "--video", "film.gif"]) == 2
    out, said = capsys.readouterr()
    assert "odd_envs:NotDrawn cannot be drawn: it does not accept render_mode='rgb_array'." in said
    assert not out


@pytest.mark.parametrize("command", ["evaluate", "export", "play"])
@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("no_such_module:create", "there is no module 'no_such_module'"),
        ("odd_envs:create", "odd_envs has no function or class 'create'"),
        ("odd_envs", "expected module:create_env"),
    ],
)
def test_a_wrong_factory_of_a_run(
    command: str, factory: str, says: str, trained: pathlib.Path, capsys: Capture
) -> None:
    said = refused([command, str(trained), "--factory", factory, factory, factory], capsys)
    assert says in said
    assert_one_sentence(said)
