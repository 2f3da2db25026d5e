"""What `paceline generate` does once its arguments are known to be good."""

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from paceline.cli.answering import Answer, Interrupts, answer, hide, plural, rate, statistics_parts, write
from paceline.cli.loading import banner, load, measuring_progress, require_tokenizer
from paceline.cli.main import EXIT_INTERRUPTED
from paceline.cli.options import rule_of
from paceline.core.logprobs import TokenLogprob
from paceline.core.params import SamplingParams
from paceline.core.rng import draw_seed
from paceline.core.stopping import token_limit
from paceline.drafters.config import SpeculativeConfig
from paceline.engine.engine import Engine, EngineConfig, RequestOptions
from paceline.engine.methods import add_method
from paceline.models.load import LoadedModel
from paceline.models.tokenizer import Tokenizer
from paceline.ops.attention import BLOCK


def generate(args: argparse.Namespace, prompt: str, params: SamplingParams, speculation: SpeculativeConfig) -> int:
    model = load(args)
    tokenizer = require_tokenizer(model)
    prompt_ids = encode_prompt(tokenizer, prompt, args.system, args.raw)
    # what can never be answered is refused before a draft model is loaded or measured
    length = len(prompt_ids) + token_limit(len(prompt_ids), params, model.config.max_context)
    params.check_vocabulary(model.config.vocab_size)
    params = replace(params, seed=draw_seed() if params.seed is None else params.seed)
    engine = engine_for_one(model, speculation, length)
    options = RequestOptions(rule=rule_of(args))
    engine.check_request(prompt_ids, params, options)

    for line in (*model.notes, banner(model, speculation, params, rule_of(args))):
        print(line, file=sys.stderr)
    with Interrupts() as interrupts:
        done = answer(engine, prompt_ids, params, options, hide if args.json else write, interrupts)
    if args.json:
        print(json.dumps(as_json(done, model, tokenizer, engine.policy.report())))
    else:
        print(flush=True)
    if args.stats:
        parts = statistics_parts(done.num_tokens, done.decode_s, done.completion.speculation, speculation.drafts)
        print(" · ".join((*parts, done.finish_reason)), file=sys.stderr)
        if (report := engine.policy.report()) is not None:
            print(f"auto: {report['summary']}", file=sys.stderr)
    if done.interrupted:
        print(f"interrupted after {plural(done.num_tokens, 'token')}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def engine_for_one(model: LoadedModel, speculation: SpeculativeConfig, length: int) -> Engine:
    """An engine with room for one request of `length` tokens and its drafts."""
    count = speculation.num_speculative_tokens
    engine = Engine(
        model.decoder,
        EngineConfig(max_model_len=length, num_kv_blocks=-(-(length + count) // BLOCK), max_num_seqs=1),
        method=speculation.method if speculation.drafts else "none",
        tokenizer=model.tokenizer,
    )
    if speculation.drafts:
        add_method(engine, model, speculation, measuring_progress())
    return engine


def encode_prompt(tokenizer: Tokenizer, prompt: str, system: str | None, raw: bool) -> list[int]:
    if raw:
        return tokenizer.encode(prompt, add_special=True)
    messages = [] if system is None else [{"role": "system", "content": system}]
    return tokenizer.apply_chat_template([*messages, {"role": "user", "content": prompt}])


def as_json(done: Answer, model: LoadedModel, tokenizer: Tokenizer, policy: dict[str, Any] | None) -> dict[str, Any]:
    completion, usage = done.completion, done.output.usage
    statistics = completion.speculation
    logprobs = None
    if completion.logprobs is not None:
        logprobs = [
            {**one_logprob(position.chosen, tokenizer), "top": [one_logprob(top, tokenizer) for top in position.top]}
            for position in completion.logprobs
        ]
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        **({} if logprobs is None else {"logprobs": logprobs}),
        "finish_reason": done.finish_reason,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
        },
        "timings": {
            "load_s": model.load_seconds,
            "prefill_s": done.prefill_s,
            "decode_s": done.decode_s,
            "tokens_per_second": rate(done.num_tokens, done.decode_s),
        },
        "exact": model.exactness.exact,
        "lossless": done.output.lossless,
        "seed": done.output.seed,
        "metrics": {
            "speculative_decoding": {
                "mean_acceptance_length": statistics.mean_acceptance_length,
                "draft_acceptance_rate": statistics.draft_acceptance_rate,
                "num_spec_steps": statistics.num_steps,
                "num_draft_tokens": statistics.num_draft_tokens,
                "num_accepted_draft_tokens": statistics.num_accepted_tokens,
                "acceptance_histogram": statistics.acceptance_histogram,
            },
            **({} if policy is None else {"auto": policy}),
        },
    }


def one_logprob(logprob: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    token = tokenizer.decode([logprob.token_id], skip_special_tokens=False)
    return {"token_id": logprob.token_id, "token": token, "logprob": logprob.logprob, "rank": logprob.rank}
