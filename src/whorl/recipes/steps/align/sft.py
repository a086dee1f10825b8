"""The step `sft`: supervised fine-tuning on solutions or conversations.

    [steps.sft]
    parents = ["pretrain", "tasks"]     # conversations are trained in the model's chat format, else in ChatML
    model.lora = {rank = 16}            # train an adapter instead of all weights; --set sft.model.lora.rank=16

Every stage takes a model and leaves a model with its lineage. `whorl sample`, `whorl serve` and `whorl export` accept any.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field

from whorl.align.config import SFTConfig
from whorl.recipes.registry import StepContext, step
from whorl.recipes.stage import (
    NOT_HASHED,
    STAGE_PARENTS,
    evaluate_held_out,
    format_likelihood_change,
    held_out_likelihood,
    load_sft_examples,
    pad_id_of,
    train_stage,
    write_curve,
)

if TYPE_CHECKING:
    from whorl.align.data.formats import Conversation
    from whorl.align.model.policy_model import PolicyModel
    from whorl.tokens.token_encoder import TokenEncoder

MAX_HELD_OUT = 128  # texts whose loss is measured during training
SAMPLES = 6  # held-out conversations that are answered before and after


class SFTStepConfig(SFTConfig):
    """Fine-tuning, and the evaluation before and after it where the tasks have a verifier."""

    eval_tasks: int = Field(
        default=64, ge=0, description="held-out tasks answered before and after, at most",
        json_schema_extra={"shrinks_to": 16},
    )  # fmt: skip
    max_completion_tokens: int = Field(default=96, ge=1, description="limit of an answer to a held-out task")


@step("model", config=SFTStepConfig, parents=STAGE_PARENTS, not_hashed=NOT_HASHED, version=3)
def sft(ctx: StepContext, config: SFTStepConfig) -> None:
    """Fine-tune on solutions; only completion tokens and their end token are trained."""
    from whorl.align.data.dataset_files import read_conversations
    from whorl.align.stage.chat_format import chat_files, with_chat_rows
    from whorl.align.stage.io import (
        load_stage_model,
        make_policy_model,
        read_tasks,
        record_pass_criterion,
        save_stage_model,
    )  # fmt: skip
    from whorl.align.stage.sft import SFTTask, fine_tune, sum_nll
    from whorl.tokens.token_encoder import TokenEncoder

    folder, tasks = ctx.parent_folder("model"), ctx.parents["tasks"].path
    talks = read_conversations(tasks, "test")[: config.eval_tasks]
    files = folder
    if (tasks / "conversations.train.jsonl").is_file():
        files = chat_files(folder, ctx.scratch / "chat")
    ctx.machine.apply()
    tokenizer, model = TokenEncoder.load(files), load_stage_model(folder, config, ctx.machine)
    if files != folder:
        model = with_chat_rows(model, files, folder)
    network = make_policy_model(model, tokenizer, config, context_hint=config.data.seq_len)
    examples, length_filter = load_sft_examples(ctx, tokenizer, config.data.seq_len + 1)
    held_out = load_sft_examples(ctx, tokenizer, config.data.seq_len + 1, "test")[0][:MAX_HELD_OUT]
    tests = read_tasks(tasks, "test")
    pad, samples = pad_id_of(tokenizer), dict[str, list[dict[str, Any]]]()

    criterion = record_pass_criterion(tests if config.eval_tasks else [], ctx.summary, ctx.progress.log)

    def evaluate(when: str) -> dict[str, float]:
        found = evaluate_held_out(
            network, tokenizer, tests, {"accuracy_greedy": 0.0}, max_tasks=config.eval_tasks,
            max_tokens=config.max_completion_tokens, length=config.data.seq_len, seed=config.seed,
        )  # fmt: skip
        if when == "before" and tests and config.eval_tasks and not found:
            limit = f"{ctx.name}.max_completion_tokens: {config.max_completion_tokens}"
            ctx.progress.log(f"    no held-out task fits its prompt and {limit}")
        if talks:
            samples[when] = chat_answers(network, tokenizer, talks, config)
        if held_out:
            total, count = sum_nll(network, held_out, pad)
            found["held_out_nll"] = total / max(1.0, count)
        return found

    replay = ctx.parents["tokens"].path if "tokens" in ctx.parents else None
    train = partial(
        fine_tune, network, examples, config, pad_id=pad, replay_data=replay,
        task_type=partial(SFTTask, held_out=held_out),
    )  # fmt: skip
    result = train_stage(
        ctx, "Fine-tuning", train, evaluate=evaluate,
        likelihood=lambda: held_out_likelihood(ctx, network.model, tokenizer),
        note=lambda metrics: f"loss {metrics['nll']:.3f}, epoch {metrics['epoch']:.2f}",
    )  # fmt: skip
    measured = result.evaluation
    save_stage_model(network, folder, ctx.out, files)
    if samples.get("before"):
        (ctx.out / "samples.json").write_text(json.dumps(samples, indent=1))
    headline, summary = f"{len(examples):,} texts; loss {result.final.get('nll', 0.0):.3f}", dict[str, Any]()
    if held_out:
        losses = [measured[when]["held_out_nll"] for when in ("before", "after")]
        headline += f", held-out {losses[0]:.3f} before, {losses[1]:.3f} after"
        summary["eval"] = measured
    if "tasks" in measured["after"]:
        summary.update(eval=measured, tasks={"test": int(measured["after"]["tasks"])})
        passed = [f"{measured[when]['accuracy_greedy']:.0%}" for when in ("before", "after")]
        n_tasks = int(measured["after"]["tasks"])
        headline += (
            f"; greedy accuracy on {n_tasks} held-out tasks {passed[0]} before, {passed[1]} after{criterion}"
        )
    ctx.summary.update(
        summary, texts=len(examples), left_out=length_filter.rejected, final=result.final, seconds=result.seconds,
        params=network.model.params(), **result.likelihood,
        headline=headline + format_likelihood_change(**result.likelihood),
    )  # fmt: skip
    write_curve(
        ctx, objective="sft" if config.objective == "next_token" else config.objective,
        loss=("nll", "Loss in nats per trained token"), trained_on=f"{len(examples):,} texts",
        samples=samples if samples.get("before") else None,
    )  # fmt: skip


def chat_answers(
    network: PolicyModel, encoder: TokenEncoder, talks: Sequence[Conversation], config: SFTStepConfig
) -> list[dict[str, Any]]:
    """Return greedy answers to the beginnings of held-out conversations, with that of the data as `reason`."""
    from whorl.engine.sampling_params import SamplingParams
    from whorl.evals.model.sampling import open_engine

    room = config.data.seq_len - config.max_completion_tokens
    asked: list[tuple[Conversation, int, list[int]]] = []
    for talk in talks:
        end = next(n for n, message in enumerate(talk.messages) if message["role"] == "assistant")
        ids = encoder.prompt(talk.messages[:end], talk.tools, talk.chat_template_kwargs) if end else []
        if 0 < len(ids) <= room and len(asked) < SAMPLES and all(ids != other for *_, other in asked):
            asked.append((talk, end, ids))
    if not asked:
        return []
    engine = open_engine(
        network.eval_copy(), (len(asked), config.data.seq_len), encoder, compile_native=False
    )
    done = engine.generate(
        [ids for *_, ids in asked], SamplingParams(temperature=0.0), max_tokens=config.max_completion_tokens,
        stop_ids=encoder.stop_ids,
    )  # fmt: skip
    return [
        {
            "prompt": talk.messages[end - 1]["content"], "answer": encoder.decode(one.ids), "passed": None,
            "reward": 0.0, "reason": f"in the data: {talk.messages[end]['content']}",
        }
        for (talk, end, _), one in zip(asked, done, strict=True)
    ]  # fmt: skip
