"""`rlstruct.functional.random` as Warp functions: the same keys give the same bits.

Numbers are unsigned here, so that a right shift shifts in zeros.
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
    """Apply SplitMix64's finalizer without its last xor-shift, which leaves the upper 33 bits unchanged."""
    y = (x ^ (x >> wp.uint64(30))) * MIX_1
    return (y ^ (y >> wp.uint64(27))) * MIX_2


@wp.func
def child_key(key: wp.uint64, n: wp.int64) -> wp.uint64:
    """Make child n of a key, like `rlstruct.functional.random.child_key`."""
    x = mix(key + (wp.uint64(n) + wp.uint64(1)) * MIX_2)
    return x ^ (x >> wp.uint64(31))


@wp.func
def draw(key: wp.uint64, number: wp.uint64) -> wp.uint64:
    """Draw 64 random bits. In stream s, a single draw has number s, and an array starts at s + 1."""
    if number == wp.uint64(0):
        return key
    return mix(key + number * GAMMA)


@wp.func
def uniform(key: wp.uint64, number: wp.uint64) -> wp.float32:
    """Draw a multiple of 2^-24 from [0, 1)."""
    return wp.float32(draw(key, number) >> wp.uint64(40)) * wp.float32(1.0 / 16777216.0)


@wp.func
def categorical_uniform(key: wp.uint64) -> wp.float32:
    """Draw the number in [0, 1) by which `rlstruct.functional.random.categorical` chooses, in its default stream."""
    return wp.float32(key & wp.uint64(0xFFFFFF)) * wp.float32(1.0 / 16777216.0)


@wp.func
def randint(key: wp.uint64, high: wp.int64, number: wp.uint64) -> wp.int64:
    """Draw an integer from 0 to high - 1; high is at most 2^31."""
    return wp.int64(((draw(key, number) >> wp.uint64(32)) * wp.uint64(high)) >> wp.uint64(32))
