from __future__ import annotations

import gc
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref

import numpy as np
import pytest
import torch

from rlstruct.profiling import Clock, OperationError, operation, operations, phase, profile, read, recorded, recorder
from rlstruct.profiling.events import PLAIN, SWITCHING, WATCHED, load_recordings, replay
from rlstruct.profiling.overlap import lookup
from rlstruct.profiling.recorder import Recorder


def test_operations_nest_and_carry_their_path(tmp_path: pathlib.Path) -> None:
    with profile(tmp_path, window=60), operation("outer"):
        with operation("inner"):
            torch.ones(3) + 1
        with operation("inner"):
            pass
    (found,) = load_recordings(tmp_path)
    assert gc.isenabled()  # again
    assert [found.paths[i] for i in found.spans.key] == [("outer",), ("outer", "inner"), ("outer", "inner")]
    outer, first, second = zip(found.spans.starts, found.spans.ends, strict=True)
    assert outer[0] <= first[0] <= first[1] <= second[0] <= second[1] <= outer[1]
    # torch's operators are on the same clock, and were recorded in the first inner one.
    names = found.host.names.tolist()
    at = names.index("aten::add")
    assert first[0] < found.host.starts[at] <= found.host.ends[at] < first[1]


def test_a_wrong_order_raises(tmp_path: pathlib.Path) -> None:
    first, second = operation("first"), operation("second")
    with profile(tmp_path, operators=False):
        first.__enter__()
        second.__enter__()
        with pytest.raises(OperationError, match="'first' ends, but 'second' was entered later"):
            first.__exit__(None, None, None)
        second.__exit__(None, None, None)
    assert issubclass(OperationError, RuntimeError)


def test_one_operation_may_be_entered_again_before_it_is_left_and_by_several_threads(tmp_path: pathlib.Path) -> None:
    work, stop = operation("work"), threading.Event()

    def recurse(n: int) -> None:
        with work:
            if n > 1:
                recurse(n - 1)

    def repeat() -> None:
        while not stop.is_set():
            recurse(2)

    thread = threading.Thread(target=repeat)
    with profile(tmp_path, window=60, operators=0.0):
        thread.start()
        for _ in range(100):
            recurse(2)
            with operation("rest"):
                time.sleep(0)  # lets the other thread run
        stop.set()
        thread.join()
    (process,) = read(tmp_path).processes
    counts = {row.path: row.count for row in process.rows if row.path}
    assert counts == {("work",): 100, ("rest",): 100}  # an operation in one of the same name is part of it


def test_an_exception_ends_all_that_is_open(tmp_path: pathlib.Path) -> None:
    clock = Clock({"idle": None, "work": "work"})

    @operation("outer")
    def fails() -> float:
        clock.enter(1)  # and does not end it
        return 1 / 0

    with profile(tmp_path, operators=False):
        with pytest.raises(ZeroDivisionError):
            fails()
        with operation("next"):
            clock.enter(1)
            clock.enter(0)
    (found,) = load_recordings(tmp_path)
    assert [found.paths[i] for i in found.spans.key] == [
        ("outer",), ("outer", "work"), ("next",), ("next", "work")
    ]  # fmt: skip


def test_nothing_is_noted_without_a_profile_or_by_other_threads(tmp_path: pathlib.Path) -> None:
    @operation("decorated")
    def decorated() -> int:
        return 1

    before = operation("before")
    with before:
        assert decorated() == 1
    with before, profile(tmp_path, operators=False):
        thread = threading.Thread(target=decorated)
        thread.start()
        thread.join()
        assert decorated() == 1
        with pytest.raises(RuntimeError, match="being profiled already"), profile(tmp_path / "other"):
            pass
    assert operations.VARIABLE not in os.environ
    (found,) = load_recordings(tmp_path)
    assert [found.paths[i] for i in found.spans.key] == [("decorated",)]
    with pytest.raises(FileExistsError, match="holds a profile"), profile(tmp_path):
        pass
    with pytest.raises(ValueError, match="window is 0"), profile(tmp_path / "other", window=0):
        pass
    with pytest.raises(ValueError, match="operators is 2"), profile(tmp_path / "other", operators=2):
        pass
    with pytest.raises(FileNotFoundError, match="holds no profile"):
        load_recordings(tmp_path / "nothing")


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_window() -> None:
    with pytest.raises(ValueError, match="profile: /proc cannot be written: "), profile("/proc"):  # not even by root
        pass


@pytest.mark.parametrize("value", ["NVTX", "1", "true", "[]", ""])
def test_another_value_of_the_variable_is_refused_by_name(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(operations.VARIABLE, value)
    with pytest.raises(ValueError, match=rf"RLSTRUCT_PROFILE is {re.escape(repr(value))}, expected 'nvtx'"):
        operations.start_if_requested()


def test_the_seconds_of_a_clock_are_those_of_its_operations(tmp_path: pathlib.Path) -> None:
    clock = Clock({"idle": None, "work": "work", "rest": "the rest"})
    with profile(tmp_path, window=60, operators=False):
        for _ in range(20):
            clock.enter(1)
            time.sleep(0.001)
            clock.enter(2)
            clock.enter(0)
        seconds = clock.seconds()
    (found,) = load_recordings(tmp_path)
    lengths = 1e-9 * np.bincount(found.spans.key, weights=found.spans.ends - found.spans.starts)
    assert dict(zip(found.paths, lengths, strict=True)) == pytest.approx(
        {(): 0.0, ("work",): seconds["work"], ("the rest",): seconds["rest"]}, rel=1e-9
    )
    assert sum(seconds.values()) == pytest.approx(seconds["idle"] + lengths.sum())


def test_every_second_of_a_clock_belongs_to_exactly_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0, 1, 3, 7, 15, 31])
    monkeypatch.setattr(operations, "clock_ns", lambda: 10**9 * next(now))
    clock = Clock({"wait": "wait", "work": "work", "rest": None})
    clock.enter(1)  # waited 1 s
    clock.enter(0)  # worked 2 s
    clock.enter(1)  # waited 4 s
    assert clock.seconds() == {"wait": 5.0, "work": 10.0, "rest": 0.0}  # the running one counts, 8 s so far
    assert clock.seconds() == {"wait": 5.0, "work": 26.0, "rest": 0.0}


def test_phases_are_restored(tmp_path: pathlib.Path) -> None:
    with profile(tmp_path, operators=False), phase("training"):
        with phase("evaluation"):
            started = json.loads(os.environ[operations.VARIABLE])
        with operation("a"):
            pass
    (found,) = load_recordings(tmp_path)
    assert started["phase"] == "evaluation"
    phases = [found.keys[i][0] for i in found.innermost[1]]
    assert [name for name, _ in itertools.groupby(phases)] == ["start", "training", "evaluation", "training", "start"]


def test_a_long_run_records_windows_that_grow_apart(tmp_path: pathlib.Path) -> None:
    with profile(tmp_path, window=0.02, operators=False):
        start = time.perf_counter()
        while time.perf_counter() - start < 0.9:
            with operation("outer"), operation("inner"):
                pass
    found = load_recordings(tmp_path)
    begun = [1e-9 * (one.begun - one.origin) for one in found]
    # At 0, 3, 9 and 27 windows of 0.02 s; a busy machine may come late, and then skip one.
    assert 2 <= len(found) <= 4
    assert all(0.0 <= late < 0.2 for late in (min(t - w for w in (0, 0.06, 0.18, 0.54) if t >= w) for t in begun))
    assert sum(one.ended - one.begun for one in found) < 0.5e9
    for one in found:
        assert {one.paths[i] for i in one.spans.key} == {("outer",), ("outer", "inner")}
        assert one.spans.starts.min() >= one.begun
        assert one.spans.ends.max() <= one.ended


def test_the_report_tells_how_long_a_process_ran_after_its_last_window(tmp_path: pathlib.Path) -> None:
    with profile(tmp_path, window=0.02, operators=False):
        with operation("work"):
            time.sleep(0.03)
        time.sleep(0.3)  # without operations no other window begins
    report = read(tmp_path)
    (process,) = report.processes
    assert process.lifetime > 0.33
    assert f" s of {process.lifetime:.2f} s in 1 window." in report.notes()[0]


def test_a_process_that_starts_between_windows_records_from_its_first_operation(tmp_path: pathlib.Path) -> None:
    length = 60 * 10**9  # windows at 0, 3 and 9 minutes; this process starts at 5
    origin = time.perf_counter_ns() - 5 * length
    chosen = {"folder": str(tmp_path), "origin": origin, "window": length, "operators": 0.0, "phase": "training"}
    late = Recorder(chosen)
    started = time.perf_counter_ns()
    for name in ("start", "first"):
        late.pop(late.push(name, time.perf_counter_ns()), time.perf_counter_ns(), strict=True)
    late.close()
    (found,) = load_recordings(tmp_path)
    assert [found.paths[i] for i in found.spans.key] == [("first",)]
    assert found.window == 0
    assert found.begun >= started


@pytest.mark.parametrize("evaluating", [0.15, 0.3])
def test_a_whole_window_lies_in_the_training_however_long_its_first_evaluation_takes(
    evaluating: float, tmp_path: pathlib.Path
) -> None:
    with profile(tmp_path, window=0.2), phase("training"):  # the first window, and the next one from 0.6 s on
        with phase("evaluation"), operation("evaluation"), operation("agent"):
            time.sleep(evaluating)
        start = time.perf_counter()
        while time.perf_counter() - start < 0.25:
            with operation("iteration"):
                time.sleep(0.005)
    (main,) = read(tmp_path).processes
    assert main.inclusive("iteration", corrected=False) > 0.19
    assert read(tmp_path).sentence.startswith("100 % of an iteration")


def test_an_operation_that_begins_late_is_recorded_from_its_first_entry_on(tmp_path: pathlib.Path) -> None:
    with profile(tmp_path, window=0.1, operators=0.0):  # windows begin after 0, 0.3 and 0.9 s
        for name, seconds in (("prepare", 0.35), ("load", 0.15), ("learn", 0.05), ("load", 0.15), ("load", 0.1)):
            with operation(name):
                time.sleep(seconds)
        with phase("evaluation"), operation("evaluation"):
            pass
    (process,) = read(tmp_path).processes
    seconds = {row.path: float(row.seconds.sum()) for row in process.rows if row.path}
    # The second "load" ends the window that "learn" has opened; the third lies between windows.
    assert seconds == pytest.approx({("prepare",): 0.35, ("load",): 0.3, ("learn",): 0.05}, abs=0.03)


def test_operations_with_ever_new_names_do_not_record_for_ever(tmp_path: pathlib.Path) -> None:
    with profile(tmp_path, window=0.02, operators=0.0):
        for i in range(200):
            with operation(f"step {i}"):
                time.sleep(0.005)
    (process,) = read(tmp_path).processes
    assert process.seconds < 0.7 * process.lifetime


def test_a_worker_that_waits_records_a_window_from_where_it_begins_to_work(tmp_path: pathlib.Path) -> None:
    chosen = {"folder": str(tmp_path), "origin": time.perf_counter_ns(), "window": 2 * 10**8, "operators": 0.0}
    worker = Recorder({**chosen, "phase": "training"})
    for name, seconds in (("start", 0.0), ("wait", 0.25), ("reset", 0.0), ("agent", 0.05), ("environment", 0.05)):
        depth = worker.push(name, time.perf_counter_ns())
        time.sleep(seconds)
        worker.pop(depth, time.perf_counter_ns(), strict=True)
    worker.close()
    (process,) = read(tmp_path).processes
    assert process.inclusive("agent") == pytest.approx(0.05, rel=0.5)
    assert process.inclusive("environment") == pytest.approx(0.05, rel=0.5)


def test_a_training_on_the_cpu_is_recorded_alike_where_there_is_a_gpu(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    one = torch.ones(1)
    with profile(tmp_path, window=60):
        start = time.perf_counter()
        while time.perf_counter() - start < 0.3:
            with operation("negate"):
                one.neg_()
    (found,) = load_recordings(tmp_path)
    assert PLAIN in found.slices[1]  # a process that works on a GPU is watched without a break


def test_noting_costs_its_mean_among_other_work(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"origin": 0, "window": 60 * 10**9, "operators": 0.0, "phase": "training"}

    def cost(name: str, noted: list[int]) -> float:
        """Return what noting costs by a record of operations whose ends take so many ns to note."""
        folder, times = tmp_path / name, itertools.count(step=100)
        folder.mkdir()
        monkeypatch.setattr(recorder, "clock_ns", times.__next__)  # an end takes 100 ns to note
        one = Recorder({**chosen, "folder": str(folder)})
        for taken in noted:
            for _ in range(17):  # one end in so many is timed
                depth, now = one.push("work", next(times)), next(times)
                one.pop(depth, now + 100 - taken, strict=True)
        one.close()
        (file,) = folder.glob("*.operations.json")
        return float(json.loads(file.read_text())["cost"])

    alone = cost("alone", [100] * 20)
    among = cost("among", [100] * 14 + [300] * 5 + [10**6])  # a quarter after heavy work; in one another program ran
    assert among - alone == pytest.approx((14 * 100 + 5 * 300) / 19 - 100, abs=2)


def test_a_log_that_ends_within_operations_is_closed() -> None:
    # The "b" in "b" is part of it.
    marks = [["start"], "a", "b", "b", None, None, "b"]
    keys, spans, innermost = replay([0, 1, 2, 2, 3, 3, 5], marks, ended=9)
    assert keys == [("start", ()), ("start", ("a",)), ("start", ("a", "b"))]
    assert spans.starts.tolist() == [1, 2, 5]
    assert spans.ends.tolist() == [9, 3, 9]
    assert spans.key.tolist() == [1, 2, 2]
    assert [steps.tolist() for steps in innermost] == [[0, 1, 2, 3, 5], [0, 1, 2, 1, 2]]


SCRIPT = """
import os, signal, subprocess, sys, time
import torch
from rlstruct.profiling import operation, profile

def main():
    with profile(sys.argv[1], window=60, operators=1):
        killed, stopped = (
            subprocess.Popen([sys.executable, __file__, name], stdout=subprocess.PIPE) for name in ("killed", "stopped")
        )
        killed.stdout.readline(), stopped.stdout.readline()
        with operation("parent"):
            torch.ones(3) + 1
            killed.kill()
            stopped.send_signal(signal.SIGINT)
            killed.wait(), stopped.wait()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)

def child(name):
    with operation(name):
        print("ready", flush=True)
        time.sleep(30)

main() if "/" in sys.argv[1] else child(sys.argv[1])
"""


@pytest.mark.slow
def test_ctrl_c_leaves_a_profile_and_a_killed_process_loses_its_own(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / "profile")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (1, 130, -signal.SIGINT)
    assert "KeyboardInterrupt" in done.stderr
    found = {one.paths[-1][0]: one for one in load_recordings(tmp_path / "profile")}
    assert set(found) == {"parent", "stopped"}
    assert "aten::add" in found["parent"].host.names
    # Both are on one clock: the child's operation began before that of its parent, which waited for it.
    assert found["stopped"].spans.starts[0] < found["parent"].spans.starts[0]
    assert found["stopped"].parent == found["parent"].pid


def test_operators_are_recorded_in_slices(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    one = torch.ones(1)
    with profile(tmp_path, window=60):
        start = time.perf_counter()
        while time.perf_counter() - start < 0.6:
            with operation("negate"):
                one.neg_()
    (found,) = load_recordings(tmp_path)
    times, kinds = found.slices
    assert set(kinds) == {SWITCHING, PLAIN, WATCHED}
    assert (np.diff(times) > 0).all()
    # Every event lies in a slice that is watched; in the others operations are noted all the same.
    of_events = lookup(found.slices, found.host.starts)
    assert (of_events == WATCHED).all()
    entries = np.bincount(lookup(found.slices, found.spans.starts), minlength=3)
    assert len(of_events) == pytest.approx(entries[WATCHED], abs=len(times))
    assert 0.05 < entries[WATCHED] / entries.sum() < 0.6  # a quarter, on an idle machine
    assert capfd.readouterr().err == ""  # torch has nothing to warn of
    (process,) = read(tmp_path).processes
    assert process.prices.event is not None
    assert process.prices.operation > 0.0


def test_what_older_releases_of_torch_say_of_every_profile_is_kept_from_users(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Talkative(torch.profiler.profile):
        """The profiler of torch 2.11."""

        def prepare_trace(self) -> None:
            warnings.warn("Warning: Profiler clears events at the end of each cycle.", UserWarning, stacklevel=2)
            super().prepare_trace()

    monkeypatch.setattr(torch.profiler, "profile", Talkative)
    with profile(tmp_path, window=60), operation("outer"):
        torch.ones(3) + 1
    assert "aten::add" in load_recordings(tmp_path)[0].host.names


def test_what_a_window_recorded_is_freed_at_its_end(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []

    class Kept(torch.profiler.profile):
        def start(self) -> None:
            super().start()
            held.append(weakref.ref(self.profiler))

    monkeypatch.setattr(torch.profiler, "profile", Kept)
    gc.disable()  # else it may be freed by chance
    try:
        with profile(tmp_path, window=60), operation("work"):
            torch.ones(3) + 1
            (one,) = held
            assert one() is not None
        assert one() is None
    finally:
        gc.enable()


def test_a_capture_is_recorded_between_windows(tmp_path: pathlib.Path) -> None:
    with recorded():  # without a profile
        pass
    with profile(tmp_path, window=0.2):  # and again from 0.6 s on
        for name in ("late", "graph"):  # later, neither begins for the first time
            with operation(name):
                pass
        time.sleep(0.25)
        with operation("late"):
            pass
        with operation("graph"), recorded(), operation("captured"):
            torch.ones(3) + 1
    sampled, capture = sorted(load_recordings(tmp_path), key=lambda one: -one.window)
    assert (sampled.window, capture.window) == (0, -1)
    assert capture.paths[1:] == [("graph",), ("graph", "captured")]
    assert "aten::add" in capture.host.names
    (process,) = read(tmp_path).processes
    assert process.n_windows == 1
    assert all("captured" not in row.path for row in process.rows)


def test_no_window_begins_or_ends_within_a_capture(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def at_work(seconds: float) -> tuple[int, int]:
        begun = time.perf_counter_ns()
        end = begun + int(1e9 * seconds)
        while time.perf_counter_ns() < end:
            with operation("agent"):
                pass
        return begun, time.perf_counter_ns()

    with profile(tmp_path, window=0.1):  # windows begin after 0, 0.3 and 0.9 s
        at_work(0.05)
        with monkeypatch.context() as capturing:
            capturing.setattr(torch.cuda, "is_initialized", lambda: True)
            capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            first = at_work(0.2)  # in a window
            assert not list(tmp_path.glob("*.json"))
        at_work(0.01)
        assert len(list(tmp_path.glob("*.operations.json"))) == 1
        with monkeypatch.context() as capturing:
            capturing.setattr(torch.cuda, "is_initialized", lambda: True)
            capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            second = at_work(0.3)  # between two
        at_work(0.05)
    ends = [(one.begun, one.ended) for one in load_recordings(tmp_path)]
    assert len(ends) == 2
    assert not [at for at in sum(ends, ()) for begun, ended in (first, second) if begun <= at <= ended]
