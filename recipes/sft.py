# /// script
# requires-python = ">=3.11"
# dependencies = ["mini-rome"]
# ///
"""Masked supervised fine-tuning of a tiny Mixture-of-Experts agent on trajectories (paper, eqs. 1-2), in two stages.

What differs from plain SFT:
  1. trajectories are run in the sandbox, with injected mistakes and the recoveries after them;
  2. whole turns whose call or execution failed, or that do not serve the task, stay in context and out of the loss;
  3. what the environment wrote is never trained, the stop token of a kept response is;
  4. stage 1 takes all that the filter let through, stage 2 the best of each instance, more often what is still wrong.

Commands:
  one CPU, two minutes   python recipes/sft.py
  on a dataset           python recipes/sft.py --stage 1 --data runs/data-.../dataset
  then stage 2           python recipes/sft.py --stage 2 --data runs/data-.../dataset --model runs/latest/sft
  longer tasks           python recipes/sft.py --sft_chunks 1 2 3 4 --sft_steps 800
  two processes          accelerate launch --cpu --num_processes 2 recipes/sft.py
  LoRA                   python recipes/sft.py --use_peft --sft_learning_rate 4e-3
  will it fit 8 GPUs?    python recipes/sft.py --config recipes/configs/sft_30b_a3b_8gpu.yaml --dry-run
  then                   python recipes/ipa.py --model runs/latest/sft
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads slow every neighbour

from trl import ModelConfig  # noqa: E402

from mini_rome.arguments import RunArguments  # noqa: E402
from mini_rome.config import IPAConfig  # noqa: E402
from mini_rome.data.staged import StageArguments, train_stage  # noqa: E402
from mini_rome.dryrun import NodeArguments, dry_run_sft  # noqa: E402
from mini_rome.launch import start_processes  # noqa: E402
from mini_rome.options import OptionsParser, guarded, lora_config  # noqa: E402
from mini_rome.pipeline import Run  # noqa: E402


def main() -> None:
    start_processes()
    kinds = (RunArguments, StageArguments, IPAConfig, ModelConfig, NodeArguments)
    parser = OptionsParser(__doc__, kinds, own=(RunArguments, StageArguments, NodeArguments))
    arguments, stage, args, model_args, node = parser.parse()
    lora = lora_config(model_args)
    if node.dry_run:
        dry_run_sft(arguments, node, lora)
        return
    if stage.data is not None:
        train_stage(arguments, stage, args, lora)
        return
    with Run(arguments, args, kind="sft", context_length=node.context_length) as run:
        short_test, long_test = run.tasks("test", arguments.sft_chunks), run.tasks("test", arguments.chunks)
        run.build_model()
        run.evaluate("untrained", short_test, arguments.sft_chunks)
        run.sft(lora)
        run.evaluate("sft_short", short_test, arguments.sft_chunks)
        run.evaluate("sft", long_test)
        run.save_model("sft")
        run.report()


if __name__ == "__main__":
    guarded(main)
