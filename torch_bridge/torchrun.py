"""torchrun that keeps the exit code: `python -m torch_bridge.torchrun --nproc_per_node=8 -m jaxtrain.run --config F`.

When a process fails, torchrun itself ends with a traceback and exit code 1, whatever the process's exit code. A
scheduler then cannot tell a preempted run, which it should restart, from a failed one. Takes torchrun's arguments.
"""

import signal
import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

PREEMPTED, INTERRUPTED, MISTAKE, FAILED = 75, 130, 2, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Return 75 if a process was preempted, 130 if interrupted, 2 for a user's mistake, 1 for any other failure, else
    0."""
    try:
        run.main(argv)
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}  # torchrun terminated the other processes
        return next((code for code in (PREEMPTED, INTERRUPTED, MISTAKE) if code in codes), FAILED)
    except SignalException as error:  # forwarded to all processes, which have saved and exited
        return INTERRUPTED if error.sigval == signal.SIGINT else PREEMPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
