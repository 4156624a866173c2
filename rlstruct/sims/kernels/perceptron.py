"""Small actor-critic perceptron that every thread of a game's kernel evaluates.

One thread computes a whole network, such as 4-64-64-2, for one environment. All threads read the same four weights at
the same time, so the cache serves a whole warp with a single word.
"""

from typing import Any

import warp as wp

from rlstruct.sims.kernels import GameKernel
from rlstruct.sims.kernels.random import categorical_uniform

Four = wp.vec4f


# Warp aligns vec4f to 4 bytes, so a GPU would load four numbers one by one; torch aligns its memory to at least 64.
@wp.func_native("""
#if defined(__CUDA_ARCH__)
    const float4 four = __ldg(reinterpret_cast<const float4*>(weights.data) + row);
    return wp::vec_t<4, wp::float32>(four.x, four.y, four.z, four.w);
#else
    return weights.data[row];
#endif
""")
def load_four(weights: wp.array(dtype=wp.vec4f), row: int) -> wp.vec4f:
    """Load four weights at once."""
    ...


@wp.func
def tanh(x: wp.float32) -> wp.float32:
    """Compute torch.nn.Tanh."""
    return wp.tanh(x)


@wp.func
def relu(x: wp.float32) -> wp.float32:
    """Compute torch.nn.ReLU."""
    return wp.max(x, wp.float32(0.0))


ACTIVATIONS = {"Tanh": tanh, "ReLU": relu}


def make_perceptron(game: GameKernel, n_actions: int, width: int, n_hidden: int, activation: str) -> tuple[Any, Any]:
    """Make an actor-critic's ``policy`` and ``act`` for `rlstruct.sims.kernels.advance.make_advance`.

    ``width``, that of all ``n_hidden`` layers, is a multiple of 4. ``weights`` holds first the actor, then the critic,
    layer by layer, in groups of four outputs: their biases, then their weights for each input. A group that has fewer
    outputs is filled up with zeros.
    """
    Frame = game.frame

    @wp.struct
    class KernelPolicy:
        rng: wp.array2d(dtype=wp.int64)  # keys that the agent draws from.  [K, B]
        weights: wp.array(dtype=Four)
        critic: int  # row at which the critic's weights begin
        stochastic: bool  # draw actions; otherwise take the most probable one
        logits: wp.array3d(dtype=wp.float32)  # [K, A, B]
        log_probability: wp.array2d(dtype=wp.float32)  # [K, B]
        value: wp.array2d(dtype=wp.float32)  # [K, B]

    evaluate = _make_evaluate(game, n_actions, width, n_hidden, ACTIVATIONS[activation])
    sample = _make_sample(n_actions)

    @wp.func
    def act(policy: KernelPolicy, k: int, i: int, frame: Frame) -> wp.int64:
        logits = evaluate(policy.weights, 0, wp.static(n_actions), frame)
        action, log_probability = sample(logits, wp.uint64(policy.rng[k, i]), policy.stochastic)
        for a in range(wp.static(n_actions)):
            policy.logits[k, a, i] = logits[a]
        policy.log_probability[k, i] = log_probability
        value = evaluate(policy.weights, policy.critic, 1, frame)
        policy.value[k, i] = value[0]
        return action

    return KernelPolicy, act


def _make_evaluate(game: GameKernel, n_actions: int, width: int, n_hidden: int, activate: Any) -> Any:
    """Make the function that computes one network's outputs, at most A, from a frame."""
    Frame, n_inputs = game.frame, game.frame._length_
    Hidden = wp.types.vector(length=max(width, 4 * ((n_inputs + 3) // 4)), dtype=wp.float32)
    Output = wp.types.vector(length=4 * ((n_actions + 3) // 4), dtype=wp.float32)

    @wp.func
    def hidden_layer(weights: wp.array(dtype=Four), at: int, n_in: int, x: Hidden) -> Hidden:
        y = Hidden()
        row = int(at)
        n_groups = int(wp.static(width // 4))  # a variable, so that the loop stays a loop: unrolled, it compiles slowly
        for j in range(n_groups):
            total = load_four(weights, row)
            for i in range(n_in):
                total += load_four(weights, row + 1 + i) * x[i]
            for c in range(4):
                y[4 * j + c] = activate(total[c])
            row += n_in + 1
        return y

    @wp.func
    def evaluate(weights: wp.array(dtype=Four), at: int, n_outputs: int, frame: Frame) -> Output:
        x = Hidden()
        for d in range(wp.static(n_inputs)):
            x[d] = frame[d]
        row = int(at)
        n_in = int(wp.static(n_inputs))
        for _ in range(wp.static(n_hidden)):
            x = hidden_layer(weights, row, n_in, x)
            row += wp.static(width // 4) * (n_in + 1)
            n_in = wp.static(width)
        out = Output()
        for j in range((n_outputs + 3) // 4):
            total = load_four(weights, row)
            for i in range(n_in):
                total += load_four(weights, row + 1 + i) * x[i]
            for c in range(4):
                out[4 * j + c] = total[c]
            row += n_in + 1
        return out

    return evaluate


def _make_sample(n_actions: int) -> Any:
    """Make the function that draws like `rlstruct.functional.random.categorical`, and its log-probability."""
    Output = wp.types.vector(length=4 * ((n_actions + 3) // 4), dtype=wp.float32)

    @wp.func
    def sample(logits: Output, key: wp.uint64, stochastic: bool):
        highest, best = logits[0], wp.int64(0)
        for a in range(1, wp.static(n_actions)):
            if logits[a] > highest:
                highest, best = logits[a], wp.int64(a)
        total = wp.float32(0.0)
        for a in range(wp.static(n_actions)):
            total += wp.exp(logits[a] - highest)
        action = best
        if stochastic:
            threshold = categorical_uniform(key) * total
            cumulative = wp.float32(0.0)
            action = wp.int64(wp.static(n_actions))
            for a in range(wp.static(n_actions)):  # counts down from A, which stays for NaN: no comparison is true
                cumulative += wp.exp(logits[a] - highest)
                if cumulative > threshold:
                    action -= wp.int64(1)
        chosen = logits[wp.min(int(action), wp.static(n_actions - 1))]
        return action, chosen - highest - wp.log(total)

    return sample
