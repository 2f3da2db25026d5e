"""Draft heads as other engines read them. Every flag that they default differently is written out.

What a format cannot say is refused: a head that is read otherwise than it was trained drafts badly, and silently.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.export.tensors import Tensors, eagle3_tensors, eagle_tensors, medusa_tensors
from paceline.models.eagle_checkpoint import load_eagle, load_eagle3
from paceline.models.head_checkpoint import load_medusa
from paceline.models.head_layer import HeadLayer
from paceline.models.heads import Eagle3Head
from paceline.models.hf_folder import ARCHITECTURES, describe
from paceline.models.home import write_json
from paceline.models.load import LoadedModel
from paceline.models.origin import check_origin
from paceline.ops.packed import unpacked

SPECULATORS_VERSION = "0.3.0"  # whose keys these are


@dataclass(frozen=True, slots=True)
class Exported:
    """What a folder is to hold; `file` ends in .safetensors, or in .pt or .bin for a pickled one."""

    config: dict[str, Any]
    tensors: Tensors
    file: str = "model.safetensors"

    def write(self, folder: Path) -> None:
        from safetensors.torch import save_file

        stored = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in self.tensors.items()}
        partial = folder / f"{self.file}.partial"
        if self.file.endswith(".safetensors"):
            save_file(stored, partial, metadata={"format": "pt"})
        else:
            torch.save(stored, partial)
        partial.replace(folder / self.file)
        write_json(folder / "config.json", self.config)


def export_head(head: str, target: LoadedModel, form: str, num_speculative_tokens: int) -> Exported:
    """A head's folder or Hub id in another form. Raises PacelineError for what the form cannot say."""
    unpacked(target.decoder.head)  # what it shares with the head is written out, as numbers
    check_origin(head, target)
    return FORMS[form](head, target, num_speculative_tokens)


def _eagle(head: str, target: LoadedModel, count: int) -> Exported:
    loaded = load_eagle(head, target.decoder)
    config = {**_layer(loaded.layer), "bias": loaded.fc.bias is not None}
    return Exported({**config, "architectures": ["LlamaForCausalLM"]}, eagle_tensors(loaded))


def _eagle3(head: str, target: LoadedModel, count: int) -> Exported:
    loaded = load_eagle3(head, target.decoder)
    options, weights = loaded.options, loaded.weights
    for name, there in (
        ("norm_before_residual", options.norm_before_residual),
        ("norm_output", options.norm_output),
        ("fc_norm", bool(weights.fuse_norms)),
        ("norm_before_fc", weights.input_norm is not None),
    ):
        if there:
            raise PacelineError(f"EAGLE's own code knows no {name}, which {head} has", hint="--format speculators")
    config = {
        **_layer(loaded.layer),
        **_eagle3_facts(loaded, target),
        "architectures": ["LlamaForCausalLMEagle3"],
        "norm_before_residual": False,
        "norm_output": False,
        "norm_before_fc": False,
        "fc_norm": False,
    }
    own_embedding = weights.embedding is not target.decoder.embedding
    return Exported(config, eagle3_tensors(loaded, "midlayer.", own_embedding))


def _speculators(head: str, target: LoadedModel, count: int) -> Exported:
    loaded = load_eagle3(head, target.decoder)
    weights, family = loaded.weights, target.config.family
    config = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": count,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target.name, "architectures": [ARCHITECTURES.get(family, family)]},
        },
        "transformer_layer_config": _layer(loaded.layer),
        **_eagle3_facts(loaded, target),
        "norm_before_residual": loaded.options.norm_before_residual,
        "norm_output": loaded.options.norm_output,
        "norm_before_fc": weights.input_norm is not None,
        "fc_norm": bool(weights.fuse_norms),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }
    return Exported(config, eagle3_tensors(loaded, "layers.0.", with_embedding=True))


def _eagle3_facts(head: Eagle3Head, target: LoadedModel) -> dict[str, Any]:
    return {
        "draft_vocab_size": len(unpacked(head.weights.output).weight),
        "target_hidden_size": target.config.hidden_size,
        # by their inputs: of layer k reads what layer k − 1 put out
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in head.options.aux_layers],
    }


def _layer(layer: HeadLayer) -> dict[str, Any]:
    described = describe(layer.config, layer.dtype)
    return {**described, "rope_theta": layer.config.rope.theta}


def _medusa(head: str, target: LoadedModel, count: int) -> Exported:
    heads = load_medusa(head, target.decoder)
    if heads.vocabulary.ids is not None:
        raise PacelineError(
            f"Medusa's own format has no reduced vocabulary, and {head} has", hint="--format medusa-vllm"
        )
    config = {
        "medusa_num_heads": len(heads.heads),
        "medusa_num_layers": len(heads.heads[0].blocks),
        "base_model_name_or_path": target.name,
        "version": "2",
    }
    return Exported(
        config, medusa_tensors(heads, "{head}.{layer}.linear", "{head}.{layer}.weight"), "medusa_lm_head.pt"
    )


def _medusa_vllm(head: str, target: LoadedModel, count: int) -> Exported:
    heads = load_medusa(head, target.decoder)
    tensors = medusa_tensors(heads, "blocks.{head}.layers.{layer}", "lm_heads.{head}.weight")
    if heads.vocabulary.ids is not None:
        tensors["token_map"] = heads.vocabulary.ids
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": target.config.hidden_size,
        "vocab_size": target.config.vocab_size,
        "truncated_vocab_size": len(unpacked(heads.heads[0].output).weight),
        "num_heads": len(heads.heads),
        "num_hidden_layers": len(heads.heads[0].blocks),
        "medusa_fc_bias": heads.heads[0].blocks[0].bias is not None,
        "original_lm_head": False,
    }
    return Exported(config, tensors)


FORMS: Mapping[str, Callable[[str, LoadedModel, int], Exported]] = {
    "eagle": _eagle,
    "eagle3": _eagle3,
    "speculators": _speculators,
    "medusa": _medusa,
    "medusa-vllm": _medusa_vllm,
}
"""By the name that a user gives."""
