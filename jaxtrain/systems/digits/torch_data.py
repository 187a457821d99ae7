"""The digits as an ordinary torch Dataset, as a PyTorch project would define it."""

import numpy as np
import torch


class Digits(torch.utils.data.Dataset):
    """Dataset of (image float32 [1, 8, 8], label int64) items."""

    def __init__(self, images: np.ndarray, labels: np.ndarray):
        self.images = torch.from_numpy(images)
        self.labels = torch.from_numpy(labels).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]
