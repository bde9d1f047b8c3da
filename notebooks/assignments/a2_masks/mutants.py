"""Common wrong answers: FUNCTION__name, graded in place of FUNCTION. Each must lose points. Not released."""

from mini_rome import collator, masks

POLICY = masks.MaskPolicy(similarity=2.0, loop_period=0)


def error_mask__zero_only(turns, benign_exit_codes):
    """Exit code 0 alone is benign, whatever was asked for."""
    return masks.error_mask(turns, POLICY)


def error_mask__none_fails(turns, benign_exit_codes):
    """An exit code of None counts as a failure."""
    kept = masks.error_mask(turns, masks.MaskPolicy(benign_exit_codes=tuple(benign_exit_codes)))
    return [int(keep and turn.exit_code is not None) for keep, turn in zip(kept, turns, strict=True)]


def error_mask__status_forgotten(turns, benign_exit_codes):
    """A timeout is not noticed."""
    return [int(not turn.malformed and turn.exit_code in (None, *benign_exit_codes)) for turn in turns]


def relevance_mask__any_repeat(turns):
    """Every repeated command is redundant, whatever it printed."""
    seen, kept = set(), []
    for turn in turns:
        commands = tuple(" ".join(command.split()) for command in turn.commands)
        kept.append(int(commands not in seen and not {"pruned", "compressed"} & set(turn.reasons)))
        seen |= {commands} if commands else set()
    return kept


def relevance_mask__any_earlier_output(turns):
    """The output of any earlier run is compared, not that of the last one."""
    seen, kept = set(), []
    for turn in turns:
        key = (tuple(" ".join(command.split()) for command in turn.commands), turn.observation)
        kept.append(int((key not in seen or not key[0]) and not {"pruned", "compressed"} & set(turn.reasons)))
        seen.add(key)
    return kept


def masked_labels__shifted(prompt_ids, turns):
    """Labels are shifted by one, which the model does again."""
    ids, labels = masks.turn_labels(prompt_ids, turns, POLICY)
    return [ids, [*labels[1:], masks.IGNORE]]


def masked_labels__turn_dropped(prompt_ids, turns):
    """A masked turn leaves the context."""
    kept = [a * b for a, b in zip(masks.error_mask(turns, POLICY), masks.relevance_mask(turns, POLICY), strict=True)]
    return list(masks.turn_labels(prompt_ids, [turn for turn, keep in zip(turns, kept, strict=True) if keep], POLICY))


def masked_labels__observations_trained(prompt_ids, turns):
    """What the environment wrote is trained as well."""
    ids, _ = masks.turn_labels(prompt_ids, turns, POLICY)
    return [ids, [masks.IGNORE] * len(prompt_ids) + ids[len(prompt_ids) :]]


def collate__padded_on_the_left(rows, pad_token_id):
    """Padding comes first."""
    batch = collator.MaskedSFTCollator(pad_token_id, POLICY)(rows)
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    return {name: [row.roll(-int(n)).tolist() for row, n in zip(rows, lengths, strict=True)]
            for name, rows in batch.items()}  # fmt: skip


def collate__pad_trained(rows, pad_token_id):
    """The label of padding is the padding token."""
    batch = collator.MaskedSFTCollator(pad_token_id, POLICY)(rows)
    batch["labels"][batch["attention_mask"] == 0] = pad_token_id
    return batch


def collate__context_only(rows, pad_token_id):
    """Every turn is trained."""
    policy = masks.MaskPolicy(errors=False, irrelevant=False)
    return collator.MaskedSFTCollator(pad_token_id, policy)(rows)


