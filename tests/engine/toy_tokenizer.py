"""A tokenizer whose tokens are one to three letters, so that stop strings begin and end inside tokens."""

import itertools

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from paceline.models.tokenizer import Tokenizer, TokenizerInfo


def toy_tokenizer(vocab_size: int = 256) -> Tokenizer:
    letters = "abcdef"
    words = ["".join(word) for size in (1, 2, 3) for word in itertools.product(letters, repeat=size)]
    assert len(words) >= vocab_size
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words[:vocab_size])}, unk_token="a"))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, TokenizerInfo(model_name="toy", vocab_size=vocab_size))
