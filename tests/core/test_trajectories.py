"""Trajectories: both parts move together."""

from __future__ import annotations

import copy
import os
import pathlib
import pickle

import pytest
import torch
from hypothesis import given
from strategies import ragged, same
from torch import Tensor

from rlstruct import DeviceMismatchError, ShapeMismatchError
from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.testing import forbid_host_sync


def counted(lengths: list[int], n_steps: int = 3, first: int = 0) -> Trajectories:
    """Row b has the number first + b in info and 10 * (first + b) + t in the steps."""
    rows = torch.arange(first, first + len(lengths))
    steps = rows.unsqueeze(1) * 10 + torch.arange(n_steps)
    return Trajectories(
        DictTensor({"environment": rows}),
        TemporalDictTensor({"observation/frame": steps}, torch.tensor(lengths, dtype=torch.int64)),
    )


def test_reads_from_both_parts() -> None:
    made = counted([3, 1])
    assert made.n_elems() == 2
    assert made.device == torch.device("cpu")
    assert made.lengths.tolist() == [3, 1]
    assert made.mask().tolist() == [[True, True, True], [True, False, False]]
    assert repr(made).splitlines() == [
        "Trajectories:",
        "info: DictTensor on cpu:",
        "  environment  int64 [2]",
        "trajectories: TemporalDictTensor on cpu:",
        "  observation/frame  int64 [2, 3]",
    ]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("observation/frame", r"got \['observation/frame'\], expected steps\['observation/frame'\]"),
        ("environment", r"got \['environment'\], expected info\['environment'\]"),
        (0, r"got an index, int, expected index\(rows\)"),
    ],
)
def test_a_key_or_index_of_both_parts_names_the_right_way(key: str | int, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        counted([3, 1])[key]


def test_an_assignment_names_set() -> None:
    with pytest.raises(TypeError, match=r"assignment to \['value'\], .* Write steps\.set\('value', tensor\) for"):
        counted([3, 1])["value"] = torch.zeros(2, 3)


def test_transitions_are_the_real_steps_with_their_info() -> None:
    flat = counted([3, 0, 1]).transitions()
    assert flat["observation/frame"].tolist() == [0, 1, 2, 20]
    assert flat["environment"].tolist() == [0, 0, 0, 2]


@given(ragged())
def test_transitions_of_anything(given_: tuple[dict[str, Tensor], Tensor]) -> None:
    expected, lengths = given_
    rows = torch.arange(lengths.shape[0])
    made = Trajectories(DictTensor({"row number": rows}), TemporalDictTensor(expected, lengths))
    flat = made.transitions()
    wanted = {k: torch.cat([v[b, :n] for b, n in enumerate(lengths)] or [v.flatten(0, 1)]) for k, v in expected.items()}
    same(dict(flat.get(list(expected))), wanted)
    assert flat["row number"].tolist() == [b for b, n in enumerate(lengths.tolist()) for _ in range(n)]


def test_minibatches_hold_every_step_once_and_mark_the_padding() -> None:
    made = counted([3, 0, 1])
    with forbid_host_sync():
        parts = list(made.minibatches(2, torch.Generator().manual_seed(1)))
    assert [part.n_elems() for part in parts] == [5, 4]
    whole = DictTensor.cat(parts)
    assert sorted(whole["observation/frame"].tolist()) == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    assert whole["environment"].equal(whole["observation/frame"] // 10)
    assert sorted(whole["observation/frame"][whole["mask"]].tolist()) == [0, 1, 2, 20]
    real = DictTensor.cat(list(made.transitions().minibatches(2)))
    assert sorted(real["observation/frame"].tolist()) == [0, 1, 2, 20]


def test_what_is_saved_is_loaded(tmp_path: pathlib.Path, device: torch.device) -> None:
    made = Trajectories(
        DictTensor({"agent_info/epsilon": torch.rand(2, device=device), "environment": torch.arange(2, device=device)}),
        TemporalDictTensor(
            {
                "observation/frame": torch.randint(256, (2, 3, 4), dtype=torch.uint8, device=device),
                "observation/done": torch.tensor([[True, False, True]] * 2, device=device),
                "action/action": torch.randn(2, 3, dtype=torch.float64, device=device).requires_grad_(),
            },
            torch.tensor([3, 1], device=device),
        ),
    )
    made.save(tmp_path / "batch.pt")
    assert os.listdir(tmp_path) == ["batch.pt"]
    back = Trajectories.load(tmp_path / "batch.pt", device)
    assert back.device == device
    assert list(back.steps.keys()) == list(made.steps.keys())
    same(dict(back.steps), dict(made.detach().steps))
    same(dict(back.info), dict(made.info))
    assert back.lengths.tolist() == [3, 1]
    assert Trajectories.load(tmp_path / "batch.pt").device == torch.device("cpu")
    mapped = Trajectories.load(tmp_path / "batch.pt", mmap=True)
    assert all(torch.equal(mapped.steps[key], value.cpu()) for key, value in back.steps.items())


def test_a_saved_view_leaves_the_rest_of_its_memory(tmp_path: pathlib.Path) -> None:
    counted([3] * 10_000).slice(0, 1).save(tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < 10_000
    assert Trajectories.load(tmp_path / "one.pt").steps["observation/frame"].tolist() == [[0, 1, 2]]


def test_a_file_in_a_new_folder_is_saved_and_a_folder_is_no_file(tmp_path: pathlib.Path) -> None:
    counted([3]).save(tmp_path / "new" / "batch.pt")
    assert Trajectories.load(tmp_path / "new" / "batch.pt").lengths.tolist() == [3]
    with pytest.raises(ValueError, match=r"Trajectories.save: .*new is a folder, expected the name of a file"):
        counted([3]).save(str(tmp_path / "new"))


def test_a_read_only_file_is_replaced(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "batch.pt"
    counted([3]).save(path)
    path.chmod(0o444)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write to any file
    counted([3, 1]).save(path)
    assert Trajectories.load(path).lengths.tolist() == [3, 1]


def test_what_cannot_be_loaded_says_why(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "batch.pt"
    with pytest.raises(FileNotFoundError):
        Trajectories.load(path)
    counted([3, 1]).save(path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"batch.pt' cannot be read: it is damaged"):
        Trajectories.load(path)
    path.write_text("episode,return")
    with pytest.raises(ValueError, match=r"batch.pt' cannot be read"):
        Trajectories.load(path)
    torch.save({"weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="has format None, expected 1"):
        Trajectories.load(path)
    torch.save(pathlib.PurePosixPath("code"), path)  # an object, which weights_only refuses
    with pytest.raises(ValueError, match=r"batch.pt' cannot be read"):
        Trajectories.load(path)


def test_rows_move_together() -> None:
    made = counted([3, 2, 1])
    for got, rows in (
        (made.index([2, 0]), [2, 0]),
        (made.index(torch.tensor([1, 1])), [1, 1]),
        (made.slice(1, 3), [1, 2]),
        (made.slice(-1), [2]),
        (Trajectories.cat([made.slice(2), made.slice(0)]), [2, 0]),
    ):
        assert got.info["environment"].tolist() == rows
        assert got.steps["observation/frame"][:, 0].tolist() == [10 * row for row in rows]
        assert got.lengths.tolist() == [3 - row for row in rows]


def test_cat_pads_to_the_longest() -> None:
    made = Trajectories.cat([counted([1], n_steps=1), counted([2], n_steps=2, first=5)])
    assert made.steps["observation/frame"].tolist() == [[0, 0], [50, 51]]
    assert made.lengths.tolist() == [1, 2]
    assert made.info["environment"].tolist() == [0, 5]
    assert Trajectories.cat([]).n_elems() == 0


def test_sample_draws_without_replacement() -> None:
    made = counted([3] * 6)
    drawn = made.sample(6, torch.Generator().manual_seed(1)).info["environment"].tolist()
    assert sorted(drawn) == list(range(6))
    assert made.sample(6, torch.Generator().manual_seed(1)).info["environment"].tolist() == drawn
    # 6 * 5 ordered pairs: each of the 6 rows comes first in about a sixth of the draws.
    firsts = [made.sample(2).info["environment"][0].item() for _ in range(300)]
    assert min(firsts.count(row) for row in range(6)) > 20
    assert made.sample(0).n_elems() == 0
    with pytest.raises(ValueError, match="got n = 7, expected 0 to 6"):
        made.sample(7)
    with pytest.raises(ValueError, match="got n = -1"):
        made.sample(-1)


def test_copies() -> None:
    made = counted([3, 1])
    for copied in (
        made.clone(),
        made.detach(),
        made.to("cpu"),
        copy.deepcopy(made),
        pickle.loads(pickle.dumps(made)),
    ):
        same(dict(copied.steps), dict(made.steps))
        same(dict(copied.info), dict(made.info))
        assert copied.lengths.tolist() == [3, 1]
    moved = made.to("meta")
    assert moved.info.device == moved.steps.device == moved.lengths.device == torch.device("meta")


def test_the_parts_must_fit() -> None:
    made = counted([3, 1])
    with pytest.raises(ShapeMismatchError, match=r"info 'environment' is \[1\] .*expected \[2, ...\]"):
        Trajectories(made.info.slice(0), made.steps)
    with pytest.raises(DeviceMismatchError, match="info 'environment' is on cpu, expected meta"):
        Trajectories(made.info, made.steps.to("meta"))
    with pytest.raises(TypeError, match=r"got \(TemporalDictTensor, DictTensor\)"):
        Trajectories(made.steps, made.info)  # type: ignore[arg-type]
    bare = Trajectories(DictTensor(), made.steps)
    assert bare.index([1]).lengths.tolist() == [1]
    assert list(bare.transitions()) == ["observation/frame"]


def test_a_key_in_both_parts_is_an_error_when_flattened() -> None:
    made = counted([1])
    twice = Trajectories(made.info.prepend_key("x/"), made.steps)
    twice.info.set("observation/frame", torch.zeros(1))
    with pytest.raises(KeyError, match="'observation/frame' is in both"):
        twice.transitions()
