"""Retail and shop in TRL's own tool loop."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer

from mini_rome.env import TRLEnv
from mini_rome.errors import ConfigError
from mini_rome.families import get_family
from mini_rome.model import build_model, build_tokenizer
from mini_rome.tool_envs import RetailToolEnv, ShopToolEnv
from mini_rome.trace import CALL, CALL_END, IM_END, TOOL_RESPONSE_TEMPLATE

KINDS: dict[str, type[TRLEnv]] = {"retail": RetailToolEnv, "shop": ShopToolEnv}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    made = build_tokenizer(["retail", "shop"])
    made.response_template = TOOL_RESPONSE_TEMPLATE
    return made


def methods(kind: type[TRLEnv]) -> set[str]:
    found = {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}
    return found - {"reset", "get_reward"}


@pytest.mark.parametrize("name", sorted(KINDS))
def test_the_methods_are_the_familys_tools_with_the_same_parameters(name: str) -> None:
    task = get_family(name).make(0, 2)
    assert methods(KINDS[name]) == {*task.tools, "submit"}
    environment = KINDS[name]()
    for tool, function in task.tools.items():
        schema = get_json_schema(getattr(environment, tool))["function"]
        wanted = list(inspect.signature(function).parameters)[1:]
        assert list(schema["parameters"]["properties"]) == schema["parameters"].get("required", []) == wanted


@pytest.mark.parametrize("name", sorted(KINDS))
@pytest.mark.parametrize("seed", range(3))
def test_the_expert_as_trl_parses_it_earns_the_reward(
    name: str, seed: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    task, environment = get_family(name).make(seed, 5), KINDS[name]()
    assert environment.reset(family=name, chunks=5, seed=seed, backend="sim") == task.instruction
    for chunk in [*task.expert, "submit"]:
        text = "".join(f"{CALL}{body}{CALL_END}" for body in chunk.split("\n")) + IM_END
        for called in tokenizer.parse_response(text, prefix="<|im_start|>assistant\n")["tool_calls"]:
            getattr(environment, called["function"]["name"])(**called["function"]["arguments"])
    assert environment.get_reward() == 1.0


def test_an_episode_that_is_not_solved_or_not_finished_earns_nothing() -> None:
    environment = ShopToolEnv()
    with pytest.raises(ConfigError, match=r"before reset\(\)"):
        environment.buy()
    environment.reset(family="shop", chunks=2, seed=0, backend="sim")
    assert environment.view("nothing", "small").startswith('{"error":"no product')
    assert environment.submit() == ""
    assert environment.get_reward() == 0.0
    environment.reset(family="shop", chunks=2, seed=0, backend="sim")
    assert environment.get_reward() == 0.0


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_trl_plays_a_tool_family_in_its_own_loop(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = [{"role": "user", "content": ""}]
    trainer = GRPOTrainer(
        model=build_model(tokenizer),
        args=GRPOConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=2, num_generations=2,
            max_completion_length=8, max_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": prompt, "family": "retail", "chunks": 1, "seed": 0, "backend": "sim"}]
        ),
        processing_class=tokenizer,
        environment_factory=RetailToolEnv,
    )  # fmt: skip
    assert {tool.__name__ for tool in trainer.tools} == methods(RetailToolEnv)
    assert trainer.chat_template is None  # ours keeps prefixes: TRL need not replace it
    trainer.train()
