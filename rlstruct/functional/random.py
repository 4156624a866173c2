"""Counter-based random numbers. Pure functions of a key, equal on every device, no state, no host sync.

A key is an int64 that stands for one environment at one step, random in all of its bits, as `step_keys` and `split`
make them; the batcher puts one per environment into ``observation["rng"]``. Draws depend on the key alone,
never on its batch, so that results do not change with the number of processes, and a replay over stored
keys draws the same numbers again.

The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014):
number n > 0 of a key is ``mix(key + n * gamma)``, number 0 the key itself. Uniform and categorical draws use integer
arithmetic only before one exact division, so their bits agree on CPU and GPU; `normal` goes through log and cos and
agrees to rounding.

Different distributions draw independently from one key: each has its own default stream, see `DEFAULT_STREAMS`. A
second draw from the same distribution needs another ``stream`` or another key (`split`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlstruct.errors import BadValueError

#: Default stream of each distribution; callers choose theirs below 2^28, where they meet none of these. `categorical`,
#: which most agents draw in every step, needs none: it takes the key's lower bits, where number 0 takes the upper ones.
DEFAULT_STREAMS = {
    name: (i + 1) << 28
    for i, name in enumerate(("uniform", "symmetric_uniform", "normal", "randint", "gumbel", "dirichlet"))
}

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: the odd number nearest to 2^64 / golden ratio
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_TRIES = 8  # of a gamma variate: all fail once in 10^10 draws
_LOW = {bits: (1 << (64 - bits)) - 1 for bits in (27, 30, 31, 40)}  # clears the sign bits that int64 >> drags in


def _mix(x: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer in place, without its last xor-shift, which leaves the upper 33 bits unchanged."""
    x = x.bitwise_xor_((x >> 30).bitwise_and_(_LOW[30])).mul_(_MIX_1)
    return x.bitwise_xor_((x >> 27).bitwise_and_(_LOW[27])).mul_(_MIX_2)


def _mix_full(x: Tensor) -> Tensor:
    x = _mix(x)
    return x.bitwise_xor_((x >> 31).bitwise_and_(_LOW[31]))


def _bits(key: Tensor, shape: tuple[int, ...], stream: int) -> Tensor:
    """Draw 64 random bits, the upper 33 of full quality: [B, *shape] int64."""
    if not shape:
        # Number 0 costs nothing: the batcher has mixed a whole batch of keys at once.
        return key if stream == 0 else _mix(key + _wrap(stream * _GAMMA))
    first = stream + 1  # an array never holds number 0, which may have been drawn separately
    lanes = _multiples(_GAMMA, first, math.prod(shape), key)
    if key.dim() != 1:
        return _mix(key.unsqueeze(-1) + lanes).view(*key.shape, *shape)
    # In memory one draw of all keys stands after the other, as simulators read them: field by field.
    return _mix(lanes.unsqueeze(1) + key).view(*shape, -1).movedim(-1, 0)


def _multiples(factor: int, first: int, n: int, key: Tensor) -> Tensor:
    """Return the multiples (first + i) * factor, i < n, of a large number, as int64 on the key's device."""
    number = torch.arange(first, first + n, device=key.device, dtype=torch.int64)
    if type(key) is Tensor and not torch.compiler.is_compiling():
        return number.mul_(factor)
    # Traced, positions are numbers of C++, where a product beyond 63 bits is undefined: compilers conclude that the
    # loop must end before it. So it is put together of halves that cannot overflow. `| 0` makes numbers of positions.
    number = number | 0
    low, high = factor & 0xFFFFFFFF, (factor >> 32) & 0xFFFFFFFF
    low_product = number * low
    upper = (number * high + (low_product >> 32)) & 0xFFFFFFFF
    return (upper << 32) | (low_product & 0xFFFFFFFF)


def _wrap(value: int) -> int:
    """Return the int64 with the lower 64 bits of ``value``."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def step_keys(seed: Tensor, episode: int | Tensor, step: Tensor) -> Tensor:
    """Make one key for each environment and step.

    Args:
        seed: one seed for each environment.  [B] int64
        episode: which reset of the batcher this is, from 0: a number, or a tensor without dimensions (int64, same
            device), which a CUDA graph reads anew at every replay.
        step: steps since that reset.  [T] int64, same device

    Returns:
        Keys that differ in all 64 bits between any two environments, resets or steps.  [T, B] int64
    """
    lane = _wrap((episode + 1) * _MIX_1) if isinstance(episode, int) else (episode + 1) * _MIX_1
    stream = _mix_full(seed + _GAMMA).add_(lane)
    return _mix_full(_mix_full(stream).unsqueeze(0) + (step.unsqueeze(1) + 1) * _GAMMA)  # [T, B]


def split(key: Tensor, n: int) -> Tensor:
    """Make n fresh keys [B, n] int64 out of each key [B], for an agent that draws more than one thing in a step.

    >>> torch.equal(split(torch.tensor([1]), 2), split(torch.tensor([1]), 2))
    True
    """
    return _mix_full(key.unsqueeze(-1) + _multiples(_MIX_2, 1, n, key))


def child_key(key: Tensor, n: Tensor | int) -> Tensor:
    """Make fresh key number n, from 0, of each key [B] int64: column n of `split`; n may differ from row to row.

    Such keys form a tree: a seed's children are episodes, an episode's children steps.

    >>> key = torch.tensor([1, 2])
    >>> torch.equal(child_key(key, 3), split(key, 4)[:, 3])
    True
    """
    lane = _wrap((n + 1) * _MIX_2) if isinstance(n, int) else (n + 1) * _MIX_2
    return _mix_full(key + lane)


def uniform(key: Tensor, shape: tuple[int, ...] = (), stream: int | None = None) -> Tensor:
    """Draw uniformly from [0, 1).

    Args:
        key: [B] int64.
        shape: of the draws for each key. In memory one number of all keys follows the other: a compiler makes
            vector code of ``uniform(key, (4,)).t().unbind(0)``, and scalar code of columns.
        stream: 0 to 2^28; None is the distribution's own. Draws with the same key and different streams are
            independent, if the ranges ``stream .. stream + prod(shape)`` do not overlap.

    Returns:
        [B, *shape] float32, multiples of 2^-24.
    """
    start = DEFAULT_STREAMS["uniform"] if stream is None else stream
    upper = (_bits(key, shape, start) >> 40).bitwise_and_(_LOW[40])
    return (upper * 2.0**-24).to(torch.float32)  # exact in either precision that torch may compute by default


def symmetric_uniform(
    key: Tensor, n: int, bound: float, dtype: torch.dtype = torch.float32, stream: int | None = None
) -> tuple[Tensor, ...]:
    """Draw n numbers uniformly from [-bound, bound) for each key [B] int64, as start states of simulators are.

    Returns:
        n tensors [B] of ``dtype``; with an explicit stream number i comes from ``uniform(key, (n,), stream)[:, i]``.
    """
    start = DEFAULT_STREAMS["symmetric_uniform"] if stream is None else stream
    if type(key) is not Tensor:  # traced: a compiler makes one loop of single draws, and mixes each key once
        drawn = (uniform(key, (), start + 1 + i) for i in range(n))
        return tuple(u.to(dtype).sub_(0.5).mul_(2 * bound) for u in drawn)
    return uniform(key, (n,), start).t().to(dtype).sub_(0.5).mul_(2 * bound).unbind(0)


def normal(key: Tensor, shape: tuple[int, ...] = (), stream: int | None = None) -> Tensor:
    """Draw from the standard normal distribution (Box and Muller, 1958); arguments as `uniform`, twice as many numbers.

    Returns:
        [B, *shape] float32, equal on all devices to rounding.
    """
    start = DEFAULT_STREAMS["normal"] if stream is None else stream
    u = uniform(key, (2, *shape), start)
    radius = (1.0 - u[:, 0]).log_().mul_(-2.0).sqrt_()
    return radius.mul_((u[:, 1] * (2.0 * math.pi)).cos_())


def randint(key: Tensor, high: int, shape: tuple[int, ...] = (), stream: int | None = None) -> Tensor:
    """Draw integers uniformly from 0 to high - 1.

    Args:
        key: [B] int64.
        high: how many values there are, at least 1 and at most 2^31; the bias is at most high / 2^32.
        shape: of the draws for each key.
        stream: as in `uniform`.

    Returns:
        [B, *shape] int64.
    """
    if not 1 <= high <= 2**31:
        raise BadValueError(f"randint: high is {high}, expected 1 to 2**31.")
    start = DEFAULT_STREAMS["randint"] if stream is None else stream
    upper = (_bits(key, shape, start) >> 32).bitwise_and_(0xFFFFFFFF)
    return upper.mul_(high) >> 32


def categorical(logits: Tensor, key: Tensor, stream: int | None = None) -> Tensor:
    """Draw one class from each row of logits, by inverting the cumulative distribution.

    Args:
        logits: unnormalised log-probabilities; a class at -inf is never drawn.  [B, A] float
        key: [B] int64.
        stream: as in `uniform`.

    Returns:
        [B] int64, from 0 to A - 1; A, which is no class, in rows whose logits hold NaN or are all -inf. Batchers refuse
        such an action once per batch.
    """
    # The default takes the key's lower bits: as good as the upper ones, which are number 0, and nothing to mix.
    u = (key & 0xFFFFFF).to(torch.float32) * 2.0**-24 if stream is None else uniform(key, (), stream)
    # u < 1 scaled by the last sum, which rounding puts next to 1: the result is below A and no empty class is hit.
    if not logits.is_cpu:  # few launches
        cumulative = torch.softmax(logits, -1, dtype=torch.float32).cumsum(-1)
    else:  # not softmax, which takes few classes row by row; nor does it matter what the probabilities sum to
        scores = logits.to(torch.float32).contiguous()
        cumulative = (scores - scores.amax(-1, keepdim=True)).exp_().cumsum(-1)
    scaled = u.unsqueeze(-1) * cumulative.narrow(-1, -1, 1)
    traced = logits.is_cpu and (type(logits) is not Tensor or torch.compiler.is_compiling())
    if traced or key.shape != logits.shape[:-1]:  # one loop; counted from behind: nothing is greater or less than NaN
        return logits.shape[-1] - (cumulative > scaled).sum(-1)
    return torch.searchsorted(cumulative, scaled, right=True).squeeze(-1)  # NaN stands above every number


def gumbel(key: Tensor, shape: tuple[int, ...] = (), stream: int | None = None) -> Tensor:
    """Draw from the standard Gumbel distribution, -log(-log(u)); arguments as `uniform`.

    Returns:
        [B, *shape] float32, equal on all devices to rounding.
    """
    start = DEFAULT_STREAMS["gumbel"] if stream is None else stream
    u = uniform(key, shape, start).add_(2.0**-25)  # between 0 and 1, neither of them
    return u.log_().neg_().log_().neg_()


def dirichlet(key: Tensor, concentration: float, among: Tensor, stream: int | None = None) -> Tensor:
    """Draw from a symmetric Dirichlet distribution over some of A classes.

    Normalised gamma variates, by Marsaglia and Tsang, "A simple method for generating gamma variables" (ACM TOMS,
    2000): a fixed number of tries, of which each succeeds with 95 % and more.

    Args:
        key: [B] int64.
        concentration: alpha, more than 0; the smaller, the fewer classes share most of the mass.
        among: the classes that take part.  [B, A] bool
        stream: as in `uniform`; uses the numbers up to ``stream + 25 * A``.

    Returns:
        [B, A] float32, sums to 1 in rows that have classes, 0 for the others.
    """
    start = DEFAULT_STREAMS["dirichlet"] if stream is None else stream
    A = among.shape[-1]
    shape = (_TRIES, A)
    normals, u = normal(key, shape, start), uniform(key, shape, start + 2 * _TRIES * A)
    # Gamma(alpha + 1), then times u^(1 / alpha) for Gamma(alpha), in logarithms: small ones would underflow.
    d = concentration + 1.0 - 1.0 / 3.0
    v = (1.0 + normals / math.sqrt(9.0 * d)).clamp(min=0.0).pow(3)
    accepted = (v > 0.0) & (u.log() < 0.5 * normals.square() + d - d * v + d * v.log())
    first = accepted.to(torch.int64).argmax(1, keepdim=True)
    log_gamma = (d * v).gather(1, first).squeeze(1).log()
    boost = (uniform(key, (A,), start + 3 * _TRIES * A) + 2.0**-25).log() / concentration
    logits = (log_gamma + boost).masked_fill(~among, -torch.inf)
    return torch.where(among, logits.softmax(-1), 0.0)
