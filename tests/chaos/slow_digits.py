"""The digits read sample by sample, from a source that is slow, or hangs, on demand: `task=tests.chaos.slow_digits`.

CHAOS_SLOW_S: seconds for each validation sample. CHAOS_STALL_AT: the training sample, counted as they are read, at
which the source waits without end.
"""

import dataclasses
import os
import time

from jaxtrain.systems.digits import TASKS as DIGITS


class Slow:
    def __init__(self, arrays, pause_s: float = 0.0, stall_at: int | None = None):
        self.columns, self.pause_s, self.stall_at = arrays.columns, pause_s, stall_at
        self.read = 0

    def __len__(self) -> int:
        return len(self.columns["label"])

    def __getitem__(self, index: int):
        self.read += 1
        time.sleep(self.pause_s)
        while self.read == self.stall_at:
            time.sleep(0.1)
        return {name: column[index] for name, column in self.columns.items()}


def build_data(config, split: str):
    arrays = DIGITS["classify"].build_data(config, split)
    if arrays is None:
        return None
    if split == "train":
        return Slow(arrays, stall_at=int(os.environ.get("CHAOS_STALL_AT", 0)) or None)
    return Slow(arrays, pause_s=float(os.environ.get("CHAOS_SLOW_S", 0)))


TASKS = {"classify": dataclasses.replace(DIGITS["classify"], build_data=build_data)}
