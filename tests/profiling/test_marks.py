from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import pathlib
import sys
import warnings
from collections.abc import Iterator

import pytest

from rlstruct.cli.main import main
from rlstruct.profiling import operation, profile, read
from rlstruct.profiling.marks import PRESETS, Marks, compile_marked

SCRIPT = """\
def f(k):
    # operation: outer
    log("a")
    if k:
        # operation: inner
        log("b")
        for i in range(3):
            if i == 1:
                # ALGO LOGIC: put action logic here
                log("c")
                continue
            # TRY NOT TO MODIFY: execute the game and log data.
            log("d")
            # TRY NOT TO MODIFY: CRUCIAL step easy to overlook
            log("e")
        # operation: of no statement
    else:
        log("f")  # operation: not at the beginning of a line
    # just a comment
    log("g")
    # operation: last
    return log("h")

# operation: whole
f(True)
"""


def test_a_comment_names_the_statements_up_to_the_next_one_or_the_end_of_their_block(tmp_path: pathlib.Path) -> None:
    script, open_now, logged = tmp_path / "script.py", [], {}
    script.write_text(SCRIPT)

    @contextlib.contextmanager
    def operation(name: str) -> Iterator[None]:
        open_now.append(name)
        yield
        open_now.pop()

    def log(key: str) -> None:
        logged[key] = " ".join(open_now)

    names = {"__operation__": operation, "log": log}
    with pytest.warns(UserWarning, match="is ignored, because no statement follows that") as caught:
        code = compile_marked(str(script))
    for one, line, comment in zip(caught, (16, 18), ("of no statement", "not at the beginning of a line"), strict=True):
        assert f"{script}, line {line}: the comment '# operation: {comment}' is ignored" in str(one.message)
    exec(code, names)
    agent, environment = "whole outer inner agent", "whole outer inner environment"
    assert logged == {"a": "whole outer", "b": "whole outer inner", "c": agent, "d": environment,
                      "e": "whole outer inner", "g": "whole outer", "h": "whole last"}  # fmt: skip
    names["f"](False)  # type: ignore[operator]
    assert logged["f"] == "outer"
    script.write_text("# operation: a\nx = 1\n\n1 / 0\n")
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile_marked(str(script)), names)
    assert caught.traceback[-1].lineno == 3  # counted from 0: lines of tracebacks are those of the file


SPELLED = """\
# operation: nothing but what must come first
'''Trains.'''
# operation: set up
from __future__ import annotations
log("set up")
#operation:spaces
log("spaces")
## Operation : case
log("case")
# OPERATION = sign
log("sign")
# operation:
log("")
# operations of the loop are no mark, and neither is the word operation
log("")
"""


def test_comments_may_be_spelled_in_several_ways_and_come_before_what_must_come_first(tmp_path: pathlib.Path) -> None:
    script, open_now, logged = tmp_path / "script.py", [""], []
    script.write_text(SPELLED)

    @contextlib.contextmanager
    def operation(name: str) -> Iterator[None]:
        open_now.append(name)
        yield
        open_now.pop()

    names = {"__operation__": operation, "log": lambda name: logged.append((name, open_now[-1]))}
    exec(compile_marked(str(script)), names)
    assert logged == [(name, name) for name in ("set up", "spaces", "case", "sign", "", "")]
    assert names["__doc__"] == "Trains."


SUSPENDED = """\
def batches(n):
    # operation: open
    for i in range(n):
        # operation: load
        batch = i + 1
        # operation: the rest
        yield batch
        log(batch)
    # operation: define
    def inner():
        yield 1

async def answers(source):
    # operation: ask
    return [one async for one in source]

load = batches(2)
# operation: train
next(load)
# operation: evaluate
next(load)
"""


def test_a_comment_before_statements_that_wait_for_others_is_ignored_with_a_warning(tmp_path: pathlib.Path) -> None:
    script, logged = tmp_path / "script.py", []
    script.write_text(SUSPENDED)
    with pytest.warns(
        UserWarning, match="is ignored, because the statements after it contain yield or await"
    ) as caught:
        code = compile_marked(str(script))
    said = sorted(str(one.message) for one in caught)
    for text, line, name in zip(said, (15, 3, 7), ("ask", "open", "the rest"), strict=True):
        assert f"{script}, line {line}: the comment that begins the operation '{name}' is ignored" in text
    with profile(tmp_path / "profile", operators=0.0):
        exec(code, {"__operation__": operation, "log": logged.append})
    (process,) = read(tmp_path / "profile").processes
    assert {row.path for row in process.rows if row.path} == {
        ("train",), ("train", "load"), ("evaluate",), ("evaluate", "load"),
    }  # fmt: skip
    assert logged == [1]


LIBRARY = """
def function():
    return 1

class Class:
    def method(self):
        return function()
"""


def test_functions_of_a_preset_are_marked_when_their_module_is_imported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_library"
    package.mkdir()
    for name in ("__init__", "early", "late"):
        (package / f"{name}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    early = importlib.import_module("some_library.early")
    targets = {
        "outer": ("some_library.early:Class.method", "some_library.late:Class.method"),
        "inner": ("some_library.late:function",),
        "missing": ("some_library.late:Class.gone", "some_library.gone:f", "no_such_library.gone:f"),
    }
    marks = Marks({"torch": targets})
    marks.install()
    with pytest.warns(UserWarning, match=r"torch \S+ has no some_library.late:Class.gone, .* '# operation: missing'"):
        late = importlib.import_module("some_library.late")
    with pytest.warns(
        UserWarning, match="has no some_library.gone:f, which the profile would show as 'missing'"
    ) as told:
        marks.warn_of_absent_modules()
    assert len(told) == 1  # a library that has not been imported is not asked for
    with profile(tmp_path / "profile", operators=0.0):
        assert early.Class().method() == late.Class().method() == 1
    (process,) = read(tmp_path / "profile").processes
    assert {row.path: row.count for row in process.rows if row.path} == {("outer",): 2, ("outer", "inner"): 1}


@pytest.mark.parametrize("library", PRESETS)
def test_the_functions_of_the_presets_exist(library: str) -> None:
    """In the installed version; the survey of frameworks runs with those that are not installed here."""
    try:
        importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{library} is not installed")
    for target in (target for targets in PRESETS[library].values() for target in targets):
        module, _, function = target.partition(":")
        found = importlib.import_module(module)
        for name in function.split("."):
            found = getattr(found, name)
        assert callable(found), target


TRAINING = """
'''Trains.'''
import multiprocessing
import sys

import torch


class Task:
    pass


def work(task):
    # operation: simulation
    return sum(range(10_000))


if __name__ == "__main__":
    assert (__doc__, sys.argv[1:], Task.__module__) == ("Trains.", ["--seed", "1"], "__main__")
    network = torch.nn.Linear(4, 4)
    optimiser = torch.optim.Adam(network.parameters())
    with multiprocessing.get_context(METHOD).Pool(1) as pool:
        assert pool.map(work, [Task()]) == [sum(range(10_000))]
        pool.close()
        pool.join()
    for _ in range(20):
        # operation: inference
        with torch.no_grad():
            network(torch.ones(4))
        # operation: learning
        optimiser.zero_grad()
        network(torch.ones(4)).sum().backward()
        optimiser.step()
    raise ValueError("at the end")
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_training_that_never_imports_rlstruct_is_profiled_with_its_processes(
    method: str, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if method == "forkserver" and sys.platform == "win32":
        pytest.skip("needs fork")
    script, folder = tmp_path / "training.py", tmp_path / "profile"
    script.write_text(TRAINING.replace("METHOD", repr(method)))
    assert main(["profile", "--out", str(folder), "--window", "60", str(script), "--seed", "1"]) == 1
    out, err = capfd.readouterr()
    assert "ValueError: at the end" in err
    assert f'{script}", line' in err
    assert "inference" in out
    learner, worker = read(folder).processes
    assert {row.path: row.count for row in learner.rows if row.path} == {
        ("inference",): 20, ("learning",): 20, ("learning", "backward"): 20, ("learning", "optimiser"): 20,
    }  # fmt: skip
    assert "PoolWorker" in worker.name
    assert {row.path: row.count for row in worker.rows if row.path} == {("simulation",): 1}


@pytest.mark.slow
def test_a_program_without_operations_is_recorded_too(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(0.2)\nassert __doc__ is None\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["profile", "--out", str(tmp_path / "profile"), str(script)]) == 0
    assert "100 % of the time in 'script' is outside of all operations" in " ".join(capfd.readouterr().out.split())
    (process,) = read(tmp_path / "profile").processes
    assert process.seconds > 0.2
    script.write_text("if True\n")
    assert main(["profile", "--out", str(tmp_path / "other"), str(script)]) == 1
    assert "SyntaxError: expected ':'" in capfd.readouterr().err
