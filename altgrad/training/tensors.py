"""Writing tensors to safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from altgrad.config.files import replacing
from altgrad.optim.stored import plain


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write ``tensors``, from any device, to ``path`` atomically.

    Serialised in memory first: safetensors' own writer reports a full disk as an error without a
    number, which could not be told from a defect.
    """
    content = save({name: plain(t).detach().cpu().contiguous() for name, t in tensors.items()}, metadata)
    with replacing(path) as temporary:
        temporary.write_bytes(content)
