"""`paceline chat`: on a pipe, on a terminal, and under Ctrl-C."""

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from paceline.cli.main import main
from paceline.drafters.config import SpeculativeConfig
from paceline.engine.llm import LLM
from paceline.models.decoder import Decoder
from paceline.models.load import load_model

CONTEXT = 512  # positions of the tiny model
FIRST, SECOND = "one two three one two three " * 4, "and then?"
START = (
    "import os, signal, sys\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background shell has it ignored
    "if os.isatty(0): os.open(os.ttyname(0), os.O_RDWR)\n"  # a new session takes it as its terminal
    "from paceline.cli.main import main\n"
    "sys.exit(main())"
)


@pytest.fixture
def chat(
    tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, list[str]]]:
    """Pipes lines into `paceline chat --model TINY …`; status, stdout, and the lines of stderr after the banner."""

    def run(lines: str, *arguments: str, model: Path = tiny_llama_dir) -> tuple[int, str, list[str]]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode("utf-8", "surrogateescape"))))
        status = main(["chat", "--model", str(model), "--max-tokens", "20", *arguments])
        output = capsys.readouterr()
        return status, output.out, output.err.splitlines()[1:]

    return run


def answer_of(model: Path, *messages: str, system: str | None = None) -> str:
    """The answer to a conversation, by the library, cold and without speculation; 20 tokens, greedy."""
    from paceline import SamplingParams

    roles = ("user", "assistant")
    listed = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    if system is not None:
        listed.insert(0, {"role": "system", "content": system})
    (output,) = LLM(str(model)).chat(listed, SamplingParams(temperature=0, max_tokens=20))
    return output.outputs[0].text


def test_each_line_is_a_turn_and_stdout_has_answers_alone(chat: Callable[..., Any], tiny_llama_dir: Path) -> None:
    status, out, err = chat(f"{FIRST}\n\n  \n{SECOND}\n")
    first = answer_of(tiny_llama_dir, FIRST.strip())
    second = answer_of(tiny_llama_dir, FIRST.strip(), first, SECOND)
    assert status == 0
    assert out == f"{first}\n{second}\n"
    assert set(err) <= {"cut at --max-tokens 20"}


def test_the_last_line_needs_no_end(chat: Callable[..., Any]) -> None:
    assert chat("hello")[1] == chat("hello\n")[1] != ""


def test_the_second_turn_finds_the_first_in_the_cache(chat: Callable[..., Any], tiny_llama_dir: Path) -> None:
    _, _, err = chat(f"{FIRST}\n/stats\n{SECOND}\n/stats\n", "--method", "ngram", "--ignore-eos")
    last, whole, last_2, whole_2 = (line for line in err if line.startswith(("last", "whole")))
    number = r"\d+(?:\.\d+)?"
    form = re.compile(
        rf"20 tokens · {number} tokens/s · "
        rf"(?:acceptance length {number} · acceptance rate \d+ % \(\d+ of \d+\)|nothing drafted) · "
        r"\d+ pass(?:es)? · (\d+) of (\d+) prompt tokens cached"
    )
    cold, warm = form.search(last), form.search(last_2)
    assert cold and warm
    assert last.startswith("last answer: ") and whole.startswith("whole chat: 1 answer · 20 tokens · ")
    tokenizer = load_model(str(tiny_llama_dir)).tokenizer
    assert tokenizer is not None
    prompt = len(tokenizer.apply_chat_template([{"role": "user", "content": FIRST.strip()}]))
    assert (cold[1], cold[2]) == ("0", str(prompt))
    # The first prompt, and its answer but the newest token, in whole blocks of 64. A byte-level tokenizer writes the
    # answer as it was generated, as far as its bytes are characters: the prompt's blocks at least.
    assert int(warm[1]) >= prompt // 64 * 64 > 0
    assert int(warm[2]) > prompt + 20
    assert whole_2.startswith("whole chat: 2 answers · 40 tokens · ")
    assert whole_2.endswith(f"{warm[1]} of {prompt + int(warm[2])} prompt tokens cached")


def test_statistics_of_plain_decoding_say_nothing_of_speculation(chat: Callable[..., Any]) -> None:
    _, _, err = chat("/stats\nhello\n/stats\n", "--method", "none")
    assert err[0] == "nothing was answered yet"
    assert len(err) >= 3 and not any("accept" in line or "draft" in line for line in err)


def test_methods_are_switched_and_change_no_answer(chat: Callable[..., Any], tiny_llama_dir: Path) -> None:
    turns = [FIRST, SECOND, "more", "again"]
    common = ("--seed", "3", "--temperature", "0.8")
    plain = chat("\n".join(turns), *common, "--method", "none")[1]
    lines = (
        "\n/method suffix 6\n".join(turns[:2]) + f"\n/method draft_model\n{turns[2]}\n/stats\n/method none\n{turns[3]}"
    )
    _, out, err = chat(lines, *common, "--draft-model", str(tiny_llama_dir), "--method", "draft_model")
    assert out == plain
    told = [line for line in err if line.startswith("method: ")]
    assert told == ["method: suffix, K = 6", "method: draft_model, K = 4", "method: none"]
    # The target as its own drafter, back after a turn that it sat out.
    assert next("acceptance rate 100 %" in line for line in err if line.startswith("last answer"))


def test_a_method_that_is_switched_to_takes_the_options_of_the_command_line(
    chat: Callable[..., Any], tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SpeculativeConfig] = []
    monkeypatch.setattr(LLM, "add_method", lambda self, config: asked.append(config) or config.method)

    def switched(methods: str, *options: str) -> list[SpeculativeConfig]:
        asked.clear()
        chat("".join(f"/method {method}\n" for method in methods.split(",")), *options)
        return asked[1:]  # the first is what it begins with

    own = {"model": str(tiny_llama_dir), "draft_dtype": "bf16", "draft_vocab_size": 99}
    options = ("--draft-model", own["model"], "--draft-dtype", "bf16", "--draft-vocab-size", "99")
    expected = [{"method": "suffix"}, {"method": "draft_model", "num_speculative_tokens": 3, **own}]
    expected += [{"method": "early_exit"}, {"method": "auto", **own}]
    found = switched("suffix,draft_model 3,early_exit,auto", "--method", "draft_model", *options)
    assert found == [SpeculativeConfig.from_dict(values) for values in expected]
    expected = [{"method": "early_exit", "draft_confidence_threshold": 0.3}, {"method": "ngram"}, {"method": "auto"}]
    found = switched("early_exit,ngram,auto", "--method", "layer_skip", "--draft-confidence-threshold", "0.3")
    assert found == [SpeculativeConfig.from_dict(values) for values in expected]


@pytest.mark.parametrize(
    ("command", "error", "hint"),
    [
        ("/method ngrm", "unknown method 'ngrm'", "did you mean ngram?"),
        ("/method xyzzy", "unknown method 'xyzzy'", "none, ngram, suffix, draft_model"),
        ("/method ngram 500", "K is 500", "0 is plain decoding"),
        ("/method ngram x", "K is not a whole number", "/method NAME [K]"),
        ("/method ngram 3 4", "K is not a whole number", "/method NAME [K]"),
        ("/method none 3", "contradicts method none", "leave K out"),
        ("/method draft_model", "needs a draft model", "--draft-model"),
        ("/method suffix,ngram", "takes one method", "--method suffix,ngram"),
    ],
)
def test_a_bad_method_is_refused_and_the_chat_goes_on(
    command: str, error: str, hint: str, chat: Callable[..., Any]
) -> None:
    status, out, err = chat(f"{command}\n/method\nhello\n", "--method", "ngram")
    assert status == 0
    assert err[0].startswith("error: ") and error in err[0]
    assert err[1].startswith("hint: ") and hint in err[1]
    assert err[2] == "method: ngram, K = 4"
    assert out == chat("hello\n")[1]


def test_commands(chat: Callable[..., Any], tiny_llama_dir: Path) -> None:
    status, out, err = chat("/help\n/statz\n/xyzzy 1 2\n/quit\nhello\n")
    assert (status, out) == (0, "")
    assert [line.split()[0] for line in err[:-2]] == ["/stats", "/method", "/reset", "/system", "/help", "/quit"]
    assert err[-2:] == [
        "unknown command /statz: did you mean /stats?",
        "unknown command /xyzzy: /help lists the commands",
    ]


def test_a_line_after_a_space_is_no_command(chat: Callable[..., Any], tiny_llama_dir: Path) -> None:
    assert chat(" /quit\n")[1] == answer_of(tiny_llama_dir, "/quit") + "\n"


def test_reset_forgets_the_conversation(chat: Callable[..., Any]) -> None:
    _, out, err = chat(f"hello\n{FIRST}\n/reset\nhello\n/stats\n", "--seed", "5", "--temperature", "1")
    first = chat("hello\n", "--seed", "5", "--temperature", "1")[1]
    assert out.startswith(first) and out.endswith(first) and len(out) > 2 * len(first)
    assert "a new conversation" in err
    assert err[-2].startswith("whole chat: 1 answer") and err[-1].startswith("auto: ")


def test_the_system_message(chat: Callable[..., Any], tiny_llama_dir: Path) -> None:
    plain, brief = answer_of(tiny_llama_dir, "hello"), answer_of(tiny_llama_dir, "hello", system="Be brief.")
    assert plain != brief
    assert chat("hello\n", "--system", "Be brief.")[1] == brief + "\n"
    _, out, err = chat("/system Be brief.\nhello\n/reset\n/system\nhello\n")
    assert out == f"{brief}\n{plain}\n"
    assert [line for line in err if "system" in line] == ["the system message is set", "there is no system message"]


def test_each_turn_has_its_own_noise(chat: Callable[..., Any]) -> None:
    """The same message as the only one, under the seeds of turn 1 and turn 2."""
    common = ("--temperature", "1", "--ignore-eos")
    outs = [chat("hello\n", *common, "--seed", seed)[1] for seed in ("7", "7", "8", str(2**64 - 1))]
    assert outs[0] == outs[1] != outs[2]
    assert chat("hello\nhello\n", *common, "--seed", str(2**64 - 1))[1].startswith(outs[3])


def test_a_conversation_beyond_the_context(chat: Callable[..., Any]) -> None:
    status, out, err = chat(f"{'a' * 600}\nhello\n")
    assert status == 0
    assert re.fullmatch(rf"error: the conversation has 6\d\d tokens .* the context holds {CONTEXT}, .*", err[0])
    assert err[1] == "hint: /reset begins a new conversation"
    assert out == chat("hello\n")[1]  # the long message is no part of it


def test_an_answer_that_fills_the_context(chat: Callable[..., Any]) -> None:
    _, _, err = chat("hello\nmore\n/reset\nhello\n", "--max-context", "64", "--max-tokens", "500", "--ignore-eos")
    assert err[0] == "the context of 64 tokens is full: /reset begins a new conversation"
    assert err[1].startswith("error: the conversation has ")
    assert err[-1] == err[0]


def test_a_turn_that_fails_is_no_part_of_the_conversation(
    chat: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = chat("hello\n", "--method", "none")[1]
    inner, count = Decoder.logits, 0

    def logits(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return inner(self, hidden) * (torch.nan if count == 3 else 1)

    monkeypatch.setattr(Decoder, "logits", logits)
    status, out, err = chat("what?\nhello\n", "--method", "none")
    assert status == 0 and count > 10
    assert out.endswith("\n" + good) and out != "\n" + good
    error, hint = (line for line in err if line.startswith(("error: ", "hint: ")))
    assert "nan" in error.lower() and "--dtype fp32" in hint


def test_what_is_not_utf8_is_not_sent(chat: Callable[..., Any]) -> None:
    status, out, err = chat("\udcff\nhello\n")
    assert status == 0 and out == chat("hello\n")[1]
    assert err[0] == "error: this line is not UTF-8, and was not sent"


def test_a_model_without_a_chat_template(chat: Callable[..., Any], tiny_llama_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "no-template"
    shutil.copytree(tiny_llama_dir, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLM, "__init__", lambda *args, **kwargs: pytest.fail("an engine was built"))
        assert chat("hello\n", model=folder)[:2] == (1, "")
    assert "paceline generate --raw" in chat("hello\n", model=folder)[2][-1]


def test_a_bad_option_is_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    for arguments, culprit in (
        (["--top-p", "2"], "--top-p is 2"),
        (["--model", "no/such/folder", "--method", "ngrm"], "unknown method"),
    ):
        assert main(["chat", *arguments]) == 1
        error, hint = capsys.readouterr().err.splitlines()
        assert culprit in error and hint.startswith("hint: ")


# Real signals, to a process of its own

COMMON = ("--method", "none", "--ignore-eos", "--max-tokens", "400", "--threads", "1")


class Running:
    """`paceline chat` in a process of its own, and what it has written to one of its streams."""

    def __init__(self, model: Path, **streams: Any) -> None:
        command = [sys.executable, "-c", START, "chat", "--model", str(model), *COMMON]
        self.process = subprocess.Popen(command, bufsize=0, **streams)

    def read(self, fd: int, form: str = ".") -> str:
        """What comes, until it has something of this form."""
        seen = b""
        deadline = time.monotonic() + 240
        while not re.search(form, seen.decode("utf-8", "replace"), re.DOTALL):
            assert time.monotonic() < deadline, seen
            if select.select([fd], [], [], 1)[0]:
                more = os.read(fd, 65536)
                assert more, seen
                seen += more
        return seen.decode("utf-8", "replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def status(self) -> int:
        return self.process.wait(timeout=240)


def test_ctrl_c_stops_the_answer_and_not_the_program(tiny_llama_dir: Path) -> None:
    """On pipes. What it had said is part of the conversation; while a line is awaited, Ctrl-C ends the program."""
    pipe = subprocess.PIPE
    with Running(tiny_llama_dir, stdin=pipe, stdout=pipe, stderr=pipe) as running:
        process = running.process
        assert process.stdin and process.stdout and process.stderr
        out, err = process.stdout.fileno(), process.stderr.fileno()
        process.stdin.write(b"hello\n")
        answer = running.read(out)
        process.send_signal(signal.SIGINT)
        told = running.read(err, "interrupted after .*\n")
        interrupted = re.search(r"the answer was interrupted after (\d+) tokens?\n", told)
        assert interrupted and 0 < int(interrupted[1]) < 400
        answer = (answer + running.read(out)).removesuffix("\n")

        process.stdin.write(b"what?\n/stats\n")
        running.read(out)
        process.send_signal(signal.SIGINT)
        told = running.read(err, "whole chat: 2 answers")
        messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": answer}]
        tokenizer = load_model(str(tiny_llama_dir)).tokenizer
        assert tokenizer is not None
        prompt = tokenizer.apply_chat_template([*messages, {"role": "user", "content": "what?"}])
        last = re.search(r"last answer: (\d+) tokens?.* of (\d+) prompt tokens cached", told)
        assert last and 0 < int(last[1]) < 400 and int(last[2]) == len(prompt)

        process.send_signal(signal.SIGINT)
        assert running.read(err, "interrupted\n").endswith("interrupted\n")
        assert running.status() == 130


class Terminal(Running):
    """A person at a terminal."""

    def __init__(self, model: Path) -> None:
        self.fd, other = pty.openpty()
        super().__init__(model, stdin=other, stdout=other, stderr=other, start_new_session=True)
        os.close(other)
        self._ahead = ""

    def wait_for(self, text: str) -> str:
        """What was shown up to and with `text`."""
        seen = self._ahead
        while text not in seen:
            seen += self.read(self.fd)
        upto = seen.index(text) + len(text)
        self._ahead = seen[upto:]
        return seen[:upto]

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def press_ctrl_c(self) -> None:
        """At a prompt, until it is noticed: readline sleeps on if the signal comes before it waits for a key."""
        for _ in range(60):
            self.type("\x03")
            if select.select([self.fd], [], [], 2)[0]:
                return

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        os.close(self.fd)


def test_a_terminal(tiny_llama_dir: Path) -> None:
    """Ctrl-C gives up a line that was begun, then stops an answer; neither ends the program, and Ctrl-D does."""
    with Terminal(tiny_llama_dir) as terminal:
        assert "/help lists the commands" in terminal.wait_for("\n> ")
        terminal.type("half a li")
        terminal.wait_for("half a li")
        terminal.press_ctrl_c()
        terminal.wait_for("\n> ")
        terminal.type("hello\n")
        terminal.wait_for("hello\r\n")
        terminal.read(terminal.fd)
        terminal.type("\x03")
        terminal.wait_for("the answer was interrupted after")
        terminal.wait_for("\n> ")
        terminal.type("/stats\n")
        terminal.wait_for("whole chat: 1 answer")
        terminal.wait_for("\n> ")
        terminal.type("\x04")
        assert terminal.status() == 0


def test_ctrl_c_at_an_empty_prompt_leaves(tiny_llama_dir: Path) -> None:
    with Terminal(tiny_llama_dir) as terminal:
        terminal.wait_for("\n> ")
        terminal.press_ctrl_c()
        assert terminal.status() == 0
