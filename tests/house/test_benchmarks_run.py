"""Benchmarks can be started after every change, and the page of their results says what the results say."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import importlib
import io
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from checkers import ROOT
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.profiling import is_on

SCRIPTS = sorted(file.stem for file in (ROOT / "benchmarks").glob("[a-z]*.py"))
PARTS = {
    "first_launch", "policy", "simulation", "learning", "training", "trained", "launches",
    "profiling", "summary",
}  # fmt: skip
EVERYWHERE = {"SyncVectorEnv", "numpy-vectorised", "torch eager"}
LEFT_OUT = {"it takes minutes: --quick leaves it out"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_finds_all_that_it_imports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    assert importlib.import_module(name).__doc__


def test_every_benchmark_shows_its_help_without_optional_packages() -> None:
    program = """if True:
        import importlib.abc, runpy, sys

        class Missing(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {"psutil", "optuna", "pynvml", "warp", "envpool", "jax", "ray", "ale_py"}:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Missing())
        sys.path.insert(0, "benchmarks")
        for script in sys.argv[1:]:
            sys.argv = [script, "--help"]
            try:
                runpy.run_path(f"benchmarks/{script}.py", run_name="__main__")
            except SystemExit as ended:
                print("ENDED", script, ended.code)
    """
    command = [sys.executable, "-c", program, *SCRIPTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    ends = re.findall("^ENDED (.*)$", done.stdout, re.MULTILINE)
    assert ends == [f"{name} 0" for name in SCRIPTS], done.stderr[-2000:]


def test_the_tables_of_the_page_are_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tables

    pages = {page: page.read_text() for page in tables.PAGES}
    assert {page: tables.rendered(text) for page, text in pages.items()} == pages, "run python benchmarks/tables.py"
    assert sum(text.count("<!-- end -->") for text in pages.values()) == len(tables.TABLES)
    assert tables.rendered("<!-- slow -->\nold\n<!-- end -->") != "<!-- slow -->\nold\n<!-- end -->"


def test_the_figures_of_the_pages_are_what_the_results_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra train")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import experiments
    import tables

    assert tables.outdated_figures() == {}, "run python benchmarks/tables.py"
    pages = {name: one.page for name, one in experiments.EXPERIMENTS.items()} | {"sharing": "docs/sharing_a_gpu.md"}
    for name, page in pages.items():
        assert (f"]({name}.png)" in (ROOT / page).read_text()) == bool(tables.FIGURES[name]()), name
    for one in experiments.EXPERIMENTS.values():  # a run that was cut may have nothing to draw
        assert one.figure is None or not one.figure([{"part": "any", "left_out": "no time"}])
    figure = tables.sharing_figure()
    figure.draw(tmp_path / "sharing.png")
    assert figure.is_in(tmp_path / "sharing.png")
    figure.add("", "SURF: MPS", 16, 5.2)
    assert not figure.is_in(tmp_path / "sharing.png")


def test_figures_have_the_numbers_of_the_papers_as_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tables

    lines = {name: set().union(*(known.values() for known in figure.papers.values()))
             for name, make in tables.FIGURES.items() if (figure := make()) is not None and figure.papers}  # fmt: skip
    assert lines == {
        "survey": {3.5}, "frameworks": {2.3, 3.5, 16.8}, "serving": {2.08}, "training": {1.69, 3.88},
        "atari_score": {18.0, 31.8}, "atari_starts": {0.7}, "sums": {1.025},
    }  # fmt: skip
    for name, values in lines.items():
        page = (ROOT / tables.experiments.EXPERIMENTS[name].page).read_text()
        assert all(f"{value:g}" in page for value in values)
    atari = tables.FIGURES["atari"]()
    page = (ROOT / tables.experiments.EXPERIMENTS["atari"].page).read_text()
    bands = [f"{low / 1000:g} to {high / 1000:g}" for ranges in atari.bands.values() for low, high in ranges.values()]
    assert bands == ["41 to 155", "39 to 125", "26 to 68"]
    assert all(band in page for band in bands)


def test_the_pages_of_the_algorithms_say_what_every_setting_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tables

    folder = ROOT / "docs" / "algorithms"
    told = {name: set(re.findall(r"^\| `(\w+)` \|", (folder / f"{name}.md").read_text(), re.MULTILINE))
            for name in ("README", *tables.CONFIGS)}  # fmt: skip
    assert told["README"] == {field.name for field in dataclasses.fields(TrainingConfig)}
    for name, kind in tables.CONFIGS.items():
        assert told[name] == {field.name for field in dataclasses.fields(kind)} - told["README"]
        assert f"]({name}.md)" in (folder / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_commits_are_measured_side_by_side(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, check=False).returncode:
        pytest.skip("needs a checkout with git")
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "compare_commits.py"),
        "HEAD",
        "--starts",
        "2",
        "--rounds",
        "3",
        "--seconds",
        "0.01",
    ]
    loops = ["--only", "eager, 4 in this process", "Trajectories"]
    run = subprocess.run([*command, *loops], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [line.split(" | ") for line in run.stdout.splitlines() if " per " in line]
    assert [row[0] for row in rows] == ["| eager, 4 in this process, per step", "| Trajectories, per 100 turns"]
    number = r"\d[\d,.]*"
    measured = rf"{number} \({number} to {number}\)"
    assert all(re.fullmatch(measured, cell) for row in rows for cell in row[1:4])
    assert [bool(re.match(measured, row[5])) for row in rows] == [True, False]  # the bare loop's share
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import compare_commits

    with pytest.raises(SystemExit, match="git knows no commit 'no-such-commit'"):
        compare_commits.package_of("no-such-commit", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_published_training_that_was_cut_goes_on_with_its_last_episodes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra: pip install 'rlstruct[train]'")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from common import published

    class Cut(published.LastEpisodes):
        def on_update(self, context: Any) -> None:
            super().on_update(context)
            if context.env_steps >= 9_000:
                raise KeyboardInterrupt

    entry = published.Entry("a2c_acrobot", 12_000)  # a simulator, whose state a checkpoint holds
    settings = {**entry.settings(), "evaluation_interval": 6_000}  # one on the way, and not nine
    monkeypatch.setattr(published.Entry, "settings", lambda self: settings)
    monkeypatch.setattr(published, "RUNS", tmp_path / "whole")
    uncut = published.measure(entry, 7)
    assert uncut["final_episodes"] == 100
    assert uncut["env_steps"] >= 12_000
    monkeypatch.setattr(published, "RUNS", tmp_path / "cut")
    Cut.__qualname__ = "LastEpisodes"  # a checkpoint names the class
    with monkeypatch.context() as cut:
        cut.setattr(published, "LastEpisodes", Cut)
        with pytest.raises(KeyboardInterrupt):
            published.measure(entry, 7)
    seconds = {"seconds": 0.0, "learning_seconds": 0.0}
    assert {**published.measure(entry, 7), **seconds} == {**uncut, **seconds}
    assert len(list((tmp_path / "cut").rglob("checkpoint.pt"))) == 1


def test_every_entry_of_a_published_table_names_a_task_and_is_a_line_once_it_has_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tables
    from common import published
    from common.tasks import TASKS

    row = {"final_return": 490.0, "last_100": 480.0, "learning_seconds": 12.0}
    results = {"ppo_cartpole_200k": [row, {**row, "final_return": 500.0}]}
    monkeypatch.setattr(tables, "load", lambda name: (results.get(name, []), "abc1234"))
    _, _, *lines = tables.published_table("classic")
    assert lines == [
        "| PPO on CartPole-v1 | 200,000 | 495 (490, 500) | 480 (480, 480) | SLM-Lab 499 | 12 | `abc1234` |"
    ]

    entries = [entry for table in published.TABLES.values() for entry in table]
    assert len({entry.name for entry in entries}) == len(entries)
    assert {entry.task for entry in entries} <= set(TASKS)
    greedy = {entry.settings().get("evaluation_stochastic") for entry in published.TABLES["classic"]}
    assert greedy == {False}


def test_other_libraries_are_trained_on_the_tasks_that_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    learn = importlib.import_module("learn")
    ran: list[Any] = []
    monkeypatch.setattr(learn.learning, "run_peer", lambda *words: ran.append(words))
    options = argparse.Namespace(rejax="jax/python", peers="peers/python", sbx="sbx/python", cleanrl=None)
    for task in ("ppo_freeway_plain", "ppo_seaquest_plain", "a2c_breakout_plain", "ppo_ant", "sac_hopper"):
        learn.train_peers(f"{task}_1k", task, [200], options)
    games, mujoco = learn.PEERS / "rejax_returns.py", learn.PEERS / "mujoco_returns.py"
    rejax = ("ppo_freeway_plain_1k", learn.TASKS["ppo_freeway_plain"], [200], ("jax/python", games, "rejax"), ["ppo"])
    sb3 = ("sac_hopper_1k", learn.TASKS["sac_hopper"], [200], ("peers/python", mujoco, "sb3"), ["sac"])
    assert ran == [rejax, sb3, (*sb3[:3], ("sbx/python", mujoco, "sbx"), ["sac"])]
    ran.clear()
    options.cleanrl = "checkout"
    learn.train_peers("ant", "ppo_ant", [200], options)
    (words,) = ran
    assert words[3:] == (("peers/python", mujoco, "cleanrl"), ["ppo", "checkout"])
    assert words[1].env == "Ant-v5"


def test_the_interval_of_a_median(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from common.reporting import interval

    # The median of n draws lies below the k-th smallest as rarely as k - 1 of n coins show heads, or fewer.
    assert interval(range(1, 6)) == (1, 5)  # 2 / 2^5 = 6 % outside: of five draws there is nothing narrower
    assert interval(range(1, 10)) == (2, 8)  # 2 (1 + 9) / 2^9 = 4 %
    assert interval(range(1, 12)) == (2, 10)  # 2 (1 + 11) / 2^11 = 1 %; with the next 55 it were 7 %


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_the_quick_ladder_of_the_gpu_benchmark(tmp_path: pathlib.Path) -> None:
    """On the CPU the quick look of test_on_gpu.py takes it, part by part."""
    pytest.importorskip("warp", reason="needs the extra warp")
    script = str(ROOT / "benchmarks" / "gpu.py")
    command = [sys.executable, script, "--quick", "--device", "cuda:0", "--out", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(next(tmp_path.glob("gpu-*.json")).read_text())["rows"]
    measured = {(row["part"], row["rung"]) for row in rows if "steps_per_second" in row}
    assert {rung for part, rung in measured if part == "simulation"} == EVERYWHERE | {"CUDA graph"}
    assert ("policy", "Warp fused policy") in measured
    assert {row["part"] for row in rows} == PARTS
    # Nothing failed:
    left_out = {row["left_out"] for row in rows if "left_out" in row}
    left_out -= {
        row["left_out"] for row in rows if row["part"] == "profiling" and "nvidia-ml-py" in row.get("left_out", "")
    }
    assert left_out == LEFT_OUT
    assert all(row["steps_per_second"] > 0 for row in rows if "steps_per_second" in row)
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=280, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "steps_per_second" not in again.stdout  # all is measured
    assert json.loads(next(tmp_path.glob("gpu-*.json")).read_text())["rows"][: len(measured)] == rows[: len(measured)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_the_experiments_with_atari_measure_every_row_and_are_resumed(device: str, tmp_path: pathlib.Path) -> None:
    for package in ("warp", "ale_py"):
        pytest.importorskip(package, reason="needs the extras warp and atari")
    program = """if True:
        import pathlib, runpy, shutil, sys

        sys.path.insert(0, "benchmarks")
        from common import reporting

        folder, *words = sys.argv[1:]
        results = reporting.RESULTS
        for name, more in ("none", ["--minutes", "0"]), ("found", []), ("again", []):
            reporting.RESULTS = results  # as in a new process: --out has changed it
            sys.argv = ["experiments.py", *words, "--out", folder, *more]
            runpy.run_path("benchmarks/experiments.py", run_name="__main__")
            (written,) = pathlib.Path(folder).glob("experiments-*.json")
            shutil.copy(written, written.with_name(f"{name}.json"))
    """
    words = f"--quick --device {device} --resume --parts atari atari_score atari_starts atari_layout".split()
    command = [sys.executable, "-c", program, str(tmp_path), *words]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    none, found, again = (
        json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in ("none", "found", "again")
    )
    assert {row.get("left_out") for row in none} == {"the time budget is used up"}
    assert [row["left_out"] for row in found if "left_out" in row] == []
    modes = {(row["N"], row["rung"]) for row in found if row["part"] == "atari"}
    ours = {"emulation", "pictures", "inference", "training"}
    assert modes >= {(n, f"rlstruct: {mode}") for n in (1, 2) for mode in ours}
    assert modes >= {(2, f"AtariVectorEnv: {mode}") for mode in ours - {"emulation"}}
    assert all(row["steps_per_second"] > 0 for row in found if "rung" in row)
    if device != "cpu":
        assert all(0 < row["occupancy"] <= 1 for row in found if row["part"] == "atari")
    scores = {row["way"]: row for row in found if row["part"] == "atari_score"}
    assert [row["updates"] for row in scores.values()] == [5, 5, 48]  # 24 batches, 19 before the window is full
    assert all(row["curve"][0][0] == 0 and row["curve"][-1][0] == 4 * row["steps"] for row in scores.values())
    assert {row["rung"] for row in found if row["part"] == "atari_starts"} >= {"in lockstep", "later"}
    assert sum(row["part"] == "atari_layout" for row in found) == 2
    assert again == found  # not measured again
    drawn = {path.name.rpartition("-")[2] for path in tmp_path.glob("*.png")}
    assert drawn == {"atari.png", "atari_layout.png", "atari_score.png", "atari_starts.png"}


def test_costs_of_starts_are_ratios_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from papers import atari

    rates = {"in lockstep": 40.0, "later": 20.0, "restart in every step": 10.0, "emulation": 80.0}
    rows = [{"rung": name, "N": 4, "steps_per_second": rate} for name, rate in rates.items()]
    # Half as fast later; a step takes 0.2 s later, 0.4 s with a restart; 94 / 4 of emulation take 1.175 s, not 0.4 s.
    assert atari.starts_table(rows)[2] == "| 4 | 0.50 | 2.00 | 2.94 |"


def test_a_score_counts_seconds_of_learning_and_has_a_target_in_both_games(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from papers import atari_score

    row = {"part": "atari_score", "way": "plain batches", "N": 8, "steps": 100, "seconds": 5.0, "updates": 6}
    curve = [[0, 0.001, 1.0], [200, 1.0, 20.0], [400, 2.0, 32.0]]  # 5 s with the evaluations, 2 s without
    rows = [{**row, "game": "Breakout", "target": None, "curve": curve},
            {**row, "game": "Pong", "curve": [[0, 0.001, -21.0], [400, 4.0, 17.0]]}]  # fmt: skip
    assert atari_score.score_table(rows)[2:] == [
        "| Breakout | plain batches | 8 | 400 | 2 | 200 | 3.0 | 1.0 to 32.0 | 31.8: 400 frames, 2 s |",
        "| Pong | plain batches | 8 | 400 | 4 | 100 | 1.5 | -21.0 to 17.0 | 18: no |",
    ]


def test_a_training_to_a_score_starts_only_where_its_whole_time_is_left(
    monkeypatch: pytest.MonkeyPatch, gpu: ModuleType
) -> None:
    from papers import atari_score

    monkeypatch.setattr(atari_score, "train", lambda *_: {"curve": []})
    run = gpu.Run(torch.device("cpu"), quick=True, deadline=time.perf_counter() + 90, silent=True)
    sizes = {"game": ("Pong", "Breakout"), "seconds": (60,)}
    atari_score.measure_score(run, sizes)  # with games on the CPU it has twice as long: 120
    trained = [(row["game"], row["way"]) for row in run.rows if "curve" in row]
    short = [(game, way) for game in sizes["game"] for way in (atari_score.WINDOW, atari_score.PLAIN)]
    assert trained == short
    run.deadline += 60
    atari_score.measure_score(run, sizes)
    trained = [(row["game"], row["way"]) for row in run.rows if "curve" in row]
    assert trained == short + [(game, atari_score.ON_CPU) for game in sizes["game"]]


def test_a_training_to_a_score_ends_in_time_for_two_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from papers import atari_score

    stops: list[str] = []
    evaluation = argparse.Namespace(seconds=30.0, env_steps=0, mean_return=-21.0)
    config = argparse.Namespace(n_envs=1)
    context: Any = argparse.Namespace(evaluations=[evaluation], env_steps=0, updates=0, config=config)
    context.stop = stops.append
    now = time.perf_counter()
    for seconds, n_stops in ((70.0, 0), (50.0, 1)):  # two of 30 s
        curve = atari_score.Curve(now + seconds, lambda row: None)
        curve.on_start(context)
        curve.on_evaluation(context)
        curve.on_update(context)
        assert len(stops) == n_stops


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> ModuleType:
    """The benchmark as a module, with results that go elsewhere."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu
    from common import reporting

    monkeypatch.setattr(reporting, "RESULTS", tmp_path)
    return gpu


def test_an_experiment_that_was_cut_shows_what_it_has(
    monkeypatch: pytest.MonkeyPatch, gpu: ModuleType, tmp_path: pathlib.Path
) -> None:
    """The last row says of the whole experiment that its time is up."""
    pytest.importorskip("matplotlib", reason="needs the extra train")
    import experiments
    from common import resumable_run

    monkeypatch.setattr(experiments, "RESULTS", tmp_path / "results")  # figures of these are part of the pages
    measured = {path: json.loads(path.read_text())["rows"] for path in (ROOT / "benchmarks" / "results").glob("exp*")}
    for name, one in experiments.EXPERIMENTS.items():
        rows = [row for rows in measured.values() for row in rows if row["part"] == name]
        run = experiments.Run(torch.device("cpu"), quick=True, deadline=0.0, silent=True)
        run.rows = [*rows, {"part": name, "left_out": resumable_run.NO_TIME}]
        run.path = tmp_path / f"{name}.json"
        shown = dataclasses.replace(one, measure=lambda run, sizes: None)
        monkeypatch.setitem(experiments.EXPERIMENTS, name, shown)
        experiments.measure(name, run)
        assert (tmp_path / f"{name}-{name}.png").exists() == (one.figure is not None and bool(rows))


def test_the_first_minutes_on_a_gpu_collect_with_a_policy_in_few_and_in_many_environments(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    minutes = {step.parts: step.minutes for step in importlib.import_module("gpu_plan").STEPS}
    run = gpu.Run(torch.device("cuda:0"), quick=False, deadline=math.inf, silent=True)
    seconds, measured = [], []
    monkeypatch.setattr(run, "left", lambda planned, what: seconds.append(planned) or True)
    monkeypatch.setattr(run, "rate", lambda part, makers, N: measured.append((part, N)))
    gpu.targets(run)
    assert set(measured) >= {(part, n) for part in ("policy", "simulation") for n in (4096, 1 << 20)}
    assert sum(seconds) <= 45 * minutes["first_launch", "targets"]  # a quarter for imports and the first launch


def test_a_resumed_run_measures_what_lacked_time_or_a_package_and_keeps_the_rest(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from common import resumable_run
    from common.ladder_rungs import Rung
    from gpu import NO_NVML

    def games() -> Rung:
        importlib.import_module("arrives_later")
        return Rung("games", lambda: time.sleep(1e-4), 1)

    def broken() -> Rung:
        raise ZeroDivisionError("for good")

    first = gpu.Run(torch.device("cpu"), quick=True, deadline=math.inf, silent=True)
    first.rate("simulation", [games], N=64)
    first.rate("simulation", [broken], N=1)
    first.add(part="profiling", work="one busy block", left_out=NO_NVML)
    first.add(part="policy", left_out=resumable_run.NO_TIME)
    gpu.summary(first)
    summary = [row for row in first.rows if row["part"] == "summary"]
    monkeypatch.setitem(sys.modules, "arrives_later", ModuleType("arrives_later"))
    again = gpu.Run(torch.device("cpu"), quick=True, deadline=math.inf, silent=True)
    again.resume()
    # A run that is cut before its first part is measured has the summary of the one before.
    assert [row for row in again.rows if "left_out" not in row] == summary
    assert [row["left_out"] for row in again.rows if "left_out" in row] == ["ZeroDivisionError: for good"]
    for where in again.todo("simulation", 0.0, [{"N": 64}, {"N": 1}]):
        again.rate("simulation", [games], **where)
    assert [(row["rung"], row["N"]) for row in again.rows if "steps_per_second" in row] == [("games", 64)]
    gpu.summary(again)
    assert len([row for row in again.rows if row["part"] == "summary"]) == len(summary)


def test_a_run_that_is_cut_keeps_what_it_has_and_measures_it_again(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from common.ladder_rungs import Rung

    def rung(name: str, calls: int | None) -> object:
        left = iter(range(calls or 10**9))

        def run() -> None:
            time.sleep(1e-4)
            if next(left, None) is None:
                raise KeyboardInterrupt  # the run is cut here

        return lambda: Rung(name, run, 1)

    def fails(name: str) -> Rung:
        raise ZeroDivisionError(name)

    bad = partial(fails, "bad")
    first = gpu.Run(torch.device("cpu"), quick=True, deadline=math.inf, silent=True)
    with pytest.raises(KeyboardInterrupt):
        first.rate("simulation", [bad, rung("one", None), rung("two", 2)], N=64)
    again = gpu.Run(torch.device("cpu"), quick=True, deadline=math.inf, silent=True)
    again.resume()
    failed, *found = again.rows
    assert failed == {"part": "simulation", "rung": "bad", "N": 64, "left_out": "ZeroDivisionError: bad"}
    assert [(row["rung"], row["N"], len(row["rounds"])) for row in found] == [("one", 64, 1)]
    assert again.best("simulation", rung="one") > 0.0
    assert not again.measured("simulation", N=64)
    again.rate("simulation", [bad, rung("one", None), rung("two", None)], N=64)
    assert [(row["rung"], len(row.get("rounds", []))) for row in again.rows] == [("bad", 0), ("one", 5), ("two", 5)]
    assert again.measured("simulation", N=64)


def test_processes_that_share_a_device_are_written_round_by_round(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sharing

    def make(calls: int) -> object:
        left = iter(range(calls))

        def collect() -> tuple[int, int]:
            time.sleep(1e-4)
            if next(left, None) is None:
                raise KeyboardInterrupt
            return 4, 40

        return lambda: contextlib.nullcontext(collect)

    def makers(*calls: int) -> list[object]:
        return [({"part": "table", "processes": n}, make(n_calls)) for n, n_calls in zip((16, 7), calls, strict=True)]

    run = sharing.Run(torch.device("cpu"), quick=True, deadline=math.inf, silent=True)
    with pytest.raises(KeyboardInterrupt):
        run.rate(makers(5, 4))
    assert [(row["processes"], len(row["rounds"])) for row in run.rows] == [(7, 2), (16, 3)]
    run.resume()
    run.rate(makers(100, 100))
    assert [(row["processes"], len(row["rounds"])) for row in run.rows] == [(16, 5), (7, 5)]
    before = copy.deepcopy(run.rows)
    run.rate(makers(0, 0))  # both are measured
    assert run.rows == before


def test_a_rung_that_raises_costs_itself_and_no_other(gpu: ModuleType) -> None:
    from common.ladder_rungs import Rung

    calls = iter(range(1000))

    def fails_late() -> None:
        if next(calls) > 5:
            raise ZeroDivisionError("late")

    def cannot_be_made() -> Rung:
        raise RuntimeError("early")

    def rung(name: str, run: object) -> object:
        return lambda: Rung(name, run, 1)

    run = gpu.Run(torch.device("cpu"), quick=True, deadline=math.inf, silent=True)
    rungs = [rung("late", fails_late), cannot_be_made, rung("good", lambda: time.sleep(1e-4))]
    run.rate("simulation", rungs, N=64)
    assert [row["left_out"] for row in run.rows if "left_out" in row] == [
        "RuntimeError: early",
        "ZeroDivisionError: late",
    ]
    assert [row["rung"] for row in run.rows if "steps_per_second" in row] == ["good"]
    assert run.measured("simulation", N=64)
    assert not run.measured("simulation", N=1)


def test_a_rung_that_hangs_ends_the_program_and_is_left_out_when_it_is_resumed(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from common import resumable_run
    from common.ladder_rungs import Rung

    ended = threading.Event()

    def leave(code: int) -> None:
        assert code == resumable_run.BROKEN
        ended.set()

    def hanging(name: str) -> object:
        assert ended.wait(20)
        return Rung(name, lambda: None, 1)

    monkeypatch.setattr(gpu.Run, "longest", 0.1)
    monkeypatch.setattr(os, "_exit", leave)
    run = gpu.Run(torch.device("cpu"), quick=True, deadline=math.inf, silent=True)
    run.watch()
    run.made("policy", [partial(hanging, "slow")], N=64)
    assert [(row["rung"], row["N"], row["left_out"]) for row in run.rows] == [("slow", 64, "it took more than 0 s")]
    assert not run.measured("policy", N=64)
    run.rate("policy", [partial(hanging, "slow"), lambda: Rung("good", lambda: time.sleep(1e-4), 1)], N=64)
    assert [row["rung"] for row in run.rows if "steps_per_second" in row] == ["good"]
    assert run.measured("policy", N=64)


def test_a_rung_that_the_program_died_of_is_left_out_there_and_after_a_second_time_everywhere(gpu: ModuleType) -> None:
    from common.ladder_rungs import Rung

    made: list[int] = []

    def dying(name: str, n: int) -> Rung:
        made.append(n)
        return Rung(name, lambda: time.sleep(1e-4), 1)

    first = gpu.Run(torch.device("cpu"), quick=True, deadline=math.inf, silent=True)
    again = gpu.Run(torch.device("cpu"), quick=True, deadline=math.inf, silent=True)
    first.add_unfinished({"part": "policy", "rung": "dying", "N": 64}, {"steps_per_second": 1.0})
    with first.limited(part="policy", rung="dying", N=64):  # a signal ends the program here
        again.resume()
    died = {"part": "policy", "rung": "dying", "N": 64, "left_out": "the program died", "broke": True}
    assert again.rows == [died]
    for n in (64, 32):
        again.rate("policy", [partial(dying, "dying", n)], N=n)
    assert made == [32]
    again.add(**{**died, "N": 16})
    again.rate("policy", [partial(dying, "dying", 8)], N=8)
    assert made == [32]
    last = gpu.Run(torch.device("cpu"), quick=True, deadline=math.inf, silent=True)
    last.resume()  # nothing was going on
    assert last.rows == again.rows


def test_a_rung_whose_fast_path_falls_back_is_left_out_with_the_reason(gpu: ModuleType) -> None:
    from common import ladder_rungs

    from rlstruct.algos.learner import warn_uncaptured
    from rlstruct.engine.compiled import warn_uncompiled

    run = gpu.Run(torch.device("cpu"), quick=True, deadline=math.inf, silent=True)
    make_rung = partial(ladder_rungs.batcher_rung, n_envs=2, device=torch.device("cpu"), backend="torch")
    rungs = run.made("policy", [partial(make_rung, name, executor=name) for name in ("graph", "eager")], N=2)
    assert [rung.name for rung in rungs] == ["eager"]  # there are no graphs on a CPU
    assert [row["left_out"] for row in run.rows] == ["RuntimeError: the executor of graph is eager, expected graph"]
    with pytest.warns(UserWarning, match=gpu.FELL_BACK):
        warn_uncaptured("it cannot")
    with pytest.warns(UserWarning, match=gpu.FELL_BACK):
        warn_uncompiled("an update", "it cannot", "compile_update")


def test_the_program_ends_at_once_where_cuda_answers_to_nothing(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from common import reporting, resumable_run

    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    ends: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    monkeypatch.setattr(os, "_exit", ends.append)
    run = gpu.Run(torch.device("cuda:0"), quick=True, deadline=math.inf, silent=True)
    run.failed(RuntimeError("CUDA error"), part="policy", rung="fails", N=64)
    assert ends == [resumable_run.BROKEN]
    assert [row["broke"] for row in reporting.written("gpu")] == [True]


def test_many_steps_in_a_launch_are_those_of_many_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("warp", reason="needs the extra warp")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from papers.fusion_kernel import Launch

    single, fused, recorded = (
        Launch(5, *how, torch.device("cpu")) for how in ((1, 3, True), (200, 3, False), (200, 3, True))
    )
    for _ in range(600):
        single()
    for launch in (fused, recorded):
        for _ in range(3):
            launch()
        assert torch.equal(launch.state, single.state)
        assert torch.equal(launch.tensors["clock"], single.tensors["clock"])
    assert single.state.abs().sum(1).gt(0).all()  # the extra floats change too
    assert single.tensors["clock"][1].ge(1).all()  # episodes have ended
    # What is not recorded is the last step of what is.
    assert torch.equal(fused.tensors["reached_frame"][0], recorded.tensors["reached_frame"][-1])
    assert not torch.equal(recorded.tensors["reached_frame"][0], recorded.tensors["reached_frame"][-1])


def test_the_fused_kernel_does_what_eager_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("warp", reason="needs the extra warp")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from papers.fusion_kernel import Launch

    from rlstruct import DictTensor
    from rlstruct.sims import make

    n_envs, n_steps, n_extra = 7, 1024, 9
    launch = Launch(n_envs, n_steps, n_extra, False, torch.device("cpu"))
    env = make("CartPole-v1", n_envs, device="cpu")
    observation, _ = env.reset()
    carry = env.state_tensors()
    names = [name for name in carry if name.startswith("state/")]
    carry |= {name: row.clone() for name, row in zip(names, launch.state[:4], strict=True)}
    carry |= {"env_key": launch.tensors["env_key"].clone(), "episode": torch.zeros(n_envs, dtype=torch.int64)}
    frame = launch.state[:4].t().clone()
    env.set_state_tensors(carry, {key: observation[key] for key in observation.keys()} | {"frame": frame})
    extra, ends = torch.zeros(n_extra, n_envs), 0
    for _ in range(n_steps):
        action = (frame[:, 2] + 0.5 * frame[:, 3] > 0).long()
        (reached, _), (observation, _) = env.step(DictTensor({"action": action}))
        frame, done = observation["frame"], reached["done"]
        extra = torch.where(done, 0.0, 0.5 * (extra + reached["frame"][:, 2]))
        ends += int(done.sum())
    launch()
    assert ends > n_envs  # restarts are compared, too
    eager = env.state_tensors()
    state = torch.cat([torch.stack([eager[name] for name in names]), extra])
    torch.testing.assert_close(launch.state, state, rtol=1e-4, atol=1e-4)
    for row, name in enumerate(("elapsed", "episode")):
        assert torch.equal(launch.tensors["clock"][row], eager[name])
    torch.testing.assert_close(launch.tensors["reached_frame"][0].t(), reached["frame"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(launch.tensors["current_frame"][0].t(), frame, rtol=1e-4, atol=1e-4)
    assert torch.equal(launch.tensors["reached_last"][0], action)
    assert torch.equal(launch.tensors["flags"][0, 2], done)


def test_gains_of_fusion_are_ratios_to_one_step_of_the_fewest_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from papers import fusion

    rates = {(8, 1): 10.0, (8, 4): 30.0, (16, 1): 20.0, (16, 4): 80.0}
    rows = [
        {
            "part": "fusion",
            "W": 0,
            "N": n,
            "rung": f"{k} a launch",
            "recorded": record,
            "steps_per_second": rate * (1 + record),
        }
        for (n, k), rate in rates.items()
        for record in (False, True)
    ]
    assert fusion.gains(rows) == [{"W": 0, "N": 8, "vectorised": 2.0, "fused": 3.0, "both": 8.0, "product": 6.0}]
    table = fusion.fusion_table(rows)
    assert table[2:4] == ["| 0 | 8 | 5e+07 / 1e+08 | 3.00 / 3.00 |", "| 0 | 16 | 2.5e+07 / 5e+07 | 4.00 / 4.00 |"]
    assert table[7] == "| 0 | 2.0 | 3.0 | 6.0 | 8.0 | 1.33 |"
    at = "16 environments, 0 extra floats, 4 steps a launch"
    assert table[-2] == f"| many steps a launch over one: CartPole | {at} | 11.3 | 4.0 |"
    rows += [
        {"part": "fusion", "W": 12, "N": 8, "rung": f"{k} a launch", "recorded": False, "steps_per_second": rate}
        for k, rate in ((1, 1.0), (4, 9.0))
    ]
    assert [line[3] for line in fusion.fusion_ratios(rows)] == ["4.0", "9.0"]


def test_compilers_are_compared_as_in_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from papers import fusion

    rates = {
        ("SyncVectorEnv", 8): 2.0, ("SyncVectorEnv", 16): 4.0, ("torch eager", 8): 3.0, ("torch eager", 16): 10.0,
        ("Warp, 4 a launch", 16): 80.0, ("JAX, 1 a call, on cpu", 8): 21.0, ("JAX, 1 a call, on cpu", 16): 30.0,
        ("JAX, 4 a call, on cpu", 8): 60.0,
    }  # fmt: skip
    rows = [{"rung": rung, "N": n, "steps_per_second": rate} for (rung, n), rate in rates.items()]
    assert fusion.compilers_ratios(rows) == [
        ["XLA over torch eager", "JAX, 1 a call, on cpu, 8 environments", "13.4", "7.0"],
        ["best over SyncVectorEnv", "Warp, 4 a launch, 16 environments", "1,024", "20"],
    ]
    assert fusion.compilers_ratios([row for row in rows if row["rung"] == "torch eager"]) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_the_quick_experiments_measure_every_row(device: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("warp", reason="needs the extra warp")
    script = str(ROOT / "benchmarks" / "experiments.py")
    command = [sys.executable, script, "--quick", "--device", device, "--out", str(tmp_path)]
    command += ["--parts", "fusion", "compilers", "survey"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(next(tmp_path.glob("experiments-*.json")).read_text())["rows"]
    measured = [row for row in rows if "steps_per_second" in row]
    cells = {(row["W"], row["N"], row["rung"], row["recorded"]) for row in measured if row["part"] == "fusion"}
    assert cells == {
        (w, n, f"{k} a launch", r) for w in (0, 12) for n in (8, 16) for k in (1, 4) for r in (True, False)
    }
    assert {row["rung"] for row in measured if row["part"] == "compilers"} >= EVERYWHERE | {"Warp, 1 a launch"}
    assert {row["left_out"] for row in rows if "left_out" in row} <= {"not installed"}
    survey = {row["work"]: row for row in rows if row["part"] == "survey"}
    assert set(survey) == {"supervised", "A2C, CartPole-v1", "ALPHAZERO, ConnectFour-v0"}
    shares = {name: [row[part] for part in ("simulation", "inference", "learning", "other")]
              for name, row in survey.items()}  # fmt: skip
    assert all(sum(parts) == pytest.approx(1.0) for parts in shares.values())
    assert shares["supervised"][:2] == [0.0, 0.0]
    assert shares["A2C, CartPole-v1"][0] > 0.05
    drawn = {path.name.rpartition("-")[2] for path in tmp_path.glob("*.png")}
    assert drawn == {"fusion.png", "compilers.png", "survey.png"}


def test_libraries_are_compared_with_the_numbers_of_rl_scope(gpu: ModuleType) -> None:
    from papers import framework_survey

    def row(library: str, algorithm: str, seconds: list[float], simulation: float) -> dict[str, object]:
        shares = {"simulation": simulation, "inference": 0.25, "learning": 0.75 - simulation, "other": 0.0}
        return {"library": library, "algorithm": algorithm, "cpu_seconds": seconds, "load": 1.0, "python": 0.5,
                "to_torch": 20.0, **shares}  # fmt: skip

    rows = [
        row("TorchRL", "ppo", [3.0, 8.0, 4.0], 0.5), row("CleanRL", "ppo", [2.0, 2.0, 9.0], 0.5),
        row("sbx", "ppo", [0.5], 0.25), row("TorchRL", "sac", [10.0], 0.125),
        {"library": "sbx", "algorithm": "sac", "left_out": "not installed"}, {"left_out": "no time"},
    ]  # fmt: skip
    said = framework_survey.frameworks_table(rows)
    assert said[2].startswith("| PPO | TorchRL | 4.00 (3.00 to 8.00) | 8.0 | 50 % | 25 % | 25 % | 0 % | 50 % | 20 |")
    assert "- Slowest over fastest library, PPO: 8.0 (RL-Scope: 2.3)." in said
    assert "- Slowest over fastest library, PPO, PyTorch without a compiler: 2.0 (RL-Scope: 2.3)." in said
    assert "- Share of simulation, PPO over SAC: TorchRL 4.0 (RL-Scope: at least 3.5)." in said
    assert said[-1] == "- SAC, sbx: not installed."
    bars = framework_survey.frameworks_bars(rows)["PPO: CPU seconds of 1,000 environment steps"]
    assert bars["CleanRL"] == {"simulation": 1.0, "inference": 0.5, "learning": 0.5, "other": 0.0}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_quick_comparison_of_libraries_measures_ours_without_the_others(tmp_path: pathlib.Path) -> None:
    script = str(ROOT / "benchmarks" / "experiments.py")
    command = [sys.executable, script, "--quick", "--device", "cpu", "--out", str(tmp_path), "--parts", "frameworks"]
    nowhere = {**os.environ, "PEERS_PYTHON": "nowhere", "SBX_PYTHON": "nowhere"}
    run = subprocess.run(command, env=nowhere, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(next(tmp_path.glob("experiments-*.json")).read_text())["rows"]
    ours = {(row["algorithm"], row["library"]): row for row in rows if "cpu_seconds" in row}
    assert set(ours) == {(a, b) for a in ("ppo", "sac") for b in ("rlstruct",)}
    assert {row["left_out"] for row in rows if "left_out" in row} == {"not installed (make peers)"}
    ppo, sac = (ours[algorithm, "rlstruct"] for algorithm in ("ppo", "sac"))
    for row in (ppo, sac):
        assert sum(row[name] for name in ("simulation", "inference", "learning", "other")) == pytest.approx(1.0)
        assert row["learning"] > 0.3
        assert row["to_torch"] > 10
    assert ppo["simulation"] > sac["simulation"] > 0.0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_processes_that_share_a_device_are_compared_with_one(device: str, tmp_path: pathlib.Path) -> None:
    script = str(ROOT / "benchmarks" / "experiments.py")
    command = [sys.executable, script, "--quick", "--device", device, "--out", str(tmp_path)]
    kinds = ["training"] if device == "cpu" else ["serving", "training"]  # test_on_gpu.py serves on the CPU
    layouts = {"serving": {"all in each"}, "training": {"all in each", "apart"}}
    run = subprocess.run([*command, "--parts", *kinds], capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(next(tmp_path.glob("experiments-*.json")).read_text())["rows"]
    for kind in kinds:
        own = [row for row in rows if row["part"] == kind]
        assert [row["steps_per_second"] > 0 for row in own if row["m"] == 1] == [True]
        for layout in layouts[kind]:
            found = {row["sharing"]: row for row in own if row["layout"] == layout and row["m"] == 2}
            assert set(found) == {"none", "mps", "mig"}
            assert found["none"]["ratio"] > 0
            if device == "cpu":
                assert found["mps"]["left_out"] == found["mig"]["left_out"] == "there is no CUDA device"
            else:
                assert found["none"]["busy"] > 0


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_sums_of_gradients_are_timed_in_both_ways(device: str, gpu: ModuleType) -> None:
    from papers import gradient_sums

    run = gpu.Run(torch.device(device), quick=True, deadline=math.inf, silent=True)
    gradient_sums.measure_sums(run, {"GPUs": (1,), "m": (2,), "calls": (2,)})
    assert [len(row["rounds"]) for row in run.rows] == [gradient_sums.ROUNDS] * 8  # of both ways and four networks
    assert all(row["ms"] > 0 for row in run.rows)
    assert len(gradient_sums.sums_table(run.rows)) == 2 + 4
    assert gradient_sums.sums_bars(run.rows).papers


def test_a_process_profiles_the_seconds_for_which_a_line_names_a_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from papers import gpu_shares

    profiled: list[bool] = []

    def step() -> int:
        profiled.append(is_on())
        return 1

    monkeypatch.setattr(sys, "stdin", io.StringIO(f"0 \n0 {tmp_path}/a folder\n0 \n"))
    gpu_shares.answer(step, torch.device("cpu"))
    assert profiled == [False] * (gpu_shares.N_WARM + 1) + [True, False]
    assert len(list((tmp_path / "a folder").glob("*.operations.json"))) == 1
    said = capsys.readouterr().out.split()
    assert said == ["ready", *["rate", "0.0"] * 3]


def test_a_run_of_few_minutes_shares_at_once_and_leaves_out_a_task_without_its_package(
    monkeypatch: pytest.MonkeyPatch, gpu: ModuleType
) -> None:
    from papers import gpu_shares

    opened: list[tuple[str, int, int]] = []

    @contextlib.contextmanager
    def open_processes(kind: str, where: dict[str, Any], device: torch.device) -> Any:
        opened.append((where["task"], where["m"], where["N"]))
        if where["task"] == "fails":
            raise RuntimeError("it cannot start")
        yield lambda seconds: float(where["m"])

    task = gpu_shares.TASKS["CartPole-v1"]
    tasks = {"CartPole-v1": task, "fails": task, "missing": dataclasses.replace(task, needs=("no_such_package",))}
    monkeypatch.setattr(gpu_shares, "TASKS", tasks)
    monkeypatch.setattr(gpu_shares, "opened", open_processes)
    run = gpu.Run(torch.device("cpu"), quick=False, deadline=time.perf_counter() + 100, silent=True)
    gpu_shares.measure("serving", run, {"m": (4,), "CartPole-v1": (8, 16), "fails": (8,), "missing": (8,)})
    assert opened[:3] == [("CartPole-v1", 1, 8), ("CartPole-v1", 4, 8), ("CartPole-v1", 4, 8)]
    assert opened.count(("fails", 1, 8)) == len([one for one in opened if one[0] == "fails"]) == 1
    assert {row["ratio"] for row in run.rows if "ratio" in row} == {4.0}
    assert {row["task"]: row["left_out"] for row in run.rows if "left_out" in row} == {
        "missing": "no_such_package is not installed", "fails": "RuntimeError: it cannot start",
    }  # fmt: skip
    run.resume()
    assert {row["task"] for row in run.rows} == {"CartPole-v1", "fails"}  # a package may be there by now


def test_mps_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from common import resumable_run

    from rlstruct.errors import SharingError

    tried: list[torch.device] = []

    def fail(device: torch.device) -> None:
        tried.append(device)
        raise SharingError("the daemon does not start")

    monkeypatch.setattr(resumable_run, "mps", fail)
    resumable_run.why_no_mps.cache_clear()
    for _ in range(2):
        with pytest.raises(SharingError, match="does not start"):
            resumable_run.check_mps(torch.device("cuda:0"))
    assert len(tried) == 1
    resumable_run.why_no_mps.cache_clear()


def test_a_survey_goes_on_without_its_supervised_training(monkeypatch: pytest.MonkeyPatch, gpu: ModuleType) -> None:
    from papers import time_survey

    def fail(seconds: float, device: torch.device) -> None:
        raise RuntimeError("the profile is empty")

    monkeypatch.setattr(time_survey, "supervised", fail)
    monkeypatch.setattr(time_survey, "works", lambda **_: [])
    run = gpu.Run(torch.device("cpu"), quick=True, deadline=math.inf, silent=True)
    time_survey.measure_survey(run, {"ms": (50,), "workers": ()})
    assert [row["left_out"] for row in run.rows] == ["RuntimeError: the profile is empty"]
    assert time_survey.survey_table(run.rows)[-1] == "supervised: RuntimeError: the profile is empty."


def test_layouts_and_sums_are_compared_at_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from papers import gpu_shares, gradient_sums

    row = {"part": "training", "task": "CartPole-v1", "layout": "all in each", "m": 1, "sharing": "none", "N": 8}
    row |= {"steps_per_second": 10.0, "ratio": None}
    rows = [row, {**row, "N": 4, "steps_per_second": 5.0}]
    rows += [{**row, "m": 2, "N": n, "ratio": ratio} for n, ratio in ((8, 1.5), (16, 1.6))]
    rows += [{**row, "m": 2, "layout": "apart", "ratio": 0.5}]
    lines = gpu_shares.tabulate("training", rows)
    assert lines[2:4] == ["| CartPole-v1 |  | none | 1 | 4 | 5 | 0.50 |  |  |",
                          "| CartPole-v1 |  | none | 1 | 8 | 10 | 1.00 |  |  |"]  # fmt: skip
    assert lines[-1] == "- CartPole-v1, 2 processes, 8 environments: 3.00"
    panels = gpu_shares.bars("training", rows)
    assert list(panels[gpu_shares.EACH_OVER_APART].values()) == [{"": 3.0}]
    places = list(gpu_shares.places("training", (4, 2), {"CartPole-v1": 8, "ALE/Pong-v5": None}, few=False))
    assert [(one["m"], one["N"]) for one in places[::6]] == [(4, 8), (4, 32), (2, 8)]

    row = {"part": "sums", "GPUs": 2, "m": 3, "network": "Ant", "weights": 7}
    rows = [{**row, "way": way, "ms": ms} for way, ms in ((gradient_sums.FLAT, 3.0), (gradient_sums.NESTED, 2.0))]
    assert gradient_sums.sums_table(rows)[2:] == ["| 2 x 3 | Ant | 7 | 3.00 | 2.00 | 1.50 | 1.004 |"]


@pytest.mark.slow
def test_shares_of_a_gpu_learn_a_game_of_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("warp", "ale_py"):
        pytest.importorskip(package, reason="needs the extras warp and atari")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from papers.gpu_shares import TASKS, configure, create_batcher

    from rlstruct.algos.ppo import PPOLearner

    task = TASKS["ALE/Pong-v5"]
    learner = PPOLearner.create(task.create_model(), task.create_agent, configure("cpu", n_envs=2))
    with create_batcher(task, 2, "cpu") as batcher:
        batcher.reset()
        batcher.update(learner.model.state_dict())
        batcher.execute()
        terms = learner.update(batcher.get()[0], 0.0)
    assert terms["ratio_error"] < 1e-3


def test_the_plain_search_plays_connect_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from common.plain_search import Node, PlainSearchAgent, SmallNet

    from rlstruct import DictTensor
    from rlstruct.sims import ConnectFour

    env = ConnectFour(1, 0, device="cpu")
    observation, _ = env.reset()
    node, n_over = Node(0, 0, 0.0, False), 0
    generator = torch.Generator().manual_seed(0)
    while n_over < 5:
        legal = observation["frame/legal"].float()
        column = torch.multinomial(legal, 1, generator=generator)[:, 0]
        (reached, _), (observation, _) = env.step(DictTensor({"action": column}))
        node = node.child(int(column))
        assert (node.reward, node.over) == (float(reached["reward"]), bool(reached["done"]))
        if node.over:
            node, n_over = Node(0, 0, 0.0, False), n_over + 1

    env = ConnectFour(1, 0, device="cpu")
    observation, _ = env.reset()
    for column in (2, 6, 3, 6, 4, 0):  # three in a row, open on both sides: columns 1 and 5 win
        _, (observation, _) = env.step(DictTensor({"action": torch.tensor([column])}))
    agent = PlainSearchAgent(SmallNet(), 99, 16, "cpu")
    action, _ = agent(DictTensor(), observation, DictTensor())
    assert int(action["action"]) in (1, 5)
    assert int(action["n_inferences"]) == 100


def test_warps_are_counted_as_a_gpu_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("warp", reason="needs the extra warp")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import atari_divergence
    import numpy as np
    from common import ptx

    # A loop (1 to 4) of a branch and its two ways, then another loop (5); an outer loop from 5 back to 1.
    ways = [[1], [2, 3], [4], [4], [1, 5], [5, 6], [1, -1]]
    assert ptx.meetings(ways) == [1, 4, 4, 4, 5, 6, -1]
    assert ptx.depths(ways, 2) == [0, 1, 0, 0, 0, 0, 0]  # one loop begins at 1, as far as 4 tells
    assert ptx.depths([[1], [2, 3], [1], [3, 4], [1, -1]], 1) == [0, 2, 0, 1, 0]
    rows = [[0, 1, 1, 0, 0, 0, 7, 10], [0, 1, 2, 0, 0, 0, 7, 30], [1, 1, 1, 0, 0, 0, 7, 20], [2, 1, 1, 0, 0, 0, 7, 5]]
    assert ptx.slowest(np.array(rows, np.int32), 2).tolist() == [50, 5]
    assert (atari_divergence.resident(188), atari_divergence.resident(128)) == (8, 16)
    assert [atari_divergence.threads_per_console(n, 16) for n in (1, 4096, 32768, 1 << 20)] == [32, 16, 2, 1]
    # One warp waits for each of its instructions; 64 share four schedulers.
    assert atari_divergence.seconds(1e6, 132, 8) == pytest.approx(1e7 / 1.755e9)
    assert atari_divergence.seconds(1e6, 132 * 64, 64) == pytest.approx(16e6 / 1.755e9)


@pytest.mark.slow  # two compilers
@pytest.mark.timeout(300)
def test_the_kernels_of_a_gpu_do_on_a_cpu_what_those_of_the_cpu_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("warp", reason="needs the extra warp")
    pytest.importorskip("ale_py", reason="needs the extra atari: its ROMs")
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import atari_divergence

    emulator = atari_divergence.Emulator(tmp_path)
    row = atari_divergence.measure(emulator, "Breakout", 32, 4)  # it compares them
    plain, drawn = row["plain"][0], row["drawn"][0]
    slowest, branches = plain["slowest"], plain["branches"]
    assert plain["thread"] < slowest["2"] < slowest["32"] < branches["32"] < 32 * plain["thread"]
    assert plain["thread"] < drawn["thread"]
    lines = atari_divergence.tables([row])
    assert sum("Breakout" in line for line in lines) == 2
    rows = json.loads(json.dumps([row]))
    assert f"| 32 consoles in a warp | {branches['32'] / 1e6:.2f}, " in "\n".join(atari_divergence.page_table(rows))
