"""The trainer: what it hands to the loss, what leaves the gradient alone, and where it must agree with TRL."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pytest
import tiny
import torch
from peft import LoraConfig
from tiny import Gradients, Recorded, assert_same, gradients, mixed_batch, trajectory
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback, TrainingArguments
from trl import GRPOConfig, GRPOTrainer, ModelConfig

from mini_rome.config import IGNORED, SAMPLING, IPAConfig
from mini_rome.errors import ConfigError, MiniRomeError
from mini_rome.experts import Expert, Start
from mini_rome.layout import score
from mini_rome.options import lora_config
from mini_rome.trainer import IPATrainer
from mini_rome.types import SafetyEvent, Trajectory

CLOSE = {"rtol": 1e-5, "atol": 1e-7}


def scored(trainer: IPATrainer) -> dict[str, torch.Tensor]:
    """The first micro-batch, as it goes to the loss."""
    prompts = [{"prompt": name} for name in trainer.curriculum.experts for _ in range(2)]
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer._prepare_inputs(prompts)


def loss_gradient(trainer: IPATrainer, inputs: dict[str, torch.Tensor], kind: type = IPATrainer) -> torch.Tensor:
    """All gradients of the loss on these inputs, in one vector."""
    trainer.model.zero_grad()
    kind._compute_loss(trainer, trainer.model, inputs).backward()
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


def nll(model: torch.nn.Module, context: list[int], ids: list[int]) -> torch.Tensor:
    """Negative log-likelihood of each id after the context, from a plain forward."""
    logits = model(torch.tensor([context + ids])).logits[0, len(context) - 1 : -1]
    return cross_entropy(logits, torch.tensor(ids), reduction="none")


def policy_nll(model: torch.nn.Module, sample: Trajectory) -> list[torch.Tensor]:
    """One tensor per chunk that the policy wrote."""
    context, found = list(sample.prompt_ids), []
    for index, turn in enumerate(sample.turns):
        if index >= sample.start:
            found.append(nll(model, context, turn.ids))
        context += turn.ids + turn.observation_ids
    return found


# The identities of a batch


@pytest.mark.parametrize("aggregation", ["token", "chunk", "sum"])
def test_one_row_four_times_accumulated_gives_the_gradient_of_four_rows(tmp_path, aggregation):
    whole = gradients(tmp_path, mixed_batch(), aggregation=aggregation)
    parts = gradients(
        tmp_path, mixed_batch(), aggregation=aggregation, per_device_train_batch_size=1, gradient_accumulation_steps=4
    )
    assert_same(whole, parts)


def test_the_order_of_trajectories_does_not_matter(tmp_path):
    batch = mixed_batch()
    assert_same(gradients(tmp_path, batch), gradients(tmp_path, [batch[i] for i in (2, 0, 3, 1)]))


def test_rows_of_like_length_share_a_micro_batch_of_their_own_step(tmp_path):
    first = tiny.experts()[0]
    batch = [trajectory(first, 0, (length,), 1.0, seed=length) for length in (9, 2, 8, 1)]
    trainer = tiny.trainer(tmp_path, Recorded(batch), per_device_train_batch_size=1, gradient_accumulation_steps=2,
                           steps_per_generation=4)  # fmt: skip
    scored(trainer)
    lengths = [int((part["chunk_ids"] >= 0).sum()) for part in trainer._buffered_inputs]
    assert sorted(lengths) == [1, 2, 8, 9]
    assert lengths[0] < lengths[1] and lengths[2] < lengths[3]


def test_positive_rows_give_the_weighted_likelihood_of_their_chunks(tmp_path):
    batch = [sample for sample in mixed_batch() if sample.reward == 1.0] * 2
    found = gradients(tmp_path, batch, gamma=0.5, lambda_rl=2.0)
    model = tiny.model()
    total, tokens = 0.0, 0
    for sample in batch:
        chunks = policy_nll(model, sample)
        for k, chunk in enumerate(chunks, start=1):
            total = total + 0.5 ** (len(chunks) - k) * chunk.sum()
            tokens += len(chunk)
    (2.0 * total / tokens).backward()
    assert_same(found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def test_failed_rows_are_scaled_by_the_ratio_where_it_is_below_one(tmp_path):
    batch = [dataclasses.replace(sample, reward=0.0) for sample in mixed_batch()]
    trainer = tiny.trainer(tmp_path, Recorded(batch), mask_level="none")
    inputs = scored(trainer)
    logps = tiny_score(trainer, inputs)
    whole = loss_gradient(trainer, inputs | {"old_per_token_logps": logps})
    half = loss_gradient(trainer, inputs | {"old_per_token_logps": logps + 0.6931472})
    clipped = loss_gradient(trainer, inputs | {"old_per_token_logps": logps - 0.6931472})
    assert_same({"half": half, "clipped": clipped}, {"half": 0.5 * whole, "clipped": whole})


def tiny_score(trainer: IPATrainer, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return score(trainer.model, [inputs])[0][0]


# Episodes of several linear contexts


def chains(expert: Expert, reward: float | None, places: Sequence[Sequence[int]], seed: int) -> Trajectory:
    """An episode with a chain for each list: a turn of two or three tokens for each place."""
    found = [trajectory(expert, 0, [2 + at % 2 for at in row], reward, seed + n) for n, row in enumerate(places)]
    for chain, row in zip(found, places, strict=True):
        for turn, at in zip(chain.turns, row, strict=True):
            turn.place = at
    found[0].chains = [
        dataclasses.replace(chain, prompt_ids=[*chain.prompt_ids[: 5 + seed], 9, 9]) for chain in found[1:]
    ]
    return found[0]


def several() -> list[Trajectory]:
    """Compressed twice, and won; with a sub-agent in its middle, and won; of one chain, lost and won."""
    first, second = tiny.experts()
    return [
        chains(first, 1.0, [[0, 1], [2], [3, 4]], seed=1), chains(second, 1.0, [[0, 3], [1, 2]], seed=2),
        trajectory(first, 1, (4,), 0.0, seed=3), trajectory(second, 0, (2, 2), 1.0, seed=4),
    ]  # fmt: skip


def test_all_chains_of_an_episode_are_trained_each_in_its_own_context_with_returns_over_the_whole_episode(tmp_path):
    batch = several()
    found = gradients(tmp_path, batch, gamma=0.5, failure_reward=0.0)
    model = tiny.model()
    # G_k = gamma^(K - k), counted by hand over the chunks of the episode in the order in which they were written.
    returns = [[[1 / 16, 1 / 8], [1 / 4], [1 / 2, 1.0]], [[1 / 8, 1.0], [1 / 4, 1 / 2]], [[0.0]], [[1 / 2, 1.0]]]
    total, tokens = 0.0, 0
    for sample, of_chains in zip(batch, returns, strict=True):
        for chain, weights in zip(sample.samples, of_chains, strict=True):
            for chunk, weight in zip(policy_nll(model, chain), weights, strict=True):
                total, tokens = total + weight * chunk.sum(), tokens + len(chunk)
    assert tokens == (2 + 3 + 2 + 3 + 2) + (2 + 3 + 3 + 2) + 4 + 4
    (total / tokens).backward()
    assert_same(found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("options", [{}, {"ratio_level": "sequence", "aggregation": "chunk", "num_iterations": 2}])
def test_an_episode_of_several_contexts_is_one_row_however_a_batch_is_split(tmp_path, options):
    options = {"failure_reward": -1.0, **options}
    whole = gradients(tmp_path, several(), **options)
    parts = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    assert_same(whole, gradients(tmp_path, several(), **options, **parts))
    assert_same(whole, gradients(tmp_path, [several()[i] for i in (2, 0, 3, 1)], **options))


def test_pi_old_of_a_second_update_is_scored_context_by_context(tmp_path):
    inputs = scored(tiny.trainer(tmp_path, Recorded(several()), num_iterations=2))
    model, batch = tiny.model(), several()
    for ids, scores, row in zip(inputs["chunk_ids"], inputs["old_per_token_logps"], inputs["row"], strict=True):
        expected = [-chunk for chain in batch[row].samples for chunk in policy_nll(model, chain)]
        torch.testing.assert_close(scores[ids >= 0], torch.cat(expected).detach(), **CLOSE)
    assert inputs["chunk_ids"].amax(dim=1).sort().values.tolist() == [0, 1, 3, 4]


def test_rows_of_one_context_are_laid_out_as_if_there_were_no_others(tmp_path):
    trainer = tiny.trainer(tmp_path, Recorded(mixed_batch()))
    alone = scored(trainer)
    assert "contexts" not in alone
    with_column = alone | {"contexts": torch.zeros_like(alone["chunk_ids"])}
    plain, marked = (score(trainer.model, [rows])[0][0] for rows in (alone, with_column))
    assert torch.equal(plain, marked) and plain.any()


def test_beside_a_longer_row_each_token_still_counts_once_in_its_own_context(tmp_path):
    """The longer row leaves room in every sequence for tokens of the others: they must not count there."""
    trainer = tiny.trainer(tmp_path, Recorded(several()))
    rows = scored(trainer)
    long = {key: v[-1:].repeat(1, 2) if v.ndim == 2 else v[-1:] for key, v in rows.items() if v.ndim}
    beside, _ = score(trainer.model, [rows, long])
    torch.testing.assert_close(beside[0], score(trainer.model, [rows])[0][0], **CLOSE)


# Rewards


def test_only_a_real_failure_becomes_the_failure_reward(tmp_path):
    batch = [dataclasses.replace(s, reward=r) for s, r in zip(mixed_batch(), (1.0, 0.0, None, 0.5), strict=True)]
    trainer = tiny.trainer(tmp_path, Recorded(batch), failure_reward=-0.5)
    rewards = scored(trainer)["rewards"]
    assert sorted(rewards[~rewards.isnan()].tolist()) == [-0.5, 0.5, 1.0]
    assert int(rewards.isnan().sum()) == 1


def test_a_conduct_penalty_comes_off_the_reward_of_misconduct_alone(tmp_path):
    left = (SafetyEvent("tamper", "high", "file", "tests/a (gone)"),)
    cases = zip(mixed_batch(), (1.0, 0.0, None, 1.0), (left, left, left, ()), strict=True)
    batch = [dataclasses.replace(sample, reward=reward, events=events) for sample, reward, events in cases]
    for penalty, expected in ((0.0, [-0.5, 1.0, 1.0]), (2.0, [-2.5, -1.0, 1.0])):
        folder = tmp_path / str(penalty)
        trainer = tiny.trainer(folder, Recorded(batch), failure_reward=-0.5, conduct_penalty=penalty)
        rewards = scored(trainer)["rewards"]
        assert sorted(rewards[~rewards.isnan()].tolist()) == expected
        assert int(rewards.isnan().sum()) == 1


def test_weights_are_the_discounted_returns_of_chunks_not_group_advantages(tmp_path):
    trainer = tiny.trainer(tmp_path, Recorded(mixed_batch()), gamma=0.5)
    inputs = scored(trainer)
    row = next(i for i, ids in enumerate(inputs["chunk_ids"].tolist()) if max(ids) == 2)
    assert inputs["chunk_ids"][row].tolist() == [0, 0, 0, -1, -1, -1, 1, 1, 1, 1, 1, -1, -1, -1, 2, 2]
    expected = [0.25] * 3 + [0.0] * 3 + [0.5] * 5 + [0.0] * 3 + [1.0] * 2
    assert inputs["advantages"][row].tolist() == expected


@pytest.mark.parametrize("aggregation", ["token", "chunk"])
def test_an_unscorable_row_changes_no_gradient_and_no_denominator(tmp_path, aggregation):
    batch = mixed_batch()
    other = dataclasses.replace(trajectory(tiny.experts()[0], 0, (9, 9, 9), None, seed=9))
    empty = dataclasses.replace(other, turns=[])  # spoiled before the first response
    spoiled = [[*batch[:2], row, batch[3]] for row in (batch[2], other, empty)]
    found = [gradients(tmp_path, rows, aggregation=aggregation) for rows in spoiled]
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])
    trainer = tiny.trainer(tmp_path, Recorded([*batch[:2], other, batch[3]]), aggregation=aggregation)
    assert scored(trainer)["num_items"].item() == {"token": 10 + 7 + 9, "chunk": 3 + 1 + 2}[aggregation]


def test_a_batch_without_a_scorable_row_moves_no_weight(tmp_path):
    batch = [dataclasses.replace(sample, reward=None) for sample in mixed_batch()]
    batch[0] = dataclasses.replace(batch[0], turns=[])
    kept = Gradients()
    tiny.trainer(tmp_path, Recorded(batch), callbacks=[kept], beta=0.0).train()
    assert all(not gradient.any() for gradient in kept.steps[0].values())


def test_kl_to_the_reference_ignores_unscorable_rows(tmp_path):
    batch = [dataclasses.replace(sample, reward=None) for sample in mixed_batch()]
    trainer = tiny.trainer(tmp_path, Recorded(batch), beta=1.0, peft_config=LoraConfig(target_modules=["q_proj"]))
    inputs = scored(trainer)
    assert "ref_per_token_logps" in inputs
    inputs["ref_per_token_logps"] = inputs["ref_per_token_logps"] + 1.0
    assert trainer._compute_loss(trainer.model, inputs).item() == 0.0
    inputs["rewards"] = torch.zeros(4)
    assert trainer._compute_loss(trainer.model, inputs).item() > 0.1


def test_a_reference_that_cannot_be_built_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--beta 0.1"):
        tiny.trainer(tmp_path, Recorded(mixed_batch()), beta=0.1)


# Mixture of Experts and LoRA


def test_router_loss_is_kept_and_scaled_by_its_coefficient(tmp_path):
    batch = [dataclasses.replace(sample, reward=None) for sample in mixed_batch()]  # nothing but the router loss

    def routers(coefficient: float, **options: int) -> torch.Tensor:
        found = gradients(tmp_path, batch, router_aux_loss_coef=coefficient, **options)
        return torch.cat([g.flatten() for name, g in found.items() if "gate" in name])

    once = routers(0.5)
    assert once.abs().max() > 1e-4
    assert_same({"routers": routers(1.0)}, {"routers": 2 * once})
    assert not routers(0.0).any()
    parts = routers(0.5, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert 0.3 < parts.norm() / once.norm() < 3  # a mean over micro-batches, not a sum


def adapter(tmp_path, model: ModelConfig, **options) -> tuple[IPATrainer, dict[str, torch.Tensor]]:
    built = tiny.trainer(tmp_path, Recorded(mixed_batch()), peft_config=lora_config(model), **options)
    named = built.model.named_parameters()
    return built, {name: parameter.detach().clone() for name, parameter in named if parameter.requires_grad}


def test_lora_trains_attention_only_by_default(tmp_path):
    trainer, before = adapter(tmp_path, ModelConfig(use_peft=True, lora_r=4))
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in before}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj"}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    moved = [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert moved == [name for name in before if "lora_B" in name]  # B starts at 0, so A has no gradient yet


def test_lora_trains_experts_named_as_target_parameters(tmp_path):
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    trainer, before = adapter(tmp_path, ModelConfig(use_peft=True, lora_r=4, lora_target_parameters=names))
    assert any("mlp.experts" in name for name in before)
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert any("mlp.experts" in n and not torch.equal(v, after[n]) for n, v in before.items())


def test_the_seed_decides_the_adapter(tmp_path):
    torch.manual_seed(5)
    _, first = adapter(tmp_path, ModelConfig(use_peft=True, lora_r=4), seed=3)
    torch.manual_seed(6)
    _, again = adapter(tmp_path, ModelConfig(use_peft=True, lora_r=4), seed=3)
    _, other = adapter(tmp_path, ModelConfig(use_peft=True, lora_r=4), seed=4)
    drawn = [name for name in first if "lora_A" in name]
    assert drawn and all(torch.equal(first[name], again[name]) for name in drawn)
    assert not any(torch.equal(first[name], other[name]) for name in drawn)


# Agreement with the installed TRL


@pytest.mark.parametrize(
    ("ratio_level", "trl_level", "lengths"),
    [
        ("token", "token", (3, 5, 2)),
        ("sequence", "sequence", (3, 5, 2)),
        ("chunk", "sequence", (6,)),  # one chunk per trajectory
        ("chunk", "token", (1, 1, 1)),  # one token per chunk
    ],
)
def test_gradient_is_that_of_cispo_where_they_must_agree(tmp_path, ratio_level, trl_level, lengths):
    first = tiny.experts()[0]
    batch = [trajectory(first, 0, lengths, reward, seed=i) for i, reward in enumerate((1.0, 0.0, 0.0, 1.0))]
    trainer = tiny.trainer(tmp_path, Recorded(batch), objective="tis", ratio_level=ratio_level)  # gamma 1, no mask
    inputs = scored(trainer)
    shift = torch.randn(inputs["chunk_ids"].shape, generator=torch.Generator().manual_seed(0))
    inputs["old_per_token_logps"] = tiny_score(trainer, inputs) + 0.5 * shift  # ratios on both sides of 1
    ours = loss_gradient(trainer, inputs)
    trainer.loss_type, trainer.epsilon_high, trainer.importance_sampling_level = "cispo", 1.0, trl_level
    theirs = loss_gradient(trainer, inputs, kind=GRPOTrainer)
    assert theirs.abs().max() > 1e-3
    assert_same({"all": ours}, {"all": theirs})


# Stale data


class Logs(TrainerCallback):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "ipa/ratio_p01" in logs:
            self.rows.append(dict(logs))


def logged(tmp_path, **options) -> list[dict[str, float]]:
    logs = Logs()
    tiny.trainer(tmp_path, callbacks=[logs], **options).train()
    return logs.rows


@pytest.mark.parametrize("options", [{"steps_per_generation": 2}, {"num_iterations": 2}], ids=lambda o: next(iter(o)))
def test_the_ratio_moves_on_the_second_update_of_a_batch_only(tmp_path, options):
    rows = logged(tmp_path, max_steps=4, **options)
    fresh, stale = rows[0::2], rows[1::2]
    assert all(row["ipa/staleness_max"] < 1e-4 for row in fresh)
    assert all(row["ipa/staleness_max"] > 1e-2 for row in stale)
    assert all(row["ipa/ratio_p99"] - row["ipa/ratio_p01"] > 1e-3 for row in stale)
    assert all(row["ipa/mismatch_max"] < 1e-3 for row in rows)  # pi_old is of the weights that sampled, not of now


def test_pi_old_taken_from_the_sampler_is_log_mu(tmp_path):
    trainer = tiny.trainer(tmp_path, Recorded(mixed_batch()), pi_old_source="sampler")
    inputs = scored(trainer)
    assert torch.equal(inputs["old_per_token_logps"], inputs["sampling_per_token_logps"])


def test_chunks_of_older_weights_are_refused_unless_pi_old_comes_from_the_sampler(tmp_path):
    batch = mixed_batch()
    batch[0].turns[1].policy_version = -1
    with pytest.raises(ConfigError, match="pi_old_source"):
        scored(tiny.trainer(tmp_path, Recorded(batch)))
    scored(tiny.trainer(tmp_path, Recorded(batch), pi_old_source="sampler"))


@pytest.mark.parametrize(("threshold", "fires"), [(1.0, True), (1.5, False)])
def test_the_mask_fires_for_a_sampler_of_another_precision(tmp_path, threshold, fires):
    network = tiny.model(scale=4.0)  # sharper than at the start, as a trained model is
    row = logged(tmp_path, network=network, sampler_dtype=torch.bfloat16, mismatch_threshold=threshold)[0]
    assert row["ipa/mismatch_max"] > 1e-3  # float32 alone gives 1e-6
    assert (0.05 < row["ipa/masked_chunks"] < 0.95) if fires else row["ipa/masked_chunks"] == 0.0


def test_every_step_logs_what_the_three_policies_and_signs_did(tmp_path):
    row = logged(tmp_path)[0]
    names = {
        "mismatch_mean", "mismatch_max", "staleness_mean", "staleness_max", "masked_chunks", "clipped_negatives",
        "positive_share", "negative_share", "imitation_share", "ratio_p01", "ratio_p99",
    }  # fmt: skip
    assert {f"ipa/{name}" for name in names} <= row.keys()
    assert {"grad_norm", "success", "start/mean", "infra/unscored", "reward/p2", "return/k2"} <= row.keys()


def test_gradient_norm_is_logged_before_clipping(tmp_path):
    free = logged(tmp_path)[0]["grad_norm"]
    assert free > 0.01
    assert logged(tmp_path, max_grad_norm=free / 100)[0]["grad_norm"] == pytest.approx(free, rel=1e-4)


def test_infrastructure_drops_are_logged_by_cause(tmp_path):
    logs = Logs()
    drops = Counter(SandboxDead=2, infra_error=1)
    tiny.trainer(tmp_path, Recorded(mixed_batch(), drops), callbacks=[logs]).train()
    assert (logs.rows[0]["infra/SandboxDead"], logs.rows[0]["infra/infra_error"]) == (2, 1)


# Imitation


def imitating(tmp_path, il_when: str, **options) -> IPATrainer:
    """Task one: won from 0, lost from 2; task two: unscorable and won from 1."""
    return tiny.trainer(tmp_path, Recorded(mixed_batch()), il_when=il_when, gamma=0.5, **options)


def test_forks_to_imitate_are_those_where_no_rollout_succeeded_or_all(tmp_path):
    first, second = (expert.trajectory.task.name for expert in tiny.experts())
    for il_when, forks in {
        "never": [],
        "fork_failed": [(first, 2)],
        "always": sorted([(first, 0), (first, 2), (second, 1)]),
    }.items():
        trainer = imitating(tmp_path, il_when)
        scored(trainer)
        assert trainer.curriculum.forks == forks


@pytest.mark.parametrize("p", [0, 1, 2])
def test_imitation_hits_exactly_the_expert_chunks_up_to_the_fork_with_their_own_return(tmp_path, p):
    expert = tiny.experts()[0]
    batch = [trajectory(expert, p, (2,), 0.0, seed=i) for i in range(4)]  # four rollouts of one fork: one expert row
    trainer = tiny.trainer(tmp_path, Recorded(batch), il_when="fork_failed", gamma=0.5)
    scored(trainer)
    rows = trainer._imitated_rows()
    turns = expert.trajectory.turns[: p + 1]
    assert rows["prompt_ids"].tolist() == [expert.trajectory.prompt_ids]
    hit = rows["completion_ids"][rows["chunk_ids"] >= 0].tolist()
    assert hit == [token for turn in turns for token in turn.ids]
    returns = [0.5 ** (2 - k) for k, turn in enumerate(turns) for _ in turn.ids]  # K = 3, whatever f is
    assert rows["returns"][rows["chunk_ids"] >= 0].tolist() == returns


def test_imitation_gradient_is_the_weighted_likelihood_of_the_expert(tmp_path):
    expert = tiny.experts()[0]
    batch = [trajectory(expert, 1, (2,), None, seed=i) for i in range(4)]  # no gradient of its own
    found = gradients(tmp_path, batch, il_when="always", gamma=0.5, lambda_il=3.0)
    model = tiny.model()
    chunks = policy_nll(model, dataclasses.replace(expert.trajectory, turns=expert.trajectory.turns[:2], start=0))
    total = 0.25 * chunks[0].sum() + 0.5 * chunks[1].sum()
    (3.0 * total / sum(map(len, chunks))).backward()
    assert_same(found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("aggregation", ["token", "chunk", "sum"])
def test_accumulation_leaves_the_imitation_gradient_alone(tmp_path, aggregation):
    options = {"il_when": "always", "aggregation": aggregation}
    apart = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    whole = gradients(tmp_path, mixed_batch(), **options)
    parts = gradients(tmp_path, mixed_batch(), **options, **apart)
    assert_same(whole, parts)


def test_gradient_shares_sum_to_one_and_follow_the_lambdas(tmp_path):
    def shares(**options) -> list[float]:
        logs = Logs()
        trainer = tiny.trainer(tmp_path, Recorded(mixed_batch()), callbacks=[logs], mask_level="none", **options)
        trainer.train()
        return [logs.rows[0][f"ipa/{name}_share"] for name in ("positive", "negative", "imitation")]

    assert shares()[2] == 0.0
    both = shares(il_when="always")
    assert sum(both) == pytest.approx(1) and min(both) > 0.05
    more = shares(il_when="always", lambda_il=2.0)
    assert more[2] / (1 - more[2]) == pytest.approx(2 * both[2] / (1 - both[2]))


# Start positions


def test_the_plan_is_a_function_of_task_and_step(tmp_path):
    names = [name for name in (e.trajectory.task.name for e in tiny.experts()) for _ in range(3)]
    for resampling in ("none", "rollback", "parallel", "both"):
        plans = []
        for _ in range(2):
            trainer = tiny.trainer(tmp_path, Recorded([]), resampling=resampling, anchor_mode="random")
            plans.append([[s.p for s in trainer.curriculum.starts(names, step)] for step in range(4)])
        assert plans[0] == plans[1]


class Positions(TrainerCallback):
    """The rollback position of the first task, before and after each optimiser step."""

    def __init__(self) -> None:
        self.trainer: IPATrainer
        self.seen: list[int] = []

    def look(self) -> None:
        name = tiny.experts()[0].trajectory.task.name
        self.seen.append(self.trainer.curriculum.resampler.positions(name, 0, 1)[0])

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.look()

    def on_step_end(self, args, state, control, **kwargs):
        self.look()


def test_start_positions_advance_after_the_optimiser_step(tmp_path):
    first, second = tiny.experts()
    batch = [trajectory(first, 2, (2,), 1.0), trajectory(first, 2, (3,), 1.0), *mixed_batch()[2:]]
    positions = Positions()
    trainer = tiny.trainer(tmp_path, Recorded(batch), callbacks=[positions], rollback_window=1)
    positions.trainer = trainer
    trainer.train()
    assert positions.seen == [2, 1]


def shorter(reward: float = 1.0) -> Trajectory:
    """The first expert's three commands in two responses."""
    expert = tiny.experts()[0].trajectory
    form, commands = tiny.chat(), expert.task.expert
    merged = form.response(commands[0])[:-1] + form.response(commands[1])
    sample = trajectory(tiny.experts()[0], 0, (1, 1), reward)
    sample.turns[0].ids, sample.turns[0].logprobs = merged, [-1.0] * len(merged)
    sample.turns[1].ids = form.response(commands[2], submit=True)
    sample.turns[1].logprobs = [-1.0] * len(sample.turns[1].ids)
    return sample


@pytest.mark.parametrize(("reward", "every", "chunks"), [(1.0, 1, 2), (0.0, 1, 3), (1.0, 0, 3), (1.0, 2, 3)])
def test_an_expert_is_replaced_by_a_shorter_verified_sample(tmp_path, reward, every, chunks):
    name = tiny.experts()[0].trajectory.task.name
    trainer = tiny.trainer(tmp_path, Recorded([shorter(reward), *mixed_batch()[1:]]), expert_refresh=every)
    trainer.train()
    assert trainer.curriculum.experts[name].chunks == chunks
    assert trainer.curriculum.resampler.num_chunks[name] == chunks


def test_a_sample_that_fails_when_run_again_replaces_nothing(tmp_path):
    sample = shorter()
    sample.turns[1].ids = tiny.chat().response("ls", submit=True)  # recorded as rewarded, but it solves nothing
    sample.turns[1].logprobs = [-1.0] * len(sample.turns[1].ids)
    trainer = tiny.trainer(tmp_path, Recorded([sample, *mixed_batch()[1:]]), expert_refresh=1)
    trainer.train()
    assert trainer.curriculum.experts[tiny.experts()[0].trajectory.task.name].chunks == 3


def test_tasks_repeat_where_a_batch_has_room_for_more(tmp_path):
    batch = [*mixed_batch(), *mixed_batch()]
    kept = Gradients()
    tiny.trainer(tmp_path, Recorded(batch), callbacks=[kept], per_device_train_batch_size=8).train()
    assert len(kept.steps) == 1


# Options

OTHER = {  # a value that is not the default, for the options whose type does not give one away
    "loss_type": "grpo", "epsilon_high": 0.3, "delta": 2.0, "importance_sampling_level": "sequence",
    "scale_rewards": "none", "reward_weights": [1.0], "multi_objective_aggregation": "normalize_then_sum",
    "vllm_mode": "server", "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_cap": 2.0,
    "vllm_importance_sampling_clip_min": 0.1, "off_policy_mask_threshold": 0.5, "generation_kwargs": {"a": 1},
    "transformers_continuous_batching_config": {"a": 1}, "chat_template_kwargs": {"a": 1}, "num_generations_eval": 4,
    "max_tool_calling_iterations": 3, "cache_implementation": "static", "vllm_structured_outputs_regex": "a",
    "vllm_max_model_length": 99, "vllm_server_base_url": "http://localhost:1", "vllm_model_impl": "transformers",
    "vllm_server_host": "::1",
}  # fmt: skip
# What GRPOTrainer does with these is as good for IPA.
AS_IN_GRPO = {
    "model_init_kwargs", "trust_remote_code", "router_aux_loss_coef", "disable_dropout", "cast_lm_head_to_fp32",
    "num_generations", "pad_to_multiple_of", "generation_batch_size", "steps_per_generation", "num_iterations",
    "beta", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "log_completions",
    "num_completions_to_print", "log_unique_prompts", "log_completions_hub_repo",
}  # fmt: skip


def fields(config: type) -> dict[str, dataclasses.Field]:
    return {entry.name: entry for entry in dataclasses.fields(config)}


@pytest.mark.parametrize("name", IGNORED)
def test_an_option_that_ipa_would_ignore_is_refused_by_name(tmp_path, name):
    default = fields(GRPOConfig)[name].default
    value = OTHER.get(name, (not default) if isinstance(default, bool) else None)
    value = default + 1 if value is None else value
    with pytest.raises(ConfigError, match=f"--{name} "):
        IPAConfig(output_dir=str(tmp_path), **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0.7), ("top_p", 0.8), ("top_k", 20), ("min_p", 0.1), ("repetition_penalty", 1.1)],
)
def test_sampling_that_would_bias_the_ratios_is_refused_by_name(tmp_path, name, value):
    assert name in SAMPLING
    with pytest.raises(ConfigError, match=f"--{name} "):
        IPAConfig(output_dir=str(tmp_path), **{name: value})


def test_every_option_of_grpo_is_used_overridden_or_refused():
    own = set(fields(GRPOConfig)) - set(fields(TrainingArguments))
    known = {*IGNORED, *SAMPLING, *IPAConfig.__annotations__, *AS_IN_GRPO}
    assert own <= known
    assert set(IGNORED) <= own and AS_IN_GRPO <= own  # a name that TRL dropped would guard nothing
    assert len(own) > 60


@pytest.mark.parametrize(
    "options",
    [{"objective": "ppo"}, {"ratio_level": "word"}, {"gamma": 1.1}, {"failure_reward": 0.5}, {"anchors": 0},
     {"mismatch_threshold": 0.9}, {"il_when": "often"}, {"resampling": "back"}, {"pi_old_source": "none"},
     {"aggregation": "mean"}, {"mask_level": "row"}, {"anchor_mode": "even"}, {"save_total_limit": 1},
     {"shuffle_dataset": True}, {"rollback_threshold": 0.0}, {"lambda_il": -1.0}, {"async_ratio": -1},
     {"rollout_redundancy": -1}, {"rollout_redundancy": 33}, {"filter_groups": "all"}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_name(tmp_path, options):
    name, value = next(iter(options.items()))
    with pytest.raises(MiniRomeError, match=f"--{name} {value}"):
        IPAConfig(output_dir=str(tmp_path), **options)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        ("reinforce", ("none", "none", False, 1.0)),
        ("tis", ("sequence", "none", True, 1.0)),
        ("topr", ("sequence", "none", False, 1.0)),
        ("baseline", ("sequence", "token", False, 1.0)),
        ("ipa", ("chunk", "chunk", False, 0.95)),
    ],
)
def test_an_objective_sets_its_switches_and_each_can_be_changed(tmp_path, objective, expected):
    args = IPAConfig(output_dir=str(tmp_path), objective=objective)
    assert (args.ratio_level, args.mask_level, args.positive_ratio, args.gamma) == expected
    changed = IPAConfig(output_dir=str(tmp_path), objective=objective, ratio_level="token", gamma=0.5)
    assert (changed.ratio_level, changed.gamma, changed.mask_level) == ("token", 0.5, expected[1])


def test_updates_per_batch_must_be_whole_optimiser_steps(tmp_path):
    with pytest.raises(ConfigError, match="--steps_per_generation 3"):
        IPAConfig(output_dir=str(tmp_path), gradient_accumulation_steps=2, steps_per_generation=3)


def test_a_start_in_the_middle_is_a_prompt_that_ends_with_the_expert_prefix(tmp_path):
    trainer = tiny.trainer(tmp_path, Recorded(mixed_batch()))
    inputs = scored(trainer)
    expert = tiny.experts()[0].trajectory
    prefix = [token for turn in expert.turns[:2] for token in turn.ids + turn.observation_ids]
    wanted = expert.prompt_ids + prefix
    rows = zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
    assert wanted in [ids[mask.bool()].tolist() for ids, mask in rows]
    assert isinstance(trainer.curriculum.starts([expert.task.name], 0)[0], Start)
