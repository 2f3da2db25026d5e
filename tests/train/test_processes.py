"""Two processes train as one: the same gradients, so the same weights, and one of them writes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from train.one_of_several import train

from paceline.errors import PacelineError
from paceline.train.processes import launched


def test_two_processes_have_the_gradients_of_one(tiny_llama_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    alone = train(tiny_llama_dir, tmp_path / "one")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = Path(__file__).with_name("one_of_several.py")
    paths = os.pathsep.join(path for path in sys.path if path)
    together = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    running = [
        subprocess.Popen(
            [sys.executable, str(script), str(tiny_llama_dir), str(tmp_path / "two")],
            env={**os.environ, **together, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": paths},
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=300)[1].decode() for process in running]
    assert [process.returncode for process in running] == [0, 0], errors
    state = torch.load(tmp_path / "two/checkpoints/step-0000002/state.pt", weights_only=True)
    for name, parameter in alone.recipe.parameters.items():
        torch.testing.assert_close(state["parameters"][name], parameter.detach(), rtol=1e-6, atol=1e-8)
    one_log, two_log = ((tmp_path / run / "log.jsonl").read_text().splitlines() for run in ("one", "two"))
    for one, two in zip(
        map(json.loads, one_log), map(json.loads, two_log), strict=True
    ):  # of the same tokens, with the same loss and gradient
        assert two["tokens"] == one["tokens"] and two["agreement"] == one["agreement"]
        assert two["loss"] == pytest.approx(one["loss"]) and two["gradient_norm"] == pytest.approx(one["gradient_norm"])


def test_several_processes_need_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(PacelineError, match="accelerate is not installed"):
        launched()
