"""What a decoder is made of: one frozen description that every loader fills and the decoder is built from."""

import dataclasses
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.errors import PacelineError
from paceline.values import is_finite, shown

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_MOST = 2**31 - 1  # no size of a model is larger: a number beyond it is damage


def require_integer(name: str, value: object, low: int = 1, high: int = _MOST) -> int:
    """`value`, a whole number from `low` to `high`; else an error that names it. True is not a number."""
    if type(value) is not int or not low <= value <= high:
        bounds = "a positive whole number" if (low, high) == (1, _MOST) else f"a whole number from {low} to {high}"
        raise PacelineError(f"{name} is {shown(value)}, not {bounds}")
    return value


def require_number(name: str, value: object) -> float:
    """`value`, a positive and finite number; else an error that names it."""
    if not is_finite(value) or value <= 0:
        raise PacelineError(f"{name} is {shown(value)}, not a positive number")
    return value


@contextmanager
def described_by(path: Path) -> Iterator[None]:
    """Put `path`, the file that holds what is read, before an error that does not name it, and a hint behind it."""
    try:
        yield
    except PacelineError as error:
        message = str(error) if str(error).startswith(str(path)) else f"{path}: {error}"
        raise PacelineError(message, error.hint or "correct that entry, or fetch the file again") from error


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base frequency and the scaling that stretches it.

    `freq_factors` (GGUF's `rope_freqs.weight`, [head_dim / 2]) divide the inverse frequencies and stand in for
    `llama3` where a file carries them instead of its parameters.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise PacelineError(
                f"rope type {shown(self.kind)} is not supported", hint=f"supported: {', '.join(ROPE_KINDS)}"
            )
        for name in ("theta", "factor", "beta_fast", "beta_slow"):
            require_number(f"rope {name}", getattr(self, name))
        for name in ("low_freq_factor", "high_freq_factor", "attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                require_number(f"rope {name}", getattr(self, name))
        if self.original_max_position is not None:
            require_integer("rope original_max_position_embeddings", self.original_max_position)
        for value in self.freq_factors or ():
            require_number("a frequency factor of the rope", value)
        if self.theta <= 1:
            raise PacelineError(f"rope theta is {self.theta}, it must be above 1")
        if self.kind in ("llama3", "yarn") and self.original_max_position is None:
            raise PacelineError(f"rope type {shown(self.kind)} needs original_max_position_embeddings")
        if self.kind == "llama3" and (self.low_freq_factor is None or self.high_freq_factor is None):
            raise PacelineError("rope type 'llama3' needs low_freq_factor and high_freq_factor")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:  # type: ignore[operator]
            raise PacelineError(
                f"rope low_freq_factor {self.low_freq_factor} is not below high_freq_factor {self.high_freq_factor}"
            )


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and conventions of a decoder-only transformer."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_context: int
    rope: RopeConfig
    local_rope: RopeConfig | None  # of the sliding-window layers, where they have their own (Gemma 3)
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sandwich_norms: bool  # a norm after each sublayer as well as before it (Gemma 3)
    activation: str  # "silu" or "gelu_tanh"
    embedding_scale: float
    attention_scale: float
    sliding_windows: tuple[int | None, ...]  # [num_layers], None = full attention
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise PacelineError(
                f"model family {shown(self.family)} is not supported", hint=f"supported: {', '.join(FAMILIES)}"
            )
        for name in _SIZES:
            require_integer(name, getattr(self, name))
        for name in ("rms_norm_eps", "embedding_scale", "attention_scale"):
            require_number(name, getattr(self, name))
        if self.head_dim % 2:
            raise PacelineError(f"head_dim is {self.head_dim}, which rotary embeddings cannot halve")
        if self.num_heads % self.num_kv_heads:
            raise PacelineError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if len(self.sliding_windows) != self.num_layers:
            raise PacelineError(f"{len(self.sliding_windows)} layer types are given for {self.num_layers} layers")
        if self.activation not in ("silu", "gelu_tanh"):
            raise PacelineError(f"activation {shown(self.activation)} is not supported")
        for window in self.sliding_windows:
            if window is not None:
                require_integer("the sliding window", window)
        for token in self.eos_token_ids:
            require_integer("the end-of-sequence token", token, 0, self.vocab_size - 1)
        if self.bos_token_id is not None:
            require_integer("the begin-of-sequence token", self.bos_token_id, 0, self.vocab_size - 1)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> "ModelConfig":
        fields = json.loads(text)
        for name in ("rope", "local_rope"):
            if fields[name] is not None:
                rope = dict(fields[name])
                if rope["freq_factors"] is not None:
                    rope["freq_factors"] = tuple(rope["freq_factors"])
                fields[name] = RopeConfig(**rope)
        for name in ("sliding_windows", "eos_token_ids"):
            fields[name] = tuple(fields[name])
        return ModelConfig(**fields)


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_context: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_dim / 2] in float32, and the factor on cos and sin, as transformers computes them.

    Sources: Su et al. 2104.09864; linear interpolation 2306.15595; YaRN 2309.00071; llama3: Llama 3.1's release.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = rope.theta**exponent  # [head_dim / 2]
    inv_freq = 1.0 / frequencies
    if rope.freq_factors is not None:
        inv_freq = inv_freq / torch.tensor(rope.freq_factors, dtype=torch.float32)
    match rope.kind:
        case "linear":
            return inv_freq / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, inv_freq), 1.0
        case "yarn":
            return _yarn(rope, frequencies, head_dim)
    return inv_freq, 1.0


def _llama3(rope: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    assert rope.original_max_position and rope.low_freq_factor and rope.high_freq_factor
    original, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / rope.factor, inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    medium = ~(wavelength < original / high) * ~(wavelength > original / low)
    return torch.where(medium, smoothed, scaled)


def _yarn(rope: RopeConfig, frequencies: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, float]:
    assert rope.original_max_position
    original = rope.original_max_position

    def magnitude(weight: float = 1.0) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    attention_factor = rope.attention_factor
    if attention_factor is None:
        if rope.mscale and rope.mscale_all_dim:
            attention_factor = magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
        else:
            attention_factor = magnitude()

    def correction_dim(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    extrapolation = 1 - ramp
    interpolated, extrapolated = 1.0 / (rope.factor * frequencies), 1.0 / frequencies
    return interpolated * (1 - extrapolation) + extrapolated * extrapolation, float(attention_factor)
