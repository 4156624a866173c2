from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from rlstruct.functional import random
from rlstruct.testing import forbid_host_sync

N = 100_000


def make_keys(n: int = N, seed: int = 0) -> Tensor:
    """Keys as a batcher makes them: 100 steps of many environments."""
    return random.step_keys(seed + torch.arange(n // 100), 0, torch.arange(100)).flatten()


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Return the statistic's distance from its mean in standard deviations; it has (classes - 1) degrees of freedom."""
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = counts.numel() - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


DRAWS = {
    "uniform": lambda key: random.uniform(key, (3,)),
    "normal": lambda key: random.normal(key, (3,)),
    "randint": lambda key: random.randint(key, 7, (3,)),
    "categorical": lambda key: random.categorical(torch.zeros(key.shape[0], 5), key),
    "split": lambda key: random.split(key, 4),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_depend_on_the_key_alone_not_on_the_batch(name: str) -> None:
    draw, keys = DRAWS[name], make_keys(1000)
    together = draw(keys)
    torch.testing.assert_close(draw(keys), together, rtol=0, atol=0)
    order = torch.randperm(1000)
    torch.testing.assert_close(draw(keys[order]), together[order], rtol=0, atol=0)
    one_by_one = torch.cat([draw(keys[i : i + 1]) for i in range(20)])
    # normal goes through vectorised log and cos, whose last bit depends on the place in the batch.
    tolerance = 1e-6 if name == "normal" else 0.0
    torch.testing.assert_close(one_by_one, together[:20], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", DRAWS)
def test_draws_leave_key_and_global_generator_alone_and_never_sync(name: str, device: torch.device) -> None:
    keys = make_keys(100).to(device)
    before, state = keys.clone(), torch.get_rng_state()
    logits = torch.zeros(100, 5, device=device)
    with forbid_host_sync():
        random.categorical(logits, keys) if name == "categorical" else DRAWS[name](keys)
    assert torch.equal(keys, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_wider_shape_begins_with_the_draws_of_a_narrower_one() -> None:
    keys = make_keys(1000)
    torch.testing.assert_close(random.uniform(keys, (4,))[:, :2], random.uniform(keys, (2,)), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_symmetric_numbers_are_uniform_ones_stretched_also_for_a_tracer(dtype: torch.dtype) -> None:
    keys = make_keys(1000)

    def draw(key: Tensor) -> tuple[Tensor, ...]:
        return random.symmetric_uniform(key, 3, 0.25, dtype, stream=7)

    drawn = draw(keys)
    traced = make_fx(draw, tracing_mode="fake")(keys)(keys)
    for i, number in enumerate(drawn):
        expected = (random.uniform(keys, (3,), stream=7)[:, i].to(dtype) - 0.5) * 0.5
        assert torch.equal(number, expected)
        assert torch.equal(traced[i], expected)
        assert number.dtype is dtype
    assert -0.25 <= drawn[0].min() < -0.24
    assert 0.24 < drawn[0].max() < 0.25


def test_streams_are_shifted_views_of_one_sequence() -> None:
    keys = make_keys(1000)
    wide = random.uniform(keys, (5,), stream=0)
    torch.testing.assert_close(random.uniform(keys, (2,), stream=3), wide[:, 3:], rtol=0, atol=0)
    torch.testing.assert_close(random.uniform(keys, stream=3), wide[:, 2], rtol=0, atol=0)


def test_a_single_draw_and_an_array_from_one_key_are_uncorrelated() -> None:
    keys = make_keys()
    single, first = random.uniform(keys) - 0.5, random.uniform(keys, (1,))[:, 0] - 0.5
    assert abs((single * first).mean().item() * 12) < 4 / math.sqrt(N)


def test_known_numbers_hold_the_generator_in_place() -> None:
    # SplitMix64 of seed 1234567, first output 6457827717110365317 (the reference implementation's published vector).
    drawn = random.uniform(torch.tensor([1234567]), (1,), stream=0)
    assert drawn.item() == (6457827717110365317 >> 40) * 2.0**-24
    # Number 0 is the key itself: the batcher has mixed it already.
    assert random.uniform(torch.tensor([1 << 62]), stream=0).item() == 0.25


def test_uniform_is_uniform_in_its_range() -> None:
    u = random.uniform(make_keys())
    assert u.dtype == torch.float32
    assert u.min().item() >= 0.0
    assert u.max().item() < 1.0
    counts = torch.histc(u, bins=256, min=0.0, max=1.0)
    assert abs(chi_square(counts, torch.full((256,), N / 256))) < 4


def test_neighbouring_keys_environments_steps_and_lanes_are_uncorrelated() -> None:
    u = random.uniform(random.step_keys(torch.arange(300), 0, torch.arange(300))) - 0.5  # [T, B]
    lanes = random.uniform(make_keys(), (2,)) - 0.5
    pairs = {
        "steps": (u[1:], u[:-1]),
        "environments": (u[:, 1:], u[:, :-1]),
        "diagonal": (u[1:, 1:], u[:-1, :-1]),
        "lanes": (lanes[:, 0], lanes[:, 1]),
    }
    for name, (x, y) in pairs.items():
        correlation = (x * y).mean().item() * 12
        assert abs(correlation) < 4 / math.sqrt(x.numel()), name


def test_pairs_of_successive_steps_fill_the_square_evenly() -> None:
    u = random.uniform(random.step_keys(torch.arange(1000), 0, torch.arange(100)))  # [T, B]
    cell = (u[:-1] * 16).long() * 16 + (u[1:] * 16).long()
    counts = torch.bincount(cell.flatten(), minlength=256).float()
    assert abs(chi_square(counts, torch.full((256,), cell.numel() / 256))) < 4


def test_keys_of_environments_steps_and_resets_all_differ() -> None:
    keys = torch.stack([random.step_keys(torch.arange(100), episode, torch.arange(100)) for episode in range(10)])
    assert keys.unique().numel() == 100_000
    assert random.split(keys[0, 0], 10).unique().numel() == 1000


def test_step_keys_do_not_depend_on_how_environments_and_steps_are_split() -> None:
    whole = random.step_keys(torch.arange(10), 3, torch.arange(20))
    parts = random.step_keys(torch.arange(4, 10), 3, torch.arange(5, 20))
    assert torch.equal(whole[5:, 4:], parts)


def test_normal_has_the_moments_of_the_normal_distribution() -> None:
    x = random.normal(make_keys(), (2,)).double().flatten()
    error = 4 / math.sqrt(x.numel())
    assert abs(x.mean().item()) < error
    assert abs(x.var().item() - 1) < error * math.sqrt(2)
    assert abs((x**3).mean().item()) < error * math.sqrt(15)
    assert abs((x**4).mean().item() - 3) < error * math.sqrt(96)
    assert x.isfinite().all()


@pytest.mark.parametrize("high", [1, 2, 3, 10])
def test_randint_draws_every_value_equally_often(high: int) -> None:
    counts = torch.bincount(random.randint(make_keys(), high), minlength=high).float()
    assert counts.numel() == high
    if high > 1:
        assert abs(chi_square(counts, torch.full((high,), N / high))) < 4


@pytest.mark.parametrize("high", [0, -1, 2**31 + 1])
def test_randint_names_a_bad_range(high: int) -> None:
    with pytest.raises(ValueError, match=f"randint: high is {high}"):
        random.randint(make_keys(100), high)


def test_randint_reaches_the_top_of_the_widest_range() -> None:
    drawn = random.randint(make_keys(), 2**31)
    assert 0 <= drawn.min().item() < 2**31 * 0.001
    assert 2**31 * 0.999 < drawn.max().item() < 2**31


def test_categorical_frequencies_are_the_probabilities_and_impossible_classes_never_come() -> None:
    logits = torch.tensor([-torch.inf, 0.0, 1.0, -torch.inf, 2.0, -1.0, -torch.inf])
    counts = torch.bincount(random.categorical(logits.expand(N, 7), make_keys()), minlength=7).float()
    possible = logits.isfinite()
    assert counts[~possible].sum().item() == 0
    assert abs(chi_square(counts[possible], N * logits.softmax(0)[possible])) < 4


@given(A=st.integers(1, 8), seed=st.integers(0, 10**6), scale=st.sampled_from([0.0, 1.0, 100.0]))
def test_categorical_draws_only_possible_classes(A: int, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(200, A, generator=generator)
    logits[torch.rand(200, A, generator=generator) < 0.5] = -torch.inf
    logits[:, seed % A] = 0.0
    drawn = random.categorical(logits, make_keys(200, seed))
    assert logits.gather(1, drawn.unsqueeze(1)).isfinite().all()


def test_categorical_never_draws_an_impossible_first_class_not_even_by_the_smallest_number() -> None:
    key = torch.tensor([5 << 24])  # the uniform number is that of the lowest 24 bits: 0
    assert random.categorical(torch.tensor([[-torch.inf, 0.0, 0.0]]), key).tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("A", [1, 2, 5, 8, 9, 18, 100])
def test_categorical_draws_the_same_however_rows_are_split_over_processes(A: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(A)
    logits = 5.0 * torch.randn(4096, A, generator=generator)
    logits[torch.rand(4096, A, generator=generator) < 0.1] = -torch.inf
    logits[::1000, 0] = torch.nan
    logits, keys = logits.to(dtype), make_keys(4100, A)[:4096]
    drawn = random.categorical(logits, keys)
    for n_rows in (1, 3, 4, 32, 33, 1024, 2048):
        for stop in range(n_rows, 4097, max(n_rows, 512)):
            part = slice(stop - n_rows, stop)
            assert torch.equal(random.categorical(logits[part], keys[part]), drawn[part])
            assert torch.equal(random.categorical(logits[part].t().contiguous().t(), keys[part]), drawn[part])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_categorical_takes_any_float(dtype: torch.dtype) -> None:
    drawn = random.categorical(torch.zeros(1000, 4, dtype=dtype), make_keys(1000))
    assert drawn.dtype == torch.int64
    assert drawn.unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("A", [4, 12])
def test_several_keys_for_each_row_draw_as_often(A: int) -> None:
    logits, keys = torch.randn(6, A), make_keys(600)[:24].view(4, 6)
    assert torch.equal(random.categorical(logits, keys), torch.stack([random.categorical(logits, k) for k in keys]))


@given(T=st.integers(1, 5), B=st.integers(1, 40), A=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_keys_of_a_batch_draw_like_copies_of_them_in_every_batch(T: int, B: int, A: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    memory = torch.full((T, B), -1, dtype=torch.int64)
    batch = random.StepKeys(memory)
    for episode in range(3):
        keys = random.step_keys(seed + torch.arange(B), episode, torch.arange(T))
        batch.write(keys)
        assert torch.equal(memory, keys)
        for row, key in zip(batch.rows, keys, strict=True):
            logits = torch.randn(B, A, generator=generator)
            assert torch.equal(random.categorical(logits, row), random.categorical(logits, key.clone()))
            assert torch.equal(random.categorical(logits, row, stream=3), random.categorical(logits, key, stream=3))
            assert torch.equal(random.categorical(logits[1:], row[1:]), random.categorical(logits[1:], key[1:]))


def test_code_traced_with_a_key_of_a_batch_holds_no_numbers_of_that_batch() -> None:
    logits, batch = torch.randn(6, 3), random.StepKeys(torch.zeros(2, 6, dtype=torch.int64))
    batch.write(make_keys(1200).view(2, -1)[:, :6])
    traced = torch.compile(random.categorical, backend="eager", fullgraph=True)
    for row in (batch.rows[0], batch.rows[1], batch.rows[1].flip(0)):
        assert torch.equal(traced(logits, row), random.categorical(logits, row.clone()))


def test_streams_make_independent_draws_from_one_key() -> None:
    logits, keys = torch.zeros(N, 4), make_keys()
    pair = random.categorical(logits, keys, stream=0) * 4 + random.categorical(logits, keys, stream=1)
    assert abs(chi_square(torch.bincount(pair, minlength=16).float(), torch.full((16,), N / 16))) < 4


DEFAULT_DRAWS = {
    "uniform": lambda key: random.uniform(key),
    "uniform of a shape": lambda key: random.uniform(key, (2,))[:, 1],
    "symmetric_uniform": lambda key: random.symmetric_uniform(key, 2, 1.0)[0],
    "normal": lambda key: random.normal(key),
    "randint": lambda key: random.randint(key, 16),
    "randint of a shape": lambda key: random.randint(key, 16, (2,))[:, 0],
    "categorical": lambda key: random.categorical(torch.zeros(len(key), 16), key),
    "gumbel": lambda key: random.gumbel(key),
    "dirichlet": lambda key: random.dirichlet(key, 1.0, torch.ones(len(key), 3, dtype=torch.bool))[:, 0],
}
EXPLICIT_DRAWS = {
    f"stream {stream}": lambda key, stream=stream: random.uniform(key, stream=stream) for stream in (0, 1, 90, 1 << 20)
}


def in_sixteenths(x: Tensor) -> Tensor:
    """Number of the sixteenth of all draws that each draw is in, ties broken by where they stand."""
    rank = torch.empty(len(x), dtype=torch.int64)
    rank[x.argsort(stable=True)] = torch.arange(len(x))
    return rank * 16 // len(x)


def test_default_draws_of_one_key_are_independent_of_each_other_and_of_explicit_streams() -> None:
    keys = make_keys()
    drawn = {name: draw(keys).double() for name, draw in {**DEFAULT_DRAWS, **EXPLICIT_DRAWS}.items()}
    for (one, x), (other, y) in itertools.combinations(drawn.items(), 2):
        correlation = torch.corrcoef(torch.stack([x, y]))[0, 1].item()
        assert abs(correlation) < 5 / math.sqrt(N), (one, other)  # 78 pairs
        cells = torch.bincount(in_sixteenths(x) * 16 + in_sixteenths(y), minlength=256).double()
        # Fixed margins leave 225 degrees of freedom, so the statistic lies a little below that of 255.
        assert chi_square(cells, torch.full((256,), N / 256)) < 4, (one, other)


@pytest.mark.parametrize("other", ["randint", "categorical"])
def test_an_epsilon_greedy_agent_written_the_obvious_way_is_unbiased(other: str) -> None:
    keys, n_actions, epsilon, greedy = make_keys(), 5, 0.3, 3
    explore = random.uniform(keys) < epsilon
    if other == "randint":
        anything = random.randint(keys, n_actions)
    else:
        anything = random.categorical(torch.zeros(N, n_actions), keys)
    action = torch.where(explore, anything, greedy)
    expected = torch.full((n_actions,), epsilon / n_actions)
    expected[greedy] += 1 - epsilon
    counts = torch.bincount(action, minlength=n_actions)
    for chosen, probability in zip(counts.tolist(), expected.tolist(), strict=True):
        # Five standard deviations of a binomial count: one case in 10^6.
        assert abs(chosen - N * probability) < 5 * math.sqrt(N * probability * (1 - probability))


def test_the_bits_are_the_same_on_every_device(device: torch.device) -> None:
    keys = make_keys(1000)
    logits = torch.linspace(-2, 2, 5).expand(1000, 5)
    assert torch.equal(random.uniform(keys.to(device), (3,)).cpu(), random.uniform(keys, (3,)))
    assert torch.equal(random.split(keys.to(device), 3).cpu(), random.split(keys, 3))
    same = random.categorical(logits.to(device), keys.to(device)).cpu() == random.categorical(logits, keys)
    assert same.float().mean().item() > 0.99  # softmax may round differently at a class border


def test_a_key_that_is_written_to_draws_anew() -> None:
    key, other = make_keys(600).view(100, 6)[:2].clone().unbind(0)
    logits = torch.randn(6, 4)
    expected = random.uniform(other), random.categorical(logits, other)
    random.uniform(key), random.categorical(logits, key)
    key.copy_(other)
    assert torch.equal(random.uniform(key), expected[0])
    assert torch.equal(random.categorical(logits, key), expected[1])


@pytest.mark.parametrize("n_classes", [2, 20])
def test_logits_that_are_nan_draw_no_class(n_classes: int, device: torch.device) -> None:
    logits = torch.zeros(3, n_classes, device=device)
    logits[1, 0] = torch.nan
    logits[2] = -torch.inf
    drawn = random.categorical(logits, make_keys(300)[:3].to(device)).tolist()
    assert drawn[0] < n_classes
    assert drawn[1:] == [n_classes] * 2  # beyond the last one: 0 would be an action like any other


@pytest.mark.parametrize("name", ["uniform", "normal", "randint", "split"])
def test_a_compiler_for_cuda_meets_no_large_factor_in_its_index_arithmetic(name: str) -> None:
    # TorchInductor makes one index of a product of arange and a number, and Triton refuses numbers of 64 bits there.
    nodes = make_fx(DRAWS[name], tracing_mode="fake")(make_keys(800)).graph.nodes  # as `engine.compiled` traces
    products = [node for node in nodes if "mul" in str(node.target) and isinstance(node.args[1], int)]
    large = [node for node in products if abs(node.args[1]) >= 2**31]
    assert large
    assert not [node for node in large if "arange" in str(node.args[0].target)]


def test_gumbel_noise_draws_by_logits() -> None:
    # The argmax of logits and Gumbel noise is a draw from the softmax.
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5])
    drawn = (logits + random.gumbel(make_keys(), (4,))).argmax(1)
    assert chi_square(torch.bincount(drawn, minlength=4).float(), N * logits.softmax(0)) < 4


def test_gumbel_noise_is_finite_where_the_uniform_number_is_the_largest() -> None:
    key = torch.tensor([4201348417020950320])
    assert random.uniform(key, (4,), random.DEFAULT_STREAMS["gumbel"])[0, 1] == 1.0 - 2.0**-24
    noise = random.gumbel(key, (4,))[0]
    assert noise.isfinite().all()
    assert noise[1] == pytest.approx(-math.log(-math.log1p(-(2.0**-24))))


@pytest.mark.parametrize("alpha", [0.03, 0.3, 1.0, 5.0])
def test_dirichlet_draws_have_the_moments_of_the_distribution(alpha: float) -> None:
    among = torch.tensor([True, False, True, True, True])
    share = random.dirichlet(make_keys(), alpha, among.expand(N, 5))
    assert (share[:, 1] == 0).all()
    torch.testing.assert_close(share.sum(1), torch.ones(N))
    drawn = share[:, among].double()
    variance = 3 / (16 * (4 * alpha + 1))
    for moment, expected in ((drawn.mean(0), 0.25), (drawn.var(0), variance)):
        torch.testing.assert_close(moment, torch.full((4,), expected, dtype=torch.float64), rtol=0.02, atol=1e-5)
    # Each share follows a beta distribution, beta(alpha, 3 alpha); for alpha 1 P(share < x) = 1 - (1 - x)^3.
    if alpha == 1.0:
        for x in (0.05, 0.25, 0.6):
            assert abs((drawn < x).double().mean() - (1 - (1 - x) ** 3)) < 0.003
    assert not random.dirichlet(make_keys()[:2], alpha, torch.zeros(2, 5, dtype=torch.bool)).any()
