"""Vectorisation and kernel fusion, after Gleeson et al., "Optimizing Data Collection in Deep RL" (MLBench 2022).

``fusion``: K steps of N CartPoles in one launch, with W further floats of state that every step reads and writes; every
step's observation is stored (recorded), or only the last one's. ``compilers``: the same game in numpy, torch, torch
compiled, JAX where it is installed, and Warp. Both tables end in the ratios that the paper prints.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from common import ladder_rungs
from common.ladder_rungs import MakeRung, Rung, synchronize
from common.reporting import Panels, Row, pivot, table

from rlstruct.sims import cart_pole as game

if TYPE_CHECKING:
    from common.resumable_run import Ladder

Sizes = Mapping[str, Sequence[int]]
STEPS = 64  # single steps between two waits for the device
MOST_RECORDED = {"cpu": 1 << 21, "cuda": 1 << 26}  # environment steps in a launch: seconds on a CPU, 4 GiB on a GPU
RATIOS = "ratio | measured with | the paper, on a GPU | here"


def fused_rung(name: str, n_envs: int, n_steps: int, n_extra: int, record: bool, device: torch.device) -> Rung:
    """Return K steps in a launch; between two waits for a GPU, so many launches as take 64 steps at least."""
    from papers.fusion_kernel import Launch

    n_launches = max(1, STEPS // n_steps) if device.type == "cuda" else 1
    launch = Launch(n_envs, n_steps, n_extra, record, device)

    def run() -> None:
        for _ in range(n_launches):
            launch()
        synchronize(device)

    return Rung(name, run, n_launches * n_steps)


def jax_rung(name: str, n_envs: int, n_steps: int) -> Rung:
    """Return CartPole in JAX, which restarts by itself, with K steps in a call of what XLA compiled."""
    import jax
    from jax import numpy as jnp

    def initial(key: Any) -> Any:  # noqa: ANN401 - arrays of JAX, here and below
        return jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)

    def step(carry: Any, nothing: None) -> Any:  # noqa: ANN401
        (_, x_dot, theta, theta_dot), key, elapsed = carry
        force = jnp.where(theta + 0.5 * theta_dot > 0.0, game.FORCE, -game.FORCE)
        sin, cos = jnp.sin(theta), jnp.cos(theta)
        push = (force + game.POLE_MASS * game.HALF_LENGTH * theta_dot**2 * sin) / game.TOTAL_MASS
        inertia = game.HALF_LENGTH * (4.0 / 3.0 - game.POLE_MASS * cos**2 / game.TOTAL_MASS)
        theta_acc = (game.GRAVITY * sin - cos * push) / inertia
        x_acc = push - game.ARM * theta_acc * cos
        rates = jnp.stack([x_dot, x_acc, theta_dot, theta_acc])
        moved = carry[0] + game.STEP * rates
        ended = (abs(moved[0]) > game.MAX_X) | (abs(moved[2]) > game.MAX_THETA) | (elapsed == 499)
        key, fresh = jax.random.split(key)
        return (jnp.where(ended, initial(fresh), moved), key, jnp.where(ended, 0, elapsed + 1)), (moved, ended)

    advance = jax.jit(jax.vmap(lambda carry: jax.lax.scan(step, carry, None, n_steps)))
    keys = jax.random.split(jax.random.PRNGKey(0), n_envs)
    carry, n_calls = (jax.vmap(initial)(keys), keys, jnp.zeros(n_envs, int)), max(1, STEPS // n_steps)

    def run() -> None:
        nonlocal carry
        for _ in range(n_calls):
            carry, seen = advance(carry)
        jax.block_until_ready(seen)

    return Rung(f"{name}, on {jax.default_backend()}", run, n_calls * n_steps)


def a_launch(n_steps: int) -> str:
    return f"{n_steps} a launch"


def measure_fusion(run: Ladder, sizes: Sizes) -> None:
    """Measure every number of steps in a launch side by side, for each number of environments and floats.

    A run that is cut has all floats for the first numbers of environments: whether gains multiply needs the extremes.
    """
    every = itertools.product(sizes["N"], sizes["W"], (False, True))
    for where in run.todo("fusion", 10, ({"N": n, "W": w, "recorded": record} for n, w, record in every)):
        n_envs, n_extra, record = where.values()
        makers = [
            partial(fused_rung, a_launch(k), n_envs, k, n_extra, record, run.device)
            for k in sizes["K"]
            if not record or k * n_envs <= MOST_RECORDED[run.device.type]
        ]
        run.rate("fusion", makers, **where)


def measure_compilers(run: Ladder, sizes: Sizes) -> None:
    """Measure frameworks and compilers side by side, at each number of environments."""
    has_jax = importlib.util.find_spec("jax") is not None
    if not has_jax and not run.measured("compilers", rung="JAX"):
        run.add(part="compilers", rung="JAX", left_out="not installed")
    for where in run.todo("compilers", 45, ({"N": n} for n in sizes["N"])):
        n_envs = where["N"]
        rungs: list[MakeRung] = ladder_rungs.simulation_rungs(n_envs, run.device)
        if not run.quick:
            rungs.append(partial(ladder_rungs.step_rung, "torch.compile", n_envs, run.device, "compile"))
        for k in sizes["K"]:
            rungs.append(partial(fused_rung, f"Warp, {a_launch(k)}", n_envs, k, 0, True, run.device))
            if has_jax:
                rungs.append(partial(jax_rung, f"JAX, {k} a call", n_envs, k))
        run.rate("compilers", rungs, **where)


def rates(rows: Sequence[Row]) -> dict[tuple[int, int, int, bool], float]:
    """Return steps per second by W, N, K, and whether each step is recorded."""
    measured = [row for row in rows if row["part"] == "fusion" and "steps_per_second" in row]
    return {
        (row["W"], row["N"], int(row["rung"].split()[0]), row["recorded"]): row["steps_per_second"] for row in measured
    }


def gains(rows: Sequence[Row]) -> list[Row]:
    """Return for each W, without records: what more environments gain, what more steps a launch gain, and both."""
    found, rows_found = rates(rows), []
    for n_extra in sorted({w for w, *_ in found}):
        own = {(n, k): rate for (w, n, k, record), rate in found.items() if w == n_extra and not record}
        if not own:  # the run was cut
            continue
        few, base = min(n for n, _ in own), own[min(own)]
        alone = {
            "vectorised": max(rate for (_, k), rate in own.items() if k == 1) / base,
            "fused": max(rate for (n, _), rate in own.items() if n == few) / base,
            "both": max(own.values()) / base,
        }
        rows_found.append({"W": n_extra, "N": few, **alone, "product": alone["vectorised"] * alone["fused"]})
    return rows_found


def fusion_ratios(rows: Sequence[Row]) -> list[list[object]]:
    """Return what fusion gains at most, without records: of CartPole, and with extra floats."""
    found, lines = rates(rows), []
    fused = {
        (w, n, k): rate / found[w, n, 1, False]
        for (w, n, k, record), rate in found.items()
        if not record and (w, n, 1, False) in found
    }
    for name, reported, most_extra in (("CartPole", "11.3", 0), ("any number of extra floats", "1,024", math.inf)):
        if own := {where: ratio for where, ratio in fused.items() if where[0] <= most_extra}:
            w, n, k = max(own, key=own.__getitem__)
            where = f"{n:,} environments, {w} extra floats, {k:,} steps a launch"
            lines.append([f"many steps a launch over one: {name}", where, reported, f"{own[w, n, k]:.1f}"])
    return lines


def fusion_table(rows: Sequence[Row]) -> list[str]:
    """Tabulate how many times as fast K steps in a launch are as one, recorded and not; and whether gains multiply."""
    found = rates(rows)
    ks = sorted({k for _, _, k, _ in found if k > 1})
    lines: list[list[object]] = []
    for w, n in sorted({(w, n) for w, n, *_ in found}):
        one = [found.get((w, n, 1, record), math.nan) for record in (True, False)]
        ratios = [
            [found.get((w, n, k, record), math.nan) / single for record, single in zip((True, False), one, strict=True)]
            for k in ks
        ]
        cells = [" / ".join("" if math.isnan(ratio) else f"{ratio:.2f}" for ratio in both) for both in ratios]
        lines.append([w, f"{n:,}", f"{1e9 / one[0]:.3g} / {1e9 / one[1]:.3g}", *cells])
    head = "extra floats | environments | ns per environment step, one step a launch: recorded / not | " + " | ".join(
        f"{k:,} steps" for k in ks
    )
    multiply = [
        [
            one["W"],
            *(f"{one[key]:.1f}" for key in ("vectorised", "fused", "product", "both")),
            f"{one['both'] / one['product']:.2f}",
        ]
        for one in gains(rows)
    ]
    titles = "extra floats | more environments | more steps a launch | product | both, measured | both over product"
    return [*table(head, lines, 0), "", *table(titles, multiply, 0), "", *table(RATIOS, fusion_ratios(rows), 2)]


def compilers_ratios(rows: Sequence[Row]) -> list[list[object]]:
    """Return what XLA gains over torch at most, and the best rate over the best one of gymnasium's SyncVectorEnv."""
    found = {(row["rung"], row["N"]): row["steps_per_second"] for row in rows if "steps_per_second" in row}
    lines = []
    xla = {
        (rung, n): rate / found["torch eager", n]
        for (rung, n), rate in found.items()
        if rung.startswith("JAX, 1 ") and ("torch eager", n) in found
    }
    if xla:
        rung, n = max(xla, key=xla.__getitem__)
        lines.append(["XLA over torch eager", f"{rung}, {n:,} environments", "13.4", f"{xla[rung, n]:.1f}"])
    if one_by_one := [rate for (rung, _), rate in found.items() if rung == "SyncVectorEnv"]:
        rung, n = max(found, key=found.__getitem__)
        ratio = found[rung, n] / max(one_by_one)
        lines.append(["best over SyncVectorEnv", f"{rung}, {n:,} environments", "1,024", f"{ratio:,.0f}"])
    return lines


def compilers_table(rows: Sequence[Row]) -> list[str]:
    """Tabulate million steps per second by framework and number of environments."""
    lines = pivot("million steps per second", rows, "environments", lambda row: f"{row['steps_per_second'] / 1e6:.3g}")
    why = [row for row in rows if "left_out" in row and "rung" in row]
    left_out = list(dict.fromkeys(f"{row['rung']}: {row['left_out']}." for row in why))
    return [*lines, "", *table(RATIOS, compilers_ratios(rows), 2), "", *left_out]


def fusion_lines(rows: Sequence[Row]) -> Panels:
    """Return the gain over steps in a launch, a panel for each number of environments, lines for each W."""
    found, panels = rates(rows), Panels("steps in a launch", "speed, over one step a launch")
    for (w, n, k, record), rate in sorted(found.items()):
        label = f"{w} extra floats{', recorded' if record else ''}"
        panels.add(f"{n:,} environments", label, k, rate / found.get((w, n, 1, record), math.nan))
    return panels


def compilers_lines(rows: Sequence[Row]) -> Panels:
    """Return rates over the number of environments, a line for each framework."""
    panels = Panels("environments", "environment steps per second")
    for row in rows:
        if "steps_per_second" in row:
            panels.add("", row["rung"], row["N"], row["steps_per_second"])
    return panels
