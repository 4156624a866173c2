from __future__ import annotations

import gzip
import json
import pathlib
from typing import Any

import pytest
from scripted_profiles import Script, in_one_line

from rlstruct.cli.main import main
from rlstruct.profiling import differences, read, save
from rlstruct.profiling.drawing import draw
from rlstruct.profiling.events import PLAIN, WATCHED, load_recordings
from rlstruct.profiling.nvml import Samples
from rlstruct.profiling.perfetto import write_trace

MS = 1_000_000


def iterations(script: Script, loss: int, n: int = 12) -> Script:
    for i in range(n):
        script.enter("iteration").python(MS // 10)
        script.enter("environment").enter("simulator").python(2 * MS + 1000 * (i % 3)).leave().leave()
        script.enter("loss").operator(loss + 1000 * (i % 4)).leave().leave()
    return script


def test_the_sentence_names_the_bottleneck_and_what_to_try(tmp_path: pathlib.Path) -> None:
    iterations(Script(), MS // 2).write(tmp_path)
    assert read(tmp_path).sentence == (
        "77 % of an iteration is the environment, mostly in the simulator: try more workers (n_processes; "
        "`rlstruct tune` finds how many), or a simulator of rlstruct.sims."
    )
    other = tmp_path / "other"
    iterations(Script(), 9 * MS).write(other)
    assert read(other).sentence.startswith("81 % of an iteration is the loss, mostly in torch's operators:")


def test_a_learner_that_waits_is_told_what_its_workers_do(tmp_path: pathlib.Path) -> None:
    worker = Script("rlstruct-worker-0", 2, parent=1).enter("agent").python(6 * MS).leave()
    worker.enter("environment").python(2 * MS).leave().enter("wait").python(2 * MS).leave().write(tmp_path)
    Script().enter("iteration").enter("wait").python(9 * MS).leave().python(MS).leave().write(tmp_path)
    sentence = read(tmp_path).sentence
    assert sentence.startswith(
        "90 % of an iteration is waiting for workers, and 75 % of their work is the agent, mostly"
    )


def test_an_iteration_without_operations_is_told_as_such(tmp_path: pathlib.Path) -> None:
    script = Script().enter("iteration").python(6 * MS).enter("loss").python(4 * MS).leave().leave()
    script.write(tmp_path)
    assert read(tmp_path).sentence == (
        "60 % of an iteration is outside of all operations in it, mostly in Python: try operations within it, `with "
        "rlstruct.profiling.operation(...)`, to see what takes so long."
    )


def test_the_sentence_is_about_the_processes_that_a_main_one_without_operations_waits_for(
    tmp_path: pathlib.Path,
) -> None:
    Script().python(90 * MS).write(tmp_path)
    iterations(Script("rlstruct-worker-learner-1", 2, parent=1), 9 * MS).write(tmp_path)
    assert read(tmp_path).sentence.startswith("81 % of an iteration is the loss, mostly in torch's operators:")


def test_a_window_of_the_evaluation_alone_is_told_as_such(tmp_path: pathlib.Path) -> None:
    script = Script(phase="evaluation").enter("evaluation").enter("wait").python(99 * MS).leave().leave()
    script.marks.append(["training"])
    script.times.append(script.now)
    script.python(MS // 2).write(tmp_path)
    assert read(tmp_path).sentence.startswith("100 % of the time in 'evaluation' is waiting for workers: try ")


def test_the_report_says_what_it_took_away_and_what_is_uncertain(tmp_path: pathlib.Path) -> None:
    iterations(Script(operation_cost=100_000), MS).write(tmp_path)
    text = in_one_line(read(tmp_path))
    assert "The cost of recording torch's operators is not: too few slices" in text
    assert "in 1 window." in text
    assert "is sampled" in text
    assert "100.00 us an operation" in text
    assert " simulator 12 " in text


def test_a_negative_cost_is_none_and_reported(tmp_path: pathlib.Path) -> None:
    script = Script(operator_cost=-50_000)
    for kind in 30 * [WATCHED, PLAIN]:
        script.slice(kind).enter("loss").python(MS).operator(MS).leave()
    script.write(tmp_path)
    report = read(tmp_path)
    assert report.processes[0].prices.event == pytest.approx(-50e-6)
    assert report.processes[0].corrected == pytest.approx(report.processes[0].seconds)
    assert "0.00 us an operator of torch" in in_one_line(report)
    assert "came out negative and counts as 0: record for longer" in in_one_line(report)


def test_a_table_with_everything_in_it_fits_80_columns(tmp_path: pathlib.Path) -> None:
    script = Script().enter("iteration").enter("simulator").python(10**12).leave().enter("loss and backward")
    script.call(10**12, "cudaLaunchKernel", 1).on_gpu(10**12, 10**12, 1).python(MS).operator(10**12).leave()
    script.enter("an operation with a name that is far too long").python(10**12).leave().leave()
    for _ in range(10_000):
        script.enter("simulator").leave()
    script.write(tmp_path)
    lines = str(read(tmp_path)).splitlines()
    assert max(map(len, lines)) == 80
    table = [line.split() for line in lines if line.startswith(("training", " iteration", "  "))]
    head = ["training", "count", "seconds", "share", "Python", "torch", "sim", "CUDA", "GPU", "→torch", "→CUDA"]
    assert head in table
    row = ["loss", "and", "backward", "1", "2000.001", "50%", "0%", "50%", "0%", "50%", "50%", "1.0", "1.0"]
    assert row in table
    assert any(line.startswith("  an op") and "… " in line for line in lines)


def test_what_is_saved_can_be_read_by_others(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra train")
    iterations(Script(), MS).write(tmp_path)
    report = read(tmp_path)
    files = save(report, tmp_path)
    assert [file.name for file in files] == ["profile.json", "trace.json.gz", "profile.png"]
    found = json.loads(files[0].read_text())
    rows = {row["operation"]: row for row in found["processes"][0]["rows"]}
    assert rows["iteration/loss"]["corrected"][1] == pytest.approx(12e-3, rel=0.01)
    assert rows["iteration/loss"]["transitions"] == {"simulator to backend": 12}
    assert found["sentence"] == report.sentence
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_waiting_does_not_set_the_scale_of_the_picture(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = pytest.importorskip("matplotlib.figure", reason="needs the extra train")
    drawn: list[Any] = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    Script("rlstruct-worker-0", 2, parent=1).enter("wait").python(2000 * MS).leave().write(tmp_path)
    script = Script().enter("iteration").enter("loss").python(100 * MS).leave().enter("agent").python(40 * MS)
    script.leave().leave().enter("start").python(700 * MS).leave().write(tmp_path)
    draw(read(tmp_path).processes, tmp_path / "profile.png", title="")
    (figure,) = drawn
    (axes,) = figure.axes
    assert axes.get_xlim() == (0.0, pytest.approx(0.105))  # the loss and a twentieth
    assert sorted(text.get_text() for text in axes.texts) == ["0.7 s →", "2.0 s →"]


def events_of(trace: pathlib.Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return found


def test_the_trace_has_every_event_on_the_track_of_its_process(tmp_path: pathlib.Path) -> None:
    script = Script().enter("outer").operator(MS).enter("inner").python(MS).leave().leave()
    script.call(MS, "cudaLaunchKernel", 1).on_gpu(MS // 2, MS, 1, "a kernel").write(tmp_path)
    Script("rlstruct-worker-0", 2, parent=1).enter("agent").python(MS).leave().write(tmp_path)
    write_trace(load_recordings(tmp_path), tmp_path / "trace")
    events = events_of(tmp_path / "trace")
    named = [event for event in events if event["ph"] == "M"]
    processes = {event["pid"]: event["args"]["name"] for event in named if event["name"] == "process_name"}
    assert processes == {1: "main", 2: "rlstruct-worker-0", 2**30: "GPUs"}
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in named if event["name"] == "thread_name"}
    begun = 10**6  # of both processes, in microseconds
    slices = sorted(
        (threads[event["pid"], event["tid"]], event["name"], event["pid"], event["ts"] - begun, event["dur"])
        for event in events
        if event["ph"] == "X"
    )
    assert slices == [
        ("GPU stream 7", "a kernel", 1, 500.0, 1000.0),
        ("operations", "agent", 2, 0.0, 1000.0),
        ("operations", "inner", 1, 1000.0, 1000.0),
        ("operations", "outer", 1, 0.0, 2000.0),
        ("torch and CUDA's API", "aten::mm", 1, 0.0, 1000.0),
        ("torch and CUDA's API", "cudaLaunchKernel", 1, 2000.0, 1000.0),
    ]


def test_events_that_cross_are_cut_so_that_the_trace_nests(tmp_path: pathlib.Path) -> None:
    script = Script().python(10 * MS).on_gpu(0, 4 * MS, 1, "first").on_gpu(MS, 5 * MS, 2, "second")
    script.on_gpu(5 * MS, 2 * MS, 3, "third").write(tmp_path)
    write_trace(load_recordings(tmp_path), tmp_path / "trace")
    slices = {e["name"]: (e["ts"] - 10**6, e["dur"]) for e in events_of(tmp_path / "trace") if e["ph"] == "X"}
    assert slices == {"first": (0.0, 4000.0), "second": (1000.0, 3000.0), "third": (5000.0, 2000.0)}


def test_the_trace_counts_how_busy_each_gpu_is_over_time(tmp_path: pathlib.Path) -> None:
    # 25 ms of which 2 to 8 ms and, in the other process, 6 to 12 ms are busy; 20 s later a window that is idle.
    Script().python(25 * MS).on_gpu(2 * MS, 6 * MS, 1).write(tmp_path)
    Script("rlstruct-worker-0", 2, parent=1).python(25 * MS).on_gpu(6 * MS, 6 * MS, 1).write(tmp_path)
    Script(start=21 * 10**9, now=21 * 10**9).python(10 * MS).write(tmp_path, window=1)
    samples = {"cuda:0": Samples([(10**9, 97.0), (10**9 + MS, 3.0)]), "of no process": Samples([(10**9, 1.0)])}
    write_trace(load_recordings(tmp_path), tmp_path / "trace", samples)
    found: dict[str, list[tuple[float, float]]] = {}
    for event in events_of(tmp_path / "trace"):
        if event["ph"] == "C":
            found.setdefault(event["name"], []).append(((event["ts"] - 10**6) / 1000, event["args"]["%"]))
    assert found == {
        "GPU busy, cuda:0": [(0, 80.0), (10, 20.0), (20, 0.0), (25, 0.0), (20_000, 0.0), (20_010, 0.0)],
        "NVML's utilisation, cuda:0": [(0, 97.0), (1, 3.0)],
    }


def test_a_difference_is_told_only_beyond_noise(tmp_path: pathlib.Path) -> None:
    for name, loss in (("a", MS), ("same", MS + 20_000), ("slower", 2 * MS)):
        iterations(Script(), loss).write(tmp_path / name)
    before, same, slower = (read(tmp_path / name) for name in ("a", "same", "slower"))
    assert differences(before, same) == ["No operation became slower or faster beyond noise."]
    told = differences(before, slower)
    assert told[0].startswith("main, training, iteration/loss: 1 ms -> 2 ms an entry, 100 % slower")
    assert told[1].startswith("main, training, iteration: ")
    assert len(told) == 2  # the environment is what it was
    assert "% faster" in differences(slower, before)[0]


def test_profiles_of_different_programs_share_no_operation(tmp_path: pathlib.Path) -> None:
    iterations(Script(), MS).write(tmp_path / "a")
    Script().python(MS).write(tmp_path / "b")
    a, b = (read(tmp_path / name) for name in ("a", "b"))
    nothing = "The profiles share no operation, so there is nothing to compare."
    assert differences(b, b) == [nothing]
    told = differences(a, b)
    assert "main, training, iteration/loss: gone" in told
    assert told[-1] == nothing


def test_differences_fit_80_columns(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "the part of the loss that became slower"
    for folder, milliseconds in (("a", 1), ("b", 4)):
        script = Script()
        for i in range(12):
            script.enter("iteration").enter("loss").enter(name)
            script.python(MS * milliseconds + 1000 * (i % 3)).leave().leave().leave()
        script.write(tmp_path / folder)
    assert main(["profile", "--diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert f"main, training, iteration/loss/{name}: 1 ms -> 4 ms an entry" in " ".join(map(str.strip, lines))


def test_a_slower_machine_is_not_taken_for_a_slower_program(tmp_path: pathlib.Path) -> None:
    names = ("agent", "copy", "replay", "loss", "backward", "optimiser")
    for folder, machine, copy in (("a", 1.0, 1.0), ("busy", 1.4, 1.0), ("slower", 1.4, 2.0)):
        script = Script()
        for i in range(12):
            script.enter("iteration")
            for name in names:
                factor = machine * (copy if name == "copy" else 1.0)
                script.enter(name).python(int(factor * (MS + 10_000 * (i % 3)))).leave()
            script.leave()
        script.write(tmp_path / folder)
    a, busy, slower = (read(tmp_path / name) for name in ("a", "busy", "slower"))
    machine_alone = "Three quarters of all operations are 40 % slower or more: probably the machine, not the program."
    assert differences(a, busy) == ["No operation became slower or faster beyond noise.", machine_alone]
    told = differences(a, slower)
    assert told[0].startswith("main, training, iteration/copy: 1.01 ms -> 2.83 ms an entry, 2.8 times as long")
    assert told[1].startswith("main, training, iteration: ")
    assert told[2:] == [machine_alone]


def test_one_entry_is_no_evidence(tmp_path: pathlib.Path) -> None:
    for name, loss in (("a", MS), ("b", 3 * MS)):
        iterations(Script(), loss, n=1).write(tmp_path / name)
    a, b = (read(tmp_path / name) for name in ("a", "b"))
    assert differences(a, b) == ["No operation became slower or faster beyond noise."]
