"""The original's data sets and loaders: torch Datasets of (image float32 [channel, S, S], int label)."""

import inspect
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.data import FOLDERS, build_data, listed_classes
from jaxtrain.systems.hjepa.device_images import normalise
from jaxtrain.systems.hjepa.image_sources import (
    ArrayImages,
    ImageFolder,
    cifar100_names,
    read_cifar,
    read_stl10,
)
from jaxtrain.systems.hjepa.original import legacy_config
from jaxtrain.systems.hjepa.original.features import JEPAEvalTransform, JEPATransform
from jaxtrain.systems.hjepa.transforms import as_image

CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck".split()
STL10 = "airplane bird car cat deer dog horse monkey ship truck".split()


class Images(Dataset):
    """One split of a config's data, augmented in training as in the original, with torch's random numbers.

    source: the same images before augmentation.
    """

    def __init__(self, config: Any, split: str):
        """config: a checked `hjepa.pretrain` config. split: "train", "validation" or "test"."""
        self._data, self.size, self.split = config.data, config.data.image_size, split
        self.source = build_data(config, split)
        self._items: Any = self.source
        if split == "train" and config.data.dataset != "digits":
            augmentation = config.data.augmentation.model_copy(update={"where": "loader"})
            data = config.data.model_copy(update={"augmentation": augmentation})
            self._items = build_data(config.model_copy(update={"data": data}), split)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def classes(self) -> list[str]:
        """Return the class names by label. Raises UserError for several datasets or if no file lists the names."""
        if isinstance(self.source, ImageFolder):
            return list(self.source.names)  # pyright: ignore[reportAttributeAccessIssue]
        if self._data.datasets:
            raise UserError("classes: several datasets at once have no common class names")
        if self._data.dataset == "cifar100":
            return cifar100_names(pathlib.Path(self._data.path))
        return list({"cifar10": CIFAR10, "stl10": STL10, "digits": map(str, range(10))}[self._data.dataset])

    @property
    def class_to_idx(self) -> dict[str, int]:
        return {name: label for label, name in enumerate(self.classes)}

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        index = range(len(self))[index]
        item = self._items[_Drawn(index)] if self.split == "train" else self._items[index]
        image = np.asarray(item["image"])
        if image.dtype == np.uint8:
            image = normalise(image.astype(np.float32) / 255)
        tensor = torch.from_numpy(np.array(image, np.float32))
        if tensor.shape[-1] != self.size:
            sides = (self.size, self.size)
            tensor = functional.interpolate(tensor[None], sides, mode="bicubic", antialias=True)[0]
        return tensor, int(item.get("label", -1))


class _Drawn(int):
    """Index with a random `epoch` from torch's generator, so that every access draws a new augmentation."""

    @property
    def epoch(self) -> int:
        return int(torch.randint(1 << 31, ()))


class _Named(Dataset):
    """One split of a data set in its authors' layout below data_path: (image float32 [3, S, S], int label).

    split: train, or val or test for the other one. transform: of the PIL image; JEPATransform for train and
    JEPAEvalTransform for others if left out. download: no effect; nothing is downloaded. Raises FileNotFoundError if
    data_path or a folder of the split is missing, or an archive is not unpacked there.
    """

    NAME, CLASSES = "", []

    def __init__(
        self,
        data_path: str | pathlib.Path,
        split: str = "train",
        image_size: int = 224,
        color_jitter: float = 0.4,
        transform: Callable[[Image.Image], Any] | None = None,
        download: bool = True,
    ):
        self._open(data_path, split, image_size, color_jitter, transform)

    def _open(self, data_path, split, image_size, color_jitter, transform, class_list=None) -> None:
        self.data_path, self.split, self.image_size = pathlib.Path(data_path), split, image_size
        if not self.data_path.is_dir():
            raise FileNotFoundError(f"data_path: {data_path} is no folder")
        evaluated = split not in ("train", "unlabeled")
        default = JEPAEvalTransform(image_size) if evaluated else JEPATransform(image_size, color_jitter=color_jitter)
        self.transform = default if transform is None else transform
        self.dataset = self._pictures("validation" if evaluated else split, class_list)

    def _pictures(self, split: str, class_list: str | pathlib.Path | None) -> Any:
        """Return the source of PIL images."""
        if self.NAME.startswith("cifar"):
            return ArrayImages(*read_cifar(self.data_path, self.NAME, split), _picture)
        folder = self.data_path / FOLDERS[split]
        classes = listed_classes(class_list, folder) if self.NAME == "imagenet100" else None
        return ImageFolder(folder, _picture, classes)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        item = self.dataset[range(len(self))[index]]
        return self.transform(item["image"]), int(item["label"])

    @property
    def targets(self) -> list[int]:
        """The labels in order."""
        source = self.dataset
        return [label for _, label in source.samples] if isinstance(source, ImageFolder) else source.labels.tolist()

    @property
    def classes(self) -> list[str]:
        """The class names by label."""
        return list(self.CLASSES)


def _picture(image: Any, index: int) -> Image.Image:
    return as_image(image)


class ImageNetDataset(_Named):
    __doc__, NAME = _Named.__doc__, "imagenet"

    def __init__(
        self,
        data_path: str | pathlib.Path,
        split: str = "train",
        image_size: int = 224,
        color_jitter: float = 0.4,
        transform: Callable[[Image.Image], Any] | None = None,
    ):
        self._open(data_path, split, image_size, color_jitter, transform)

    @property
    def classes(self) -> list[str]:
        """The class folders by label."""
        return list(self.dataset.names)

    @property
    def class_to_idx(self) -> dict[str, int]:
        return {name: label for label, name in enumerate(self.classes)}


class ImageNet100Dataset(ImageNetDataset):
    """The 100 classes of ImageNet-100, numbered from 0, from folders of classes; see ImageNetDataset.

    class_list: a file with their names, one per line, which is needed among other folders: the original has the list in
    its code, and numbers the classes among all folders.
    """

    NAME = "imagenet100"

    def __init__(
        self,
        data_path: str | pathlib.Path,
        split: str = "train",
        image_size: int = 224,
        color_jitter: float = 0.4,
        transform: Callable[[Image.Image], Any] | None = None,
        *,
        class_list: str | pathlib.Path | None = None,
    ):
        self._open(data_path, split, image_size, color_jitter, transform, class_list)


class CIFAR10Dataset(_Named):
    __doc__, NAME, CLASSES = _Named.__doc__, "cifar10", CIFAR10


class CIFAR100Dataset(_Named):
    __doc__, NAME = _Named.__doc__, "cifar100"

    @property
    def classes(self) -> list[str]:
        """The class names by label, from the authors' `meta` file."""
        return cifar100_names(self.data_path)


class STL10Dataset(_Named):
    """STL-10. split "unlabeled": its 100,000 images without a label (-1). use_unlabeled: no effect, as in the original;
    see CIFAR10Dataset for the rest."""

    NAME, CLASSES = "stl10", STL10

    def __init__(
        self,
        data_path: str | pathlib.Path,
        split: str = "train",
        image_size: int = 224,
        color_jitter: float = 0.4,
        transform: Callable[[Image.Image], Any] | None = None,
        download: bool = True,
        use_unlabeled: bool = True,
    ):
        self._open(data_path, split, image_size, color_jitter, transform)

    def _pictures(self, split: str, class_list: str | pathlib.Path | None) -> Any:
        return ArrayImages(*read_stl10(self.data_path, split), _picture)


KINDS: dict[str, type[_Named]] = {
    kind.NAME: kind for kind in (ImageNetDataset, ImageNet100Dataset, CIFAR10Dataset, CIFAR100Dataset, STL10Dataset)
}
KINDS["folder"] = ImageNetDataset


def build_dataset(
    dataset_name: str,
    data_path: str | pathlib.Path,
    split: str = "train",
    image_size: int = 224,
    color_jitter: float = 0.4,
    download: bool = True,
    **kwargs: Any,
) -> Dataset:
    """Return ImageNetDataset, ImageNet100Dataset, CIFAR10Dataset, CIFAR100Dataset or STL10Dataset by its short name.

    `digits` are scikit-learn's, without augmentation. download: no effect; nothing is downloaded. kwargs: further
    arguments of the class. Raises ValueError for an unknown name and an unknown argument, and FileNotFoundError if
    data_path or a split's folder of classes is missing.
    """
    name = dataset_name.lower()
    if name == "digits" and not kwargs:
        data = {"dataset": name, "data_path": str(data_path), "image_size": image_size}
        return Images(checked({"data": data}), "train" if split == "train" else "validation")
    kind = KINDS.get(name)
    if kind is None:
        raise UserError(f"dataset_name={dataset_name!r} is unknown; known: digits, {', '.join(KINDS)}")
    known = inspect.signature(kind.__init__).parameters
    unknown = sorted(set(kwargs) - set(known))
    if unknown:
        raise UserError(f"build_dataset: {', '.join(unknown)}: unknown; known: {', '.join(list(known)[1:])}")
    return kind(data_path, split, image_size, color_jitter, **kwargs)


def create_train_loader(config: Mapping[str, Any]) -> DataLoader:
    """Return a loader of the training split of the config's `data` section: shuffled, whole batches only."""
    return _loader(config, "train", shuffle=True, drop_last=True)


def create_val_loader(config: Mapping[str, Any]) -> DataLoader:
    """Return a loader of the validation split of the config's `data` section; it keeps the last, short batch."""
    return _loader(config, "validation")


def _loader(config: Mapping[str, Any], split: str, **options: Any) -> DataLoader:
    data = config.get("data") or {}
    workers = data.get("num_workers", 0)
    method = {"multiprocessing_context": "forkserver"} if workers else {}  # JAX's threads do not survive a fork
    images = Images(checked(config), split)
    return DataLoader(images, batch_size=data.get("batch_size", 128), num_workers=workers, **method, **options)


def checked(config: Mapping[str, Any]) -> Any:
    """Convert the original's nested config to this project's settings. Raises UserError that lists every mistake."""
    from jaxtrain import config_io

    return config_io.check(legacy_config.convert(config), "the original's config")[1]
