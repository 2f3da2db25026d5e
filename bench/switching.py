"""A conversation that alternates copying and free prose: what `auto` drafts on which turn.

    python bench/switching.py [--model smollm2-135m] [--draft-model NAME]

Copying turns (greedy) ask for a text again that stands in the conversation, prose turns (sampled, seeded) for something
new. Counted by turn and method: tokens that were drafted, verified and accepted; every answer is compared with plain
decoding's. It must hold: lookups (`suffix`, `ngram`) write more than half of the tokens of copying turns, less than a
fifth of those of prose turns. Their drafts are tried there too, as long as the rows cost nothing.
The last line is one JSON object.
"""

import script  # noqa: F401 - Ctrl-C is one line from here on

# isort: split
import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from provenance import provenance

from paceline.core.params import SamplingParams
from paceline.engine.llm import LLM
from paceline.models.load import load_model
from paceline.models.progress import terminal_progress

TEXT = (
    "The harbour master writes down every boat that comes in: its name, its length, its home port and the hour. "
    "On Monday there were four: the Gannet from Oban, the Linnet from Kirkwall, the Plover from Stornoway and the "
    "Teal from Lerwick. Each paid nine pounds and was given a berth on the north quay until the storm had passed."
)
TURNS = (
    ("copying", f"Repeat this text word for word:\n\n{TEXT}"),
    ("prose", "Now tell me about your favourite season, and why you like it."),
    ("copying", f"Write the text once more, without any change:\n\n{TEXT}"),
    ("prose", "What should somebody know before they keep bees?"),
    ("copying", f"And a last time, word for word:\n\n{TEXT}"),
    ("prose", "How would you explain money to a child?"),
)
LOOKUPS = ("suffix", "ngram")
MOST, FEW = 0.5, 0.2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft-model")
    parser.add_argument("--tokens", type=int, default=80)
    args = parser.parse_args()

    model = load_model(args.model, dtype=args.dtype, progress=terminal_progress())
    auto = {"method": "auto", **({"model": args.draft_model} if args.draft_model else {})}
    plain, chosen = LLM(model, "none"), LLM(model, auto)
    greedy = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    params = {"copying": greedy, "prose": replace(greedy, temperature=1.0, top_p=0.95, seed=7)}
    messages: list[dict[str, str]] = []
    turns = []
    for kind, text in TURNS:
        messages.append({"role": "user", "content": text})
        wanted = plain.chat(messages, params[kind])[0].outputs[0]
        before = accepted(chosen)
        got = chosen.chat(messages, params[kind])[0].outputs[0]
        after = accepted(chosen)
        turns.append(
            {
                "kind": kind,
                "tokens": len(got.token_ids),
                "passes": got.speculation.num_steps,
                "drafted": got.speculation.num_draft_tokens,
                "accepted": {method: count - before.get(method, 0) for method, count in after.items()},
                "identical": got.token_ids == wanted.token_ids,
            }
        )
        print(f"{kind:8} {turns[-1]}", file=sys.stderr, flush=True)
        # what was to be copied stands there, whatever a small model made of it
        messages.append({"role": "assistant", "content": TEXT if kind == "copying" else wanted.text})
    result = {"provenance": provenance(), "model": args.model, "turns": turns, **verdict(turns)}
    print(json.dumps(result))
    return 0 if result["holds"] else 1


def accepted(llm: LLM) -> Mapping[str, int]:
    """Tokens of each method's drafts that were accepted so far."""
    report = llm.policy_report() or {"methods": {}}
    return {method: use["num_accepted_tokens"] for method, use in report["methods"].items()}


def verdict(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    by_kind: dict[str, dict[str, float]] = {}
    for kind in ("copying", "prose"):
        own = [turn for turn in turns if turn["kind"] == kind]
        tokens = sum(turn["tokens"] for turn in own)
        lookups = sum(count for turn in own for method, count in turn["accepted"].items() if method in LOOKUPS)
        by_kind[kind] = {
            "by_lookups": lookups / tokens,
            "by_drafts": sum(sum(turn["accepted"].values()) for turn in own) / tokens,
            "drafted_a_token": sum(turn["drafted"] for turn in own) / tokens,
            "acceptance_length": tokens / sum(turn["passes"] for turn in own),
        }
        print(f"{kind}: " + ", ".join(f"{name} {figure:.2f}" for name, figure in by_kind[kind].items()))
    holds = (
        by_kind["copying"]["by_lookups"] > MOST
        and by_kind["prose"]["by_lookups"] < FEW
        and all(turn["identical"] for turn in turns)
    )
    print(f"switching: {'holds' if holds else 'DOES NOT HOLD'}")
    return {"by_kind": by_kind, "holds": holds}


if __name__ == "__main__":
    sys.exit(main())
