"""Freed memory stays in the process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from rlstruct.engine.memory import keep_freed_memory
if {kept}:
    keep_freed_memory()
counts = []
for _ in range(6):
    blocks = [torch.ones(2 << 20) for _ in range(6)]  # 8 MB each, as shuffled minibatches are
    del blocks
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(counts[-1] - counts[1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other rules")
@pytest.mark.parametrize("kept", [True, False])
def test_blocks_that_are_freed_and_allocated_again_cause_no_page_faults(kept: bool) -> None:
    """Without the call there are thousands, one for 4 KB, or some for 2 MB each where pages are huge."""
    program = subprocess.run(
        [sys.executable, "-c", FAULTS.format(kept=kept)], capture_output=True, text=True, check=True
    )
    assert (int(program.stdout) < 24) == kept
