"""torchrun that keeps the exit code: `python -m torch_bridge.torchrun --nproc_per_node=8 -m jaxtrain.run --config F`.

torchrun itself ends with a traceback and exit code 1 whatever its processes ended with, so that a scheduler cannot tell
a preempted run, to be started again, from one that failed. Arguments are torchrun's own.
"""

import signal
import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

PREEMPTED, INTERRUPTED, MISTAKE, FAILED = 75, 130, 2, 1


def main(argv: Sequence[str] | None = None) -> int:
    """75 where a process was preempted, 130 interrupted, 2 for the user's mistake, 1 for any other failure."""
    try:
        run.main(argv)
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}  # the others were ended by torchrun
        return next((code for code in (PREEMPTED, INTERRUPTED, MISTAKE) if code in codes), FAILED)
    except SignalException as error:  # passed on to all processes, which have saved and ended
        return INTERRUPTED if error.sigval == signal.SIGINT else PREEMPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
