"""A verdict that the agent could have forged reaches no loss, by any of the ways into one."""

from collections.abc import Callable

import pytest

from mini_rome.chunking import pack
from mini_rome.collator import to_records, to_sft_rows
from mini_rome.errors import VerifierError
from mini_rome.masks import MaskPolicy
from mini_rome.tasks.choice import find_task
from mini_rome.types import IN_PLACE, Trajectory, Turn

WAYS: dict[str, Callable[[Trajectory], object]] = {
    "IPA": pack,
    "imitation": lambda t: pack(t, prefix="completion"),
    "SFT rows": lambda t: to_sft_rows([t], MaskPolicy()),
    "SFT records": lambda t: to_records([t]),
}


def trajectory(verifier: str) -> Trajectory:
    turns = [Turn([5, 2], [-0.1, -0.2], "ls", ["ls"], "a", [7], exit_code=0)]
    return Trajectory(find_task("notes"), [1], turns, reward=1.0, verifier=verifier)


@pytest.mark.parametrize("way", WAYS)
def test_an_in_place_verdict_is_refused_and_any_other_is_taken(way: str) -> None:
    for verifier in ("host-check", "fresh-container"):
        assert WAYS[way](trajectory(verifier))
    with pytest.raises(VerifierError, match="in-place.*never for training"):
        WAYS[way](trajectory(IN_PLACE))
