"""Several learners that train one network: their start, their process group, and the average of their gradients."""
