"""Reads the tensors of a checkpoint by torch's reader, without its trust: their description executes nothing."""

from __future__ import annotations

import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from ..errors import CheckpointError
from .files import METADATA

_KNOWN = {
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}  # fmt: skip


class Reader(FileSystemReader):
    """torch's reader of a directory; but torch takes the description as a pickle, which may call any function.

    Args:
        directory: The checkpoint.
        listed: Names of its files; others are not opened.
    """

    def __init__(self, directory: Path, listed: Collection[str]) -> None:
        """Nothing is read yet."""
        super().__init__(directory)
        self._directory, self._listed = directory, frozenset(listed)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The description of the tensors.

        Raises:
            CheckpointError: It is damaged, has something else in it than descriptions, or leads to other files.
        """
        try:
            with open(self._directory / METADATA, "rb") as file:
                found = _Unpickler(file).load()
            strange = {info.relative_path for info in found.storage_data.values()} - self._listed
        except Exception as error:  # a foreign pickle raises whatever it likes
            raise self._damaged(str(error)) from error
        if not isinstance(found, Metadata) or strange:
            raise self._damaged(f"it leads to {min(strange)}" if strange else "it is no description of tensors")
        found.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return found

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(
            "a damaged checkpoint, of which nothing was executed",
            at=f"{self._directory / METADATA}: {why}",
            hint="another checkpoint, from whom you know",
        )


class _Unpickler(pickle.Unpickler):
    """Makes descriptions of tensors, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """A class that a description is made of.

        Raises:
            UnpicklingError: It is another one.
        """
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no tensor")
        return super().find_class(module, name)
