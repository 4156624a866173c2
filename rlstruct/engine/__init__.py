"""Ways to run a pure step of tensors: as it is, compiled, or recorded as a graph.

A step is a function ``step(carry, *inputs) -> (carry, record)`` of dicts of tensors that depends on nothing but its
arguments and the weights that it holds. An executor is called as the step is, and gives the same results:

* the step itself: eager torch;
* `rlstruct.engine.compiled.Compiled`: few kernels, made by TorchInductor;
* `rlstruct.engine.graph.Graph`: one launch of all its kernels, on CUDA and on the simulated accelerator.

`rlstruct.engine.promise` says what an agent that promises to be pure may depend on; `rlstruct.engine.acting` calls
agents, compiled where they promise it.
"""

from rlstruct.engine import private

private.check()
