"""Which whole turns supervised fine-tuning trains: eqs. 1-2."""

from dataclasses import replace

import pytest
from samples import episode, trajectory, turn

from mini_rome.masks import (
    MaskPolicy,
    annotate,
    error_causes,
    error_mask,
    masked_labels,
    masked_share,
    relevance_causes,
    relevance_mask,
)

POLICY = MaskPolicy()


def causes(*turns, policy: MaskPolicy = POLICY) -> list[list[str]]:
    return relevance_causes(turns, policy)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, []),
        ({"exit_code": None}, []),
        ({"exit_code": 1}, ["exit_code"]),
        ({"exit_code": -9}, ["exit_code"]),
        ({"status": "timeout", "exit_code": 124}, ["timeout"]),
        ({"status": "oom", "exit_code": 137}, ["oom"]),
        ({"status": "output_limit"}, ["output_limit"]),
        ({"status": "sandbox_dead", "exit_code": None}, ["sandbox_dead"]),
        ({"malformed": True, "exit_code": None}, ["malformed"]),
        ({"malformed": True, "exit_code": 2}, ["malformed", "exit_code"]),
    ],
)
def test_errors_are_read_from_what_was_recorded(fields: dict, expected: list[str]) -> None:
    failed = turn(**fields)
    assert error_causes(failed, POLICY) == expected
    assert error_mask([turn(), failed], POLICY) == [1, int(not expected)]
    assert error_mask([failed], replace(POLICY, errors=False)) == [1]


def test_benign_exit_codes_are_no_error() -> None:
    assert error_mask([turn(exit_code=1), turn(exit_code=2)], replace(POLICY, benign_exit_codes=(0, 1))) == [1, 0]


def test_a_command_again_with_its_last_output_is_redundant() -> None:
    assert causes(turn("ls", "a"), turn("pwd", "/"), turn("ls", "a")) == [[], [], ["redundant"]]
    assert causes(turn("ls  -l", "a"), turn(" ls -l", "a")) == [[], ["redundant"]]


def test_a_command_again_with_another_output_is_progress() -> None:
    back_and_forth = [turn("ls", "a"), turn("touch b", ""), turn("ls", "a b"), turn("rm b", ""), turn("ls", "a")]
    assert causes(*back_and_forth) == [[]] * 5


def test_a_malformed_turn_is_not_redundant_but_can_loop() -> None:
    broken = [turn("", "no call", malformed=True) for _ in range(3)]
    assert causes(*broken[:2]) == [[], []]
    assert causes(*broken) == [[], ["loop"], ["loop"]]


def test_nearly_the_same_command_with_equal_output_is_a_near_duplicate() -> None:
    first, second = turn("head -n 10 notes.txt", "x"), turn("head -n 11 notes.txt", "x")  # ratio 38/40
    assert causes(first, second) == [[], ["near_duplicate"]]
    assert causes(first, second, policy=replace(POLICY, similarity=0.951)) == [[], []]
    assert causes(first, replace(second, observation="y")) == [[], []]
    assert causes(first, turn("tail -n 3 other", "x")) == [[], []]


def test_silent_or_malformed_turns_are_no_near_duplicates() -> None:
    assert causes(turn("touch notes-12345678.txt", " "), turn("touch notes-12345679.txt", " ")) == [[], []]
    assert causes(turn("", "x", malformed=True), turn("", "x", malformed=True)) == [[], []]
    assert causes(turn("ls", "x"), turn("", "x", malformed=True)) == [[], []]
    assert causes(turn("", "x", malformed=True), turn("ls", "x")) == [[], []]


def test_a_near_duplicate_keeps_the_order_of_its_characters() -> None:
    assert causes(turn("cat abcdefgh", "x"), turn("hgfedcba tac", "x")) == [[], []]


def test_similarity_counts_every_character_of_long_commands() -> None:
    long = "ab" * 200
    assert causes(turn("1" + long, "x"), turn("2" + long, "x")) == [[], ["near_duplicate"]]


def test_commands_of_one_response_are_compared_as_lines() -> None:
    """18 of 19 characters agree, line break counted once: a ratio of 0.947."""
    first, second = (turn("two", "x", commands=["abcdefgh", f"ijklmnopq{last}"]) for last in "12")
    assert causes(first, second) == [[], []]
    assert causes(first, second, policy=replace(POLICY, similarity=0.947)) == [[], ["near_duplicate"]]


def test_near_duplicates_are_looked_for_among_the_last_turns() -> None:
    far = [turn("head -n 10 notes.txt", "x"), *(turn(c, c) for c in "abc"), turn("head -n 11 notes.txt", "x")]
    assert causes(*far)[-1] == ["near_duplicate"]
    assert causes(*far, policy=replace(POLICY, lookback=3))[-1] == []


def test_later_passes_through_a_cycle_are_a_loop() -> None:
    cycle = [turn("edit", "1"), turn("test", "2"), turn("edit", "3"), turn("test", "4")]
    assert causes(*cycle, *cycle) == [[]] * 8  # two passes are none yet, and each turn answers something new
    assert causes(*cycle * 3, turn("done", "5")) == [[]] * 4 + [["loop"]] * 8 + [[]]
    assert causes(*cycle * 3, policy=replace(POLICY, loop_period=3)) == [[]] * 12
    assert causes(*cycle * 3, policy=replace(POLICY, loop_repeats=4)) == [[]] * 12
    assert causes(*cycle * 2, policy=replace(POLICY, loop_repeats=2)) == [[]] * 4 + [["loop"]] * 4


def test_defaults_are_the_documented_ones() -> None:
    assert MaskPolicy() == MaskPolicy(True, True, (0,), 0.95, 4, 4, 3, ("pruned", "compressed"))


def test_a_broken_cycle_is_no_loop() -> None:
    pair = [turn("a", "1"), turn("b", "2")]
    found = causes(*pair, turn("c", "3"), *pair, *pair, turn("d", "4"))
    assert not any("loop" in each for each in found)


def test_a_repeated_turn_can_have_two_causes() -> None:
    assert causes(*[turn("ls", "a")] * 3) == [[], ["redundant", "loop"], ["redundant", "loop"]]


def test_turns_that_context_editing_pruned_or_compressed_are_off_task() -> None:
    reasons = ("pruned", "compressed", "note")
    edited = [turn(command, reason, reasons=[reason]) for command, reason in zip("abc", reasons, strict=True)]
    assert causes(*edited) == [["pruned"], ["compressed"], []]
    assert relevance_mask(edited, POLICY) == [0, 0, 1]
    assert relevance_mask(edited, replace(POLICY, irrelevant=False)) == [1, 1, 1]


def test_annotation_follows_the_policy_also_the_second_time() -> None:
    turns = [turn("a", "1"), turn("b", "2", exit_code=1), turn("a", "1"), turn("c", "3", reasons=["pruned"])]
    sample = trajectory(turns)
    annotate(sample, replace(POLICY, similarity=2.0))
    annotate(sample, POLICY)
    assert [t.error for t in turns] == [False, True, False, False]
    assert [t.irrelevant for t in turns] == [False, False, True, True]
    assert [t.reasons for t in turns] == [[], ["exit_code"], ["redundant"], ["pruned"]]
    annotate(sample, replace(POLICY, benign_exit_codes=(0, 1), recorded=()))
    assert [t.error or t.irrelevant for t in turns] == [False, False, True, False]


def test_labels_are_the_kept_turns_their_stop_token_included() -> None:
    stop, newline = 2, 3
    turns = [
        turn("a", "1", ids=(10, stop), observation_ids=[newline, 90]),
        turn("b", "2", ids=(11, stop), observation_ids=[newline, 91], exit_code=1),
        turn("c", "3", ids=(12, stop), observation_ids=[newline, 92]),
    ]
    input_ids, labels = masked_labels(trajectory(turns), POLICY)
    assert input_ids == [1, 2, 10, stop, newline, 90, 11, stop, newline, 91, 12, stop]
    assert labels == [-100, -100, 10, stop] + [-100] * 6 + [12, stop]


def test_an_irrelevant_turn_stays_in_the_context() -> None:
    sample = trajectory([turn("a", "1"), turn("a", "1"), turn("b", "2")])
    input_ids, labels = masked_labels(sample, POLICY)
    assert len(input_ids) == 10 and [label for label in labels if label != -100] == [10, 11, 10, 11]
    assert labels[5:7] == [-100, -100]
    _, everything = masked_labels(sample, replace(POLICY, irrelevant=False))
    assert everything[5:7] == [10, 11]


def test_expert_turns_of_a_resumed_trajectory_are_trained_too() -> None:
    _, labels = masked_labels(episode([1, 2], [1, 1], start=1), POLICY)
    assert labels == [-100, -100, 10, -100, 20, 21]


def test_labels_leave_the_trajectory_alone() -> None:
    sample = trajectory([turn("a", "1"), turn("b", "2", exit_code=1)])
    masked_labels(sample, POLICY)[0].append(0)
    assert sample.prompt_ids == [1, 2] and sample.turns[1].reasons == [] and not sample.turns[1].error


def test_the_masked_share_counts_tokens_by_their_first_cause() -> None:
    turns = [
        turn("a", "1", ids=(1,) * 5),
        turn("b", "2", ids=(1,) * 2, exit_code=1),
        turn("a", "1", ids=(1,) * 2),
        turn("a", "1", ids=(1,), exit_code=1),
    ]
    samples = [trajectory(turns), trajectory([turn("c", "3", ids=(1,) * 10)])]
    assert masked_share(samples, POLICY) == {"exit_code": 3 / 20, "redundant": 2 / 20, "all": 5 / 20}
    assert masked_share(samples, replace(POLICY, errors=False)) == {"redundant": 3 / 20, "all": 3 / 20}
    assert masked_share(samples, replace(POLICY, irrelevant=False)) == {"exit_code": 3 / 20, "all": 3 / 20}
    assert masked_share([], POLICY) == {}
