"""Training data: the target's own answers, which tokens are its own, and nothing that an evaluation asks."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from paceline.cli.main import main
from paceline.decode import decode
from paceline.drafters.none import NoDrafter
from paceline.errors import PacelineError
from paceline.models.load import load_model
from paceline.models.tokenizer import Tokenizer
from paceline.train.conversation import encode_conversation, user_turn
from paceline.train.dataset import Sample, batches, hold_aside, read_samples
from paceline.train.generate import Report, Sampling
from paceline.train.prompts import Exclusion, Prompt, read_prompts, select

TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Héllo!"},
    {"role": "user", "content": "More"},
    {"role": "assistant", "content": "a <b> c"},
]
REWRITES = (  # only the last answer keeps its reasoning
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last else m['content'].split('>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir: Path) -> Tokenizer:
    return Tokenizer.from_hf_folder(tiny_llama_dir)


def with_template(folder: Path, template: str) -> Tokenizer:
    hf = AutoTokenizer.from_pretrained(folder)
    hf.chat_template = template
    return Tokenizer.from_transformers(hf, "tiny")


def test_the_assistants_tokens_are_found_without_markers(tokenizer: Tokenizer) -> None:
    """By hand: ChatML, one token a byte, two specials."""
    end = tokenizer.encode("<|im_end|>", add_special=False)
    encoded = encode_conversation(tokenizer, TALK, frozenset(end))
    said = [tokenizer.decode(encoded.token_ids[a:b], skip_special_tokens=False) for a, b in encoded.assistant]
    assert said == ["Héllo!<|im_end|>", "a <b> c<|im_end|>"]
    assert [b - a for a, b in encoded.assistant] == [len("Héllo!".encode()) + 1, len("a <b> c") + 1]
    text = tokenizer.render_chat(TALK, add_generation_prompt=False)
    assert list(encoded.token_ids) == tokenizer.encode(text, add_special=False)


def test_an_answer_that_the_template_rewrites_is_not_the_assistants(tiny_llama_dir: Path) -> None:
    tokenizer = with_template(tiny_llama_dir, REWRITES)
    first = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>x</think>yes"}]
    encoded = encode_conversation(tokenizer, [*first, *TALK[2:]])
    assert [tokenizer.decode(encoded.token_ids[a:b]) for a, b in encoded.assistant] == ["a <b> c\n"]


def test_a_mask_that_would_be_empty_is_an_error(tokenizer: Tokenizer, tiny_llama_dir: Path) -> None:
    with pytest.raises(PacelineError, match="no token of the conversation is the assistant's"):
        encode_conversation(tokenizer, TALK[:1])
    other = with_template(tiny_llama_dir, "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
                          "{% if add_generation_prompt %}(answer){% endif %}")  # fmt: skip
    with pytest.raises(PacelineError, match="no token of the conversation is the assistant's"):
        encode_conversation(other, TALK[:2])


def test_a_users_turn_is_opened_as_the_template_opens_one(tokenizer: Tokenizer, tiny_llama_dir: Path) -> None:
    turn = user_turn(tokenizer)
    assert tokenizer.decode(turn.prompt_ids, skip_special_tokens=False) == "<|im_start|>user\n"
    assert turn.stop_token_ids == tuple(tokenizer.encode("<|im_end|>", add_special=False)) and turn.stop == ()
    plain = user_turn(
        with_template(tiny_llama_dir, "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}")
    )
    assert plain.stop == ("[/INST]",) and plain.stop_token_ids == ()
    with pytest.raises(PacelineError, match="does not write the user's text once"):
        user_turn(with_template(tiny_llama_dir, "{{ messages[0].content | upper | lower }}"))


def test_prompts_of_an_evaluation_are_left_out_by_id_and_by_text(tmp_path: Path) -> None:
    evaluation = [Prompt("e/1", ("What is  2+2?",)), Prompt("e/2", ("A", "Then what follows?"))]
    prompts = [
        Prompt("t/1", ("What is 2 + 2",)),
        Prompt("e/2", ("something else",)),
        Prompt("t/2", ("fine", "then: WHAT follows")),
        Prompt("t/3", ("kept",)),
        Prompt("t/4", ("Kept!",)),
        Prompt("t/5", (" ",)),
        Prompt("t/6", ("kept as well",)),
    ]
    kept, left = select(prompts, Exclusion.of(evaluation))
    assert [prompt.id for prompt in kept] == ["t/3", "t/6"]
    assert left == {"excluded by text": 2, "excluded by id": 1, "repeated": 1, "empty": 1}
    file = tmp_path / "p.jsonl"
    file.write_text('{"turns": ["a", "b"], "id": "x", "category": "c"}\n\n{"prompt": "d"}\n')
    assert read_prompts(file) == [Prompt("x", ("a", "b"), "c"), Prompt("p/3", ("d",))]
    file.write_text('{"turns": "a"}\n')
    with pytest.raises(PacelineError, match="line 1: turns is 'a'"):
        read_prompts(file)


def generated(folder: Path, out: Path, *options: str) -> int:
    return main(["data", "generate", "--model", str(folder), "--out", str(out), "--max-tokens", "12", *options])


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    rows = [{"id": f"p/{i}", "turns": [f"say {i}", "go on"][: 1 + i % 2]} for i in range(6)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_what_is_generated_is_what_plain_decoding_says(
    tiny_llama_dir: Path, prompts_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each span, decoded again alone after the tokens before it, with its own seed and temperature."""
    out = tmp_path / "out.jsonl"
    assert generated(tiny_llama_dir, out, "--prompts", str(prompts_file), "--temperature", "0", "1") == 0
    summary = json.loads(capsys.readouterr().out)
    model = load_model(str(tiny_llama_dir))
    samples = read_samples(out, 512).kept
    assert summary["samples"] == len(samples)
    sampling, turns = Sampling(12, (0.0, 1.0)), Counter[str]()
    for sample in samples:  # bytes that are no text are other tokens in the next turn: a sample of its own
        for start, stop in sample.assistant:
            params = sampling.params(int(sample.id[2:]), sample.id, turns[sample.id])
            steps = decode(model.decoder, sample.token_ids[:start], params, NoDrafter(), 0)
            assert tuple(token for step in steps for token in step.token_ids) == sample.token_ids[start:stop]
            turns[sample.id] += 1
    assert turns == {f"p/{i}": 1 + i % 2 for i in range(6)}


def test_an_interrupted_run_goes_on_and_writes_what_it_would_have(
    tiny_llama_dir: Path,
    prompts_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    options = ("--prompts", str(prompts_file), "--batch", "2")
    assert generated(tiny_llama_dir, whole, *options) == 0
    assert generated(tiny_llama_dir, parts, *options, "--limit", "3") == 0
    torn = parts.read_bytes()
    parts.write_bytes(torn[:-30])  # in the middle of a line
    told: list[int] = []

    def meter(what: str, total: int) -> Report:
        return lambda done, tokens: told.append(done)

    monkeypatch.setattr("paceline.cli.data_generation.Meter", meter)
    assert generated(tiny_llama_dir, parts, *options) == 0
    assert told[0] == 2 and told[-1] == 6  # what was there counts
    assert sorted(whole.read_text().splitlines()) == sorted(parts.read_text().splitlines())
    capsys.readouterr()
    assert generated(tiny_llama_dir, parts, *options, "--seed", "1") == 1
    assert "was begun otherwise: seed is 0 there and 1 here" in capsys.readouterr().err


def test_a_model_writes_its_own_prompts(
    tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random model ends a turn by chance, so most attempts come to nothing: the same are taken after a restart."""
    monkeypatch.setattr("paceline.train.generate.TRIES", 10_000)
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    options = ("--self-prompt", "2", "--max-tokens", "24", "--batch", "64")
    assert generated(tiny_llama_dir, first, *options) == 0
    prompts = [json.loads(line) for line in (tmp_path / "a.prompts.jsonl").read_text().splitlines()[1:]]
    (tmp_path / "b.prompts.jsonl").write_text(
        "\n".join((tmp_path / "a.prompts.jsonl").read_text().splitlines()[: 1 + len(prompts) // 2]) + "\n"
    )
    assert generated(tiny_llama_dir, second, *options) == 0
    assert sorted(first.read_text().splitlines()) == sorted(second.read_text().splitlines())
    assert len(read_samples(first, 512).kept) == 2
    monkeypatch.setattr("paceline.train.generate.TRIES", 1)
    assert generated(tiny_llama_dir, tmp_path / "c.jsonl", "--self-prompt", "3", "--max-tokens", "1") == 1
    assert "were of use, 3 were asked for" in capsys.readouterr().err


def test_useless_samples_are_counted_and_skipped(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "samples": [{"token_ids": [1, 2, 3, 4], "assistant": [[2, 4]]}]},
        {"id": "b", "samples": [{"token_ids": [], "assistant": []}, {"token_ids": [1, 2, 3], "assistant": []}]},
        {"id": "d", "samples": [{"token_ids": list(range(9)), "assistant": [[1, 9]]}]},
    ]
    file = tmp_path / "s.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [{"paceline": "samples"}, *rows]))
    samples = read_samples(file, 8)
    assert [sample.id for sample in samples.kept] == ["a"]
    assert samples.kept[0].mask() == [False, False, True, True]
    assert samples.skipped == {"empty": 1, "no answer": 1, "too long": 1}
    file.write_text('{"paceline": "samples"}\n{"id": "a", "samples": [{"token_ids": [1, 2], "assistant": [[1, 3]]}]}\n')
    with pytest.raises(PacelineError, match="line 2: no sample"):
        read_samples(file, 8)


def test_packs_hold_every_sample_once_an_epoch_within_their_size() -> None:
    samples = [Sample(str(i), tuple(range(3 + i % 7)), ((1, 3),)) for i in range(40)]
    packs = batches(samples, 20, seed=3)
    seen: list[str] = []
    for pack in packs:
        assert sum(len(sample.token_ids) for sample in pack) <= 20
        seen += [sample.id for sample in pack]
        if len(seen) == 80:
            break
    assert sorted(seen[:40], key=int) == sorted(seen[40:], key=int) == [str(i) for i in range(40)]
    assert seen[:40] != seen[40:]
    train, aside = hold_aside(samples, 5)
    again = hold_aside(samples[3:], 5)
    assert len(aside) == 5 and len(train) == 35 and {s.id for s in again[1]} >= {s.id for s in aside} - {"0", "1", "2"}


def test_a_fingerprint_is_of_the_weights_as_they_are_stored(tiny_llama_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from paceline.models.adopt import adopt
    from paceline.models.origin import Origin

    known = {Origin.of(load_model(str(tiny_llama_dir), dtype=dtype)) for dtype in ("bf16", "fp32", "fp64")}
    assert len(known) == 1
    hf = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32)
    (origin,) = known
    assert adopt(hf).source.fingerprint() == origin.weights
    with torch.no_grad():
        hf.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    assert adopt(hf).source.fingerprint() != origin.weights


def test_a_prompt_may_hold_what_other_programs_break_lines_at(tmp_path: Path) -> None:
    text = "one\u2028two\x85three"
    (tmp_path / "p.jsonl").write_text(json.dumps({"turns": [text]}, ensure_ascii=False) + "\n", encoding="utf-8")
    (prompt,) = read_prompts(tmp_path / "p.jsonl")
    assert prompt.turns == (text,)
