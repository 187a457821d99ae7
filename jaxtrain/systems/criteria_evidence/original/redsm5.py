"""The original's loaders of the ReDSM5 corpus: posts, annotations and DSM criteria, as pandas frames."""

import pathlib
from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.systems.criteria_evidence.original.datasets import MissingFile
from jaxtrain.systems.criteria_evidence.original.groundtruth_frames import load_dsm_criteria

SOURCES = ("local", "huggingface")


class DSMCriteriaLoader:
    """Loader of a dsm_criteria.json, a list of {"id", "text"}. Raises FileNotFoundError if it is not there."""

    def __init__(self, dsm_path: str | pathlib.Path):
        self.dsm_path = pathlib.Path(dsm_path)
        if not self.dsm_path.is_file():
            raise MissingFile(f"{self.dsm_path}: no such file; wanted a JSON list of {{id, text}}")

    def load_criteria(self) -> list[dict[str, str]]:
        return load_dsm_criteria(self.dsm_path)

    def get_criterion_by_id(self, criterion_id: str) -> dict[str, str] | None:
        """Return the entry of an id, None for an unknown one."""
        return next((entry for entry in self.load_criteria() if entry["id"] == criterion_id), None)

    def get_all_criterion_ids(self) -> list[str]:
        return [entry["id"] for entry in self.load_criteria()]


class ReDSM5DataLoader:
    """Loader of posts and annotations from CSVs in data_dir, or from a dataset of the Hugging Face hub.

    field_map: as `load_field_map` returns it. data_source: local or huggingface; the latter reads the configurations
    `posts` and `annotations` of hf_dataset_name and needs `datasets`. Raises ValueError for another source, or one
    without its place.
    """

    def __init__(
        self,
        field_map: Mapping[str, Any],
        data_source: str = "local",
        data_dir: str | pathlib.Path | None = None,
        hf_dataset_name: str | None = None,
        hf_cache_dir: str | pathlib.Path | None = None,
        posts_file: str = "posts.csv",
        annotations_file: str = "annotations.csv",
    ):
        if data_source not in SOURCES:
            raise UserError(f"data_source: {data_source!r}, wanted one of {', '.join(SOURCES)}")
        name, where = ("data_dir", data_dir) if data_source == "local" else ("hf_dataset_name", hf_dataset_name)
        if where is None:
            raise UserError(f"{name}: missing; data_source={data_source!r} needs it")
        self.field_map, self.data_source = field_map, data_source
        self.data_dir = None if data_dir is None else pathlib.Path(data_dir)
        self.hf_dataset_name, self.hf_cache_dir = hf_dataset_name, hf_cache_dir
        self.posts_file, self.annotations_file = posts_file, annotations_file

    def load_posts(self) -> Any:
        """Return the posts as a DataFrame. Raises FileNotFoundError, and ValueError for a missing column."""
        return self._table(self.posts_file, "posts", ("post_id", "text"))

    def load_annotations(self) -> Any:
        """Return the annotations as a DataFrame. Raises FileNotFoundError, and ValueError for a missing column."""
        return self._table(self.annotations_file, "annotations", ("post_id", "criterion_id"))

    def load_dsm_criteria(self, dsm_path: str | pathlib.Path) -> list[dict[str, str]]:
        return DSMCriteriaLoader(dsm_path).load_criteria()

    def get_valid_criterion_ids(self, dsm_path: str | pathlib.Path) -> set[str]:
        return set(DSMCriteriaLoader(dsm_path).get_all_criterion_ids())

    def _table(self, file: str, section: str, needs: tuple[str, ...]) -> Any:
        import pandas

        if self.data_source == "local":
            path = self.data_dir / file
            if not path.is_file():
                raise MissingFile(f"{path}: no such file; data_dir and {section}_file name it")
            frame = pandas.read_csv(path)
        else:
            import datasets

            split = datasets.load_dataset(self.hf_dataset_name, section, split="train", cache_dir=self.hf_cache_dir)
            frame = split.to_pandas()
        columns = [self.field_map[section].get(name, name) for name in needs]
        absent = [name for name in columns if name not in frame.columns]
        if absent:
            raise UserError(f"{section}: missing columns {', '.join(absent)}; it has {', '.join(frame.columns)}")
        return frame
