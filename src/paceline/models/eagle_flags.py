"""What an EAGLE-3 head's config.json says of its norms, where its tensors do not tell, or must agree."""

from paceline.errors import PacelineError
from paceline.models.head_files import HeadFiles
from paceline.values import shown

_PRESENCE = {True: "there", False: "missing"}


def norm_before_residual(files: HeadFiles, is_speculators: bool) -> bool:
    """Whether the residual stream begins with the normed feature. Raises PacelineError for an unwritten default."""
    value = _said(files, "norm_before_residual")
    if value is None and is_speculators:
        raise PacelineError(
            f"{files.where}: config.json does not say norm_before_residual, which speculators takes for false "
            "and vLLM for true",
            hint="write into it what the head was trained with",
        )
    return bool(value)


def norm_output(files: HeadFiles, is_speculators: bool) -> bool:
    """EAGLE-3.1's flag, where config or tensors know of its fc_norm. SpecForge means by it that the output layer reads
    normed states (absent: true)."""
    value = _said(files, "norm_output")
    if is_speculators or "fc_norm" in files.config or "fc_norm.0.weight" in files.tensors:
        return bool(value)
    if value is False:
        raise PacelineError(
            f"{files.where}: config.json says norm_output False, and no fc_norm: in SpecForge's words its output layer "
            "reads states that no norm has seen, which is not supported",
            hint='if EAGLE-3.1\'s norm_output is meant, write "fc_norm": false beside it',
        )
    return False


def _said(files: HeadFiles, flag: str) -> bool | None:
    """What config.json says of a flag; None: nothing."""
    value: object = files.config.get(flag)
    if value is not None and not isinstance(value, bool):
        raise PacelineError(f"{files.where}: config.json says {flag} {shown(value)}, which is neither true nor false")
    return value


def has_norm(files: HeadFiles, flag: str, tensor: str) -> bool:
    """Whether the head has an optional norm. Config and tensors must agree where the config speaks."""
    there, said = tensor in files.tensors, _said(files, flag)
    if said is not None and said != there:
        raise PacelineError(f"{files.where}: config.json says {flag} {said}, and {tensor} is {_PRESENCE[there]}")
    return there
