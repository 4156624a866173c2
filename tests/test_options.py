"""Settings know the values they accept; constructors, help and tables say the same."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import math
import pickle
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch
from option_bounds import check_bounds

from rlstruct.algos import A2CConfig, DQNConfig, PPOConfig, PQNConfig, ReinforceConfig, SACConfig, TrainingConfig
from rlstruct.options import Options, declared, described, option

KINDS = [TrainingConfig, A2CConfig, DQNConfig, PPOConfig, PQNConfig, ReinforceConfig, SACConfig]


@dataclass(frozen=True, kw_only=True)
class Oven(Options):
    """Settings of an oven.

    Attributes:
        degrees: temperature,
            in Celsius.
        minutes: time to bake; None bakes until stopped.
        shelf: counted from below.
        mode: way to heat.
        label: printed on the box.
    """

    degrees: float = option(180.0, above=0, at_most=250)
    minutes: int | None = option(None, at_least=1)
    shelf: int = option(2, at_least=1, at_most=4, may_change=True)
    mode: Literal["fan", "grill", "both"] = option("fan")
    label: str = option("cake", may_change=True)


@dataclass(frozen=True, kw_only=True)
class SmallOven(Oven):
    """A smaller one, with another default."""

    shelf: int = 1


@pytest.mark.parametrize("kind", [Oven, SmallOven])
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"degrees": 0}, ValueError, "degrees is 0, expected more than 0 and at most 250."),
        ({"degrees": 250.5}, ValueError, "degrees is 250.5, expected more than 0 and at most 250."),
        ({"degrees": math.nan}, ValueError, "degrees is nan, expected more than 0 and at most 250."),
        ({"degrees": None}, TypeError, "degrees is None, a NoneType; expected a number, more than 0 and at most 250."),
        ({"minutes": 0}, ValueError, "minutes is 0, expected at least 1, or None."),
        ({"minutes": 1.5}, TypeError, "minutes is 1.5, a float; expected a whole number, at least 1, or None."),
        ({"shelf": 5}, ValueError, "shelf is 5, expected 1 to 4."),
        ({"shelf": "2"}, TypeError, "shelf is '2', a str; expected a whole number, 1 to 4."),
        ({"mode": "steam"}, ValueError, "mode is 'steam', expected 'fan', 'grill' or 'both'."),
    ],
)
def test_a_wrong_value_is_refused(
    kind: type[Oven], changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        kind(**changes)
    assert str(caught.value) == f"{kind.__name__}: {message}"


@pytest.mark.parametrize(
    ("kind", "changes", "error", "message"),
    [
        (SACConfig, {"critic_reduction": "max"}, ValueError, "critic_reduction is 'max', expected 'min' or 'mean'."),
        (SACConfig, {"hold_noise": "no"}, ValueError, "hold_noise is 'no', expected True or False."),
        (DQNConfig, {"double": None}, ValueError, "double is None, expected True or False."),
        (PPOConfig, {"reward_scale": float("nan")}, ValueError, "reward_scale is nan, expected a number."),
        (PPOConfig, {"reward_scale": "1"}, TypeError, "reward_scale is '1', a str; expected a number."),
        (PPOConfig, {"learning_rate": float("nan")}, ValueError, "learning_rate is nan, expected at least 0."),
    ],
)
def test_switches_choices_and_numbers_without_bounds_are_checked_too(
    kind: type[Options], changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        kind(**changes)
    assert str(caught.value) == f"{kind.__name__}: {message}"


def test_an_unknown_setting_is_refused_and_the_nearest_named() -> None:
    with pytest.raises(TypeError, match=r"^SmallOven: there is no setting 'degree'\. Did you mean 'degrees'\?"):
        SmallOven(degree=200.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^PPOConfig: there is no setting 'n_epoch'\. Did you mean 'n_epochs'\?"):
        PPOConfig(n_epoch=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^Oven: there is no setting 'zzz'\. help\(Oven\) lists them\."):
        Oven(zzz=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^PPOConfig: .* 'total_timesteps'\. Did you mean 'n_env_steps'\?"):
        PPOConfig(total_timesteps=1)  # type: ignore[call-arg]  # stable-baselines3's name: n_timesteps looks similar
    with pytest.raises(TypeError, match=r"^DQNConfig: .* 'gamma'\. Did you mean 'discount'\?"):
        DQNConfig(gamma=0.9)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^PPOConfig: .* 'lr'\. Did you mean 'learning_rate'\?"):
        PPOConfig(lr=0.1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^PPOConfig: .* 'batch_size'\. Did you mean 'n_minibatches'\?"):
        PPOConfig(batch_size=64)  # type: ignore[call-arg]  # a setting of DQN and SAC
    settings = {one.name for config in KINDS for one in dataclasses.fields(config)}
    assert {*TrainingConfig.elsewhere.values()} <= settings
    assert [*inspect.signature(SmallOven).parameters] == ["degrees", "minutes", "shelf", "mode", "label"]
    assert pickle.loads(pickle.dumps(SmallOven(label="x"))) == dataclasses.replace(SmallOven(), label="x")


def test_values_at_the_bounds_are_accepted_and_kept() -> None:
    given = {"degrees": 250, "minutes": 1, "shelf": 4, "mode": "grill", "label": ""}
    assert dataclasses.asdict(SmallOven(**given)) == given
    assert SmallOven() == SmallOven(degrees=180.0, minutes=None, shelf=1, mode="fan", label="cake")
    assert SmallOven(shelf=3.0).shelf == 3  # type: ignore[arg-type]  # 1e6 steps are a whole number, too


def test_numbers_become_those_of_python() -> None:
    # range() accepts no 3.0; neither JSON nor a checkpoint, which is read without running code, holds numpy's numbers.
    numbers: Any = {"degrees": np.float32(99.5), "minutes": np.int64(7), "shelf": 3.0}
    assert repr(Oven(**numbers)) == "Oven(degrees=99.5, minutes=7, shelf=3, mode='fan', label='cake')"
    numbers = {
        "learning_rate": np.float64(0.5),
        "seed": np.int64(3),
        "replay_capacity": 1e5,
        "reward_scale": np.float64(2),
    }
    config = SACConfig(**numbers)
    assert [type(getattr(config, name)) for name in numbers] == [float, int, int, float]
    file = io.BytesIO()
    torch.save(dataclasses.asdict(config), file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == json.loads(json.dumps(dataclasses.asdict(config)))


def test_the_docstring_says_the_range() -> None:
    assert described(Oven) == {
        "degrees": "temperature, in Celsius. More than 0 and at most 250.",
        "minutes": "time to bake; None bakes until stopped. At least 1.",
        "shelf": "counted from below. 1 to 4.",
        "mode": "way to heat.",
        "label": "printed on the box.",
    }


def test_a_subclass_inherits_what_was_declared() -> None:
    assert set(declared(SmallOven, "may_change")) == {"shelf", "label"}
    assert str(declared(SmallOven, "range")["shelf"]) == "1 to 4"


@pytest.mark.parametrize("kind", KINDS)
def test_every_bound_of_the_library_is_checked_and_documented(kind: type[Options]) -> None:
    check_bounds(kind)
