"""vLLM: plain, and with its n-gram speculation. It takes any number of prompts at once."""

import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from paceline.bench.answers import Answer, Arm, Measured
from paceline.bench.peers.base import Subject
from paceline.core.params import SamplingParams
from paceline.errors import PacelineError
from paceline.models.load import resolve
from paceline.models.sources import FolderSource

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
GPU_SHARE = 0.25  # of the memory, each of two engines beside ours


def arms(subject: Subject) -> list[Arm]:
    """Raises PacelineError for a model that is no Hugging Face folder or id, or runs in another precision."""
    source = resolve(subject.model.name)
    if not isinstance(source, FolderSource):
        raise PacelineError(f"vLLM is given Hugging Face folders here, and {subject.model.name} is none")
    if subject.model.precision not in DTYPES:
        raise PacelineError(f"vLLM does not run in {subject.model.precision}", hint="use --dtype bf16")
    speculation = NGRAM | (
        {} if subject.num_draft_tokens is None else {"num_speculative_tokens": subject.num_draft_tokens}
    )
    vllm: Any = import_module("vllm")
    options = {
        "model": str(source.path),
        "dtype": DTYPES[subject.model.precision],
        "max_model_len": subject.max_model_len,
        "gpu_memory_utilization": GPU_SHARE,
    }
    plain, speculative = vllm.LLM(**options), vllm.LLM(**options, speculative_config=speculation)
    return [VllmArm("vllm", vllm, plain), VllmArm("vllm+ngram", vllm, speculative)]


class VllmArm:
    """Its clock tells of whole batches alone."""

    most_at_once: int | None = None

    def __init__(self, label: str, vllm: Any, llm: Any) -> None:
        self.label, self._vllm, self._llm = label, vllm, llm

    def warm_up(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> None:
        self.answer(prompts, params)
        self.forget()

    def answer(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Measured:
        asked = [{"prompt_token_ids": list(ids)} for ids in prompts]
        own = [self._vllm.SamplingParams(temperature=0.0, max_tokens=p.max_tokens, ignore_eos=True) for p in params]
        start = time.perf_counter()
        outputs = self._llm.generate(asked, own, use_tqdm=False)
        seconds = time.perf_counter() - start
        return Measured(tuple(Answer(tuple(out.outputs[0].token_ids), seconds) for out in outputs), seconds)

    def forget(self) -> None:
        self._llm.reset_prefix_cache()
