"""Runs of ablations at miniature size, the trainers IPA is compared with, and what is skipped when one goes on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
import yaml

from mini_rome import pipeline
from mini_rome.errors import ConfigError
from mini_rome.evaluation import ablation_plan, ablation_pool, ablation_run
from mini_rome.evaluation.ablation import Ablation
from mini_rome.evaluation.ablation_figures import ABLATIONS, BASELINES
from mini_rome.evaluation.ablation_job import SFT, Job, build
from mini_rome.evaluation.ablation_plan import Plan, choose_seeds
from mini_rome.evaluation.ablation_pool import run_plans
from mini_rome.evaluation.ablation_run import make_sft, run_job
from mini_rome.evaluation.ablation_trainers import (
    GiGPOBaseline,
    GiGPOConfig,
    GRPOBaseline,
    NoisySampler,
    step_advantages,
)
from mini_rome.evaluation.rows import Row, read_rows
from mini_rome.sampler.base import SamplingParams
from mini_rome.sampler.transformers import TransformersSampler

# Of every ablation: what it trains and measures is kept, its size is not.
MINIATURE = {
    "families": ["notes"], "sft_chunks": [1], "sft_tasks": 4, "sft_steps": 1, "sft_batch_size": 4, "chunks": [2],
    "extra_turns": 0, "max_new_tokens": 5, "train_tasks": 2, "num_generations": 2, "per_device_train_batch_size": 4,
}  # fmt: skip
STEPS = 2


def miniature(name: str) -> Ablation:
    whole = ABLATIONS[name]
    held_out, repeats = min(whole.held_out, 2), min(whole.repeats, 2)
    base = {**whole.base, **MINIATURE, "anchors": 2}
    return dataclasses.replace(whole, base=base, held_out=held_out, repeats=repeats, every=1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One folder of models and finished runs for all tests: figures share runs here as they do in earnest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "build_model", lambda tokenizer, seed: tiny.model(seed, vocab_size=len(tokenizer)))
        patch.setattr(ablation_run, "TRIES", 2)
        yield tmp_path_factory.mktemp("cache")


def jobs(name: str, cache: Path, seed: int = 0) -> list[Job]:
    ablation = miniature(name)
    return [Job.of(ablation, variant, seed, STEPS, "sim", str(cache), str(cache)) for variant in ablation.variants]


def told(job: Job) -> list[Row]:
    if not job.result.exists():
        make_sft(job)
        run_job(job)
    return [Row(*row) for row in json.loads(job.result.read_text())["rows"]]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "fig12" else pytest.mark.long) for name in ABLATIONS]
)
def test_every_variant_of_every_ablation_runs_two_steps(name: str, cache: Path) -> None:
    for job in jobs(name, cache):
        rows = told(job)
        measured = {metric for metric in ("start_success", "test_success") if any(r.metric == metric for r in rows)}
        expected = {"start_success": job.repeats, "test_success": job.held_out}
        assert measured == {metric for metric, count in expected.items() if count}, job.variant.name
        assert {row.step for row in rows if row.metric in measured} == {0, 1, 2}, job.variant.name
        assert {row.step for row in rows if row.metric == "grad_norm"} == {1, 2}, job.variant.name
        assert all(0.0 <= row.value <= 1.0 for row in rows if "success" in row.metric)


def test_a_run_repeats_itself_but_for_its_seconds(cache: Path) -> None:
    job = jobs("fig12", cache)[0]

    def numbers() -> list[tuple]:
        return [row[1:] for row in told(job) if row.metric != "seconds"]  # the name is of the figure that was first

    first = numbers()
    job.result.unlink()
    assert numbers() == first


def test_tokens_and_episodes_add_up(cache: Path) -> None:
    alone = jobs("fig12", cache)[1]
    naive = told(dataclasses.replace(alone, base={**alone.base, "il_when": "never"}))
    episodes = {row.step: row.value for row in naive if row.metric == "episodes"}
    tokens = {row.step: row.value for row in naive if row.metric == "tokens"}
    assert episodes == {0: 0, 1: 4, 2: 8}
    assert 0 == tokens[0] < tokens[1] < tokens[2] <= 8 * 2 * MINIATURE["max_new_tokens"]  # two turns of five tokens


def test_imitation_counts_the_experts_tokens_and_leaves_the_other_half_to_rollouts(cache: Path) -> None:
    imitated, first = (told(job) for job in jobs("control12", cache)[2:4])
    spent = [{row.step: row.value for row in rows if row.metric == "tokens"} for rows in (imitated, first)]
    assert spent[0][2] == 2 * spent[0][1] > 0 and spent[0][1] == spent[1][1] != spent[1][2] - spent[1][1] > 0
    episodes = {row.step: row.value for row in first if row.metric == "episodes"}
    assert episodes == {0: 0, 1: 0, 2: 4}


def test_figures_with_a_run_in_common_share_it_and_others_do_not(cache: Path) -> None:
    twelve, control, baselines = (
        {job.variant.name: job.result for job in jobs(name, cache)} for name in ("fig12", "control12", "baselines")
    )
    assert twelve["rollback"] == control["rollback"] == baselines["IPA, rollback"]
    assert len({*twelve.values(), *control.values(), *baselines.values()}) == 2 + 3 + 6
    assert jobs("fig12", cache, seed=1)[0].result != twelve["rollback"]


def test_an_option_that_nothing_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="gama 1: no option of RunArguments, IPAConfig, ModelConfig"):
        build({"gama": 1}, ablation_run.IPAConfig)


@pytest.mark.long
def test_a_task_that_the_model_solves_is_not_hard(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = dataclasses.replace(jobs("fig12", cache)[0], seed=5, every=2)
    make_sft(job)
    tried: list[str] = []

    def play(arm, tasks, params=None):
        tried.append(tasks[0].name)
        reward = float(len(set(tried)) < 3)  # the first two are easy
        return [tiny.trajectory(tiny.experts()[0], 0, (2,), reward) for _ in tasks]

    monkeypatch.setattr(ablation_run.Arm, "play", play)
    chosen: list[str] = []

    def reinforce(arm, experts, *rest):
        chosen.extend(expert.trajectory.task.name for expert in experts)

    monkeypatch.setattr(ablation_run.Arm, "reinforce", reinforce)
    monkeypatch.setattr(ablation_run.Measures, "test", lambda measures, step: None)
    run_job(job)
    assert chosen == [tried[2]] and len(set(tried)) == 3
    number = len(tried)
    run_job(job)  # as another variant would: the search is not repeated
    assert chosen == [tried[2]] * 2 and len(tried) == number


# Going on


def test_seeds_of_another_length_are_left_alone() -> None:
    rows = [Row("a", str(seed), "all", 40, "x", 0.0) for seed in (100, 101, 102)]
    assert choose_seeds(rows, 2, 40, 100) == [100, 101]
    assert choose_seeds(rows, 5, 40, 100) == [100, 101, 102, 103, 104]
    assert choose_seeds(rows, 2, 20, 100) == [103, 104]
    begun = [*rows, Row("a", "103", "all", 20, "x", 0.0)]  # of 20 steps: it is finished first
    assert choose_seeds(begun, 2, 20, 100) == [103, 104]


def plan_of(cache: Path, out: Path, monkeypatch: pytest.MonkeyPatch, **options) -> Plan:
    """A plan whose runs are made here, one after the other."""
    chosen = {"seeds": 1, "steps": STEPS, "variants": [], "backend": "sim", "first_seed": 0}
    chosen |= {"fast": False, "out": str(out), "cache": str(cache), **options}
    plan = Plan.of(miniature("fig12"), **chosen)
    monkeypatch.setattr(ablation_pool.Pool, "work", lambda self: [(told(job), p.take(job)) for p, job in self.todo])
    return plan


def test_finished_runs_are_skipped_and_the_rest_is_added(cache: Path, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "fig12.csv"
    first = plan_of(cache, out, monkeypatch, variants=["naive"])
    run_plans([first], 1)
    before = read_rows(out)
    assert {row.variant for row in before} == {"naive"}
    plan = plan_of(cache, out, monkeypatch)
    assert [job.variant.name for job in plan.missing()] == ["rollback"]
    run_plans([plan], 1)
    plan.report()
    after = read_rows(out)
    assert [row for row in after if row.variant == "naive"] == before and len(after) > len(before)
    assert plan_of(cache, out, monkeypatch).missing() == []
    assert_nothing_changes_where_nothing_runs(plan_of(cache, out, monkeypatch), monkeypatch)
    facts = json.loads(out.with_suffix(".json").read_text())
    for name in ("command", "commit", "versions", "device", "seeds", "seconds", "backend", "runs", "sft", "claims"):
        assert name in facts, name
    assert set(facts["runs"]) == {"naive/0", "rollback/0"} and facts["sft"]["0"]["short"] is not None
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_runs_from_two_models_after_sft_are_told_apart(cache: Path, tmp_path: Path, monkeypatch) -> None:
    """The model made anew, as after the cache was lost: another code may give other weights."""
    own, out = tmp_path / "cache", tmp_path / "fig12.csv"
    run_plans([plan_of(cache, out, monkeypatch)], 1)
    shutil.copytree(cache, own)
    first = plan_of(own, tmp_path / "again.csv", monkeypatch, variants=["naive"])
    run_plans([first], 1)
    naive, rollback = sorted(jobs("fig12", own), key=lambda job: job.variant.name)
    model = naive.model / SFT
    assert model == rollback.model / SFT
    facts = json.loads(model.read_text())
    assert facts["weights"] == hashlib.sha256((model.parent / "model.safetensors").read_bytes()).hexdigest()[:12]
    model.write_text(json.dumps(facts | {"weights": "another"}))
    rollback.result.unlink()  # run again; that of naive was made from the first model, whatever is there now
    run_plans([plan_of(own, first.csv, monkeypatch)], 1)
    found = json.loads(first.csv.with_suffix(".json").read_text())
    told_apart = {"naive/0": facts["weights"], "rollback/0": "another"}
    assert {name: run["sft"] for name, run in found["runs"].items()} == told_apart
    assert {name: model["weights"] for name, model in found["sft"].items()} == {
        "0": facts["weights"],
        "0, another": "another",
    }
    later = plan_of(own, tmp_path / "later.csv", monkeypatch)
    run_plans([later], 1)
    found = json.loads(later.csv.with_suffix(".json").read_text())
    assert {name: run["sft"] for name, run in found["runs"].items()} == told_apart


def assert_nothing_changes_where_nothing_runs(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which command and commit made the rows stays said, whoever asks for them again."""
    files = [plan.csv.with_suffix(ending) for ending in (".csv", ".json", ".png")]
    before = [path.read_bytes() for path in files]
    with monkeypatch.context() as later:
        later.setattr("mini_rome.runs.commit", lambda: "another")
        run_plans([plan], 1)
        plan.report()
    assert [path.read_bytes() for path in files] == before


def test_a_variant_that_is_not_there_is_named(cache: Path, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ConfigError, match="--variants nive: fig12 has rollback, naive"):
        plan_of(cache, tmp_path / "x.csv", monkeypatch, variants=["nive"])


def test_two_processes_do_not_write_one_table(cache: Path, tmp_path: Path, monkeypatch) -> None:
    plan = plan_of(cache, tmp_path / "fig12.csv", monkeypatch)
    with plan.alone(), pytest.raises(ConfigError, match="another process is running this ablation"):
        run_plans([plan], 1)


@pytest.mark.long
def test_jobs_run_in_processes_and_leave_the_same_rows(cache: Path, tmp_path: Path, monkeypatch) -> None:
    """The real pool: a model that both runs start from is made once, before them."""
    plan = Plan.of(
        miniature("fig12"), seeds=1, steps=STEPS, variants=[], backend="sim", first_seed=7, fast=False,
        out=str(tmp_path / "fig12.csv"), cache=str(tmp_path / "cache"),
    )  # fmt: skip
    run_plans([plan], 2)
    assert {(row.variant, row.seed) for row in read_rows(plan.csv)} == {("rollback", "7"), ("naive", "7")}
    assert len(list(plan.cache.glob("sft-*"))) == 1 and not list(plan.cache.glob("tmp-*"))
    assert plan.missing() == [] and ablation_plan.FIRST_SEED == 100


# What IPA is compared with


def group(rewards: tuple[float, ...]) -> list:
    """Rollouts of one task from its initial state, of different lengths."""
    expert = tiny.experts()[0]
    return [tiny.trajectory(expert, 0, (3, 2 + at), reward, seed=at) for at, reward in enumerate(rewards)]


def gradients(batch: list, folder: Path, kind: type, **options) -> dict[str, torch.Tensor]:
    kept = tiny.Gradients()
    options = {"per_device_train_batch_size": len(batch), "num_generations": len(batch), **options}
    tiny.trainer(folder, tiny.Recorded(batch), callbacks=[kept], kind=kind, count=1, **options).train()
    return kept.steps[0]


def test_grpo_is_reinforce_with_standardised_rewards(tmp_path: Path) -> None:
    """Rewards 1 and 0 become +-0.5 / (sqrt(0.5) + 1e-4): the gradient is so many times that of rewards +1 and -1."""
    batch = group((1.0, 0.0))
    found = gradients(batch, tmp_path / "grpo", GRPOBaseline)
    plain = gradients(batch, tmp_path / "plain", tiny.IPATrainer, objective="reinforce", failure_reward=-1.0)
    scale = 0.5 / (0.5**0.5 + 1e-4)
    tiny.assert_same(found, {name: scale * gradient for name, gradient in plain.items()})


def test_grpo_has_no_gradient_where_all_rewards_are_alike(tmp_path: Path) -> None:
    found = gradients(group((1.0, 1.0)), tmp_path, GRPOBaseline)
    assert max(gradient.abs().max() for gradient in found.values()) == 0.0


def test_grpo_refuses_an_episode_of_several_contexts(tmp_path: Path) -> None:
    batch = group((1.0, 0.0))
    batch[1].chains = group((0.0,))
    with pytest.raises(ConfigError, match="--context: GRPO's loss reads rows of one context"):
        gradients(batch, tmp_path, GRPOBaseline)


def gigpo(**options) -> GiGPOConfig:
    return GiGPOConfig(output_dir="unused", advantage_clip=9.0, step_reward_gamma=0.5, **options)


def test_step_advantages_add_the_groups_of_equal_states() -> None:
    """Two rollouts, both of two chunks from the initial state: rewards 1 and 0, so episodes have +1 and -1.

    The first states are equal: returns 0.5 and 0, standardised +1 and -1. The second states differ: no group, no
    advantage.
    """
    batch = group((1.0, 0.0))
    batch[0].turns[0].observation, batch[1].turns[0].observation = "left", "right"
    assert step_advantages(batch, gigpo()) == [[2.0, 1.0], [-2.0, -1.0]]
    batch[1].turns[0].observation = "left"
    assert step_advantages(batch, gigpo()) == [[2.0, 2.0], [-2.0, -2.0]]
    assert step_advantages(batch, gigpo(step_weight=0.0)) == [[1.0, 1.0], [-1.0, -1.0]]


def test_advantages_are_clipped_and_spoiled_rollouts_have_none() -> None:
    batch = [*group((1.0, 0.0)), tiny.trajectory(tiny.experts()[0], 0, (2,), None)]
    clipped = dataclasses.replace(gigpo(), advantage_clip=0.2, generation_batch_size=None)
    assert step_advantages(batch, clipped) == [[0.2, 0.2], [-0.2, -0.2], [0.0]]


def test_gigpo_without_step_groups_is_grpo_but_for_the_scale(tmp_path: Path, monkeypatch) -> None:
    """With episode advantages alone, +-1, its gradient is that of rewards +1 and -1."""
    batch = group((1.0, 0.0))
    options = {"step_weight": 0.0, "advantage_clip": 9.0}
    known = {entry.name for entry in dataclasses.fields(tiny.IPAConfig)}
    assert not known & set(options)
    monkeypatch.setattr(tiny, "IPAConfig", GiGPOConfig)
    found = gradients(batch, tmp_path / "gigpo", GiGPOBaseline, **options)
    monkeypatch.undo()
    plain = gradients(batch, tmp_path / "plain", tiny.IPATrainer, objective="reinforce", failure_reward=-1.0)
    tiny.assert_same(found, plain)


def test_the_published_values_are_those_that_the_variants_have() -> None:
    path = Path(__file__).parents[1] / "recipes/configs/roll_gigpo.yaml"
    published = yaml.safe_load(path.read_text())
    for variant in (each for each in BASELINES.variants if each.trainer == "gigpo"):
        _, args, _ = build({**BASELINES.base, **variant.options}, GiGPOConfig, output_dir="unused")
        assert published and {name: getattr(args, name) for name in published} == published
    lines = [text for text in path.read_text().splitlines() if text and not text.startswith("#")]
    assert all("# " in text for text in lines)  # each with its source


def test_noise_moves_the_sampler_and_not_the_trainer() -> None:
    network = tiny.model()
    before = {name: weights.clone() for name, weights in network.state_dict().items()}
    noisy = NoisySampler(network, 1, 0.05)._model.state_dict()
    assert all(torch.equal(weights, before[name]) for name, weights in network.state_dict().items())
    weights = before["model.embed_tokens.weight"]
    off = (noisy["model.embed_tokens.weight"] - weights).std() / weights.std()
    assert off == pytest.approx(0.05, rel=0.05)
    assert torch.equal(noisy["model.norm.weight"], before["model.norm.weight"])
    still = NoisySampler(network, 1, 0.0)._model.state_dict()
    assert all(torch.equal(still[name], before[name]) for name in before)
    assert isinstance(NoisySampler(network, 1, 0.0), TransformersSampler) and SamplingParams().temperature == 1.0
