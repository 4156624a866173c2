"""Runner of a profiled script: ``python -m rlstruct.profiling.script FILE ARGUMENTS``, as `rlstruct profile` starts it.

The script runs in this module, so a child of multiprocessing (spawn, forkserver), which imports its parent's main
module by name, runs these lines, too: it is recorded and marked like its parent. A forked child is not.
"""

import os
import sys
from multiprocessing.util import Finalize, register_after_fork

from rlstruct.profiling.marks import PRESETS, Marks, compile_marked
from rlstruct.profiling.operations import operation, phase, stop

_SCRIPT = "RLSTRUCT_PROFILED_SCRIPT"  # environment variable with its path, for children

if __name__ in ("__main__", "__mp_main__"):
    if __name__ == "__main__":
        sys.argv = sys.argv[1:]
        os.environ[_SCRIPT] = os.path.abspath(sys.argv[0])
        sys.path[0] = os.path.dirname(os.environ[_SCRIPT])
    else:  # a process of a fork server ends without `atexit`, and drops the finalizers that exist when it begins
        register_after_fork(stop, lambda stop: Finalize(None, stop, exitpriority=0))
    __file__, __operation__ = os.environ[_SCRIPT], operation
    globals()["__doc__"] = None  # the script may have none
    _marks = Marks(PRESETS)
    _marks.install()
    try:
        with phase("script"):
            exec(compile_marked(__file__), globals())
    finally:
        if __name__ == "__main__":
            _marks.warn_of_absent_modules()
