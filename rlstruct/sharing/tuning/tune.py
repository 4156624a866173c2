"""tune: search for the fastest number of workers, environments and steps on this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from rlstruct.batchers.arguments import as_arguments, as_integer
from rlstruct.batchers.batcher import RL_Batcher
from rlstruct.batchers.collector_factory import CreateAgent, CreateEnv
from rlstruct.batchers.workers.placement import Mode, running_daemon
from rlstruct.device import DeviceLike, resolve_device, usable_cores
from rlstruct.errors import BadTypeError, BadValueError, kind_of
from rlstruct.options import Range, writable
from rlstruct.sharing.gpu_sharing import best_mode, mig_instances
from rlstruct.sharing.tuning import cache as answers
from rlstruct.sharing.tuning.measuring import Learn, Prober, batch_size, memory_available, worker_size
from rlstruct.sharing.tuning.search import Candidate, Climb, Measured, Probe, Space

_ROW = "{:>7} {:>6} {:>5} {:>10} {:>6} {:>8} {:>6}  "  # of the table
_MEMORY_FRACTION = 0.8  # default memory_limit, as a share of the memory that may be in use
_OF_WORKERS = "on_worker_error", "max_restarts", "cluster"  # options of RL_Batcher


@dataclass(frozen=True, eq=False)
class Tuning(Mapping[str, Any]):
    """The answer of `tune`: a mapping to the arguments of the fastest batcher, ``RL_Batcher(**tuning)``.

    Attributes:
        best: the fastest candidate.
        probes: all candidates that were considered, in order.
        arguments: arguments of `RL_Batcher`.
        limit: bytes that could be in use.
        seconds: duration of the search; 0 if the answer comes from the cache.
        learns: whether probes also learned from their batches.
    """

    best: Candidate
    probes: tuple[Probe, ...]
    arguments: dict[str, Any]
    limit: float
    seconds: float
    learns: bool

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - an argument of RL_Batcher
        return self.arguments[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arguments)

    def __len__(self) -> int:
        return len(self.arguments)

    @property
    def options(self) -> str:
        """The answer as options of ``rlstruct train``."""
        best = self.best
        shared = f" --sharing {best.sharing}" if best.sharing != "none" else ""
        return f"--n-processes {best.n_processes} --n-envs {best.n_envs} --n-timesteps {best.n_timesteps}{shared}"

    def settings(self) -> dict[str, Any]:
        """Return the answer as plain values by name."""
        return self.best._asdict()

    def save(self, file: str | Path) -> Path:
        """Write the answer, the device and the environments' arguments as JSON, for `RL_Batcher`.

        Args:
            file: path to write; missing folders are created.

        Returns:
            The path. ``RL_Batcher(create_agent=…, create_env=…, **json.loads(file.read_text()))`` uses it; pass
            ``agent_args`` and other options again.

        Raises:
            TypeError: JSON cannot hold an argument of the environments.
        """
        saved = {"device": self.arguments["device"], **self.best.arguments(), "env_args": self.arguments["env_args"]}
        for name, value in saved["env_args"].items():
            try:
                json.dumps(value)
            except TypeError:
                raise BadTypeError(
                    f"Tuning.save: env_args[{name!r}] is {kind_of(value)}, expected a value that JSON can hold. "
                    f"Pass it to tune as a part of the factory: functools.partial(create_env, {name}=…)."
                ) from None
        file = Path(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(saved, indent=1) + "\n")
        return file

    def __str__(self) -> str:
        """Format the probes as a table of 80 columns, with the reason why each climb continued or stopped."""
        lines = [_ROW.format("workers", "envs", "steps", "steps/s", "noise", "est. MiB", "MiB") + "why"]
        for probe in self.probes:
            candidate, measured = probe.candidate, probe.measured
            rate = noise = memory = ""
            if measured is not None:
                rate, noise = f"{measured.rate:,.0f}", f"{100 * measured.noise:.1f}%"
                memory = f"{measured.memory / 2**20:.0f}"
            numbers = _ROW.format(*candidate[:3], rate, noise, f"{probe.projected / 2**20:.0f}", memory)
            shared = f" ({candidate.sharing})" if candidate.sharing != "none" else ""
            why = f"{'FASTEST ' if candidate == self.best else ''}{probe.why}{shared}"
            lines += textwrap.wrap(why, 80, initial_indent=numbers, subsequent_indent=" " * len(numbers)) or [numbers]
        does = "collects and learns" if self.learns else "collects"
        duration = f"{self.seconds:.0f} s" if self.seconds else "from the cache"
        n = sum(probe.measured is not None for probe in self.probes)
        probes = f"{n} probe{'s' * (n > 1)}"
        return "\n".join([*lines, f"{does} fastest: {self.best} ({probes}, {duration})", f"paste: {self.options}"])


def tune(
    create_agent: CreateAgent,
    create_env: CreateEnv,
    *,
    agent_args: Mapping[str, Any] | None = None,
    env_args: Mapping[str, Any] | None = None,
    n_processes: Sequence[int] | None = None,
    n_envs: Sequence[int] | None = None,
    n_timesteps: Sequence[int] = (8, 32, 128),
    sharing: Sequence[Mode] | None = None,
    device: DeviceLike = "cpu",
    memory_limit: float | None = None,
    alpha: float | None = None,
    seconds: float = 60.0,
    create_learner: Callable[[], Learn] | None = None,
    cache: str | Path | None = None,
    again: bool = False,
    progress: bool = False,
    **batcher_options: Any,  # noqa: ANN401 - passed on
) -> Tuning:
    """Find the fastest number of workers, environments and steps on this machine, with short probes of real batchers.

    The search is Algorithm 1 of GMI-DRL (USENIX ATC 2025), see `rlstruct.sharing.tuning.search`. Each probe alternates
    with the fastest candidate so far, so a slow moment of the machine affects both. A candidate that is expected to
    exceed the memory limit is not started.

    Args:
        create_agent: see `RL_Batcher`.
        create_env: called as ``create_env(n_envs=…, seed=…, **env_args)``.
        agent_args: arguments of ``create_agent``.
        env_args: further arguments of ``create_env``.
        n_processes: numbers of workers to choose from, in rising order. By default 0, 1, 2, 4, … up to four per core;
            on a GPU only 0, unless processes can share it.
        n_envs: numbers of environments per process, in rising order. By default powers of 2 up to 4,096, on a GPU from
            64 to 65,536.
        n_timesteps: numbers of steps per batch, in rising order.
        sharing: modes in which workers may share a GPU; by default MIG or MPS, if available.
        device: device of agent and environments.
        memory_limit: bytes that this process and its workers may use together, on a GPU all its processes. By default
            80 % of the available memory.
        alpha: a climb ends when speed grows by less than alpha times the growth of the batches' memory. By default the
            noise of the measurements, between 0.02 and 0.03.
        seconds: time limit; a probe that would probably exceed it is not started.
        create_learner: called for each probe to tune a training. It returns a function that learns from a batch and
            returns new weights or None. By default batches are dropped.
        cache: JSON file that stores answers by hardware, versions, factories and arguments; None stores nothing.
        again: measure and replace the stored answer, if there is one.
        progress: show a progress bar on a terminal, if tqdm is installed.
        batcher_options: further arguments of `RL_Batcher`.

    Raises:
        ValueError: a number is out of range, values do not rise, or even the smallest candidate exceeds the limit.
        TypeError: an argument has a wrong type.
        WorkerError: creating or running agent or environments failed.
    """
    device = resolve_device(device)
    space = search_space(device, n_processes, n_envs, n_timesteps, sharing)
    _check(memory_limit, alpha, seconds, env_args)
    begin = time.perf_counter()
    options = {"device": str(device), **batcher_options}
    options |= {"agent_args": as_arguments("agent_args", agent_args), "env_args": as_arguments("env_args", env_args)}

    def arguments(candidate: Candidate) -> dict[str, Any]:
        tuned = candidate.arguments()
        tuned["env_args"] |= options["env_args"]
        own = dict(options)
        for name in () if candidate.n_processes else _OF_WORKERS:
            own.pop(name, None)
        if candidate.sharing != "mps":
            own.pop("thread_percentage", None)
        return {**own, "create_agent": create_agent, "create_env": create_env, **tuned}

    limit = _MEMORY_FRACTION * memory_available(device) if memory_limit is None else float(memory_limit)
    asked = {"space": repr(space), "alpha": alpha, "seconds": seconds, "limit": memory_limit, "learns": create_learner}
    if cache is not None:
        writable("tune: cache", cache, replaces=True)
    key = "" if cache is None else answers.key(device, create_agent, create_env, options, asked)
    stored = None if cache is None or again else answers.read(Path(cache)).get(key)
    if stored is not None:
        probes = tuple(Probe(Candidate(*c), size, m and Measured(*m), *rest) for c, size, m, *rest in stored["probes"])
        best = Candidate(*stored["best"])
        return Tuning(best, probes, arguments(best), limit, 0.0, create_learner is not None)

    def create(candidate: Candidate) -> RL_Batcher:
        return RL_Batcher(**{"seed": 0, **arguments(candidate)})

    smallest = Candidate(space.n_processes[0], space.n_envs[0], space.n_timesteps[0])
    size = batch_size(create, smallest)
    worker = worker_size(create, smallest, device) if any(space.n_processes) else 0
    with _bar(seconds, progress) as show:
        prober = Prober(create, create_learner, device, limit, seconds, show)
        with contextlib.closing(prober):
            search = Climb(space, prober, size, prober.start, worker, limit, alpha)
            outcome = search.run()
    if outcome is None:
        raise BadValueError(
            f"tune: {search.probes[-1].candidate}, the smallest candidate, was {search.probes[-1].why}. Pass a larger "
            "memory_limit, or smaller n_envs and n_timesteps."
        )
    best, probes = outcome.candidate, tuple(search.probes)
    if cache is not None:
        answers.write(Path(cache), key, {"best": best, "probes": [list(vars(probe).values()) for probe in probes]})
    spent = time.perf_counter() - begin
    return Tuning(best, probes, arguments(best), limit, spent, create_learner is not None)


def default_sharing(device: torch.device) -> Mode:
    """Return the best available mode for processes that share a device."""
    return best_mode("tune", device, 2, mig_instances() if device.type == "cuda" else [])


def search_space(
    device: torch.device,
    n_processes: Sequence[int] | None,
    n_envs: Sequence[int] | None,
    n_timesteps: Sequence[int],
    sharing: Sequence[Mode] | None,
) -> Space:
    """Check the values to choose from, and fill in defaults."""
    on_gpu = device.type == "cuda"
    if sharing is None:
        sharing = [default_sharing(device)]
    if n_processes is None:
        take_turns = on_gpu and list(sharing) == ["none"] and not running_daemon()
        most = 0 if take_turns else 4 * usable_cores()
        n_processes = [0, *(2**i for i in range(most.bit_length()))]
    if n_envs is None:
        n_envs = [2**i for i in (range(6, 17) if on_gpu else range(13))]
    values: object
    for name, values in (("n_processes", n_processes), ("n_envs", n_envs), ("n_timesteps", n_timesteps)):
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise BadTypeError(f"tune: {name} is {values!r}, expected the values to choose from. Pass [1, 2, 4].")
        numbers = [as_integer(f"{name}[{i}]", value, int(name != "n_processes")) for i, value in enumerate(values)]
        if sorted(set(numbers)) != numbers:
            raise BadValueError(
                f"tune: {name} is {list(values)}, expected rising numbers. Pass {sorted(set(numbers))}."
            )
    for i, mode in enumerate(sharing):
        Range(choices=get_args(Mode)).check("tune", f"sharing[{i}]", mode)
    return Space(tuple(n_processes), tuple(n_envs), tuple(n_timesteps), tuple(sharing))


def _check(memory_limit: float | None, alpha: float | None, seconds: float, env_args: Mapping[str, Any] | None) -> None:
    for name, value in (("memory_limit", memory_limit), ("seconds", seconds), ("alpha", alpha)):
        Range(above=0, or_none=name != "seconds").check("tune", name, value)
    if "n_envs" in (env_args or {}):
        raise BadValueError("tune: env_args has 'n_envs', which is tuned. Leave it out, and pass n_envs=[8] to fix it.")


@contextlib.contextmanager
def _bar(seconds: float, wanted: bool) -> Iterator[Callable[[Candidate], None]]:
    """Show the elapsed seconds in a progress bar, if wanted and tqdm is installed. The search may end early."""
    if not wanted or importlib.util.find_spec("tqdm") is None:
        yield lambda candidate: None
        return
    look: dict[str, Any] = {"bar_format": "{desc}|{bar}| {n:.0f} of at most {total:.0f} s", "dynamic_ncols": True}
    with importlib.import_module("tqdm").tqdm(total=seconds, disable=None, leave=False, **look) as bar:  # not in logs

        def show(candidate: Candidate) -> None:
            bar.n = min(bar.format_dict["elapsed"], seconds)
            bar.set_description(str(candidate))

        yield show
