"""Models from the Hugging Face Hub through `huggingface_hub`: its cache, token and offline mode hold."""

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PacelineError
from paceline.models.home import Progress
from paceline.values import shown

WITHOUT_WEIGHTS = ("*.json", "*.jinja", "tokenizer.model", "*.txt")
PATTERNS = (*WITHOUT_WEIGHTS, "*.safetensors")
HEAD_PATTERNS = ("config.json", "*.safetensors.index.json", "*.safetensors", "pytorch_model.bin", "*.pt")
_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[^:@\s]+))?(:(?P<file>[^:\s]+\.gguf))?(@(?P<late>[^:@\s]+))?"
)


@dataclass(frozen=True, slots=True)
class HubId:
    """`owner/name`, optionally `@revision`, optionally `:file.gguf`."""

    repo: str
    revision: str | None = None
    file: str | None = None

    @staticmethod
    def parse(name: str) -> "HubId | None":
        """None if `name` does not have the form of a Hub id."""
        match = _ID.fullmatch(name)
        if match is None or (match["revision"] and match["late"]):
            return None
        return HubId(match["repo"], match["revision"] or match["late"], match["file"])

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "") + (f":{self.file}" if self.file else "")

    def fetch(self, patterns: Sequence[str] = PATTERNS) -> Path:
        """The snapshot's folder, or the one GGUF file if the id names it; downloads what is missing of `patterns`."""
        from huggingface_hub import hf_hub_download, snapshot_download

        if self.file is not None:
            file = self.file
            return Path(_call(self, lambda: hf_hub_download(self.repo, file, revision=self.revision)))
        folder = Path(
            _call(self, lambda: snapshot_download(self.repo, revision=self.revision, allow_patterns=list(patterns)))
        )
        if not any(folder.glob("*.safetensors")) and not (folder / "config.json").exists():
            raise PacelineError(
                f"{self}: the repository has no safetensors model",
                hint=f"for a GGUF repository name the file: {self.repo}:FILE.gguf",
            )
        return folder


@dataclass(frozen=True, slots=True)
class HubFile:
    """A catalog source: one file of a Hub repository. Entered only where the file's hash is known."""

    repo: str
    filename: str
    revision: str

    def describe(self) -> str:
        return f"{self.repo}@{self.revision}:{self.filename}"

    def fetch(self, partial: Path, size: int, name: str, progress: Progress) -> None:
        """Download the file to `partial`; `huggingface_hub` shows the progress and resumes."""
        from huggingface_hub import hf_hub_download

        work = partial.with_suffix(".hub")
        found = _call(
            HubId(self.repo, self.revision),
            lambda: hf_hub_download(self.repo, self.filename, revision=self.revision, local_dir=work),
        )
        Path(found).replace(partial)
        shutil.rmtree(work, ignore_errors=True)
        progress(f"downloading {name}", size, size)


def _call(source: HubId, download: Callable[[], str]) -> str:
    """Run a download; each way to fail becomes one line that says what to do."""
    from huggingface_hub import errors

    try:
        return download()
    except errors.GatedRepoError as error:
        raise PacelineError(
            f"{source}: access to this repository is restricted",
            hint=f"accept its terms at huggingface.co/{source.repo}, then `hf auth login` or HF_TOKEN",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise PacelineError(
            f"{source}: no such repository on the Hub, or it is private",
            hint="check the spelling; a private one needs HF_TOKEN; `paceline models` lists the catalog",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise PacelineError(f"{source}: the repository has no revision {shown(source.revision)}") from error
    except errors.RemoteEntryNotFoundError as error:
        raise PacelineError(f"{source}: the repository has no such file") from error
    except errors.HFValidationError as error:
        raise PacelineError(f"{source}: not a valid Hub id") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        from huggingface_hub import constants

        if constants.is_offline_mode():
            raise PacelineError(
                f"{source} is not in the local Hub cache, and HF_HUB_OFFLINE is set",
                hint="unset HF_HUB_OFFLINE to download it",
            ) from error
        raise PacelineError(
            f"cannot reach the Hugging Face Hub for {source}, and there is no cached copy",
            hint="check the network, or name a local folder, a GGUF file or a model of `paceline models`",
        ) from error
    except Exception as error:  # whatever the network or the HTTP library breaks with on the way
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PacelineError(
            f"{source}: the download failed: {first_line}", hint="run the command again to continue"
        ) from error
