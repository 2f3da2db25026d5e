"""EAGLE heads in the formats they are published in: their authors', and for EAGLE-3 vLLM's `speculators`, too."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.models.config import ModelConfig, described_by
from paceline.models.decoder import Decoder
from paceline.models.eagle_flags import has_norm, norm_before_residual, norm_output
from paceline.models.head_checkpoint import (
    KINDS,
    VOCABULARY_ROWS,
    check_hidden,
    check_vocabulary,
    checked_ids,
    opened,
    unnamed_rows,
)
from paceline.models.head_files import HeadFiles, last_dimension
from paceline.models.head_layer import HeadLayer
from paceline.models.head_matrices import HeadMatrices
from paceline.models.heads import DraftVocabulary, Eagle3Head, Eagle3Options, Eagle3Weights, EagleHead
from paceline.models.hf_config import config_from_hf
from paceline.models.origin import own_settings
from paceline.ops.packed import AnyLinear, is_packed
from paceline.values import shown

_AUX_KEY = "eagle_aux_hidden_state_layer_ids"


def load_eagle(name: str, target: Decoder, draft_dtype: str | None = None) -> EagleHead:
    """An EAGLE-1 or -2 head for `target`: the two differ in how their trees grow alone.

    `draft_dtype`: see `HeadMatrices.of`. Raises PacelineError.
    """
    matrices = HeadMatrices.of(target, draft_dtype)
    files = opened(name, "eagle")
    own_settings(files.config, files.where)
    config, size = eagle_layer(files, target.config), target.config.hidden_size
    fc = matrices.linear(files.take("fc.weight", size, 2 * size), files.find("fc.bias", size))
    embedding = _embedding(files, target, size, matrices)
    layer = HeadLayer(config, layer_weights(files, config, size), matrices)
    own = files.find("lm_head.weight", files.rows("lm_head.weight"), size)
    files.drop("layer.self_attn.rotary_emb.inv_freq")
    files.check_empty(KINDS["eagle"])
    output = matrices.target_output(target, None) if own is None else matrices.linear(own, finely=True)
    return EagleHead(layer, embedding, fc, output)


def load_eagle3(
    name: str, target: Decoder, aux_layers: Sequence[int] | None = None, draft_dtype: str | None = None
) -> Eagle3Head:
    """An EAGLE-3 head for `target`.

    aux_layers: whose outputs it reads, where its config is wrong or silent. draft_dtype: see `HeadMatrices.of`. Raises
    PacelineError.
    """
    matrices = HeadMatrices.of(target, draft_dtype)
    files = opened(name, "eagle3")
    config, options = eagle3_layer(files, target.config, aux_layers)
    size, fused = config.hidden_size, len(options.aux_layers) * target.config.hidden_size
    num_fuse_norms = len(options.aux_layers) if has_norm(files, "fc_norm", "fc_norm.0.weight") else 0

    def norm(key: str, width: int = size) -> torch.Tensor:
        return matrices.numbers(files.take(key, width))

    vocabulary, output = _eagle3_output(files, target, size, matrices)
    weights = Eagle3Weights(
        embedding=_embedding(files, target, size, matrices),
        fc=matrices.linear(files.take("fc.weight", size, fused), files.find("fc.bias", size)),
        fuse_norms=tuple(norm(f"fc_norm.{i}.weight", target.config.hidden_size) for i in range(num_fuse_norms)),
        input_norm=norm("input_norm.weight", fused) if has_norm(files, "norm_before_fc", "input_norm.weight") else None,
        embedding_norm=norm("layer.input_layernorm.weight"),
        feature_norm=norm("layer.hidden_norm.weight"),
        output_norm=norm("norm.weight"),
        output=output,
    )
    layer = HeadLayer(config, layer_weights(files, config, 2 * size), matrices)
    files.drop("layer.self_attn.rotary_emb.inv_freq")
    files.check_empty(KINDS["eagle3"])
    return Eagle3Head(layer, weights, vocabulary, options)


def eagle_layer(files: HeadFiles, target: ModelConfig) -> ModelConfig:
    """Of an EAGLE-1/2 head's layer. Raises PacelineError for a head that its config and shapes show not to fit."""
    config = _layer_config(files, _inner(files.config), target)
    check_hidden(files, "hidden_size", config.hidden_size, target.hidden_size)
    if "layer.input_layernorm.weight" in files.tensors:
        raise PacelineError(f"{files.where}: an EAGLE-1/2 head has no input_layernorm in its first layer")
    _check_vocabulary(files, config, target.vocab_size)
    if "lm_head.weight" in files.tensors:
        check_vocabulary(files, "lm_head.weight", files.rows("lm_head.weight"), target.vocab_size)
    return config


def eagle3_layer(
    files: HeadFiles, target: ModelConfig, aux_layers: Sequence[int] | None = None
) -> tuple[ModelConfig, Eagle3Options]:
    """Of an EAGLE-3 head's layer, and what no weight tells. Raises PacelineError as `eagle_layer` does."""
    raw = files.config
    own = own_settings(raw, files.where) or {}
    is_speculators = "speculators_model_type" in raw
    if is_speculators and raw["speculators_model_type"] != "eagle3":
        raise PacelineError(
            f"{files.where}: speculators_model_type is {shown(raw['speculators_model_type'])}, not 'eagle3'"
        )
    described = raw.get("transformer_layer_config") if is_speculators else _inner(raw)
    if not isinstance(described, Mapping):
        raise PacelineError(f"{files.where}: config.json has no transformer_layer_config")
    config = _layer_config(files, described, target)
    size = target.hidden_size
    check_hidden(files, "target_hidden_size", raw.get("target_hidden_size") or size, size)
    _check_vocabulary(files, config, target.vocab_size)
    options = Eagle3Options(
        aux_layers=_aux_layers(files, target.num_layers, aux_layers or own.get("aux_hidden_layers")),
        norm_before_residual=norm_before_residual(files, is_speculators),
        norm_output=norm_output(files, is_speculators),
    )
    fused = len(options.aux_layers) * size
    width = last_dimension(files.tensors["fc.weight"].shape) if "fc.weight" in files.tensors else fused
    if width != fused:
        raise PacelineError(
            f"{files.where}: fc.weight reads {width} values, {len(options.aux_layers)} hidden states of the target "
            f"make {len(options.aux_layers)} × {size}",
            hint="the head was trained for another target, or on other layers",
        )
    _check_output(files, config, target, own.get("output_layer") == "target")
    return config, options


def _check_output(files: HeadFiles, config: ModelConfig, target: ModelConfig, shared: bool) -> None:
    """`shared`: the head says that its output rows are the target's own."""
    rows, named = files.rows("lm_head.weight"), files.rows("d2t")
    if not rows:
        if named and not shared:
            raise PacelineError(f"{files.where}: there is d2t for {named} draft tokens, but no lm_head.weight")
        check_hidden(files, "there is no lm_head.weight, and hidden_size", config.hidden_size, target.hidden_size)
    elif "d2t" not in files.tensors:
        if rows < target.vocab_size:
            raise unnamed_rows(files, "lm_head.weight", rows, target.vocab_size, "d2t")
    elif named != rows:
        raise PacelineError(f"{files.where}: d2t names {named} draft tokens, lm_head.weight has {rows} rows")


def _check_vocabulary(files: HeadFiles, config: ModelConfig, vocab_size: int) -> None:
    """By what the tensors say of the target's vocabulary; by the config where they say nothing."""
    known = next((name for name in VOCABULARY_ROWS if name in files.tensors), None)
    if known is None:
        check_vocabulary(files, "vocab_size", config.vocab_size, vocab_size)
    else:
        check_vocabulary(files, known, files.rows(known), vocab_size)


def _inner(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """vLLM's own EAGLE configs wrap the layer's in `model`."""
    inner = raw.get("model")
    return inner if isinstance(inner, Mapping) else raw


def _layer_config(files: HeadFiles, raw: Mapping[str, Any], target: ModelConfig) -> ModelConfig:
    if not raw.get("model_type"):
        raise PacelineError(f"{files.where}: config.json does not describe the head's layer: it has no model_type")
    types = raw.get("layer_types")
    own = types if isinstance(types, list) and len(types) == 1 else None  # else it lists the target's layers
    with described_by(Path(files.where) / "config.json"), _beside(target, raw):
        config = config_from_hf({**raw, "num_hidden_layers": 1, "layer_types": own})
    if raw.get("num_hidden_layers", 1) != 1:
        raise PacelineError(f"{files.where}: the head has {raw['num_hidden_layers']} layers, 1 is supported")
    if config.sandwich_norms:
        raise PacelineError(
            f"{files.where}: the head's layer is of model type {shown(raw['model_type'])}",
            hint="layers of llama, mistral, qwen2 and qwen3 are supported, on whatever target",
        )
    return config


@contextmanager
def _beside(target: ModelConfig, raw: Mapping[str, Any]) -> Iterator[None]:
    """Where a head's width does not go with its number of heads, an error names the target's as well."""
    size, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    try:
        yield
    except PacelineError as error:
        if type(size) is not int or type(heads) is not int or heads < 1 or size % heads == 0:
            raise
        raise PacelineError(
            f"hidden_size {size} is no multiple of its {heads} attention heads; the target's hidden size is "
            f"{target.hidden_size}, with {target.num_heads} heads",
            hint="the head was trained for another target, or its config.json is wrong",
        ) from error


def layer_weights(files: HeadFiles, config: ModelConfig, attention_width: int) -> dict[str, torch.Tensor]:
    """Take the layer's tensors; `attention_width`: of what attention reads. Raises PacelineError for what is amiss."""
    size, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "self_attn.q_proj": (q_width, attention_width),
        "self_attn.k_proj": (kv_width, attention_width),
        "self_attn.v_proj": (kv_width, attention_width),
        "self_attn.o_proj": (size, q_width),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    weights = {f"{name}.weight": files.take(f"layer.{name}.weight", *shape) for name, shape in shapes.items()}
    weights["post_attention_layernorm.weight"] = files.take("layer.post_attention_layernorm.weight", size)
    optional = {f"{name}.bias": shape[:1] for name, shape in shapes.items()}
    if (
        config.qk_norm and "layer.self_attn.q_norm.weight" in files.tensors
    ):  # not every head on Qwen 3 took its norms over
        norms = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
        weights |= {name: files.take(f"layer.{name}", config.head_dim) for name in norms}
    for name, shape in optional.items():
        tensor = files.find(f"layer.{name}", *shape)
        if tensor is not None:
            weights[name] = tensor
    return weights


def _embedding(files: HeadFiles, target: Decoder, size: int, matrices: HeadMatrices) -> torch.Tensor:
    """The head's own, or the target's where it has none; an exact copy of the target's is not held twice."""
    own = files.find("embed_tokens.weight", files.rows("embed_tokens.weight"), size)
    if own is None:
        check_hidden(files, "there is no embed_tokens.weight, and hidden_size", size, target.config.hidden_size)
        return target.embedding
    same = not is_packed(target.embedding) and torch.equal(own.to(target.device, target.dtype), target.embedding)
    return target.embedding if same else matrices.numbers(own)


def _eagle3_output(
    files: HeadFiles, target: Decoder, size: int, matrices: HeadMatrices
) -> tuple[DraftVocabulary, AnyLinear]:
    """Without rows of its own, the head reads the target's."""
    rows = files.rows("lm_head.weight")
    d2t, t2d = files.find("d2t", files.rows("d2t")), files.find("t2d", files.rows("t2d"))
    whole = DraftVocabulary(target.config.vocab_size)
    vocabulary = whole if d2t is None else _draft_vocabulary(files, d2t, t2d, target)
    if not rows:
        return vocabulary, matrices.target_output(target, vocabulary.ids)
    return vocabulary, matrices.linear(files.take("lm_head.weight", rows, size), finely=True)


def _draft_vocabulary(
    files: HeadFiles, d2t: torch.Tensor, t2d: torch.Tensor | None, target: Decoder
) -> DraftVocabulary:
    vocab_size, rows = target.config.vocab_size, len(d2t)
    ids = checked_ids(files, "d2t", torch.arange(rows) + d2t, vocab_size).long()
    if t2d is not None and not torch.equal(t2d.nonzero().flatten(), ids.sort().values):
        raise PacelineError(f"{files.where}: d2t and t2d name different target tokens", hint="fetch the file again")
    return DraftVocabulary(vocab_size, ids.to(target.device))


def _aux_layers(files: HeadFiles, num_layers: int, chosen: Sequence[int] | None) -> tuple[int, ...]:
    """Whose outputs are fused. A list at the top of config.json counts a layer's *input* (so do EAGLE's code, vLLM and
    speculators), one in `eagle_config` its output (SpecForge, SGLang)."""
    inputs, nested = files.config.get(_AUX_KEY), files.config.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise PacelineError(f"{files.where}: config.json holds eagle_config {shown(nested)}, which is no object")
    for listed in (inputs, nested.get(_AUX_KEY)):
        if listed is not None and not (isinstance(listed, list) and all(type(i) is int for i in listed)):
            raise PacelineError(f"{files.where}: {_AUX_KEY} is {shown(listed)}, which is no list of layers")
    if nested.get("use_aux_hidden_state") is False:
        raise PacelineError(f"{files.where}: use_aux_hidden_state is false: the head reads the last hidden state alone")
    if chosen is not None:
        layers = tuple(chosen)
    elif inputs is None and nested.get(_AUX_KEY) is not None:
        layers = tuple(nested[_AUX_KEY])
    else:
        layers = tuple(i - 1 for i in inputs or (2, num_layers // 2, num_layers - 3))
    strange = next((i for i in layers if not 0 <= i < num_layers), None)
    if strange is not None or not layers:
        raise PacelineError(
            f"{files.where} reads the output of layer {strange}, the target has layers 0 to {num_layers - 1}",
            hint="set aux_hidden_layers to the layers whose outputs the head was trained on",
        )
    return layers
