"""The original's ring buffer of activations, in torch."""

import torch


class ActivationBuffer:
    """Ring buffer of activations in torch; the `sae` task has its own on the device (sae.RingBuffer).

    max_size (`size` in the README): rows in the storage. d (`dim`): their width, by default that of the first rows.
    device: where torch lacks it, the CPU; None means that of the first rows. `buf` and `ptr` are the README's `buffer`
    and `position`.
    exact_fill_bug: as in the original, a write that ends exactly at the end of the storage leaves the buffer apparently
    empty until the next wrap.
    """

    def __init__(
        self,
        max_size: int = 819_200,
        d: int | None = None,
        device="cuda",
        *,
        size: int | None = None,
        dim: int | None = None,
        exact_fill_bug: bool = False,
    ):
        size, dim = max_size if size is None else size, d if dim is None else dim
        without = device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available()
        self.size, self.device, self.exact_fill_bug = size, "cpu" if without else device, exact_fill_bug
        self.buffer = None if dim is None else torch.zeros(size, dim, device=self.device)
        self.position, self.full = 0, False

    @property
    def max_size(self) -> int:
        return self.size

    @property
    def d(self) -> int | None:
        return None if self.buffer is None else self.buffer.shape[1]

    @property
    def buf(self) -> torch.Tensor | None:
        return self.buffer

    @buf.setter
    def buf(self, rows: torch.Tensor | None) -> None:
        self.buffer = rows

    @property
    def ptr(self) -> int:
        return self.position

    @ptr.setter
    def ptr(self, position: int) -> None:
        self.position = position

    def __len__(self) -> int:
        return self.size if self.full else self.position

    def add(self, acts) -> None:
        """Write rows [row, dim]; more axes are flattened to rows. Raises ValueError for another width."""
        self.device = acts.device if self.device is None else self.device
        if not acts.numel():
            return
        rows = acts.detach().reshape(-1, acts.shape[-1]).to(self.device, torch.float32)
        if self.buffer is None:
            self.buffer = torch.zeros(self.size, rows.shape[1], device=self.device)
        if rows.shape[1] != self.buffer.shape[1]:
            raise ValueError(f"activations are {rows.shape[1]} wide, the buffer {self.buffer.shape[1]}")
        if len(rows) >= self.size:
            self.buffer[:] = rows[-self.size :]
            self.position, self.full = 0, True
            return
        end = self.position + len(rows)
        self.buffer[torch.arange(self.position, end, device=self.device) % self.size] = rows
        self.full = self.full or (end > self.size if self.exact_fill_bug else end >= self.size)
        self.position = end % self.size

    def sample(self, number: int):
        """Draw [number, dim] rows uniformly with replacement from the stored rows."""
        return self.buffer[torch.randint(len(self), (number,), device=self.device)]

    def get_loader(self, batch_size: int = 1024, shuffle: bool = True):
        """Return a DataLoader over the stored rows, or None if the buffer is empty."""
        if not len(self):
            return None
        return torch.utils.data.DataLoader(self.buffer[: len(self)], batch_size=batch_size, shuffle=shuffle)
