"""`paceline tune layer-skip`: the search finds what is fast, and goes on where it stopped."""

import json
import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from drafters import head_files

from paceline.cli.layer_skip_search import Skips, Trial, Workload, search
from paceline.cli.main import main
from paceline.cli.tree_tuning import acceptance, expected
from paceline.cli.tree_tuning import measure as measure_tree
from paceline.cli.tuning import Log, read_prompts
from paceline.core.params import SamplingParams
from paceline.core.tree_shapes import StaticTree
from paceline.decode import decode
from paceline.drafters.base import create_drafter
from paceline.drafters.config import SpeculativeConfig
from paceline.drafters.layer_skip import default_skips
from paceline.drafters.none import NoDrafter
from paceline.errors import PacelineError
from paceline.models.decoder import Segment
from paceline.models.head_checkpoint import load_medusa
from paceline.models.load import load_model

GREEDY = SamplingParams(temperature=0, max_tokens=9)
BEST = Skips((1, 3, 4), (0, 4))


def distance(skips: Skips) -> int:
    return len(set(skips.attention) ^ set(BEST.attention)) + len(set(skips.mlp) ^ set(BEST.mlp))


def measure(skips: Skips) -> Trial:
    return Trial(skips, 100.0 - distance(skips), 2.0)


def test_the_search_climbs_and_tries_no_set_twice() -> None:
    trials: list[Trial] = []
    told: list[Trial] = []
    best = search(measure, 6, 200, trials, told.append)
    assert best.skips == BEST
    assert told == trials and len(trials) == 200
    assert trials[0].skips == Skips(default_skips(6), default_skips(6))
    assert len({trial.skips for trial in trials}) == 200


def test_an_interrupted_search_goes_on_as_it_was() -> None:
    whole: list[Trial] = []
    search(measure, 6, 30, whole, lambda trial: None)
    parts: list[Trial] = whole[:11]
    search(measure, 6, 30, parts, lambda trial: None)
    assert parts == whole


def test_a_lucky_measurement_must_win_twice() -> None:
    speeds = iter([50.0, 50.0, 90.0, 40.0, 45.0])
    trials: list[Trial] = []
    best = search(lambda skips: Trial(skips, next(speeds), 2.0), 6, 3, trials, lambda trial: None)
    assert [trial.tokens_per_second for trial in trials] == [50.0, 40.0, 45.0]
    assert best is trials[0]


def test_the_log_is_read_again_even_with_a_line_cut_off(tmp_path: Path) -> None:
    path, about = tmp_path / "log", {"model": "m", "max_tokens": 4}
    log = Log(path, about, Trial.parse)
    for trial in (measure(BEST), measure(Skips((), (2,)))):
        log.keep(trial)
    with path.open("a") as file:
        file.write('{"skips": {"att')
    again = Log(path, about, Trial.parse)
    assert again.trials == log.trials
    again.keep(measure(BEST))
    assert len(Log(path, about, Trial.parse).trials) == 3
    with pytest.raises(PacelineError, match="another search: max_tokens is 4 there and 8 here"):
        Log(path, {**about, "max_tokens": 8}, Trial.parse)
    path.write_text("no json\n")
    with pytest.raises(PacelineError, match="no log of this search"):
        Log(path, about, Trial.parse)


@pytest.mark.parametrize("text", ["no json", "first\nlast without an end", '{"model": "other"}\n{"cut', "\xff"])
def test_what_is_no_log_of_the_search_is_left_as_it_is(text: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(PacelineError):
        Log(path, {"model": "m"}, Trial.parse)
    assert path.read_bytes() == text.encode("latin-1")


def test_the_first_step_is_not_timed_and_the_clock_is_the_one_given(tiny_llama_dir: Path) -> None:
    ticks = iter(range(100))
    target = load_model(str(tiny_llama_dir), dtype="fp32").decoder
    workload = Workload(target, [[1, 2, 3], [4, 5]], 9, 3, now=lambda: next(ticks))
    tokens_per_second, length = workload.run(NoDrafter())
    answers = [[t for s in decode(target, p, GREEDY, NoDrafter(), 0) for t in s.token_ids] for p in workload.prompts]
    assert tokens_per_second == sum(len(answer) - 1 for answer in answers) / 2  # a tick an answer
    assert length == 1


def test_prompts_are_read_from_text_and_json_lines(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("one\n\ntwo\nthree\n")
    assert read_prompts(text, 2) == ["one", "two"]
    lines.write_text('{"prompt": "one"}\n{"turns": ["two", "later"]}\n')
    assert read_prompts(lines, 9) == ["one", "two"]
    for bad, message in (('{"x": 1}', "line 1: no prompt"), ("[", "line 1: no prompt"), ('{"prompt": 3}', "is 3")):
        lines.write_text(bad + "\n")
        with pytest.raises(PacelineError, match=message):
            read_prompts(lines, 9)
    lines.write_text('{"prompt": "one\u2028two"}\n', encoding="utf-8")  # a line's end to `splitlines`, none to JSON
    assert read_prompts(lines, 9) == ["one\u2028two"]
    text.write_bytes(b"caf\xe9\n")
    with pytest.raises(PacelineError, match="is not text in UTF-8"):
        read_prompts(text, 9)
    text.write_text("\n")
    with pytest.raises(PacelineError, match="holds no prompts"):
        read_prompts(text, 9)


def test_the_command(tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts").write_text("hello there\nwhat now\n")
    command = ["tune", "layer-skip", "--model", str(tiny_llama_dir), "--prompts", str(tmp_path / "prompts")]
    command += ["--log", str(tmp_path / "log"), "-n", "8", "-k", "3", "--trials"]
    assert main([*command, "2"]) == 0
    first = capsys.readouterr()
    config = SpeculativeConfig.from_dict(json.loads(first.out))
    assert config.method == "layer_skip" and config.num_speculative_tokens == 3
    assert "plain decoding:" in first.err and "trial 2:" in first.err
    before = (tmp_path / "log").read_text()
    assert main([*command, "3"]) == 0
    second = capsys.readouterr()
    assert (tmp_path / "log").read_text().startswith(before)
    assert len((tmp_path / "log").read_text().splitlines()) == 4
    assert second.err.count("trial") == 3
    assert main([*command, "0"]) == 1
    assert "--trials is 0" in capsys.readouterr().err
    command[command.index("8")] = "9"
    assert main([*command, "3"]) == 1
    assert "max_tokens is 8 there and 9 here" in capsys.readouterr().err
    command[command.index("9")] = "8"
    assert main([*command, "3", "--cpu-time"]) == 1
    assert "clock is wall there and cpu here" in capsys.readouterr().err
    assert os.listdir(tmp_path)  # nothing else is touched


def test_acceptance_by_hand() -> None:
    """A level counts where the one above it was right; a chain of the same nodes is worth less."""
    rows = acceptance([(0, 1, -1), (1, 0), (-1,), (0, -1)], 4, 2)
    assert rows == [[0.5, 0.25], [1 / 3, 1 / 3], [0.0, 0.0]]
    assert expected(rows, StaticTree(((0,), (1,), (0, 1)))) == pytest.approx(1 + 0.5 + 0.25 + 0.5 / 3)


def test_ranks_are_those_of_the_heads_own_logits(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Along the answer, at each depth: Medusa's heads see the last hidden state alone, so this is done by hand."""
    model = load_model(str(tiny_llama_dir), dtype="fp64")
    head_files.medusa(model.decoder.head.weight, "original").write(tmp_path / "head")  # type: ignore[union-attr]
    drafter = create_drafter(
        SpeculativeConfig("medusa", 2, model=str(tmp_path / "head"), speculative_token_tree="chain"), model
    )
    prompt, args = [3, 1, 4, 1, 5], Namespace(max_tokens=8, depth=2, width=300)
    found = measure_tree(model.decoder, drafter, 0, prompt, args)
    text = [*prompt, *(t for s in decode(model.decoder, prompt, replace(GREEDY, max_tokens=8), NoDrafter(), 0)
                       for t in s.token_ids)]  # fmt: skip
    cache = model.decoder.new_pool(len(text)).new_sequence()
    states = model.decoder.final_hidden(model.decoder.forward([Segment(cache, text)]).hidden)
    heads = load_medusa(str(tmp_path / "head"), model.decoder)
    at, expected_ranks = len(prompt) - 1, []
    while at + 2 < len(text):
        own = []
        for depth in range(min(2, len(text) - at - 2)):
            order = heads.logits(depth, states[at - 1][None])[0].argsort(descending=True).tolist()
            own.append(order.index(text[at + 1 + depth]))
        expected_ranks.append(tuple(own))
        at += len(own) + 1
    assert found.ranks == tuple(expected_ranks) and len(expected_ranks) > 1


def test_the_tree_command(tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it prints is a configuration; an interrupted run goes on with the prompts that are left."""
    model = load_model(str(tiny_llama_dir), dtype="fp32")
    head = head_files.medusa(model.decoder.head.weight, "original").write(tmp_path / "head")  # type: ignore[union-attr]
    (tmp_path / "prompts").write_text("hello there\nwhat now\nand then\n")
    command = ["tune", "tree", "--model", str(tiny_llama_dir), "--prompts", str(tmp_path / "prompts"), "-n", "12"]
    command += ["--log", str(tmp_path / "log"), "--method", "medusa", "--head", str(head), "--depth", "2", "-k", "7"]
    command += ["--width", "200"]
    assert main(command) == 0
    whole = capsys.readouterr()
    values = json.loads(whole.out)
    assert values["num_speculative_tokens"] == len(values["speculative_token_tree"]) == 7
    assert "depth 1: accepted by rank" in whole.err and "tokens a pass expected" in whole.err
    config = SpeculativeConfig.from_dict(values)
    create_drafter(config, model)
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 4
    (tmp_path / "log").write_text("\n".join(lines[:2]) + "\n" + lines[2][:9])
    assert main(command) == 0
    again = capsys.readouterr()
    assert again.out == whole.out and "prompt 1 of 3" not in again.err and "prompt 2 of 3" in again.err
    assert (tmp_path / "log").read_text().splitlines() == lines
    assert main([*command, "-k", "129"]) == 1
    assert "--num-draft-tokens is 129" in capsys.readouterr().err
    command[command.index("medusa")] = "lookahead"
    assert main(command) == 1
    assert "--method lookahead drafts no tree of a given shape" in capsys.readouterr().err
