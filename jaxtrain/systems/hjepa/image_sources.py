"""Images from disk: class folders, CIFAR and STL-10 in their own formats, digits, and mixtures of them.

A source yields {"image": uint8 [channel, height, width], "label": int}; the label is -1 if there is none.
"""

import dataclasses
import pathlib
import pickle
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from jaxtrain.data.digits import load_digits
from jaxtrain.data.index_stream import SampleIndex
from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.transforms import as_image, center_crop, eval_transform, resize_shorter, train_transform

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class NoImages(UserError, FileNotFoundError):
    """Class folders, or image files in them, are missing."""


class NoArchive(NoImages, RuntimeError):
    """The files of CIFAR or STL-10 are missing, for which torchvision raises a RuntimeError."""


@dataclasses.dataclass(frozen=True)
class ImageFolder:
    """Image files under `folder`/<class>/**, with classes numbered from 0 in sorted order.

    read: (image, index) -> array. classes: use only these folders. samples: list of (path, label). names: class names
    by label. Source: torchvision ImageFolder's layout and numbering.
    """

    folder: pathlib.Path
    read: Callable
    classes: tuple[str, ...] | None = None

    def __post_init__(self):
        folders = sorted(path.name for path in self.folder.iterdir() if path.is_dir()) if self.folder.is_dir() else []
        if not folders:
            raise NoImages(f"{self.folder}: no class folders; wanted {self.folder}/<class>/<image file>")
        missing = sorted(set(self.classes or ()) - set(folders))
        if missing:
            raise UserError(f"{self.folder}: {len(missing)} classes of the list are missing, first {missing[0]}")
        names = folders if self.classes is None else sorted(self.classes)
        samples = [
            (path, label)
            for label, name in enumerate(names)
            for path in sorted((self.folder / name).rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not samples:
            raise NoImages(f"{self.folder}: holds no image file ({', '.join(SUFFIXES)})")
        object.__setattr__(self, "samples", samples)
        object.__setattr__(self, "names", names)

    def __len__(self) -> int:
        return len(self.samples)  # pyright: ignore[reportAttributeAccessIssue]

    def __getitem__(self, index: int) -> dict:
        path, label = self.samples[index]  # pyright: ignore[reportAttributeAccessIssue]
        with Image.open(path) as image:
            return item(self.read(image, index), label)


@dataclasses.dataclass(frozen=True)
class ReadSquare:
    """Read a square of `side` pixels, uint8 [3, side, side]: resize the shorter side, crop the centre."""

    side: int

    def __call__(self, image, index: int) -> np.ndarray:
        return channels_first(center_crop(resize_shorter(as_image(image), self.side), self.side))


@dataclasses.dataclass(frozen=True)
class ReadEvaluation:
    """Apply the evaluation transform without its normalisation: uint8 [3, S, S]."""

    image_size: int

    def __call__(self, image, index: int) -> np.ndarray:
        return channels_first(eval_transform(self.image_size).crop(image))


@dataclasses.dataclass(frozen=True)
class ReadAugmented:
    """Apply the training transform with Pillow: float32 [3, S, S], seeded by (seed, epoch, sample)."""

    transform: train_transform
    seed: int

    def __call__(self, image, index: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, getattr(index, "epoch", 0), int(index)])
        return self.transform(image, rng)


@dataclasses.dataclass(frozen=True)
class ReadCrops:
    """Cut several crops of one image from its full resolution, seeded by (seed, epoch, sample).

    Returns {"image": float32 [crop, 3, S, S], "image_local": float32 [crop, 3, s, s]}.
    Source: Caron et al. 2020 (multi-crop).
    """

    large: train_transform
    small: train_transform
    global_crops: int
    local_crops: int
    seed: int

    def __call__(self, image, index: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([self.seed, getattr(index, "epoch", 0), int(index)])
        crops = {"image": np.stack([self.large(image, rng) for _ in range(self.global_crops)])}
        if self.local_crops:
            crops["image_local"] = np.stack([self.small(image, rng) for _ in range(self.local_crops)])
        return crops


def item(pixels, label: int) -> dict:
    """Return an item. pixels: the result of a `read` function, one array or several by name."""
    return (pixels if isinstance(pixels, dict) else {"image": pixels}) | {"label": label}


def channels_first(image) -> np.ndarray:
    array = np.asarray(image)
    return np.ascontiguousarray(array.transpose(2, 0, 1) if array.ndim == 3 else array[None])


@dataclasses.dataclass(frozen=True)
class ArrayImages:
    """Images held in memory, uint8 [sample, channel, height, width], read through `read`."""

    images: np.ndarray
    labels: np.ndarray
    read: Callable

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict:
        image = self.images[index].transpose(1, 2, 0)
        image = image[..., 0] if image.shape[-1] == 1 else image
        return item(self.read(image, index), int(self.labels[index]))


def read_cifar(path: pathlib.Path, name: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Read CIFAR-10 or -100 in its authors' layout: uint8 [N, 3, 32, 32], int [N]. UserError if a file is missing."""
    if name == "cifar10":
        folder, key = path / "cifar-10-batches-py", b"labels"
        files = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    else:
        folder, key, files = path / "cifar-100-python", b"fine_labels", ["train" if split == "train" else "test"]
    parts = []
    for file in files:
        if not (folder / file).is_file():
            raise NoArchive(
                f"{folder / file}: no such file; unpack the archive of https://www.cs.toronto.edu/~kriz/cifar.html "
                f"in {path}, or set data.path"
            )
        with open(folder / file, "rb") as handle:
            parts.append(_Arrays(handle, encoding="bytes").load())
    images = np.concatenate([np.asarray(part[b"data"], np.uint8) for part in parts]).reshape(-1, 3, 32, 32)
    return images, np.concatenate([np.asarray(part[key]) for part in parts])


def cifar100_names(path: pathlib.Path) -> list[str]:
    """Return class names by label, from the authors' `meta` file. Raises UserError if it is missing."""
    file = path / "cifar-100-python" / "meta"
    if not file.is_file():
        raise UserError(f"{file}: no such file; it lies in the archive of https://www.cs.toronto.edu/~kriz/cifar.html")
    with open(file, "rb") as handle:
        return [name.decode() for name in _Arrays(handle, encoding="bytes").load()[b"fine_label_names"]]


class _Arrays(pickle.Unpickler):
    """Unpickler that accepts only numpy arrays and plain containers, so that no code can run."""

    def find_class(self, module: str, name: str):
        allowed = {("numpy", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
        if (module.partition(".")[0], name) in allowed:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise UserError(f"the CIFAR file holds {module}.{name}, which is no array; is it the published file?")


def read_stl10(path: pathlib.Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Read STL-10's binaries: uint8 [N, 3, 96, 96] and labels 0..9, -1 for unlabelled ("unlabeled" split)."""
    folder, stem = path / "stl10_binary", {"validation": "test"}.get(split, split)
    file = folder / f"{stem}_X.bin"
    if not file.is_file():
        raise NoArchive(
            f"{file}: no such file; unpack the archive of https://cs.stanford.edu/~acoates/stl10/ in {path}"
        )
    images = np.fromfile(file, np.uint8).reshape(-1, 3, 96, 96).transpose(0, 1, 3, 2)  # columns first on disk
    labels = folder / f"{stem}_y.bin"
    return np.ascontiguousarray(images), (
        np.fromfile(labels, np.uint8).astype(int) - 1 if labels.is_file() else np.full(len(images), -1)
    )


def read_digits(validation_ratio: float, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's 1,797 handwritten digits, uint8 [N, 1, 8, 8]; every seed holds out the same samples."""
    images, labels = load_digits()
    order = np.random.Generator(np.random.Philox(0)).permutation(len(labels))
    cut = round(len(order) * validation_ratio)
    rows = order[cut:] if split == "train" else order[:cut]
    return np.round(images[rows, None] * (255 / 16)).astype(np.uint8), labels[rows]


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Several sources combined into one; each item gains "dataset", the number of its source.

    concat: one source after another. balanced: as many samples of each as the smallest has, in one fixed shuffled
    order.
    weighted: every position draws a source by weight and then one of its samples, anew in every epoch; as long as the
    largest source.
    """

    sources: Sequence
    weights: Sequence[float]
    strategy: str
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if self.strategy == "weighted" and not sum(self.weights) > 0:
            raise UserError("data.datasets: the weights are all 0; give at least one dataset a weight")
        sizes = [len(source) for source in self.sources]
        if self.strategy == "balanced":
            pairs = [(number, index) for number in range(len(sizes)) for index in range(min(sizes))]
            order = np.random.default_rng(self.seed).permutation(len(pairs))
            pairs = [pairs[position] for position in order]
        else:
            pairs = [(number, index) for number, size in enumerate(sizes) for index in range(size)]
        object.__setattr__(self, "pairs", pairs)
        object.__setattr__(self, "sizes", sizes)

    def __len__(self) -> int:
        return max(self.sizes) if self.strategy == "weighted" else len(self.pairs)  # pyright: ignore

    def __getitem__(self, index: int) -> dict:
        epoch = getattr(index, "epoch", 0)
        if self.strategy != "weighted":
            number, row = self.pairs[index]  # pyright: ignore[reportAttributeAccessIssue]
        else:
            rng = np.random.default_rng([self.seed, epoch, int(index)])
            share = np.asarray(self.weights, float) / sum(self.weights)
            share = share ** (1 / self.temperature)
            number = int(rng.choice(len(self.sources), p=share / share.sum()))
            row = int(rng.integers(self.sizes[number]))  # pyright: ignore[reportAttributeAccessIssue]
        return self.sources[number][SampleIndex.of(row, epoch)] | {"dataset": number}
