"""Sequences of frames and actions for the world model."""

import dataclasses
import pathlib

import numpy as np

from jaxtrain.data.sources import ArraySource
from jaxtrain.errors import UserError
from torch_bridge import files


def build_data(config, split: str):
    """Return windows of the files in data.path/<split> (training: or data.path), or without a path a moving square."""
    data = config.data
    if split not in ("train", "validation"):
        return None
    if data.path is None:
        return moving_square(
            data.synthetic_items if split == "train" else max(8, data.synthetic_items // 4),
            data.seq_len,
            data.image_size,
            config.model.action_dim,
            seed=config.seed + (split != "train") * 1_000_003,
        )
    root = pathlib.Path(data.path)
    folder = root / split if (root / split).is_dir() else root
    if folder == root and split != "train":
        return None
    return SequenceFiles(folder, data.seq_len, data.random_window and split == "train", config.seed)


@dataclasses.dataclass(frozen=True)
class SequenceFiles:
    """Windows of the `*.pt` files of a folder, which hold {"frames": [L, C, H, W], "actions": [L, A]}.

    Files shorter than seq_len are skipped. random_window: one item per file, its start drawn by (seed, epoch, file);
    else every start in order. Items: {"frames": float32 [T, C, H, W], "actions": float32 [T, A]}.
    """

    folder: pathlib.Path
    seq_len: int
    random_window: bool
    seed: int = 0

    def __post_init__(self):
        lengths = {path: len(np.asarray(files.read(path)["actions"])) for path in sorted(self.folder.glob("*.pt"))}
        long_enough = {path: length for path, length in lengths.items() if length >= self.seq_len}
        if not long_enough:
            raise UserError(f"{self.folder}: {len(lengths)} .pt files, none with {self.seq_len} steps or more")
        windows = [
            (path, start)
            for path, length in long_enough.items()
            for start in ([None] if self.random_window else range(length - self.seq_len + 1))
        ]
        object.__setattr__(self, "windows", windows)

    def __len__(self) -> int:
        return len(self.windows)  # pyright: ignore[reportAttributeAccessIssue]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        path, start = self.windows[index]  # pyright: ignore[reportAttributeAccessIssue]
        content = {name: np.asarray(array) for name, array in files.read(path).items()}
        if start is None:
            rng = np.random.default_rng([self.seed, getattr(index, "epoch", 0), int(index)])
            start = int(rng.integers(len(content["actions"]) - self.seq_len + 1))
        window = slice(start, start + self.seq_len)
        return {name: np.asarray(content[name][window], np.float32) for name in ("frames", "actions")}


def moving_square(items: int, steps: int, size: int, action_dim: int, seed: int) -> ArraySource:
    """Make frames float32 [steps, 3, size, size] in [0, 1] of a square that the first two numbers of each action push.

    Unlike noise, these can be learned: the next frame follows from the last one and the action.
    """
    rng = np.random.default_rng(seed)
    actions = rng.uniform(-1, 1, (items, steps, action_dim)).astype(np.float32)
    side = max(1, size // 4)
    pushes = np.zeros((items, steps, 2), np.float32)
    pushes[..., : min(2, action_dim)] = actions[..., :2]
    start = rng.uniform(0, size - side, (items, 2))
    frames = np.zeros((items, steps, 3, size, size), np.float32)
    for step in range(steps):
        for item in range(items):
            top, column = np.round(start[item]).astype(int)
            frames[item, step, :, top : top + side, column : column + side] = 1
        start = np.clip(start + pushes[:, step] * side, 0, size - side)
    return ArraySource({"frames": frames, "actions": actions})
