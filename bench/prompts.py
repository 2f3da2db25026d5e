"""Prompts for the scripts here, written for this project: chat, code, copying, tables, and four above 700 tokens."""

from pathlib import Path

_LICENCE = (Path(__file__).parent.parent / "LICENSE").read_text()

SHORT = (
    "Explain why the sky is blue to a ten-year-old.",
    "Write a Python function that returns the n-th Fibonacci number, then call it for n = 1 to 10.",
    "List the first twelve prime numbers, separated by commas.",
    "Translate into French: The library opens at nine and closes at six, except on Sundays.",
    "Summarise in one sentence: A heat pump moves heat from a cold place to a warm one. It uses a fluid that boils at "
    "a low temperature, a compressor and two heat exchangers. It needs less energy than it moves.",
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog while the cat sleeps.",
    "A train leaves at 14:05 and arrives at 17:50. How long is the journey? Show each step.",
    'Fix this JSON: {"name": "Ada", "born": 1815, "languages": ["English", "French", "published": true}',
    "What is the capital of Australia, and why is it not Sydney?",
    "Write a short poem about rain in the city, four lines.",
    "Rename the variable x to total:\nx = 0\nfor item in items:\n    x = x + item.price\nprint(x)\nreturn x",
    "Give three reasons to learn a second language.",
    "Complete the table:\n| n | n squared |\n|---|---|\n| 1 | 1 |\n| 2 | 4 |\n| 3 | 9 |\n| 4 |",
    "Write a polite e-mail that moves a meeting from Tuesday to Thursday.",
    "Café, naïve, 12345 and 😊: which of these contain a letter with an accent?",
    "Explain the difference between a list and a tuple in Python with one example of each.",
)

LONG = (
    f"Here is the beginning of a licence:\n\n{_LICENCE[:4200]}\n\nWhich rights does it grant? Quote the sentence.",
    f"Continue this text exactly where it stops:\n\n{_LICENCE[4200:8400]}",
    "Sort these lines by their number:\n" + "\n".join(f"item {37 * i % 101}: value {i * i}" for i in range(90)),
    "Write the next ten rows of this table:\n| day | temperature | rain |\n|---|---|---|\n"
    + "\n".join(f"| {d} | {11 + d * 7 % 13} | {d * 5 % 4} mm |" for d in range(1, 75)),
)

PROMPTS = SHORT + LONG
