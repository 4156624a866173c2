"""Named tensors that share a batch: DictTensor, TemporalDictTensor, Trajectories and their specs. Layer 1."""
