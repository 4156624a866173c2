"""Processes with roles: each runs a user's class with its share of a GPU, and sends values to the others.

This is the programming interface of GMI-DRL (Listing 1 of its slides; USENIX ATC 2025): a role is a class with a method
that runs in a process, groups of roles sum tensors, and messages go from role to role.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import platform
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from rlstruct.algos.distributed.launch import JOIN_SECONDS, LearnerProcesses, gpu_facts
from rlstruct.algos.distributed.process_group import DistributedLearnerGroup, local_device
from rlstruct.batchers.workers.placement import SHARING, Mode
from rlstruct.batchers.workers.processes import GUARD, NO_MAIN_GUARD, has_ended
from rlstruct.batchers.workers.system import check_platform
from rlstruct.device import resolve_device
from rlstruct.errors import BadTypeError, BadValueError, LearnerError, ShapeMismatchError, UsageError, kind_of

_SECONDS_TO_FIND_THE_CAUSE = 0.5  # an error may only follow from the end of another process
_PIECE_BYTES = 4 * 2**20  # torch's TCPStore refuses values above 8 MiB, and closes the connection


class _NotStartedError(UsageError, AttributeError):
    """So that hasattr works."""


class _Later:
    """An attribute of a role until `launch_roles` sets it; the object's own value then hides this descriptor."""

    def __get__(self, role: Role | None, kind: type[Role]) -> NoReturn:
        raise _NotStartedError(
            f"{kind.__name__}: there is no role, index, device or other process before launch_roles has "
            "started this one. Use them in run(), not in __init__, and call launch_roles({'name': [it]})."
        )


class Role(ABC):
    """The work of one process of `launch_roles`. Objects are pickled, so keep large things out of ``__init__``.

    Call the methods below in ``run``. Several threads of it may, if no two of them call the same method at a time.
    Processes that wait for each other raise only if none of them has another thread, which could still send.

    Attributes:
        role: the key under which `launch_roles` got this object.
        index: its number among those with the same key, from 0.
        device: of `launch_roles`; for ``"cuda"`` one of the GPUs that this process sees, such as ``"cuda:0"``.
    """

    role: str
    index: int
    device: str
    _messages: Messages

    if not TYPE_CHECKING:  # a type checker needs only the annotations
        role = index = device = _messages = _Later()

    @abstractmethod
    def run(self) -> Any:  # noqa: ANN401 - anything that can be pickled
        """Do the work of this process; `launch_roles` returns the result, which must be possible to pickle.

        Tensors in it arrive on the CPU.
        """

    def size(self, role: str | None = None) -> int:
        """Return how many processes have a role; by default how many there are in all."""
        return len(self._messages.ranks(role))

    def all_reduce(self, x: Tensor, role: str | None = None) -> Tensor:
        """Return the sum of a tensor over all processes of a role, which must all call this; by default over all.

        Args:
            x: of the same shape and dtype everywhere, on any device.
            role: this process must have it.

        Shapes and dtypes are compared before the first sum of each shape and dtype, which takes about a millisecond
        longer.

        Raises:
            BadTypeError: ``x`` is no tensor.
            BadValueError: this process does not have the role.
            LearnerError: one of the others failed or died, has ended without taking part in this sum, or waits for this
                process meanwhile.
            ShapeMismatchError: another process passes another shape or dtype.
        """
        return self._messages.all_reduce(x, role)

    def send(self, value: object, role: str, index: int = 0) -> None:
        """Send a value to another process, and go on at once.

        Messages between two processes arrive once each and in order. The value is pickled before this returns, so
        that it may be changed afterwards, and stays in this process's memory until it has arrived; tensors on a GPU
        travel through the CPU.
        """
        self._messages.send(value, role, index)

    def receive(self, role: str, index: int = 0) -> Any:  # noqa: ANN401 - what was sent
        """Wait for the next message of another process, and return its value.

        Raises:
            LearnerError: that process, or any other, failed or died, that process has ended without another message, or
                it waits for this one meanwhile.
        """
        return self._messages.receive(role, index)


def launch_roles(
    roles: Mapping[str, Sequence[Role]],
    *,
    device: str = "cpu",
    sharing: Mode = "none",
    thread_percentage: float | None = None,
) -> dict[str, list[Any]]:
    """Start a process for each role, wait until all have run, and return their results.

    On a GPU each process has a share of it, as learners have. On the CPU each computes with its part of the cores.

    Args:
        roles: objects that each run in one process, by the name of their role.
        device: device of each process; ``"cuda"`` spreads them over all visible GPUs.
        sharing: ``"none"``, ``"mps"``, ``"mig"`` or ``"auto"``, see `rlstruct.sharing.GpuSharing`.
        thread_percentage: share of the GPU's threads for each process under MPS.

    Returns:
        What each ``run`` returned, with the keys and the order of ``roles``.

    Raises:
        BadTypeError: ``roles`` is no dict of lists of objects whose class derives from `Role`.
        BadValueError: ``roles`` is empty, there is no such ``device``, or it cannot be shared in this way.
        LearnerError: a process failed or died; the message has its traceback, and the others are ended.
        SharingError: this machine cannot share the device in this mode.
    """
    check_platform("launch_roles")
    members, device = _members(roles), str(device)  # also of a torch.device
    try:
        resolve_device(device)
    except BadValueError as error:
        raise BadValueError(
            f"launch_roles: device is {device!r}, expected a device of this machine, such as 'cpu', or 'cuda' for all "
            f"visible GPUs. Pass one of those that are listed here: {error}"
        ) from error
    shares = SHARING["roles"](torch.device(device), len(members), sharing, thread_percentage)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = LearnerProcesses()
    with contextlib.ExitStack() as stack:
        stack.callback(shares.close)
        stack.callback(processes.end)
        # Rank 0 waits here and needs no share.
        play = partial(_play, members, device)
        processes.start(play, len(members) + 1, store.port, lambda rank: shares.environment(rank - 1))
        results = _results(store, members, processes)
        store.set("leave", "")
        processes.end(patience=10.0)
    by_role: dict[str, list[Any]] = {role: [] for role in roles}
    for (role, _, _), result in zip(members, results, strict=True):
        by_role[role].append(pickle.loads(result))
    return by_role


def _members(roles: Mapping[str, Sequence[Role]]) -> list[tuple[str, int, Role]]:
    """Return name, index and object of each role, by rank; raise BadTypeError or BadValueError for wrong arguments."""
    if not isinstance(roles, Mapping):
        raise BadTypeError(
            f"launch_roles: roles is {kind_of(roles)}, expected a dict of lists of roles by their name. Pass "
            "for example {'learner': [Mine()]}."
        )
    for role, each in roles.items():
        if not isinstance(role, str):
            raise BadTypeError(f"launch_roles: roles has the key {role!r}, expected a name. Pass {str(role)!r}.")
        if not isinstance(each, Sequence):
            raise BadTypeError(
                f"launch_roles: roles[{role!r}] is {kind_of(each)}, expected a list with one object for each "
                f"process. Pass {{{role!r}: [...]}}, also for a single one."
            )
    members = [(role, i, one) for role, each in roles.items() for i, one in enumerate(each)]
    for role, i, one in members:
        if not isinstance(one, Role):
            raise BadTypeError(
                f"launch_roles: roles[{role!r}][{i}] is {kind_of(one)}, expected an object of a class that derives "
                "from rlstruct.sharing.Role and has a method run(), such as Mine()."
            )
    if not members:
        raise BadValueError("launch_roles: roles is empty, expected at least one object, such as {'learner': [Mine()]}")
    return members


def _results(store: Store, members: Sequence[tuple[str, int, Role]], processes: LearnerProcesses) -> list[bytes]:
    """Wait for the pickled result of each process."""
    failed_at = None
    while open_ranks := [rank for rank in range(len(members)) if not store.check([f"result {rank}"])]:
        failed = [rank for rank in open_ranks if store.check([f"error {rank}"])]
        for rank in open_ranks:
            process = processes.processes[rank]
            if rank not in failed and has_ended(process) and not store.check([f"result {rank}"]):
                process.join(1.0)
                hint = f" Your main script calls launch_roles whenever it is imported, as each process does. {GUARD}"
                raise LearnerError(
                    f"launch_roles: {_title(members, rank)} (pid {process.pid}) ended with code {process.exitcode} "
                    f"before it returned a result.{hint if process.exitcode == NO_MAIN_GUARD else ''}",
                    ranks=(rank,),
                )
        if failed and failed_at is None:
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + _SECONDS_TO_FIND_THE_CAUSE:
            text = store.get(f"error {failed[0]}").decode()
            raise LearnerError(f"launch_roles: {_title(members, failed[0])} failed:\n{text}", ranks=(failed[0],))
        time.sleep(0.01)
    return [
        b"".join(store.get(f"result {rank} {i}") for i in range(int(store.get(f"result {rank}"))))
        for rank in range(len(members))
    ]


def _title(members: Sequence[tuple[str, int, Role]], rank: int) -> str:
    role, index, _ = members[rank]
    return f"{role} {index}"


def _play(members: Sequence[tuple[str, int, Role]], device: str) -> None:
    """Run one role in the process that `launch_roles` has started for it."""
    rank = int(os.environ["RANK"]) - 1  # rank 0 of these variables waits in `launch_roles`
    del os.environ["WORLD_SIZE"]  # a role that trains is no learner of torchrun
    name, index, role = members[rank]
    device = local_device(device, rank)
    role.role, role.index, role.device = name, index, device
    _take_cores(rank, len(members))
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    try:
        role._messages = Messages(rank, store, [(one, i) for one, i, _ in members], device)
        result = _pickled(role.run())
        role._messages.close()  # the others may end as soon as all results are stored
        starts = range(0, len(result), _PIECE_BYTES)
        for i, start in enumerate(starts):
            piece: Any = bytes(result[start : start + _PIECE_BYTES])  # torch's types lack bytes
            store.set(f"result {rank} {i}", piece)
        store.set(f"result {rank}", str(len(starts)))  # last: the result is complete
    except Exception as error:
        store.set(f"error {rank}", "".join(traceback.format_exception(error)))
    _leave(store)


def _leave(store: Store) -> None:
    """Wait until all have finished, since others may still receive what this process has sent."""
    with contextlib.suppress(dist.DistError):  # the process that holds the store has ended
        while not store.check(["leave"]):
            time.sleep(0.01)


def _take_cores(rank: int, size: int) -> None:
    """Compute with this process's part of the cores, and with as many threads; with all if there are too few."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) >= size:
        os.sched_setaffinity(0, cores[rank::size])
    torch.set_num_threads(max(1, len(cores) // size))


class _Everyone(DistributedLearnerGroup):
    """All processes of `launch_roles`, which find out during a sum if another one takes no part in it."""

    messages: Messages | None = None

    def check_others(self, waited: float) -> None:
        super().check_others(waited)
        if self.messages is not None:
            self.messages.check_sum()


class Messages:
    """Groups and messages of the processes of `launch_roles`, on torch.distributed.

    Args:
        rank: of this process.
        store: connects the processes.
        members: role and index of each, by rank.
        device: of this process.

    Attributes:
        group: all processes.
    """

    def __init__(self, rank: int, store: Store, members: Sequence[tuple[str, int]], device: str) -> None:
        self._rank, self._members = rank, [*members]
        self._store = PrefixStore("messages", store)
        role, index = members[rank]
        own = {"host": platform.node(), "pid": os.getpid(), "device": device, **gpu_facts(device)}
        own |= {"role": f"{role} {index}", "where": "launch_roles"}
        store.set(f"facts {rank}", json.dumps(own))
        store.wait([f"facts {i}" for i in range(len(members))], timedelta(seconds=JOIN_SECONDS))
        facts = [json.loads(store.get(f"facts {i}")) for i in range(len(members))]
        self.group = _Everyone(rank, rank, PrefixStore("all", store), facts)
        self._groups = {
            role: dist.new_group(self.ranks(role), backend="gloo")
            for role in dict.fromkeys(role for role, _ in members)
        }
        self._sent, self._received, self._n_sums = Counter[int](), Counter[int](), Counter[str]()
        self._agreed: set[tuple[str, torch.Size, torch.dtype]] = set()  # what all partners have summed before
        self._summing: tuple[str, int, str, list[int]] | None = None  # group, number, shape and dtype, partners
        # By receiver: the key in the store, until the message has arrived; the work, and the memory that it reads.
        self._sending = defaultdict[int, deque[tuple[str, Any, Tensor]]](deque)
        self.group.messages = self

    def close(self) -> None:
        """Stop watching the others, and let them know that this process takes part in no more messages and sums."""
        self.group.peers.close()
        self._store.set(f"ended {self._rank}", json.dumps(self._n_sums))

    def ranks(self, role: str | None) -> list[int]:
        """Return the ranks of all processes of a role; by default of all."""
        ranks = [rank for rank, (one, _) in enumerate(self._members) if role in (None, one)]
        if not ranks:
            raise BadValueError(f"Role: there is no role {role!r}, expected one of {self._known()}.")
        return ranks

    def all_reduce(self, x: Tensor, role: str | None) -> Tensor:
        """See `Role.all_reduce`."""
        ranks = self.ranks(role)
        if not isinstance(x, Tensor):
            raise BadTypeError(
                f"Role.all_reduce: x is {kind_of(x)}, expected a tensor. Pass for example torch.tensor([1.0])."
            )
        if self._rank not in ranks:
            mine, index = self._members[self._rank]
            raise BadValueError(
                f"Role.all_reduce: {mine} {index} sums over the role {role!r}, which it does not have. Pass {mine!r}, "
                "or nothing for the sum over all processes."
            )
        group = repr(role)  # that of all is no role's
        self._summing = group, self._n_sums[group], f"{list(x.shape)} {x.dtype}", [r for r in ranks if r != self._rank]
        self._n_sums[group] += 1
        if (group, x.shape, x.dtype) not in self._agreed:
            self._agree(*self._summing)
            self._agreed.add((group, x.shape, x.dtype))
        if role is None:
            total = self.group.all_reduce_sum(x)
        else:
            total = x.detach().to("cpu", copy=True)
            self.group.wait(dist.all_reduce(total, group=self._groups[role], async_op=True))
        self._summing = None
        return total.to(x.device)

    def _agree(self, group: str, number: int, layout: str, partners: Sequence[int]) -> None:
        """Wait for the shapes and dtypes that the partners sum; raise if one differs. gloo would add raw bytes."""
        self._store.set(f"sum {group} {number} {self._rank}", layout)
        for rank in partners:
            missing = "taking part in a sum. Call all_reduce equally often in each process."
            self._wait_for(f"sum {group} {number} {rank}", rank, missing)
        self.check_sum()

    def check_sum(self) -> None:
        """Raise if a partner of the current sum has ended before it, or has another shape or dtype."""
        if self._summing is None:
            return
        group, number, layout, partners = self._summing
        for rank in partners:
            key = f"sum {group} {number} {rank}"
            if self._store.check([key]) and (other := self._store.get(key).decode()) != layout:
                self._store.set(f"sum {group} {number} {self._rank}", layout)  # so that the partner raises as well
                raise ShapeMismatchError(
                    f"Role.all_reduce: {self._title(self._rank)} sums {layout} and {self._title(rank)} sums {other}, "
                    "expected the same shape and dtype in each process. Pad or convert one of the two tensors."
                )
            ended = f"ended {rank}"
            if self._store.check([ended]) and json.loads(self._store.get(ended)).get(group, 0) <= number:
                raise LearnerError(
                    f"Role.all_reduce: {self._title(rank)} has ended without taking part in a sum of "
                    f"{self._title(self._rank)}. Call all_reduce equally often in each process.",
                    ranks=(rank,),
                )
            if _only_thread():
                self._refuse_circle(rank)

    def send(self, value: object, role: str, index: int) -> None:
        """See `Role.send`."""
        to = self._rank_of(role, index, "send")
        packed = torch.frombuffer(_pickled(value), dtype=torch.uint8)
        sending, key = self._sending[to], f"{self._rank} {to} {self._sent[to]}"
        while sending and not self._store.check([sending[0][0]]):  # messages to one process arrive in order
            sending.popleft()
        sending.append((key, dist.isend(packed, to), packed))
        # Announced in the store, where the receiver can wait without giving up a connection.
        self._store.set(key, str(len(packed)))
        self._sent[to] += 1

    def receive(self, role: str, index: int) -> Any:  # noqa: ANN401 - what was sent
        """See `Role.receive`."""
        source = self._rank_of(role, index, "receive")
        key = f"{source} {self._rank} {self._received[source]}"
        self._wait_for(key, source, "sending another message. Send as many messages as are received.")
        packed = torch.empty(int(self._store.get(key)), dtype=torch.uint8, device="cpu")
        self._received[source] += 1
        dist.recv(packed, source)
        self._store.delete_key(key)  # the sender may free its copy
        return pickle.loads(packed.numpy().tobytes())  # sync: none, it is on the CPU

    def _wait_for(self, key: str, source: int, missing: str) -> None:
        """Wait until another process has stored a key; raise LearnerError if it has ended without ``missing``."""
        begin = looked = time.monotonic()
        try:
            while not self._store.check([key]):  # torch's own wait prints warnings once its time is over
                if (now := time.monotonic()) > looked + 1.0:
                    looked = now
                    self.group.peers.check(now - begin)
                    # It may have stored the key and ended since the last look.
                    if self._store.check([f"ended {source}"]) and not self._store.check([key]):
                        raise LearnerError(
                            f"{self._title(self._rank)}: {self._title(source)} has ended without {missing}",
                            ranks=(source,),
                        )
                    if _only_thread():
                        self._store.set(f"waits {self._rank}", json.dumps([source, key, self._n_sums, begin]))
                        self._refuse_circle(source, key)
                time.sleep(0.0 if now < begin + 0.01 else 1e-3)
        finally:  # a caller that catches an error may send after all
            if looked > begin:
                self._store.set(f"waits {self._rank}", "")

    def _refuse_circle(self, source: int, *keys: str) -> None:
        """Raise LearnerError if ``source``, for which this process waits (for its keys), in turn waits for this one."""
        records, awaited, rank = dict[int, bytes](), [*keys], source
        while rank != self._rank:
            if rank in records or not self._store.check([f"waits {rank}"]):
                return
            records[rank] = self._store.get(f"waits {rank}")
            if not records[rank]:
                return
            rank, key, n_sums, _ = json.loads(records[rank])
            awaited.append(key)
            if len(records) == 1 and self._summing is not None and n_sums.get(self._summing[0], 0) > self._summing[1]:
                return  # it takes part in the sum
        # Each wait has its own record, and none of these processes has another thread that could send meanwhile. So if
        # all records are still the same and nothing has arrived, all wait, and will forever.
        if any(self._store.check([key]) for key in awaited):
            return
        if any(self._store.get(f"waits {rank}") != record for rank, record in records.items()):
            return
        titles = [self._title(rank) for rank in (self._rank, *records, self._rank)]
        raise LearnerError(
            f"Role: {', '.join(f'{one} waits for {other}' for one, other in pairwise(titles))}, so none of them can go "
            "on. Let one send, or take part in the sum, before it receives.",
            ranks=tuple(records),
        )

    def _title(self, rank: int) -> str:
        role, index = self._members[rank]
        return f"{role} {index}"

    def _rank_of(self, role: str, index: int, method: str) -> int:
        if (role, index) not in self._members:
            raise BadValueError(f"Role.{method}: there is no {role} {index}, expected one of {self._known()}.")
        rank = self._members.index((role, index))
        if rank == self._rank:
            raise BadValueError(f"Role.{method}: {role} {index} is this process itself, expected another one.")
        return rank

    def _known(self) -> str:
        return ", ".join(f"{role} {index}" for role, index in self._members)


def _only_thread() -> bool:
    """Return True if this is the main thread, and no other thread of the user's may send while it waits."""
    threads = {threading.current_thread(), *threading.enumerate()}
    return {one for one in threads if not one.name.startswith("rlstruct-")} == {threading.main_thread()}


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickler that moves tensors to the CPU, wherever they are in an object, without the rest of a view's memory."""

    def reducer_override(self, obj: Any) -> Any:  # noqa: ANN401 - see cloudpickle
        if isinstance(obj, Tensor) and not isinstance(obj, nn.Parameter):  # a parameter contains another tensor
            moved = obj.detach().to("cpu")
            is_view = moved.layout is torch.strided and moved.untyped_storage().nbytes() > moved.nbytes
            own = moved.clone() if is_view else moved
            return own.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return super().reducer_override(obj)


def _pickled(value: object) -> memoryview:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getbuffer()
