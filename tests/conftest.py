"""What all tests share. Nothing outside the repository is read, except models that the catalog fetched."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "bench")]  # helpers shared by tests and scripts

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Two workers share two cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def profiles(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `auto` keeps from run to run does not leave the tests, and nothing comes in."""
    monkeypatch.setattr("paceline.engine.profile.home", lambda: tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: random Llama, byte-level tokenizer, ChatML template."""
    import tiny
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-llama")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHATML,
    )
    fast.save_pretrained(folder)
    config = tiny.hf_config(
        "llama", vocab_size=len(fast), bos_token_id=fast.bos_token_id, eos_token_id=fast.eos_token_id
    )
    tiny.hf_model(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The 135M model's GGUF file, fetched through the catalog once."""
    from paceline.models import catalog, download

    return download.pull(catalog.find("smollm2-135m"))
