"""`paceline bench`: drafting methods, plain decoding and other engines on the same prompts, in one run."""
