"""Freed memory stays in the process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Tensors that are there already get their blocks: a small allocation between two blocks would keep the heap from
# shrinking by chance. The first rounds settle where the blocks lie.
FAULTS = """
import resource, torch
from rlstruct.engine.memory import keep_freed_memory
if {kept}:
    keep_freed_memory()
tensors = [torch.empty(0) for _ in range(6)]
counts = []
for _ in range(10):
    for tensor in tensors:
        tensor.resize_(2 << 20).fill_(1.0)  # 8 MB, as a shuffled minibatch has
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
        tensor.resize_(0)
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(counts[-1] - counts[-5])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other rules")
@pytest.mark.parametrize("kept", [True, False])
def test_blocks_that_are_freed_and_allocated_again_cause_no_page_faults(kept: bool) -> None:
    """Without the call there are thousands, one for 4 KB, or some for 2 MB each where pages are huge."""
    program = subprocess.run(
        [sys.executable, "-c", FAULTS.format(kept=kept)], capture_output=True, text=True, check=True
    )
    assert (int(program.stdout) < 24) == kept
