from __future__ import annotations

import json
import pathlib
import sys
import threading
import time
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted_profiles import Script, in_one_line

from rlstruct.profiling import nvml, operation, profile, read
from rlstruct.profiling.events import load_recordings
from rlstruct.profiling.gpu import use_of_gpus, weighted_length

MS = 1_000_000


def a_run_on_a_gpu(folder: pathlib.Path) -> None:
    """20 ms: a forward pass, data that is awaited and copied, and a graph that was captured and is replayed twice."""
    script = Script().enter("iteration").enter("agent")
    script.call(MS, "cudaLaunchKernel", 1).on_gpu(2 * MS, 2 * MS, 1, blocks=66)  # ordered at 0, begins at 2
    script.python(4 * MS).leave()  # at 5
    script.enter("wait").python(2 * MS).leave()  # at 7
    script.call(MS, "cudaMemcpyAsync", 2).on_gpu(8 * MS, MS, 2, "Memcpy HtoD (Pinned -> Device)")
    script.call(0, "cudaStreamBeginCapture", 90)  # at 8
    script.enter("agent").call(MS // 2, "cudaLaunchKernel", 91).leave()
    script.enter("simulator").call(MS // 2, "cudaLaunchKernel", 92).call(MS // 2, "cudaMemsetAsync", 93).leave()
    script.call(0, "cudaStreamEndCapture", 94).python(MS // 2)  # at 10
    for correlation, begins in ((3, 11), (4, 15)):
        script.enter("graph").call(MS, "cudaGraphLaunch", correlation).leave()  # at 10 and 14
        script.on_gpu(begins * MS, MS, correlation, "policy", blocks=132)
        script.on_gpu((begins + 1) * MS, MS, correlation, "cart_pole", blocks=1)
        script.on_gpu((begins + 2) * MS, MS // 2, correlation, "Memset (Device)", blocks=0)
        script.python(3 * MS)
    script.python(2 * MS).leave()  # at 20
    script.write(folder)


def test_a_synthetic_trace_goes_through_the_whole_analysis(tmp_path: pathlib.Path) -> None:
    a_run_on_a_gpu(tmp_path)
    (file,) = tmp_path.glob("*.operations.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "gpus": {"0": "aaaa"}}))
    samples = [(10**9 + i * MS, 95.0) for i in range(20)] + [(10**10, 0.0)]
    gpus = {"aaaa": {"taken": samples, "error": ""}, "bbbb": {"taken": [(10**9 + MS, 3.0)], "error": ""}}
    (tmp_path / "1.nvml.json").write_text(json.dumps(gpus))
    report = read(tmp_path)
    (use,) = report.gpus
    assert use.seconds == pytest.approx(20e-3)
    assert use.busy == pytest.approx((2 + 1 + 2 * 2.5) / 20)
    # The grids fill half, all, and one of 132 multiprocessors; copies and fills count for nothing.
    assert use.weighted == pytest.approx((2 * 0.5 + 2 * (1 + 1 / 132)) / 20)
    assert use.nvml == pytest.approx(0.95)  # of this GPU, in this window
    assert use.kernels == pytest.approx(6e-3)
    # Kernels of a replay belong to what was captured.
    assert use.operations == {
        "iteration/agent": pytest.approx(4e-3),
        "iteration/simulator": pytest.approx(3e-3),
        "iteration": pytest.approx(1e-3),  # the copy
    }
    # Idle: 0-2 a launch; 4-5 the host; 5-7 data is awaited and 7-8 copied; 9-10 and 13.5-14 the host, 10-11 and 14-15
    # launches; the end 17.5 to 20 the host.
    assert use.idle == {
        "host": pytest.approx(1e-3 + 1e-3 + 0.5e-3 + 2.5e-3),
        "data": pytest.approx(2e-3 + 1e-3),
        "launches": pytest.approx(2e-3 + 1e-3 + 1e-3),
    }
    assert use.busy * use.seconds + sum(use.idle.values()) == pytest.approx(use.seconds)
    assert "busy 40 % of the time" in report.sentence
    assert "NVML's utilisation 95 %, busy 40.0 %" in in_one_line(report)
    assert max(map(len, str(report).splitlines())) <= 80
    (process,) = report.processes
    busy = sum(row.seconds[4:].sum() for row in process.rows)
    assert busy == pytest.approx(8e-3)  # the sweep sees the same
    assert (
        sum(row.transitions[:, 3].sum() for row in process.rows) == 3
    )  # those that follow Python: others follow each other


def test_a_capture_in_another_window_explains_later_replays(tmp_path: pathlib.Path) -> None:
    capture = Script().enter("iteration").enter("graph").call(0, "cudaStreamBeginCapture", 90)
    capture.enter("loss").call(MS, "cudaLaunchKernel", 91).leave()
    capture.enter("optimiser").call(MS, "cudaLaunchKernel", 92).leave()
    capture.call(0, "cudaStreamEndCapture", 93).write(tmp_path, window=-1)
    later = Script(start=2 * 10**9, now=2 * 10**9).enter("iteration").enter("graph")
    later.call(MS, "cudaGraphLaunch", 1).on_gpu(MS, MS, 1).on_gpu(2 * MS, 2 * MS, 1).python(5 * MS).write(tmp_path)
    (use,) = read(tmp_path).gpus
    assert use.seconds == pytest.approx(6e-3)  # the capture is no part of the sample
    names = {"iteration/graph/loss": MS, "iteration/graph/optimiser": 2 * MS}
    assert use.operations == {name: pytest.approx(1e-9 * ns) for name, ns in names.items()}


def test_work_that_no_recorded_capture_explains_belongs_to_who_launches_it(tmp_path: pathlib.Path) -> None:
    script = Script().enter("graph").call(MS, "cudaGraphLaunch", 1).leave()
    script.on_gpu(MS, MS, 1).on_gpu(2 * MS, MS, 1).python(4 * MS).write(tmp_path)
    (use,) = use_of_gpus(load_recordings(tmp_path), tmp_path)
    assert use.operations == {"graph": pytest.approx(2e-3)}
    assert use.nvml is None
    assert "unknown" in str(use)


def test_without_a_gpu_there_is_nothing_to_say(tmp_path: pathlib.Path) -> None:
    Script().enter("loss").operator(MS).leave().write(tmp_path)
    report = read(tmp_path)
    assert report.gpus == []
    assert "cuda" not in report.sentence


intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10), st.integers(1, 8)), min_size=1, max_size=12)


@given(intervals)
def test_the_weighted_share_is_what_brute_force_finds(found: list[tuple[int, int, int]]) -> None:
    starts, lengths, eighths = np.asarray(found, dtype=np.int64).T
    ends, weights = starts + lengths, eighths / 8
    loads = [min(1.0, weights[(starts <= t) & (t < ends)].sum()) for t in range(45)]
    assert weighted_length(starts, ends, weights) == pytest.approx(sum(loads))


class FakeError(Exception):
    """As NVML's."""


@pytest.fixture
def pynvml(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """NVML with two GPUs, of which the first is busy for 98 % and the second for 7 %."""
    fake = types.ModuleType("pynvml")
    fake.calls = []
    fake.NVMLError = FakeError
    fake.nvmlInit = lambda: fake.calls.append("init")
    fake.nvmlShutdown = lambda: fake.calls.append("shutdown")
    fake.nvmlDeviceGetCount = lambda: 2
    fake.nvmlDeviceGetHandleByIndex = lambda index: index
    fake.nvmlDeviceGetUUID = lambda handle: "GPU-AAAA" if handle == 0 else "GPU-bbbb"
    fake.nvmlDeviceGetUtilizationRates = lambda handle: types.SimpleNamespace(gpu=98 if handle == 0 else 7)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def a_busy_gpu(folder: pathlib.Path, uuid: str, begun: int, seconds: float = 4.0) -> None:
    """A process whose cuda:0 is the GPU with that UUID."""
    script = Script(start=begun).enter("agent").call(MS, "cudaLaunchKernel", 1).on_gpu(MS, MS, 1)
    script.python(int(1e9 * seconds)).leave().write(folder)
    (file,) = folder.glob("*.operations.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "gpus": {"0": uuid}}))


def test_nvml_is_sampled_until_the_profile_ends(tmp_path: pathlib.Path, pynvml: types.ModuleType) -> None:
    begun = time.perf_counter_ns()
    end = nvml.sample(tmp_path)
    assert end is not None
    time.sleep(0.25)
    end()
    assert pynvml.calls == ["init", "shutdown"]
    # What this process calls cuda:0 is the second GPU of the driver's, as under CUDA_VISIBLE_DEVICES=1.
    a_busy_gpu(tmp_path, "bbbb", begun - 10**9, 3.0)
    (use,) = read(tmp_path).gpus
    assert use.device == 0
    assert use.nvml == pytest.approx(0.07)


def test_a_window_names_the_gpus_of_its_process_by_uuid(
    tmp_path: pathlib.Path, pynvml: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under CUDA_VISIBLE_DEVICES=1, the second GPU of the driver's is cuda:0; before CUDA is in use, none has."""
    seen = [types.SimpleNamespace(uuid="BBBB")]  # torch's has no prefix
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "get_device_properties", seen.__getitem__)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for in_use in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda in_use=in_use: in_use)
        with profile(tmp_path / str(in_use), operators=False), operation("work"):
            pass
        (window,) = load_recordings(tmp_path / str(in_use))
        assert window.gpus == ({0: "bbbb"} if in_use else {})


def test_without_a_driver_nothing_is_sampled(tmp_path: pathlib.Path, pynvml: types.ModuleType) -> None:
    def fails() -> None:
        raise FakeError

    pynvml.nvmlInit = fails
    assert nvml.sample(tmp_path) is None


def test_a_driver_that_hangs_does_not_keep_a_profile_from_ending(
    tmp_path: pathlib.Path, pynvml: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "LONGEST_CALL", 0.1)
    asked, over = threading.Event(), threading.Event()

    def hang(handle: int) -> types.SimpleNamespace:
        asked.set()
        over.wait(60.0)
        return types.SimpleNamespace(gpu=7)

    pynvml.nvmlDeviceGetUtilizationRates = hang
    end = nvml.sample(tmp_path)
    assert end is not None
    assert asked.wait(60.0)
    begun = time.monotonic()
    end()
    assert time.monotonic() - begun < 20.0
    over.set()
    assert set(nvml.read_samples(tmp_path)) == {"aaaa", "bbbb"}


def test_a_gpu_that_mig_divides_has_no_utilisation_and_the_report_says_why(
    tmp_path: pathlib.Path, pynvml: types.ModuleType
) -> None:
    def refuses(handle: int) -> types.SimpleNamespace:
        if handle == 0:
            raise FakeError("Not Supported")
        return types.SimpleNamespace(gpu=7)

    pynvml.nvmlDeviceGetUtilizationRates = refuses
    begun = time.perf_counter_ns() - 10**9
    end = nvml.sample(tmp_path)
    assert end is not None
    time.sleep(0.15)
    end()
    assert pynvml.calls == ["init", "shutdown"]
    a_busy_gpu(tmp_path, "aaaa", begun)
    assert "NVML's utilisation unknown (NVML: Not Supported)" in in_one_line(read(tmp_path))
    a_busy_gpu(tmp_path, "bbbb", begun)  # the other one answers all the same
    assert read(tmp_path).gpus[0].nvml == pytest.approx(0.07)
    a_busy_gpu(tmp_path, "cccc", begun)
    assert "unknown (NVML knows no GPU of this UUID: a MIG instance?)" in in_one_line(read(tmp_path))


@pytest.mark.parametrize(("seconds", "expected"), [(4.0, 0.8), (0.4, 0.2)])
def test_samples_that_reach_back_before_a_window_are_left_out(
    seconds: float, expected: float, tmp_path: pathlib.Path
) -> None:
    # Idle before the window; 80 % from its first second on, 20 % in the second half of a shorter one.
    taken = [(10**9 + i * 100 * MS, 80.0 if i >= 10 else 20.0 if i >= 2 else 0.0) for i in range(-10, 40)]
    (tmp_path / "1.nvml.json").write_text(json.dumps({"aaaa": {"taken": taken, "error": ""}}))
    a_busy_gpu(tmp_path, "aaaa", 10**9, seconds)
    (use,) = read(tmp_path).gpus
    assert use.nvml == pytest.approx(expected)


def test_the_gpu_time_of_several_processes_is_a_union_and_stands_next_to_nvml(tmp_path: pathlib.Path) -> None:
    # Work at 1 to 3 and 8 to 9 ms; at 2 to 4, and on another GPU at 5 to 6; the third process is recorded from 10 on.
    second = Script("rlstruct-worker-0", 2, parent=1).python(10 * MS).on_gpu(2 * MS, 2 * MS, 1)
    late = Script("rlstruct-worker-1", 3, parent=1, start=10**9 + 10 * MS, now=10**9 + 10 * MS).python(10 * MS)
    scripts = (Script().python(20 * MS).on_gpu(MS, 2 * MS, 1).on_gpu(8 * MS, MS, 2), second, late.on_gpu(0, MS, 1))
    second.on_gpu(5 * MS, MS, 9, device=1)
    for script in scripts:
        script.write(tmp_path)
        file = tmp_path / f"{script.pid}-0.operations.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "gpus": {"0": "aaaa", "1": "bbbb"}}))
    taken = [(10**9 + i * MS, 90.0 if i < 10 else 50.0) for i in range(21)]
    (tmp_path / "1.nvml.json").write_text(json.dumps({"aaaa": {"taken": taken, "error": ""}}))
    report = read(tmp_path)
    (use,) = report.shared  # one process alone uses the other GPU
    # Two at once, at most: the first and the second for 10 ms, then the first and the third. Work of the first covers
    # 3 of 20 ms, of the second 2, of the third 1; the first two overlap for 1.
    assert (use.gpu, use.processes, use.seconds) == ("aaaa", 2, pytest.approx(20e-3))
    assert use.busy == pytest.approx(5 / 20)
    assert use.busiest == pytest.approx(3 / 20)
    assert use.nvml == pytest.approx(0.5)  # the first half is left out: samples reach back
    assert report.to_json()["shared"] == [vars(use)]
    assert "aaaa" in str(report)
    for file in [*tmp_path.glob("2-*"), *tmp_path.glob("3-*")]:
        file.unlink()
    assert read(tmp_path).shared == []
