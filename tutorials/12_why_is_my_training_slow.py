"""Tutorial 12: why is my training slow? Profile it, read one sentence, change one thing, and compare.

    python tutorials/12_why_is_my_training_slow.py

`rlstruct profile train a2c --env CartPole-v1` does the same for any training. It needs
matplotlib for the pictures (the extra `train`). It writes the folders before and after: remove them before you run it
again.
"""

import time

import gymnasium

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos.a2c import A2CConfig, train
from rlstruct.envs import GymEnvInf
from rlstruct.profiling import differences, operation, profile, read, save


class SlowCartPole(gymnasium.Wrapper):
    """An environment with a secret: each step spends half a millisecond on something useless."""

    def step(self, action):
        with operation("unused rendering"):  # your own operation; without a profile it costs next to nothing
            time.sleep(0.0005)
        return self.env.step(action)


def create_slow_env(n_envs, seed):
    return GymEnvInf([SlowCartPole(gymnasium.make("CartPole-v1")) for _ in range(n_envs)], seed)


def create_env(n_envs, seed):
    return GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)


def create_model():
    return ActorCritic(n_inputs=4, n_actions=2)


def profiled(folder, environments):
    """Train for a moment under the profiler, and return its report."""
    config = A2CConfig(n_env_steps=1_000, n_envs=4, n_timesteps=16, evaluation_processes=0, evaluation_episodes=1)
    with profile(folder, window=60):  # a minute; the default records samples of a long run
        train(config, create_model, ActorCriticAgent, environments)
    report = read(folder)  # with the cost of measuring subtracted
    save(report, folder)  # profile.json, trace.json.gz for https://ui.perfetto.dev, profile.png
    return report


if __name__ == "__main__":
    # 1. One sentence says what takes most of an iteration, and what to try.
    before = profiled("before", create_slow_env)
    print(before.sentence)
    assert "unused rendering" in before.sentence

    # 2. The table shows where the rest goes: Python, torch's operators, the simulator. It counts every second once.
    print(before)
    main = before.processes[0]
    seconds = sum(row.seconds.sum() for row in main.rows)
    assert abs(seconds - main.seconds) < 0.01 * main.seconds

    # 3. Fix it, and profile again: what became faster, beyond noise? A last line about the machine says that most
    #    operations changed alike, because it was busier during one of the runs; the lines above changed more than that.
    after = profiled("after", create_env)
    print(after.sentence)
    for line in differences(before, after):
        print(" ", line)
    assert after.processes[0].inclusive("environment") < main.inclusive("environment")

    # 4. With worker processes (n_processes=2) the same report shows their operations, on the same clock, and the
    # sentence says what the learner waits for. On a GPU it also says how busy the GPU really is.
