"""`rlstruct.functional.random` as Warp functions: the same keys give the same bits.

SplitMix64 on uint64, where a shift drags no sign in.
"""

import warp as wp

from rlstruct.functional.random import DEFAULT_STREAMS

UNIFORM = wp.uint64(DEFAULT_STREAMS["uniform"])
SYMMETRIC_UNIFORM = wp.uint64(DEFAULT_STREAMS["symmetric_uniform"])
RANDINT = wp.uint64(DEFAULT_STREAMS["randint"])
GAMMA = wp.uint64(0x9E3779B97F4A7C15)
MIX_1 = wp.uint64(0xBF58476D1CE4E5B9)
MIX_2 = wp.uint64(0x94D049BB133111EB)


@wp.func
def mix(x: wp.uint64) -> wp.uint64:
    """Half of SplitMix64's finalizer: the upper 33 bits are of full quality."""
    y = (x ^ (x >> wp.uint64(30))) * MIX_1
    return (y ^ (y >> wp.uint64(27))) * MIX_2


@wp.func
def child_key(key: wp.uint64, n: wp.int64) -> wp.uint64:
    """Fresh key number n of a key, see `rlstruct.functional.random.child_key`."""
    x = mix(key + (wp.uint64(n) + wp.uint64(1)) * MIX_2)
    return x ^ (x >> wp.uint64(31))


@wp.func
def draw(key: wp.uint64, number: wp.uint64) -> wp.uint64:
    """64 random bits. Number 0 is the key itself; the array of stream s begins at s + 1, a single draw is at s."""
    if number == wp.uint64(0):
        return key
    return mix(key + number * GAMMA)


@wp.func
def uniform(key: wp.uint64, number: wp.uint64) -> wp.float32:
    """Uniform in [0, 1), a multiple of 2^-24."""
    return wp.float32(draw(key, number) >> wp.uint64(40)) * wp.float32(1.0 / 16777216.0)


@wp.func
def categorical_uniform(key: wp.uint64) -> wp.float32:
    """The number in [0, 1) by which `rlstruct.functional.random.categorical` draws from its default stream."""
    return wp.float32(key & wp.uint64(0xFFFFFF)) * wp.float32(1.0 / 16777216.0)


@wp.func
def randint(key: wp.uint64, high: wp.int64, number: wp.uint64) -> wp.int64:
    """Uniform in 0 to high - 1; high is at most 2^31."""
    return wp.int64(((draw(key, number) >> wp.uint64(32)) * wp.uint64(high)) >> wp.uint64(32))
