"""The model of GMI-DRL (USENIX ATC 2025): who lives with whom on GPUs, what that costs, and how gradients are summed.

Three roles share GPUs: simulators, agents, trainers. Pure functions of seconds, bytes and shares of a GPU; nothing is
measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlstruct.errors import BadValueError


@dataclass(frozen=True, kw_only=True)
class Roles:
    """What the roles take, each for one step of its environments, alone.

    Attributes:
        simulate: seconds of a simulator, T_s; ``act`` and ``train`` likewise, T_a and T_t.
        simulator: share of a GPU, R_s; ``agent`` and ``trainer`` likewise, R_a and R_t. See `dominant_share`.
        agents: alpha: how many agents there are for each simulator, if they are apart.
        trainers: beta: how many trainers, likewise.
    """

    simulate: float
    act: float
    train: float = 0.0
    simulator: float
    agent: float
    trainer: float = 0.0
    agents: float = 0.2
    trainers: float = 0.3

    @property
    def seconds(self) -> float:
        """Seconds of a step, without communication."""
        return self.simulate + self.act + self.train

    def together(self) -> float:
        """Share of a GPU of one process that plays all roles in turn: that of the largest."""
        return max(self.simulator, self.agent, self.trainer)

    def apart(self) -> float:
        """Share of a GPU of the roles in processes of their own, by the time for which each is busy."""
        busy = self.simulate * self.simulator + self.act * self.agents * self.agent
        return (busy + self.train * self.trainers * self.trainer) / self.seconds


ISAAC_GYM = Roles(simulate=6.0, act=1.0, train=2.0, simulator=10.0, agent=1.0, trainer=2.0)
"""What the paper measured for Isaac Gym on an A100, in units of the agent's: R_s = 10 R_a = 5 R_t, T_s = 6 T_a = 3 T_t;
where they are apart, communication takes as long as 2 steps of collecting, or 7 of training."""
ISAAC_GYM_COLLECTING = Roles(simulate=6.0, act=1.0, simulator=10.0, agent=1.0)


def dominant_share(multiprocessors: float, memory: float) -> float:
    """Return the resource that binds: the larger of the shares of a GPU's multiprocessors and of its memory."""
    return max(multiprocessors, memory)


def throughput(share: float, seconds: float, communication: float = 0.0, gpus: float = 1.0) -> float:
    """Return steps per second: (R_all / R) / (T + COM / BW), as many copies as fit, each at its speed.

    Args:
        share: of a GPU that one copy takes.
        seconds: of a step.
        communication: seconds of a step, bytes over bandwidth.
        gpus: R_all.

    >>> both, alone = ISAAC_GYM_COLLECTING, ISAAC_GYM_COLLECTING.seconds
    >>> apart = throughput(both.apart(), alone, communication=2 * alone)
    >>> round(throughput(both.together(), alone) / apart, 2)
    2.58
    """
    return gpus / share / (seconds + communication)


def collecting_bytes(state: float, action: float, weights: float) -> float:
    """Bytes of a step if agents are apart from simulators (MP-DP): states travel both ways, actions, weights."""
    return 2.0 * state + action + weights


def training_bytes(n_gpus: int, processes: int, experience: float, weights: float) -> float:
    """Bytes of a step if trainers are apart (EA-T): the experience of all processes, the weights, their reduction.

    Args:
        n_gpus: n.
        processes: m, of each GPU.
        experience: states, actions and further words of one process.
        weights: M_p.
    """
    return processes * experience + weights + reduced_bytes(n_gpus, weights)


def reduced_bytes(n: int, weights: float) -> float:
    """Bytes that each of n members sends to sum gradients in a ring, 2 (n - 1) / n of the weights; also for DP-only."""
    return 2.0 * (n - 1) / n * weights


@dataclass(frozen=True)
class Reduction:
    """A way to sum the gradients of m processes on each of n GPUs.

    Attributes:
        name: ``"ip"``, across processes on the CPU; ``"rp"``, rings between GPUs; ``"hybrid"``.
        rings: k, processes of each GPU whose gradients go by rings: 0, all, or some.
        seconds: that it takes.
    """

    name: str
    rings: int
    seconds: float


def reductions(n: int, m: int, cpu: float, gpu: float, *, as_printed: bool = False) -> list[Reduction]:
    """Project what each way to sum gradients costs, the cheapest first, from two costs with one process on each GPU.

    By the paper's theory a sum of N members on the CPU takes 2 (N - 1) / N x S / B1, and a ring over n GPUs
    2 (n - 1) / n x S / B2, S being the bytes of the weights. ``cpu`` and ``gpu`` are these for N = n.

    Args:
        n: GPUs, at least two: with one there is no ring, and what the CPU takes must be measured.
        m: processes of each.
        cpu: seconds of a sum across n processes on the CPU, C_ip.
        gpu: seconds of a ring between n GPUs, C_rp.
        as_printed: take the paper's projection of the hybrid, (k / n + m - k) C_ip + C_rp, which is not the ratio of
            its own theory, 2 (N - 1) / N with N = n (m - k) + k members on the CPU.

    Raises:
        ValueError: a number is out of range.
    """
    for name, value, least in (("n", n, 2), ("m", m, 1)):
        if value < least:
            raise BadValueError(f"reductions: {name} is {value}, expected at least {least}.")

    def on_cpu(members: float) -> float:
        return (members - 1.0) / members * n / (n - 1.0) * cpu

    found = [Reduction("ip", 0, on_cpu(n * m))]
    if m <= n:  # the members of a ring are on different GPUs
        found.append(Reduction("rp", m, 2.0 * gpu))
    for k in range(1, m):
        printed = (k / n + m - k) * cpu
        found.append(Reduction("hybrid", k, gpu + (printed if as_printed else on_cpu(n * (m - k) + k))))
    return sorted(found, key=lambda one: one.seconds)


@dataclass(frozen=True)
class Group:
    """Channels whose experience the same trainers learn from.

    Attributes:
        channels: their numbers.
        trainers: how many.
    """

    channels: tuple[int, ...]
    trainers: int


def group_channels(
    rates: Sequence[float], n_trainers: int, fit: Callable[[int, int], bool] = lambda i, j: True
) -> list[Group]:
    """Group channels of experience, so that the trainers of the slowest group get as much as possible.

    Maximises min over the groups i of (sum of the rates in i) / (trainers of i x number of groups): the fewer groups,
    the larger the batches. All partitions are tried, but for those that cannot be better any more.

    Args:
        rates: experience per second of each channel, at least one.
        n_trainers: to be shared out, at least one for each group.
        fit: whether two channels may be in one group: their experience has the same keys and shapes.

    Returns:
        The best groups.

    Raises:
        ValueError: there is no channel, or there are fewer trainers than groups that do not fit together.
    """
    total = sum(rates)
    parts: list[list[int]] = []
    highest, best = -1.0, list[Group]()

    def place(i: int) -> None:
        """Put channel i into each group that it fits, and into one of its own, and go on with the next."""
        nonlocal highest, best
        if parts and total / (n_trainers * len(parts)) <= highest:
            return  # even if they were shared out evenly
        if i == len(rates):
            sums = [sum(rates[j] for j in part) for part in parts]
            trainers = _share_out(sums, n_trainers)
            least = min(one / share for one, share in zip(sums, trainers, strict=True)) / len(parts)
            if least > highest:
                highest = least
                best = [Group(tuple(part), share) for part, share in zip(parts, trainers, strict=True)]
            return
        for part in parts:
            if all(fit(i, j) for j in part):
                part.append(i)
                place(i + 1)
                part.pop()
        if len(parts) < n_trainers:
            parts.append([i])
            place(i + 1)
            parts.pop()

    if rates:
        place(0)
    if not best:
        raise BadValueError(
            f"group_channels: {len(rates)} channels do not go into {n_trainers} groups that fit together. Pass more "
            "trainers, or channels with equal shapes."
        )
    return best


def _share_out(sums: Sequence[float], n_trainers: int) -> list[int]:
    """Give each group a trainer, and each further one to where the most is left for each; that is optimal."""
    trainers = [1] * len(sums)
    for _ in range(n_trainers - len(sums)):
        trainers[max(range(len(sums)), key=lambda i: sums[i] / (trainers[i] + 1))] += 1
    return trainers
