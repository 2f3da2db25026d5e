"""What a head's matrices are held as: never a token's business, as packed as was asked for, and near the numbers."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import tiny
import torch
from drafters import head_files
from engine.running import plain
from torch import Tensor

from paceline.core.params import SamplingParams
from paceline.decode import decode
from paceline.drafters.base import Drafter, create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.registry import METHODS
from paceline.engine.methods import _described
from paceline.errors import PacelineError
from paceline.models.eagle_checkpoint import load_eagle, load_eagle3
from paceline.models.exit_adapter import ExitAdapter, load_exit_adapter
from paceline.models.head_checkpoint import load_medusa
from paceline.models.head_layer import HeadRows
from paceline.models.head_matrices import HeadMatrices
from paceline.models.heads import FeatureHead, MedusaHeads
from paceline.models.load import LoadedModel, load_model
from paceline.models.origin import Origin
from paceline.ops.native import library
from paceline.ops.packed import PackedLinear

if (reason := library.why_not()) is not None:
    pytest.skip(f"native operators {reason}", allow_module_level=True)

VOCAB, SIZE, LAYERS = 64, 64, (0, 1, 2)
PROMPT = tiny.prompt(30, vocab_size=VOCAB)
GREEDY = SamplingParams(temperature=0, max_tokens=16)
SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=16)
DTYPES = (None, "auto", "bf16", "float32", "file", "int8", "int4")
# Kinds of heads, by method and what is special: rows of the target's output layer or of their own, all or some.
KINDS = {
    "medusa": "medusa",
    "medusa, own rows": "medusa",
    "medusa, some of the target's rows": "medusa",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "eagle3, some of the target's rows": "eagle3",
    "early_exit": "early_exit",
    "early_exit, some of the target's rows": "early_exit",
}
LOAD: dict[str, Callable[..., Any]] = {
    "medusa": load_medusa,
    "eagle": load_eagle,
    "eagle3": load_eagle3,
    "early_exit": load_exit_adapter,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, LoadedModel]:
    """One tiny model in several precisions."""
    folder = tmp_path_factory.mktemp("target")
    config = tiny.hf_config("llama", vocab_size=VOCAB, hidden_size=SIZE, num_hidden_layers=len(LAYERS))
    tiny.hf_model(config, dtype=torch.float32).save_pretrained(folder)
    return {dtype: load_model(str(folder), dtype=dtype) for dtype in ("int8", "int4", "bf16", "fp32")}


@pytest.fixture(scope="module")
def folders(models: Mapping[str, LoadedModel], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """A random head of every kind."""
    embed = torch.empty(VOCAB, SIZE, dtype=torch.float64, device="meta")
    some = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:40].sort().values
    own = {"format": 1, "target": Origin.of(models["fp32"]).to_dict(), "output_layer": "target"}
    adapter = {
        "exit.input_norm.weight": head_files.norm_weight(SIZE, 1),
        "exit.down.weight": head_files.random(96, SIZE, seed=2),
        "exit.up.weight": head_files.random(SIZE, 96, seed=3, scale=0.1),
        "exit.norm.weight": head_files.norm_weight(SIZE, 4),
    }
    medusa = head_files.medusa(embed, "original", own_output=False)
    eagle3 = head_files.eagle3_speculators(embed, size=SIZE, draft_vocab=40, layers=LAYERS, fc_norm=True)
    shared = {name: tensor for name, tensor in eagle3.tensors.items() if name != "lm_head.weight"}
    files: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
        "medusa": (medusa.config, medusa.tensors),
        "medusa, some of the target's rows": ({"paceline": own}, {**medusa.tensors, "token_map": some}),
        "eagle3": (eagle3.config, eagle3.tensors),
        "eagle3, some of the target's rows": ({**eagle3.config, "paceline": own}, shared),
        "early_exit": ({"paceline": {**own, "early_exit_layer": 2}}, adapter),
        "early_exit, some of the target's rows": (
            {"paceline": {**own, "early_exit_layer": 2}},
            {**adapter, "token_map": some},
        ),
    }
    for kind, head in (
        ("medusa, own rows", head_files.medusa(embed, "vllm", reduced=40)),
        ("eagle", head_files.eagle(embed, embed, bias=True, own_embedding=False)),
    ):
        files[kind] = (head.config, head.tensors)
    base = tmp_path_factory.mktemp("heads")
    return {kind: str(head_files.write(base / str(number), *files[kind])) for number, kind in enumerate(KINDS)}


def drafter_of(kind: str, model: LoadedModel, folders: Mapping[str, str], draft_dtype: str | None) -> Drafter:
    options: dict[str, Any] = {"draft_confidence_threshold": 0.0} if KINDS[kind] == "early_exit" else {}
    if draft_dtype is not None:
        options["draft_dtype"] = draft_dtype
    return create_drafter(SpeculativeConfig(KINDS[kind], 4, model=folders[kind], **options), model)


def linears_of(value: object) -> list[Any]:
    """Every linear layer of a head, the output last."""
    match value:
        case MedusaHeads():
            return [linear for head in value.heads for linear in (*head.blocks, head.output)]
        case ExitAdapter():
            return [value.down, value.up, value.output]
    top = getattr(value, "weights", value)
    layer = value.layer  # type: ignore[attr-defined]
    return [top.fc, layer.qkv, layer.output, layer.gate_up, layer.down, top.output]  # type: ignore[attr-defined]


def types_of(head: object) -> list[str | None]:
    """The type that each matrix is packed in, None for numbers."""
    return [linear.parts[0].type if isinstance(linear, PackedLinear) else None for linear in linears_of(head)]


def logits_of(head: MedusaHeads | ExitAdapter | FeatureHead) -> Tensor:
    """Of a few rows [n, V], in float32; the same inputs for every head of a kind."""
    hidden = {i: head_files.random(8, SIZE, seed=80 + i, scale=1.0).to(torch.bfloat16) for i in (-1, *LAYERS)}
    match head:
        case MedusaHeads():
            return head.logits(1, hidden[-1]).float()
        case ExitAdapter():
            return head.logits(hidden[-1]).float()
    features = head.fuse(hidden)
    states = head.forward([HeadRows(head.layer.new_pool(64).new_sequence(), range(8), features)])
    return head.logits(states).float()


@pytest.mark.parametrize("draft_dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["int8", "bf16", "fp32"])
def test_no_token_changes(
    precision: str, kind: str, draft_dtype: str | None, models: Mapping[str, LoadedModel], folders: Mapping[str, str]
) -> None:
    model = models[precision]
    drafter = drafter_of(kind, model, folders, draft_dtype)
    for params in (GREEDY, SEEDED):
        steps = list(decode(model.decoder, PROMPT, params, drafter, 4))
        assert [token for step in steps for token in step.token_ids] == plain(model.decoder, PROMPT, params)
        assert sum(step.num_draft_tokens for step in steps) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_are_packed_as_asked(kind: str, models: Mapping[str, LoadedModel], folders: Mapping[str, str]) -> None:
    """Beside a packed target 8 bits unless told otherwise; a matrix of 80 columns makes no groups of 32."""

    def types(precision: str, draft_dtype: str | None = None) -> list[str | None]:
        return types_of(LOAD[KINDS[kind]](folders[kind], models[precision].decoder, draft_dtype=draft_dtype))

    def expected(matrices: str, outputs: str) -> list[str | None]:
        match KINDS[kind]:
            case "medusa":
                return [matrices, outputs] * 4
            case "early_exit":
                return [matrices, matrices, outputs]
        return [matrices, matrices, matrices, matrices, "BF16", outputs]

    numbers = [None] * len(expected("", ""))
    for precision in ("int8", "int4"):  # the output layer keeps 8 bits
        for draft_dtype in (None, "auto", "int8"):
            assert types(precision, draft_dtype) == expected("Q8_0", "Q8_0")
        assert types(precision, "int4") == expected("Q4_1", "Q8_0")
    for precision in ("bf16", "fp32"):
        assert types(precision) == types(precision, "bf16") == types(precision, "float32") == numbers
        assert types(precision, "int8") == expected("Q8_0", "Q8_0")
        assert types(precision, "file") == ["BF16"] * len(numbers)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_beside_a_packed_target(
    kind: str, models: Mapping[str, LoadedModel], folders: Mapping[str, str]
) -> None:
    """A head's own matrices are; a whole output layer that is the target's is not widened, but shared."""
    decoder = models["int8"].decoder
    linears = linears_of(LOAD[KINDS[kind]](folders[kind], decoder, draft_dtype="bf16"))
    if kind in ("medusa", "eagle", "early_exit"):
        assert linears[-1] is decoder.head
        linears = [linear for linear in linears if linear is not decoder.head]
    assert linears and all(linear.weight.dtype == torch.bfloat16 for linear in linears)


@pytest.mark.parametrize("kind", KINDS)
def test_eight_bits_are_near_the_numbers(
    kind: str, models: Mapping[str, LoadedModel], folders: Mapping[str, str]
) -> None:
    """Of 32 normal numbers the largest is 2.1 σ on average: rounding them to steps of 1 / 127 of that leaves an error
    of 2.1 / 127 / √12 = 0.5 % of them, in weights and in activations, which is 0.7 % a product. Products in a row add
    theirs up at most; bf16 rounds as well. Four bits, steps of 1 / 15 of the range, leave several times as much.
    """
    products = {"medusa": 2, "early_exit": 3}.get(KINDS[kind], 6)  # one after another
    load, decoder = LOAD[KINDS[kind]], models["fp32"].decoder
    exact = logits_of(load(folders[kind], decoder))

    def error(draft_dtype: str) -> float:
        logits = logits_of(load(folders[kind], decoder, draft_dtype=draft_dtype))
        known = exact.isfinite()
        assert torch.equal(logits.isfinite(), known)
        return float((logits[known] - exact[known]).norm() / exact[known].norm())

    bf16, int8, int4 = map(error, ("bf16", "int8", "int4"))
    assert 0 < bf16 < int8 < bf16 + 0.007 * products
    assert int4 > 3 * int8


def test_a_product_is_off_by_no_more_than_its_rounding(models: Mapping[str, LoadedModel]) -> None:
    """Half a step for every weight and every activation, of max / 127 of their group of 32, beside bf16's own."""
    matrices = HeadMatrices.of(models["bf16"].decoder, "int8")
    weight = head_files.random(48, 96, seed=1).to(torch.bfloat16)
    x = head_files.random(5, 96, seed=2, scale=1.0).to(torch.bfloat16)
    bias = head_files.random(48, seed=3)
    exact = x.double() @ weight.double().T + bias.to(torch.bfloat16).double()
    half = {name: each.double().abs().view(len(each), 3, 32).amax(-1) / 254 for name, each in (("w", weight), ("x", x))}
    wide = {name: each.repeat_interleave(32, dim=1) for name, each in half.items()}
    bound = x.double().abs() @ (wide["w"] * 1.1).T + (wide["x"] * 1.1) @ (weight.double().abs() + wide["w"]).T
    error = (matrices.linear(weight, bias)(x).double() - exact).abs()
    assert bool((error <= bound + exact.abs() / 256).all())
    assert float(error.max()) > 0


def test_the_option_is_refused_where_it_says_nothing(
    models: Mapping[str, LoadedModel], folders: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models["bf16"]
    for name, method in METHODS.items():
        config = SpeculativeConfig(name, draft_dtype="int8")
        if "draft_dtype" not in method.options:
            with pytest.raises(PacelineError, match=f"method '{name}' does not take draft_dtype"):
                create_drafter(config, model)
    takers = {name for name, method in METHODS.items() if "draft_dtype" in method.options}
    assert takers == {"draft_model", "medusa", "eagle", "eagle3", "early_exit", "composite", "auto"}
    with pytest.raises(PacelineError, match="unknown draft_dtype 'int3'") as caught:
        SpeculativeConfig("eagle3", draft_dtype="int3")
    assert caught.value.hint == "known: auto, bf16, fp32, fp64, file, int8, int4"
    with pytest.raises(PacelineError, match="draft_dtype is int8, and early_exit has no adapter"):
        create_drafter(SpeculativeConfig("early_exit", draft_dtype="int8"), model)
    elsewhere = copy.copy(model.decoder)
    elsewhere.device = torch.device("cuda")
    with pytest.raises(PacelineError, match="int8 runs on the CPU alone"):
        HeadMatrices.of(elsewhere, "int8")
    monkeypatch.setenv(library.VARIABLE, "torch")
    with pytest.raises(PacelineError, match="int8 needs native operators"):
        load_eagle(folders["eagle"], model.decoder, "int8")


def test_costs_are_kept_for_each_precision_by_itself(
    models: Mapping[str, LoadedModel], folders: Mapping[str, str]
) -> None:
    def described(**options: Any) -> str:
        config = SpeculativeConfig.from_dict(
            {"method": "auto", "methods": ["eagle"], "model": folders["eagle"]} | options
        )
        return _described(create_drafter(config, models["bf16"]), config)  # type: ignore[arg-type]

    assert len({described(), described(draft_dtype="bf16"), described(draft_dtype="int8")}) == 3
