"""Counter-based random numbers: pure functions of a key, equal on every device, without state or host syncs.

A key is an int64 for one environment at one step, with 64 random bits, made by `step_keys` or `split`. The batcher puts
one per environment into ``observation["rng"]``. A draw depends only on its key, never on the rest of the batch, so
results do not change with the number of processes, and a replay over stored keys draws the same numbers again.

The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014):
number n > 0 of a key is ``mix(key + n * gamma)``, number 0 the key itself. Uniform and categorical draws use integer
arithmetic only before one exact division, so their bits agree on CPU and GPU; `normal` goes through log and cos and
agrees to rounding.

Different distributions draw independently from one key: each has its own default stream, see `DEFAULT_STREAMS`. A
second draw from the same distribution needs another ``stream`` or another key (`split`).
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from rlstruct.errors import BadValueError, ShapeMismatchError
from rlstruct.functional.checks import axes

#: Default stream of each distribution. Callers choose streams below 2^28, which never overlap these. `categorical`,
#: which most agents call in every step, needs no stream: it uses the key's lower bits, number 0 the upper ones.
DEFAULT_STREAMS = {
    name: (i + 1) << 28
    for i, name in enumerate(("uniform", "symmetric_uniform", "normal", "randint", "gumbel", "dirichlet"))
}

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: the odd number nearest to 2^64 / golden ratio
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_TRIES = 8  # rejection sampling of gamma variates: all tries fail once in 10^10 draws
_PREPARED = "_rlstruct_uniform"  # attribute of a key: what `_lower_uniform` returns for it, [B, 1]; see `StepKeys`
_LOW = {bits: (1 << (64 - bits)) - 1 for bits in (27, 30, 31, 40)}  # clears the sign bits that >> shifts in


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
    # Memory holds draw 0 of all keys, then draw 1 of all keys: simulators read field by field.
    return _mix(lanes.unsqueeze(1) + key).view(*shape, -1).movedim(-1, 0)


def _multiples(factor: int, first: int, n: int, key: Tensor) -> Tensor:
    """Return the multiples (first + i) * factor, i < n, of a large number, as int64 on the key's device."""
    number = torch.arange(first, first + n, device=key.device, dtype=torch.int64)
    if type(key) is Tensor and not torch.compiler.is_compiling():
        return number.mul_(factor)
    # Compiled code computes indices as signed C++ integers, whose overflow is undefined, so a compiler may end the loop
    # before it. Combine two 32-bit halves that cannot overflow instead. `| 0` turns indices into plain values.
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
        episode: number of the batcher's reset, from 0: an int, or a tensor [] or [B] int64 on the same device, which a
            CUDA graph reads again at every replay.
        step: steps since that reset.  [T] int64, same device

    Returns:
        Keys that differ in all 64 bits between any two environments, resets or steps.  [T, B] int64
    """
    axes("step_keys", seed=(seed, "B"), step=(step, "T"))
    lane = _wrap((episode + 1) * _MIX_1) if isinstance(episode, int) else (episode + 1) * _MIX_1
    stream = _mix_full(seed + _GAMMA).add_(lane)
    return _mix_full(_mix_full(stream).unsqueeze(0) + (step.unsqueeze(1) + 1) * _GAMMA)  # [T, B]


def split(key: Tensor, n: int) -> Tensor:
    """Derive n new keys [..., n] int64 from each key [...], for an agent that draws several times in a step.

    >>> torch.equal(split(torch.tensor([1]), 2), split(torch.tensor([1]), 2))
    True
    """
    return _mix_full(key.unsqueeze(-1) + _multiples(_MIX_2, 1, n, key))


def child_key(key: Tensor, n: Tensor | int) -> Tensor:
    """Derive new key number n, from 0, of each key [...] int64: column n of `split`.

    ``n`` is a number, or a tensor of one number for each key, [...] int64; a single key may have many numbers.

    Such keys form a tree: a seed's children are episodes, an episode's children steps.

    >>> key = torch.tensor([1, 2])
    >>> torch.equal(child_key(key, 3), split(key, 4)[:, 3])
    True
    """
    lane = _wrap((n + 1) * _MIX_2) if isinstance(n, int) else (n + 1) * _MIX_2
    return _mix_full(key + lane)


def purpose_seed(seed: Tensor, purpose: str) -> Tensor:
    """Derive the seeds of a purpose, such as "replay buffer", from seeds [B] int64, for `step_keys`.

    Whatever shares a seed with the environments, or with each other, must draw with the seeds of a separate purpose.
    Otherwise equal keys give equal numbers.
    """
    return child_key(seed, zlib.crc32(purpose.encode()))


def uniform(key: Tensor, shape: tuple[int, ...] = (), stream: int | None = None) -> Tensor:
    """Draw uniformly from [0, 1).

    Args:
        key: [...] int64, any number of axes.
        shape: shape of the draws for each key. Memory holds draw 0 of all keys, then draw 1, and so on: a compiler
            vectorises ``uniform(key, (4,)).t().unbind(0)``, but not access by columns.
        stream: 0 to 2^28; None takes the distribution's default. Draws with the same key and different streams are
            independent, if the ranges ``stream .. stream + prod(shape)`` do not overlap.

    Returns:
        [..., *shape] float32, multiples of 2^-24.
    """
    start = DEFAULT_STREAMS["uniform"] if stream is None else stream
    upper = (_bits(key, shape, start) >> 40).bitwise_and_(_LOW[40])
    return (upper * 2.0**-24).to(torch.float32)  # exact whether torch multiplies in float32 or float64


def symmetric_uniform(
    key: Tensor, n: int, bound: float, dtype: torch.dtype = torch.float32, stream: int | None = None
) -> tuple[Tensor, ...]:
    """Draw n numbers uniformly from [-bound, bound) for each key [B] int64, for the start states of simulators.

    Returns:
        n tensors [B] of ``dtype``; with an explicit stream number i comes from ``uniform(key, (n,), stream)[:, i]``.
    """
    axes("symmetric_uniform", key=(key, "B"))
    start = DEFAULT_STREAMS["symmetric_uniform"] if stream is None else stream
    if type(key) is not Tensor:  # traced: a compiler fuses single draws into one loop and mixes each key once
        drawn = (uniform(key, (), start + 1 + i) for i in range(n))
        return tuple(u.to(dtype).sub_(0.5).mul_(2 * bound) for u in drawn)
    return uniform(key, (n,), start).t().to(dtype).sub_(0.5).mul_(2 * bound).unbind(0)


def normal(key: Tensor, shape: tuple[int, ...] = (), stream: int | None = None) -> Tensor:
    """Draw from the standard normal distribution (Box and Muller, 1958); arguments as `uniform`, twice as many numbers.

    Returns:
        [..., *shape] float32, equal on all devices to rounding.
    """
    start = DEFAULT_STREAMS["normal"] if stream is None else stream
    first, second = uniform(key, (2, *shape), start).unbind(key.dim())
    radius = (1.0 - first).log_().mul_(-2.0).sqrt_()
    return radius.mul_((second * (2.0 * math.pi)).cos_())


def randint(key: Tensor, high: int, shape: tuple[int, ...] = (), stream: int | None = None) -> Tensor:
    """Draw integers uniformly from 0 to high - 1.

    Args:
        key: [...] int64, any number of axes.
        high: number of values, 1 to 2^31; the bias is at most high / 2^32.
        shape: shape of the draws for each key.
        stream: as in `uniform`.

    Returns:
        [..., *shape] int64.
    """
    if not 1 <= high <= 2**31:
        raise BadValueError(f"randint: high is {high}, expected 1 to 2**31.")
    start = DEFAULT_STREAMS["randint"] if stream is None else stream
    upper = (_bits(key, shape, start) >> 32).bitwise_and_(0xFFFFFFFF)
    return upper.mul_(high) >> 32


def categorical(logits: Tensor, key: Tensor, stream: int | None = None) -> Tensor:
    """Draw one class from each row of logits, by inverting the cumulative distribution.

    Args:
        logits: unnormalised log-probabilities; a class at -inf is never drawn. For K independent choices per key, such
            as the parts of a MultiDiscrete action, [B, K, A].  [B, A] or [B, K, A] float
        key: [B] int64. K choices draw from the K keys of `split`; keys of your own for all rows, [B, K], work too.
            With more keys, [n, B] or [n, B, K], each row of logits is drawn from n times.
        stream: as in `uniform`.

    Returns:
        The shape of the keys, [B] or [B, K] int64, from 0 to A - 1; the invalid class A in rows whose logits contain
        NaN or are all -inf. Batchers check for such actions once per batch, and raise.

    Raises:
        ShapeMismatchError: there is no key for each row of logits.
    """
    rows = logits.shape[:-1]
    if len(rows) == 2 and key.dim() == 1 and key.shape == rows[:1]:
        key = split(key, rows[1])  # [B, K]
    if len(rows) not in (1, 2) or key.shape[-len(rows) :] != rows:
        raise ShapeMismatchError(
            f"categorical: logits is {list(logits.shape)} and key {list(key.shape)}, expected logits [B, A] or "
            "[B, K, A], and a key [B]. Rows that shared a key would draw the same class."
        )
    traced = type(logits) is not Tensor or torch.compiler.is_compiling()
    prepared: Tensor | None = None if traced or stream is not None else getattr(key, _PREPARED, None)
    if prepared is not None:
        u = prepared
    else:
        u = (_lower_uniform(key) if stream is None else uniform(key, (), stream)).unsqueeze(-1)
    # Scale u < 1 by the last sum, which rounding may move off 1: the result is below A and skips empty classes.
    if not logits.is_cpu:  # few launches
        cumulative = torch.softmax(logits, -1, dtype=torch.float32).cumsum(-1)
    else:  # softmax is slow for few classes, and the sum need not be 1
        scores = logits if logits.dtype is torch.float32 else logits.to(torch.float32)
        cumulative = (scores.contiguous() - scores.amax(-1, keepdim=True)).exp_().cumsum(-1)
    scaled = u * cumulative.narrow(-1, -1, 1)
    if (traced and logits.is_cpu) or key.shape != rows:
        # Fuses into one loop. Counting down from A gives A for NaN, because comparisons with NaN are False.
        return logits.shape[-1] - (cumulative > scaled).sum(-1)
    return torch.searchsorted(cumulative, scaled, right=True).squeeze(-1)  # NaN sorts above every number


def _lower_uniform(key: Tensor) -> Tensor:
    """Return the uniform numbers that `categorical` uses by default, float32 of the keys' shape.

    They come from a key's lower bits, which are as random as the upper ones, number 0, and need no mixing.
    """
    return (key & 0xFFFFFF).to(torch.float32) * 2.0**-24


class StepKeys:
    """Memory for the keys of a batch. On the CPU it also holds the uniform numbers that `categorical` needs.

    Computing these for all steps at once saves a third of a draw for few environments. Each row has its own numbers as
    an attribute; copies and views of a row do not have them, so `categorical` computes them.

    Args:
        memory: where to write the keys.  [T, B] int64

    Attributes:
        rows: the keys of each step.      T of [B] int64
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory, self.rows = memory, memory.unbind(0)
        self._uniform: Tensor | None = None
        if type(memory) is Tensor and memory.is_cpu:
            self._uniform = torch.empty((*memory.shape, 1), dtype=torch.float32, device=memory.device)
            for row, numbers in zip(self.rows, self._uniform.unbind(0), strict=True):
                setattr(row, _PREPARED, numbers)

    def write(self, keys: Tensor) -> None:
        """Write the keys of all steps, [T, B] int64."""
        self._memory.copy_(keys)
        if self._uniform is not None:
            self._uniform.copy_(_lower_uniform(keys).unsqueeze(-1))


def gumbel(key: Tensor, shape: tuple[int, ...] = (), stream: int | None = None) -> Tensor:
    """Draw from the standard Gumbel distribution, -log(-log(u)); arguments as `uniform`.

    Returns:
        [..., *shape] float32, equal on all devices to rounding.
    """
    start = DEFAULT_STREAMS["gumbel"] if stream is None else stream
    # Strictly between 0 and 1: the largest number plus 2**-25 rounds to 1, whose noise would be inf.
    u = uniform(key, shape, start).add_(2.0**-25).clamp_(max=1.0 - 2.0**-24)
    return u.log_().neg_().log_().neg_()


def dirichlet(key: Tensor, concentration: float, among: Tensor, stream: int | None = None) -> Tensor:
    """Draw from a symmetric Dirichlet distribution over some of A classes.

    Normalised gamma variates, by Marsaglia and Tsang, "A simple method for generating gamma variables" (ACM TOMS,
    2000), with a fixed number of tries, each of which succeeds with a probability of at least 95 %.

    Args:
        key: [B] int64.
        concentration: alpha, more than 0; a small alpha puts most of the mass on few classes.
        among: the classes that take part.  [B, A] bool
        stream: as in `uniform`; uses the numbers up to ``stream + 25 * A``.

    Returns:
        [B, A] float32; a row sums to 1, or to 0 if no class takes part.
    """
    axes("dirichlet", key=(key, "B"), among=(among, "B A"))
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
