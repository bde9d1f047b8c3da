"""Masked SFT rows: the collator and the dataset transform give the loss of eqs. 1-2."""

import json

import oracle
import pytest
import torch
from samples import trajectory, turn
from torch.nn.functional import cross_entropy

from mini_rome.collator import MaskedSFTCollator, to_records, to_sft_rows
from mini_rome.masks import MaskPolicy

PAD = 0
TRAJECTORIES = [
    trajectory(
        [turn("a", "1", ids=(5, 6, 2)), turn("b", "2", ids=(7, 2), exit_code=1), turn("c", "3", ids=(8, 9, 2))]
    ),
    trajectory([turn("a", "1", ids=(4, 2)), turn("a", "1", ids=(4, 2))]),
]
KEPT = [[(1, 3), (0, 2), (1, 3)], [(1, 2), (0, 2)]]
FAILED = trajectory([turn("x", "?", exit_code=1)])


def toy_logits(input_ids: torch.Tensor) -> torch.Tensor:
    """A language model of random numbers: logits (B, T, V) in float64, a function of the token and its position."""
    table = torch.randn(100, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return table[input_ids] + torch.arange(input_ids.shape[1])[None, :, None] * table[:1]


def batch_loss(batch: dict[str, torch.Tensor]) -> float:
    logits = toy_logits(batch["input_ids"])[:, :-1]  # the label shift of any causal language model
    return cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100).item()


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """What any collator does with tokenised rows."""
    fills = {"input_ids": PAD, "labels": -100}
    return {
        key: torch.nn.utils.rnn.pad_sequence([torch.tensor(row[key]) for row in rows], True, fill)
        for key, fill in fills.items()
    }


def test_collator_transform_and_equation_give_one_loss() -> None:
    collated = MaskedSFTCollator(PAD)(to_records(TRAJECTORIES))
    rows = []
    for sample, kept in zip(TRAJECTORIES, KEPT, strict=True):
        ids = [*sample.prompt_ids]
        where = []
        for index, each in enumerate(sample.turns):
            where += range(len(ids), len(ids) + len(each.ids))
            ids += each.ids + (each.observation_ids if index < len(sample.turns) - 1 else [])
        logps = toy_logits(torch.tensor([ids])).log_softmax(-1)[0]
        rows.append((kept, [logps[t - 1, ids[t]].item() for t in where]))
    expected = oracle.masked_sft_loss(rows)
    assert batch_loss(collated) == pytest.approx(expected, rel=1e-12)
    assert batch_loss(padded(to_sft_rows(TRAJECTORIES, MaskPolicy()))) == pytest.approx(expected, rel=1e-12)


def test_a_batch_is_padded_on_the_right() -> None:
    batch = MaskedSFTCollator(PAD)(to_records(TRAJECTORIES))
    assert batch["input_ids"].tolist() == [[1, 2, 5, 6, 2, 90, 7, 2, 90, 8, 9, 2], [1, 2, 4, 2, 90, 4, 2] + [PAD] * 5]
    assert batch["attention_mask"].tolist() == [[1] * 12, [1] * 7 + [0] * 5]
    assert batch["labels"].tolist()[1] == [-100, -100, 4, 2] + [-100] * 8
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_the_collator_follows_its_policy_at_batch_time() -> None:
    collator = MaskedSFTCollator(PAD)
    row = to_records(TRAJECTORIES[1:])
    assert collator(row)["labels"][0, 5].item() == -100
    collator.policy = MaskPolicy(irrelevant=False)
    assert collator(row)["labels"][0, 5].item() == 4


def test_rows_with_nothing_to_train_are_left_out_and_change_no_loss() -> None:
    rows = to_sft_rows([FAILED, *TRAJECTORIES], MaskPolicy())
    assert rows == to_sft_rows(TRAJECTORIES, MaskPolicy()) and len(rows) == 2
    assert json.loads(json.dumps(rows)) == rows
    with_it = MaskedSFTCollator(PAD)(to_records([FAILED, *TRAJECTORIES]))
    assert batch_loss(with_it) == pytest.approx(batch_loss(padded(rows)), rel=1e-12)


def test_every_token_of_a_dataset_row_has_a_label() -> None:
    for row in to_sft_rows(TRAJECTORIES, MaskPolicy()):
        assert set(row) == {"input_ids", "labels"}
        assert all(label in (-100, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_trls_trainer_sees_one_loss_from_collator_transform_and_packed_rows(packing: bool, tmp_path) -> None:
    """One optimiser step of SFTTrainer on the same model and batch; the loss it reports is eqs. 1-2."""
    datasets, transformers, trl = (pytest.importorskip(name) for name in ("datasets", "transformers", "trl"))
    from mini_rome.model import build_tokenizer

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100, "max_position_embeddings": 64}  # fmt: skip

    def trained(rows: list[dict], collator: MaskedSFTCollator | None, **settings) -> float:
        torch.manual_seed(0)
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
        args = trl.SFTConfig(
            str(tmp_path), max_steps=1, per_device_train_batch_size=2, logging_steps=1, report_to="none",
            use_cpu=True, bf16=False, max_length=32, disable_tqdm=True, gradient_checkpointing=False, **settings,
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            model, args, train_dataset=datasets.Dataset.from_list(rows), data_collator=collator,
            processing_class=build_tokenizer(),
        )  # fmt: skip
        trainer.train()
        return trainer.state.log_history[0]["loss"]

    raw = {"remove_unused_columns": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
    at_batch_time = trained(to_records(TRAJECTORIES), MaskedSFTCollator(PAD), **raw)
    before = trained(to_sft_rows(TRAJECTORIES, MaskPolicy()), None, packing=packing, padding_free=False)
    assert before == pytest.approx(at_batch_time, rel=1e-5)
