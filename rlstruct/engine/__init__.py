"""Ways to run a pure step of tensors: eager, compiled, or recorded as a graph.

A step is a function of pytrees (DictTensor, Trajectories, dicts, tuples) that depends on nothing but its arguments and
the weights of its owner. An executor is called as the step is, and gives the same results:

* the step itself: eager torch;
* `rlstruct.engine.compiled.Compiled`: few kernels, made by TorchInductor;
* `rlstruct.engine.graph.Graph`: one launch of all its kernels, on CUDA and on the simulated accelerator.

`rlstruct.engine.runner.Runner` owns the life of an executor: it warms up, makes and compares it, falls back, and starts
over. `rlstruct.engine.executors` lists what makes them; `rlstruct.engine.purity` says what a pure step may depend on.
"""

from rlstruct.engine import torch_private

torch_private.check()
