"""Bad input: an error of one to three lines that names option, value and way on, before anything is written.

The recipes run in this process, as `python recipes/ipa.py ...` would; a few run in a process of their own.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mini_rome import pipeline
from mini_rome.arguments import RunArguments
from mini_rome.config import IPAConfig
from mini_rome.errors import ConfigError, ImageMissing
from mini_rome.families import FAMILIES
from mini_rome.options import OptionsParser, guarded
from mini_rome.run_options import check_same_options, options_of
from mini_rome.sandbox import Pool

ROOT = Path(__file__).parent.parent
IPA, SFT, DATA, CPT = (ROOT / "recipes" / f"{name}.py" for name in ("ipa", "sft", "data", "cpt"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory: whatever a recipe writes lands here."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def began(run: object) -> None:
    raise AssertionError("the run began")


def run(
    recipe: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> tuple[int, str]:
    """(exit code, what it wrote to stderr) of a recipe run in this process."""
    monkeypatch.setattr(sys, "argv", [str(recipe), *words])
    monkeypatch.setattr("mini_rome.pipeline.Run.build_model", began)  # the end of a test that should have failed
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(recipe), run_name="__main__")
    code = ended.value.code
    assert isinstance(code, int)
    return code, capsys.readouterr().err


BAD = [
    ("an unknown option", "--nonsense 3", ["unknown option --nonsense"]),
    ("a misspelt option", "--max_step 3", ["unknown option --max_step,", "did you mean --max_steps?"]),
    ("a misspelt option", "--learning_rat 3", ["--learning_rat"]),
    ("no number", "--chunks abc", ["--chunks", "'abc'"]),
    ("no choice of a value", "--objective ppo", ["--objective ppo", "reinforce", "ipa"]),
    ("no choice of a level", "--ratio_level word", ["--ratio_level word", "none, token, chunk, sequence"]),
    ("no choice of starts", "--resampling often", ["--resampling often", "rollback", "parallel"]),
    ("a cut of the distribution", "--top_p 0.9", ["--top_p 0.9", "need 1.0", "bias"]),
    ("another temperature", "--temperature 0.7", ["--temperature 0.7", "need 1.0"]),
    ("top-k", "--top_k 20", ["--top_k 20", "need 0"]),
    ("GRPO's clip", "--epsilon 0.3", ["--epsilon 0.3", "IPA has no place"]),
    ("GRPO's loss", "--loss_type bnpo", ["--loss_type bnpo", "IPA has no place"]),
    ("GRPO's scaling", "--scale_rewards none", ["--scale_rewards none", "IPA has no place"]),
    ("GRPO's generation", "--use_vllm true", ["--use_vllm True", "IPA has no place"]),
    ("GRPO's length", "--max_completion_length 99", ["--max_completion_length 99", "IPA has no place"]),
    ("gamma", "--gamma 1.5", ["--gamma 1.5", "[0, 1]"]),
    ("a reward for failing", "--failure_reward 1", ["--failure_reward 1", "[-10, 0]"]),
    (
        "a batch not divisible", "--per_device_train_batch_size 3 --num_generations 8",
        ["(12)", "num_generations (8)", "--per_device"],
    ),
    ("tasks that fit no batch", "--train_tasks 7", ["--train_tasks 7", "--num_generations 2", "64"]),
    ("a horizon of nothing", "--chunks 0", ["--chunks 0", "1 to 16"]),
    ("a horizon beyond the dial", "--chunks 8 17", ["--chunks 17", "1 to 16"]),
    ("a horizon of SFT beyond the dial", "--sft_chunks 99", ["--sft_chunks 99", "1 to 16"]),
    ("a family", "--families notes chess", ["'chess'", "notes, tickets"]),
    ("a negative step", "--learning_rate -1", ["--learning_rate -1", "[0, inf]"]),
    ("a negative step of SFT", "--sft_learning_rate -1", ["--sft_learning_rate -1", "0 or more"]),
    ("a negative number of steps", "--max_steps -5", ["--max_steps -5", "[0, inf]"]),
    ("no rollout", "--num_generations 0", ["--num_generations 0", "[1, inf]"]),
    ("an empty batch", "--per_device_train_batch_size 0", ["--per_device_train_batch_size 0", "[1, inf]"]),
    ("no accumulation", "--gradient_accumulation_steps 0", ["--gradient_accumulation_steps 0", "[1, inf]"]),
    ("no task", "--train_tasks 0", ["--train_tasks 0", "at least 1"]),
    ("a rate", "--mistake_rate 1.0", ["--mistake_rate 1.0", "[0, 1)"]),
    ("negative turns", "--extra_turns -1", ["--extra_turns -1", "0 or more"]),
    ("a sampler", "--sampler magic", ["--sampler magic"]),
    ("a precision", "--sampler_dtype float99", ["--sampler_dtype float99", "bfloat16"]),
    ("a precision that is a function", "--sampler_dtype tensor", ["--sampler_dtype tensor", "bfloat16"]),
    ("context that is not JSON", "--context guard", ["--context guard", "not JSON"]),
    ("context that is no mapping", "--context [1]", ["--context [1]", "compress_at (int)"]),
    ("a context feature", '--context {"gard":"stop"}', ['"gard"', "guard (str)"]),
    ("a context feature's kind", '--context {"compress_at":"9"}', ["compress_at", "(int)"]),
    ("a context feature's value", '--context {"guard":"maybe"}', ["--context guard='maybe'", "stop"]),
    ("context of a native agent", '--agent native --context {"guard":"stop"}', ["--agent native --context", "own"]),
    ("a sandbox", "--sandbox podman", ["'podman'", "auto, docker, sim"]),
    ("no such model", "--model no/such", ["--model no/such", "does not exist", "make ipa"]),
    ("no such run", "--resume no/such", ["--resume no/such", "state.json"]),
    ("TRL's way to resume", "--resume_from_checkpoint x", ["--resume_from_checkpoint x", "--resume"]),
    ("no such configuration", "--config missing.yaml", ["--config", "missing.yaml"]),
    ("a configuration that is a folder", "--config .", ["--config"]),
    ("a configuration that is left out", "--config", ["--config"]),
]


@pytest.mark.parametrize(("words", "named"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_options_are_named_with_their_value_and_nothing_is_written(
    words: str, named: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    code, told = run(IPA, ["--sandbox", "sim", *words.split()], monkeypatch, capsys)  # the last --sandbox counts
    assert code == 2
    check_message(told, named)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("recipe", "words", "named"),
    [
        (DATA, "--count 0", ["--count 0", "at least 1"]),
        (DATA, "--chunks 99", ["--chunks 99", "1 to 16"]),
        (DATA, "--families chess", ["'chess'", "notes, tickets"]),
        (DATA, "--teacher_url http://127.0.0.1:9/v1", ["--teacher_url http://127.0.0.1:9/v1", "--teacher_model"]),
        (DATA, "--seed x", ["--seed", "'x'"]),
        (DATA, "--policy no/such", ["--policy no/such", "does not exist"]),
        (DATA, "--resume no/such", ["--resume no/such", "no run of data.py"]),
        (SFT, "--stage 2", ["--stage 2", "only with --data"]),
        (SFT, "--stage 2 --data no/such", ["--stage 2", "--model"]),
        (SFT, "--data no/such --resume runs/x", ["--resume runs/x", "run again"]),
        (CPT, "--families chess", ["'chess'", "notes, tickets"]),
        (CPT, "--model no/such", ["--model no/such", "does not exist"]),
        (CPT, "--data no/such", ["--data no/such", "make data"]),
        (SFT, "--data no/such", ["--data no/such", "make data"]),
        (SFT, "--data no/such --chunks 17", ["--chunks 17", "1 to 16"]),
    ],
)
def test_bad_options_of_data_and_its_stages_are_named_and_nothing_is_written(
    recipe: Path, words: str, named: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    code, told = run(recipe, ["--sandbox", "sim", *words.split()], monkeypatch, capsys)
    assert code == 2
    check_message(told, named)
    assert list(folder.iterdir()) == []


def test_a_run_of_data_goes_on_with_the_options_of_its_instances_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    words = "--sandbox sim --families notes --chunks 1 --count 4 --seed 3 --sample 2"
    assert run(DATA, words.split(), monkeypatch, capsys) == (0, "")
    (made,) = (folder / "runs").glob("data-*")
    again = ["--sandbox", "sim", "--resume", str(made)]
    kept = {name: (made / name).read_bytes() for name in ("instances.jsonl", "raw.jsonl", "dataset/train.parquet")}
    code, told = run(DATA, [*again, "--seed", "4"], monkeypatch, capsys)
    assert code == 2
    check_message(told, ["--seed 4", "was started with 3"])
    assert run(DATA, again, monkeypatch, capsys) == (0, "")  # neither families nor count nor seed are said again
    assert {name: (made / name).read_bytes() for name in kept} == kept


def check_message(told: str, named: list[str]) -> None:
    lines = [line for line in told.splitlines() if line.strip()]
    assert 1 <= len(lines) <= 3, told
    assert "Traceback" not in told
    assert re.match(r"(ipa|sft|data|cpt)\.py: ", lines[0]), told
    for text in named:
        assert text in told, (text, told)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("nonsense: 3\n", ["nonsense"]),
        ("max_steps: 3\nlearning_rat: 1\n", ["unknown option --learning_rat,", "did you mean --learning_rate?"]),
        ("top_p: 0.9\n", ["--top_p 0.9"]),
        ("chunks: [99]\n", ["--chunks 99"]),
        ("chunks: []\n", ["--chunks []"]),
        ("max_steps: [\n", ["--config", "YAML"]),
        ("context: [guard]\n", ["--context ['guard']", "guard (str)"]),
        ("context: 3\n", ["--context 3", "guard (str)"]),
        ("- a\n- b\n", ["my.yaml", "mapping"]),
        ("", ["my.yaml", "mapping"]),
    ],
    ids=[
        *("unknown key", "misspelt key", "value refused", "horizon", "no horizon", "no YAML"),
        *("a list of features", "a number of them", "a list", "empty"),
    ],
)
def test_a_bad_configuration_file_is_an_error(
    text: str, named: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (folder / "my.yaml").write_text(text)
    code, told = run(IPA, ["--sandbox", "sim", "--config", "my.yaml"], monkeypatch, capsys)
    assert code == 2
    check_message(told, named)
    assert [path.name for path in folder.iterdir()] == ["my.yaml"]


def test_the_context_length_is_the_limit_of_the_sampler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}

    class Asked(Exception):
        pass

    def make(*words: object, **options: object) -> None:
        given.update(options)
        raise Asked

    monkeypatch.setattr(pipeline, "make_sampler", make)
    words = ["--sandbox", "sim", "--context_length", "8192"]
    monkeypatch.setattr(sys, "argv", [str(IPA), *words])
    with pytest.raises(Asked):
        runpy.run_path(str(IPA), run_name="__main__")
    assert given["max_model_len"] == 8192


@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_configuration_is_yaml_with_options_in_it(path: Path) -> None:
    options = yaml.safe_load(path.read_text())
    assert options and all(isinstance(name, str) and name.isidentifier() for name in options), options
    families = options.get("families", [])
    assert isinstance(families, list) and set(families) <= set(FAMILIES)


@pytest.mark.parametrize("recipe", [IPA, SFT], ids=["ipa", "sft"])
def test_a_folder_that_holds_another_run_is_left_as_it_is(
    recipe: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.txt").write_text("precious")
    code, told = run(recipe, ["--sandbox", "sim", "--output_dir", "mine"], monkeypatch, capsys)
    assert code == 2
    check_message(told, ["--output_dir mine", "another run", "new folder"])
    assert [path.name for path in (folder / "mine").iterdir()] == ["thesis.txt"]
    assert not (folder / "runs").exists()


def test_an_image_that_is_missing_is_said_before_a_folder_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def missing():
        raise ImageMissing("image mini-rome/base is not on this engine: mini-rome image build")

    monkeypatch.setattr("mini_rome.pipeline.Pool", lambda backend, size: Pool(backend, size=size, make_box=missing))
    code, told = run(IPA, ["--sandbox", "sim"], monkeypatch, capsys)
    assert code == 2
    check_message(told, ["mini-rome image build"])
    assert list(folder.iterdir()) == []


def test_a_model_folder_without_a_model_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (folder / "empty").mkdir()
    code, told = run(IPA, ["--sandbox", "sim", "--model", "empty"], monkeypatch, capsys)
    assert code == 2
    check_message(told, ["--model empty", "config.json"])
    assert [path.name for path in folder.iterdir()] == ["empty"]


# -- in a process of its own ---------------------------------------------------------------------------------------


def spawn(recipe: Path, words: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, str(recipe), *words], cwd=folder, env=inherited, capture_output=True, text=True, timeout=170
    )


def test_docker_that_does_not_answer_is_named_and_so_is_the_way_on(folder: Path) -> None:
    ended = spawn(IPA, ["--sandbox", "docker"], folder, DOCKER_HOST="unix:///no/such/docker.sock")
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    told = ended.stderr[ended.stderr.index("ipa.py: ") :]  # before it, what libraries say of themselves
    assert "ocker" in told
    assert "--sandbox sim" in told
    assert len(told.splitlines()) <= 3
    assert list(folder.iterdir()) == []


def test_an_unknown_option_ends_a_process_with_two_and_no_traceback(folder: Path) -> None:
    ended = spawn(SFT, ["--nonsense", "3"], folder)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "--nonsense" in ended.stderr.strip().splitlines()[-1]
    assert "Traceback" not in ended.stderr
    assert list(folder.iterdir()) == []


def test_a_run_older_than_an_option_goes_on_with_its_default_and_no_other() -> None:
    for ratio, known in ((0, True), (0, False), (1, True)):
        both = RunArguments(resume="old"), IPAConfig(output_dir="x", async_ratio=ratio)
        recorded = options_of(*both)
        if not known:
            del recorded["async_ratio"]
        check_same_options(*both, recorded)
    del recorded["async_ratio"]
    with pytest.raises(ConfigError, match="--async_ratio 1: the run in old was started with 0"):
        check_same_options(*both, recorded)


# -- the parser ----------------------------------------------------------------------------------------------------


def parser() -> OptionsParser:
    return OptionsParser("What it does.", (RunArguments, IPAConfig), own=(RunArguments, IPAConfig))


def test_the_command_line_goes_before_the_file_and_the_file_before_the_defaults(folder: Path) -> None:
    (folder / "my.yaml").write_text("max_steps: 7\nlearning_rate: 1.0e-3\nchunks: [3, 4]\n")
    arguments, args = parser().parse(["--config", "my.yaml", "--max_steps", "9"])
    assert (args.max_steps, args.learning_rate, arguments.chunks) == (9, 1e-3, [3, 4])
    assert arguments.train_tasks == RunArguments().train_tasks


@pytest.mark.parametrize("name", ["ipa_tiny.yaml", "ipa_tiny_lora.yaml"])
def test_the_shipped_configurations_are_read(name: str) -> None:
    from trl import ModelConfig

    types = (RunArguments, IPAConfig, ModelConfig)
    path = ROOT / "recipes" / "configs" / name
    arguments, args, model = OptionsParser("", types, own=()).parse(["--config", str(path)])
    if name == "ipa_tiny.yaml":
        assert (arguments, args.max_steps) == (RunArguments(), IPAConfig().max_steps)  # it spells the defaults out
    assert model.use_peft is (name == "ipa_tiny_lora.yaml")


def test_help_explains_every_own_option_with_its_default_and_fits_the_screen(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("What it does.")
    for name in (*RunArguments.__annotations__, *IPAConfig.__annotations__):
        assert f"--{name} " in text or f"--{name}\n" in text
    assert "[notes tickets]" in text
    assert max(map(len, text.splitlines())) <= 118


def test_guarded_turns_errors_into_exit_codes(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["recipes/ipa.py"])

    def fails() -> None:
        raise ConfigError("--x 3: no")

    def stopped() -> None:
        raise KeyboardInterrupt

    for main, code, told in ((fails, 2, "ipa.py: --x 3: no\n"), (stopped, 130, "ipa.py: stopped\n"), (int, 0, "")):
        with pytest.raises(SystemExit) as ended:
            guarded(main)
        assert (ended.value.code, capsys.readouterr().err) == (code, told)
    with pytest.raises(ZeroDivisionError):
        guarded(lambda: 1 / 0)  # a bug keeps its traceback
