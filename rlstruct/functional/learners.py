"""Old name of `rlstruct.functional.all_reduce`."""

from rlstruct.functional.all_reduce import sum_over_learners as sum_over_learners
